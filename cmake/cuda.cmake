# nvcc, its runtime library, and the architectures: from TORCH_CUDA_ARCH_LIST or the default.

set(_flash_attn_ext_default_archs "8.0+PTX;9.0")  # real code for Ampere and Hopper, PTX so that newer GPUs run

# Sets FLASH_ATTN_EXT_WITH_CUDA, FLASH_ATTN_EXT_ARCHS (for people), FLASH_ATTN_EXT_SM80_ARCHS, FLASH_ATTN_EXT_SM90_ARCHS (for CMake),
# FLASH_ATTN_EXT_CUDA_INCLUDES; makes flash_attn_ext::cudart.
macro(flash_attn_ext_find_cuda)
  set(FLASH_ATTN_EXT_WITH_CUDA OFF)
  set(FLASH_ATTN_EXT_ARCHS "")
  set(FLASH_ATTN_EXT_TOOLKIT_VERSION "")
  if(FLASH_ATTN_EXT_CUDA STREQUAL "AUTO" AND NOT FLASH_ATTN_EXT_TORCH_CUDA)
    message(STATUS "CPU only: torch ${FLASH_ATTN_EXT_TORCH_VERSION} is a CPU build")
  elseif(FLASH_ATTN_EXT_CUDA)
    _flash_attn_ext_find_nvcc()
    if(CMAKE_CUDA_COMPILER)
      _flash_attn_ext_enable_cuda()
    elseif(FLASH_ATTN_EXT_CUDA STREQUAL "AUTO")
      message(STATUS "CPU only: torch is built for CUDA ${FLASH_ATTN_EXT_TORCH_CUDA}, but no nvcc of that major version was found "
                     "(CUDA_HOME, PATH, pip's cuda-toolkit[nvcc,cccl,cudart,crt,nvvm])")
    else()
      message(FATAL_ERROR "FLASH_ATTN_EXT_CUDA=ON, but no nvcc was found: set CUDA_HOME, or pip install "
                          "'cuda-toolkit[nvcc,cccl,cudart,crt,nvvm]==${FLASH_ATTN_EXT_TORCH_CUDA}.*'")
    endif()
  endif()
endmacro()

