# Makes flash_attn_ext::torch from a torch package directory. Used by our build and, installed, by flash_attn_ext-config.cmake.
# Not find_package(Torch): for a CUDA build of torch that demands a complete CUDA toolkit and rewrites architecture flags.

# directory: .../site-packages/torch. Sets <prefix>_VERSION and <prefix>_CUDA ("" for a CPU build) for the caller.
function(flash_attn_ext_import_torch directory prefix)
  if(NOT EXISTS "${directory}/version.py" OR NOT EXISTS "${directory}/include/ATen/core/TensorBody.h")
    message(FATAL_ERROR "No torch with its C++ headers in '${directory}'.")
  endif()
  file(READ "${directory}/version.py" text)
  string(REGEX MATCH "\n__version__[^'\"\n]*['\"]([^'\"]+)" unused "${text}")
  set(version "${CMAKE_MATCH_1}")
  set(cuda "")
  if(text MATCHES "\ncuda[^'\"\n]*= *['\"]([^'\"]+)")
    set(cuda "${CMAKE_MATCH_1}")
  endif()
  if(text MATCHES "\nhip[^'\"\n]*= *['\"]")
    message(FATAL_ERROR "torch ${version} is a ROCm build: only CPU and CUDA builds of torch are supported.")
  endif()

  set(names c10 torch_cpu torch)
  if(cuda)
    list(APPEND names c10_cuda torch_cuda)
  endif()
  set(libraries "")
  foreach(name IN LISTS names)
    set(file "${directory}/lib/${CMAKE_SHARED_LIBRARY_PREFIX}${name}${CMAKE_SHARED_LIBRARY_SUFFIX}")
    if(NOT EXISTS "${file}")
      message(FATAL_ERROR "torch ${version} has no ${file}.")
    endif()
    list(APPEND libraries "${file}")
  endforeach()

  add_library(flash_attn_ext::torch INTERFACE IMPORTED)
  set_target_properties(
    flash_attn_ext::torch
    PROPERTIES INTERFACE_INCLUDE_DIRECTORIES "${directory}/include;${directory}/include/torch/csrc/api/include"
               INTERFACE_SYSTEM_INCLUDE_DIRECTORIES "${directory}/include;${directory}/include/torch/csrc/api/include"
               INTERFACE_LINK_LIBRARIES "${libraries}")
  set(config "${directory}/share/cmake/Torch/TorchConfig.cmake")
  if(EXISTS "${config}")
    file(READ "${config}" text)
    if(text MATCHES "_GLIBCXX_USE_CXX11_ABI=([01])")
      set_target_properties(flash_attn_ext::torch PROPERTIES INTERFACE_COMPILE_DEFINITIONS
                                                             "_GLIBCXX_USE_CXX11_ABI=${CMAKE_MATCH_1}")
    endif()
  endif()
  set(${prefix}_VERSION "${version}" PARENT_SCOPE)
  set(${prefix}_CUDA "${cuda}" PARENT_SCOPE)
endfunction()
