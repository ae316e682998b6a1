# What surrounds the libraries: torch and pybind11 of the given Python, the layout of the package in the build tree and installed.

# The torch that this Python imports; sets FLASH_ATTN_EXT_TORCH_{DIRECTORY,VERSION,CUDA}.
macro(flash_attn_ext_find_torch)
  set(FLASH_ATTN_EXT_TORCH_DIRECTORY "${FLASH_ATTN_EXT_TORCH}")
  if(NOT FLASH_ATTN_EXT_TORCH_DIRECTORY)
    execute_process(
      COMMAND ${Python_EXECUTABLE} -c "import importlib.util, os; print(os.path.dirname(importlib.util.find_spec('torch').origin))"
      OUTPUT_VARIABLE FLASH_ATTN_EXT_TORCH_DIRECTORY OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE status ERROR_QUIET)
    if(NOT status EQUAL 0)
      message(FATAL_ERROR "${Python_EXECUTABLE} has no torch: install it, or pass -DFLASH_ATTN_EXT_TORCH=<.../site-packages/torch>.")
    endif()
  endif()
  flash_attn_ext_import_torch("${FLASH_ATTN_EXT_TORCH_DIRECTORY}" FLASH_ATTN_EXT_TORCH)
  message(STATUS "torch ${FLASH_ATTN_EXT_TORCH_VERSION} in ${FLASH_ATTN_EXT_TORCH_DIRECTORY}")
endmacro()

macro(flash_attn_ext_find_pybind11)
  execute_process(COMMAND ${Python_EXECUTABLE} -m pybind11 --cmakedir OUTPUT_VARIABLE pybind11_DIR
                  OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE status ERROR_QUIET)
  if(NOT status EQUAL 0)
    message(FATAL_ERROR "${Python_EXECUTABLE} has no pybind11: pip install pybind11")
  endif()
  set(PYBIND11_FINDPYTHON ON)
  find_package(pybind11 3 CONFIG REQUIRED)
endmacro()

# The git commit of these sources, "" outside a clone (an sdist).
macro(flash_attn_ext_find_commit)
  set(FLASH_ATTN_EXT_COMMIT "")
  if(EXISTS ${CMAKE_SOURCE_DIR}/.git)
    execute_process(COMMAND git -C ${CMAKE_SOURCE_DIR} describe --always --abbrev=12 --exclude=*
                    OUTPUT_VARIABLE FLASH_ATTN_EXT_COMMIT OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  endif()
endmacro()

# <build>/python/flash_attn_ext looks like the installed package: libraries beside relative links to the repository's Python files.
# `cmake --install . --prefix <site-packages>/flash_attn_ext` puts the compiled half there; setup.py does.
function(flash_attn_ext_package)
  set(directory ${CMAKE_BINARY_DIR}/python/flash_attn_ext)
  # torch is imported before us, so its libraries are loaded already; the neighbours serve C++ programs without Python.
  set_target_properties(
    flash_attn_ext _C
    PROPERTIES LIBRARY_OUTPUT_DIRECTORY ${directory}
               BUILD_WITH_INSTALL_RPATH ON
               INSTALL_RPATH "$ORIGIN;$ORIGIN/../torch/lib;$ORIGIN/../nvidia/cu13/lib")
  set_target_properties(_C PROPERTIES INSTALL_RPATH "$ORIGIN")

  include(CMakePackageConfigHelpers)
  configure_file(cmake/flash_attn_ext-config.cmake.in ${directory}/share/cmake/flash_attn_ext/flash_attn_ext-config.cmake @ONLY)
  configure_file(cmake/flash_attn_ext-torch.cmake ${directory}/share/cmake/flash_attn_ext/flash_attn_ext-torch.cmake COPYONLY)
  write_basic_package_version_file(${directory}/share/cmake/flash_attn_ext/flash_attn_ext-config-version.cmake
                                   COMPATIBILITY SameMinorVersion)

  file(GLOB entries RELATIVE ${CMAKE_SOURCE_DIR}/flash_attn_ext CONFIGURE_DEPENDS flash_attn_ext/*)
  list(FILTER entries EXCLUDE REGEX "__pycache__|\\.so$|^share$|^include$")
  foreach(entry IN LISTS entries)
    _flash_attn_ext_link(${CMAKE_SOURCE_DIR}/flash_attn_ext/${entry} ${directory}/${entry})
  endforeach()
  _flash_attn_ext_link(${CMAKE_SOURCE_DIR}/csrc/include ${directory}/include)

  install(TARGETS flash_attn_ext _C LIBRARY DESTINATION .)
  install(DIRECTORY ${directory}/share DESTINATION .)
  install(DIRECTORY csrc/include DESTINATION .)
endfunction()

function(_flash_attn_ext_link target link)
  get_filename_component(directory ${link} DIRECTORY)
  file(RELATIVE_PATH relative ${directory} ${target})
  file(CREATE_LINK ${relative} ${link} SYMBOLIC)
endfunction()
