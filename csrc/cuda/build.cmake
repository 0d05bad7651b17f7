# halfstep._cuda: kernels by nvcc, bindings by the host compiler, the CUDA runtime linked in (no driver needed to import).
# Sets HALFSTEP_CUDA_FACTS, JSON for build_facts.json. Without a usable nvcc there is no target `_cuda`, and the reason is
# in the facts; an nvcc that is there and does not work ends the configuration, as any broken compiler does.

# Why there is no module ("" = there is one), whether an nvcc that could make it is there, its version, architectures.
function(halfstep_cuda_facts reason found version archs)
  if(reason)
    message(STATUS "halfstep: no CUDA module: ${reason}")
  endif()
  list(TRANSFORM archs REPLACE "(.+)" "\"\\1\"")
  list(JOIN archs ", " archs)
  set(HALFSTEP_CUDA_FACTS
      "{\"reason\": \"${reason}\", \"found\": ${found}, \"nvcc\": \"${version}\", \"archs\": [${archs}]}"
      PARENT_SCOPE)
endfunction()

# --- nvcc ------------------------------------------------------------------------------------------------------------
# CMake looks at CUDACXX and PATH; toolkits are often installed and in neither.
if("$ENV{CUDACXX}" STREQUAL "")
  find_program(nvcc nvcc HINTS ENV CUDA_HOME ENV CUDA_PATH PATHS /usr/local/cuda PATH_SUFFIXES bin NO_CACHE)
  set(looked "in CUDA_HOME, CUDA_PATH, PATH and /usr/local/cuda")
else()
  find_program(nvcc NAMES "$ENV{CUDACXX}" NO_CACHE)
  set(looked "at CUDACXX=$ENV{CUDACXX}")
endif()
if(NOT nvcc)
  halfstep_cuda_facts("no nvcc was found (looked ${looked})" false "" "")
  return()
endif()
# Asked before CMake tries it: an old nvcc fails on a new g++, which would be the wrong thing to mend.
execute_process(COMMAND ${nvcc} --version OUTPUT_VARIABLE said ERROR_VARIABLE said)
if(NOT said MATCHES "release [0-9.]+, V([0-9.]+)")
  message(FATAL_ERROR "${nvcc} --version does not answer as nvcc does: ${said}")
endif()
set(version ${CMAKE_MATCH_1})
if(version VERSION_LESS 12.1)  # before, a kernel's parameters end at 4 KB: too small for the tensor table
  halfstep_cuda_facts("nvcc ${version} is too old, the kernels need 12.1 or newer" false "${version}" "")
  return()
endif()
# In a folder that was configured before, CMake goes on with the nvcc it met first.
if(NOT "${HALFSTEP_NVCC}" STREQUAL "${nvcc} ${version}")
  file(REMOVE ${CMAKE_PLATFORM_INFO_DIR}/CMakeCUDACompiler.cmake)
  file(REMOVE_RECURSE ${CMAKE_BINARY_DIR}/CMakeFiles/_cuda.dir)
  set(HALFSTEP_NVCC "${nvcc} ${version}" CACHE INTERNAL "the nvcc of this folder's objects")
endif()
set(CMAKE_CUDA_COMPILER ${nvcc})
enable_language(CUDA)

# --- architectures ---------------------------------------------------------------------------------------------------
# Those of the list that this nvcc knows, and PTX of the newest for GPUs that come later. CUDAARCHS, CMake's own variable,
# wins.
if("$ENV{CUDAARCHS}" STREQUAL "")
  execute_process(COMMAND ${nvcc} --list-gpu-code OUTPUT_VARIABLE known COMMAND_ERROR_IS_FATAL ANY)
  string(REGEX MATCHALL "[0-9]+" known "${known}")
  set(archs "")
  foreach(arch 75 80 86 89 90 100 120)
    if(arch IN_LIST known)
      list(APPEND archs ${arch}-real)
    endif()
  endforeach()
  list(POP_BACK archs newest)
  string(REPLACE "-real" "" newest ${newest})  # CMake's word for both
  list(APPEND archs ${newest})
elseif("$ENV{CUDAARCHS}" MATCHES "^(native|all|all-major)$")
  string(TOUPPER "CMAKE_CUDA_ARCHITECTURES_$ENV{CUDAARCHS}" list)
  string(REPLACE "-" "_" list ${list})
  set(archs ${${list}})
else()
  set(archs $ENV{CUDAARCHS})
endif()
set(CMAKE_CUDA_ARCHITECTURES ${archs})
halfstep_cuda_facts("" true "${version}" "${archs}")

# --- the module ------------------------------------------------------------------------------------------------------
set(flags_file ${CMAKE_CURRENT_LIST_DIR}/nvcc_flags.txt)
file(STRINGS ${flags_file} flags REGEX "^-")
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${flags_file})
file(GLOB sources CONFIGURE_DEPENDS csrc/cuda/*.cu csrc/cuda/*.cpp csrc/cuda/module/*.cpp csrc/module/*.cpp)
# Not in `all`: setup.py builds it by name, so that a failure here is not one of the CPU module.
pybind11_add_module(_cuda MODULE NO_EXTRAS EXCLUDE_FROM_ALL ${sources})
target_link_libraries(_cuda PRIVATE halfstep_flags)
target_compile_options(_cuda PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:${flags} --threads=2 -Xfatbin=-compress-all>)
list(JOIN archs "," archs_macro)  # a ';' would end the definition on nvcc's command line
target_compile_definitions(_cuda PRIVATE
  HALFSTEP_MODULE="halfstep._cuda" HALFSTEP_MODULE_NAME=_cuda HALFSTEP_ARCHS="${archs_macro}")
target_include_directories(_cuda SYSTEM PRIVATE ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
install(TARGETS _cuda COMPONENT _cuda LIBRARY DESTINATION halfstep)