# CMAKE_CUDA_COMPILER, unless given: CUDA_HOME, PATH, then pip's nvidia/cu13; of torch's major version.
macro(_flash_attn_ext_find_nvcc)
  if(NOT CMAKE_CUDA_COMPILER)
    execute_process(
      COMMAND ${Python_EXECUTABLE} ${CMAKE_SOURCE_DIR}/cmake/find_nvcc.py "${FLASH_ATTN_EXT_TORCH_CUDA}"
      OUTPUT_VARIABLE CMAKE_CUDA_COMPILER OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
  endif()
endmacro()

macro(_flash_attn_ext_enable_cuda)
  get_filename_component(_root ${CMAKE_CUDA_COMPILER} DIRECTORY)
  get_filename_component(_root ${_root} DIRECTORY)
  if(NOT EXISTS ${_root}/lib64)  # pip's toolkit: CMake's compiler probe looks for the runtime in lib64 only
    set(ENV{LIBRARY_PATH} "${_root}/lib:$ENV{LIBRARY_PATH}")
  endif()
  _flash_attn_ext_read_archs()
  set(CMAKE_CUDA_ARCHITECTURES 80)  # of the probe; targets set their own
  set(CMAKE_CUDA_RUNTIME_LIBRARY None)
  set(CMAKE_CUDA_VISIBILITY_PRESET hidden)
  set(CMAKE_CUDA_FLAGS_RELEASE "-O3 -DNDEBUG")
  enable_language(CUDA)
  string(REGEX MATCH "^[0-9]+\\.[0-9]+" FLASH_ATTN_EXT_TOOLKIT_VERSION "${CMAKE_CUDA_COMPILER_VERSION}")
  string(REGEX MATCH "^[0-9]+" _major "${CMAKE_CUDA_COMPILER_VERSION}")

  # By full path: pip's wheels ship libcudart.so.13 without the name -lcudart asks for.
  file(GLOB _cudart ${_root}/lib64/libcudart.so.${_major} ${_root}/lib/libcudart.so.${_major}
       ${FLASH_ATTN_EXT_TORCH_DIRECTORY}/../nvidia/cu${_major}/lib/libcudart.so.${_major})
  if(NOT _cudart)
    message(FATAL_ERROR "No libcudart.so.${_major} in ${_root}/lib64, ${_root}/lib or torch's nvidia/cu${_major}/lib.")
  endif()
  list(GET _cudart 0 _cudart)
  add_library(flash_attn_ext::cudart INTERFACE IMPORTED)
  set_target_properties(flash_attn_ext::cudart PROPERTIES INTERFACE_LINK_LIBRARIES "${_cudart}")
  # For op/: the compiler's own headers, then those of torch's pip packages (ATen includes cublas, cusparse and cusolver).
  # In the other order crt/host_defines.h is missing.
  set(FLASH_ATTN_EXT_CUDA_INCLUDES ${_root}/include)
  if(EXISTS ${FLASH_ATTN_EXT_TORCH_DIRECTORY}/../nvidia/cu${_major}/include)
    list(APPEND FLASH_ATTN_EXT_CUDA_INCLUDES ${FLASH_ATTN_EXT_TORCH_DIRECTORY}/../nvidia/cu${_major}/include)
  endif()
  set(FLASH_ATTN_EXT_WITH_CUDA ON)
  message(STATUS "CUDA ${FLASH_ATTN_EXT_TOOLKIT_VERSION} (${CMAKE_CUDA_COMPILER}) for architectures ${FLASH_ATTN_EXT_ARCHS}")
endmacro()

# TORCH_CUDA_ARCH_LIST: "8.0;9.0+PTX", separated by ; , or spaces, or a family's name as torch knows them.
macro(_flash_attn_ext_read_archs)
  set(_list "$ENV{TORCH_CUDA_ARCH_LIST}")
  if(NOT _list)
    set(_list "${_flash_attn_ext_default_archs}")
  endif()
  string(REPLACE "Ampere" "8.0;8.6+PTX" _list "${_list}")
  string(REPLACE "Ada" "8.9+PTX" _list "${_list}")
  string(REPLACE "Hopper" "9.0+PTX" _list "${_list}")
  string(REPLACE "Blackwell" "10.0;12.0+PTX" _list "${_list}")
  string(REGEX REPLACE "[ ,]+" ";" _list "${_list}")
  set(FLASH_ATTN_EXT_SM80_ARCHS "")
  set(FLASH_ATTN_EXT_SM90_ARCHS "")
  set(_skipped "")
  foreach(_arch IN LISTS _list)
    if(NOT _arch MATCHES "^([0-9]+)\\.([0-9])[af]?(\\+PTX)?$")
      message(FATAL_ERROR "TORCH_CUDA_ARCH_LIST: '${_arch}' is not an architecture such as 8.0, 9.0 or 9.0+PTX.")
    endif()
    set(_number "${CMAKE_MATCH_1}${CMAKE_MATCH_2}")
    if(_number LESS 80)
      list(APPEND _skipped ${_arch})
      continue()
    endif()
    list(APPEND FLASH_ATTN_EXT_ARCHS ${_arch})
    list(APPEND FLASH_ATTN_EXT_SM80_ARCHS ${_number}-real)
    if(_arch MATCHES "PTX")
      list(APPEND FLASH_ATTN_EXT_SM80_ARCHS ${_number}-virtual)
    endif()
    if(_number EQUAL 90)
      set(FLASH_ATTN_EXT_SM90_ARCHS 90a-real)
    endif()
  endforeach()
  list(REMOVE_DUPLICATES FLASH_ATTN_EXT_SM80_ARCHS)
  if(_skipped)
    message(STATUS "The kernels need compute capability 8.0: without ${_skipped}")
  endif()
  if(NOT FLASH_ATTN_EXT_ARCHS)
    message(FATAL_ERROR "TORCH_CUDA_ARCH_LIST='$ENV{TORCH_CUDA_ARCH_LIST}' names nothing from 8.0 on.")
  endif()
endmacro()

# One family of kernels: family (sm80, sm90), its CMake architectures, its sources. SPILLS n: an error where more bytes spill.
# ONCE: all machine code is made from PTX of compute capability 8.0, so that the front end, half of the time, runs once. Measured on an
# H200: within 1 % of code made from PTX of 9.0, where no newer instruction is used.
function(flash_attn_ext_cuda_family family archs)
  cmake_parse_arguments(PARSE_ARGV 2 arg "ONCE" "SPILLS" "SOURCES")
  set(target flash_attn_ext_${family})
  add_library(${target} OBJECT ${arg_SOURCES})
  target_link_libraries(${target} PRIVATE flash_attn_ext_problem flash_attn_ext::cudart)
  target_compile_options(
    ${target} PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:-Xptxas=-v -Xcompiler=-Wall,-Wextra --expt-relaxed-constexpr>)
  if(FLASH_ATTN_EXT_WERROR)
    target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:-Werror=all-warnings>)
  endif()
  set(launcher ${Python_EXECUTABLE} ${CMAKE_SOURCE_DIR}/cmake/compile_cuda.py)
  if(DEFINED arg_SPILLS)
    list(APPEND launcher --most-spills=${arg_SPILLS})
  endif()
  if(arg_ONCE)
    set(codes "")
    foreach(arch IN LISTS archs)
      if(arch MATCHES "^([0-9]+)-real$")
        list(APPEND codes sm_${CMAKE_MATCH_1})
      else()
        list(APPEND codes compute_80)
      endif()
    endforeach()
    list(REMOVE_DUPLICATES codes)
    list(JOIN codes "," codes)
    target_compile_options(${target} PRIVATE "$<$<COMPILE_LANGUAGE:CUDA>:--generate-code=arch=compute_80,code=[${codes}]>")
    set(archs OFF)
  endif()
  set_target_properties(${target} PROPERTIES CUDA_ARCHITECTURES "${archs}" CUDA_COMPILER_LAUNCHER
                                                                           "${launcher};${CMAKE_CUDA_COMPILER_LAUNCHER}")
endfunction()
