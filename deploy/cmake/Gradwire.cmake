# Build helpers: one macro to find what we depend on, one function per kind of target.
# Every target of Gradwire is made by these, so warnings, sanitizers and floating-point rules hold everywhere.

# Of this directory and those below it: a project that has Gradwire as a part keeps its own.
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)

# What such a project decides for all of its parts.
if(PROJECT_IS_TOP_LEVEL)
  set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
  set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/bin)
  if(NOT CMAKE_BUILD_TYPE)
    set(CMAKE_BUILD_TYPE Release CACHE STRING "Build type" FORCE)
  endif()
  find_program(CCACHE_PROGRAM ccache)
  if(CCACHE_PROGRAM AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
    set(CMAKE_CXX_COMPILER_LAUNCHER ${CCACHE_PROGRAM})
  endif()
endif()

# Bits are promised: no contraction of a*b+c, no fast-math, anywhere.
add_library(gradwire_options INTERFACE)
target_compile_options(gradwire_options INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-pthread -ffp-contract=off -fno-fast-math>
  $<$<COMPILE_LANGUAGE:CUDA>:--fmad=false --ftz=false --prec-div=true --prec-sqrt=true -Xcompiler=-ffp-contract=off>)
target_include_directories(gradwire_options INTERFACE ${PROJECT_SOURCE_DIR})
add_library(gradwire_warnings INTERFACE)
target_compile_options(gradwire_warnings INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra $<$<BOOL:${GRADWIRE_WERROR}>:-Werror> -Wno-unused-parameter>
  $<$<COMPILE_LANGUAGE:CUDA>:$<$<BOOL:${GRADWIRE_WERROR}>:-Werror=all-warnings> -Xcompiler=-Wall,-Wextra,-Wno-unused-parameter>)
if(CMAKE_CXX_COMPILER_ID STREQUAL GNU AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 14)
  # GCC 12 and 13 warn about overlapping memcpy inside std::string operator+ (GCC bug 105651): no such overlap exists.
  target_compile_options(gradwire_warnings INTERFACE
    $<$<COMPILE_LANGUAGE:CXX>:-Wno-restrict> $<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-Wno-restrict>)
  if(GRADWIRE_PRECOMPILE)  # there it does not know that the header is the system's, and warns in two more ways
    target_compile_options(gradwire_warnings INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Wno-array-bounds -Wno-stringop-overflow>)
  endif()
endif()
if(CMAKE_CXX_COMPILER_ID MATCHES Clang)
  target_compile_options(gradwire_warnings INTERFACE -Wthread-safety)
endif()
if(CMAKE_UNITY_BUILD)
  # Several source files are compiled as one (the sanitizer presets: half of the time). Names in anonymous namespaces are
  # therefore unique within a target.
  target_compile_options(gradwire_warnings INTERFACE $<$<CXX_COMPILER_ID:GNU>:-Wno-subobject-linkage>)
endif()
if(GRADWIRE_SANITIZE)
  target_compile_options(gradwire_options INTERFACE -fsanitize=${GRADWIRE_SANITIZE} -fno-omit-frame-pointer
                         -fno-sanitize-recover=all)
  target_link_options(gradwire_options INTERFACE -fsanitize=${GRADWIRE_SANITIZE})
  if(GRADWIRE_SANITIZE MATCHES address AND NOT GRADWIRE_FUZZ)
    # What these see of memory AddressSanitizer sees, too; they take a sixth of the time of compiling.
    target_compile_options(gradwire_options INTERFACE -fno-sanitize=null,object-size,vptr)
  endif()
endif()
# The tests' own text: much of it, run once for each time it is compiled. What it tests is compiled as ever.
add_library(gradwire_test_options INTERFACE)
target_compile_options(gradwire_test_options INTERFACE $<$<CONFIG:Release>:-O1>)
if(GRADWIRE_SANITIZE MATCHES undefined)
  target_compile_options(gradwire_test_options INTERFACE -fno-sanitize=undefined)
endif()
if(GRADWIRE_FUZZ)
  target_compile_options(gradwire_options INTERFACE -fsanitize=fuzzer-no-link)
endif()

# Finds a CUDA compiler (GRADWIRE_CUDA: AUTO, ON or OFF). Sets GRADWIRE_HAVE_CUDA. Nothing needs it.
macro(gradwire_find_cuda)
  set(GRADWIRE_HAVE_CUDA OFF)
  if(NOT GRADWIRE_CUDA STREQUAL "OFF" AND NOT GRADWIRE_SANITIZE)
    include(CheckLanguage)
    check_language(CUDA)
    if(CMAKE_CUDA_COMPILER)
      if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
        set(CMAKE_CUDA_ARCHITECTURES 80-real 90-real 100)
      endif()
      enable_language(CUDA)
      # CMake before 3.25.2 does not know C++20 for nvcc.
      set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
      set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION -std=c++20)
      # Linked statically (CMake's default): programs start where there is no CUDA.
      set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
      if(CCACHE_PROGRAM AND NOT CMAKE_CUDA_COMPILER_LAUNCHER)
        set(CMAKE_CUDA_COMPILER_LAUNCHER ${CCACHE_PROGRAM})
      endif()
      set(GRADWIRE_HAVE_CUDA ON)
    elseif(GRADWIRE_CUDA STREQUAL "ON")
      message(FATAL_ERROR "GRADWIRE_CUDA is ON, but there is no CUDA compiler; put nvcc on the PATH or set CUDACXX")
    endif()
  endif()
  message(STATUS "CUDA: ${GRADWIRE_HAVE_CUDA}")
endmacro()

macro(gradwire_find_dependencies)
  find_package(Threads REQUIRED)
  find_package(OpenSSL REQUIRED COMPONENTS Crypto SSL)
  find_package(Protobuf REQUIRED MODULE)  # Debian's protobuf 3.21 has no usable CONFIG package
  find_package(absl REQUIRED CONFIG)
  find_package(gRPC REQUIRED CONFIG)
  find_package(Boost 1.74 REQUIRED)  # headers: Asio, Beast
  find_package(hwy REQUIRED CONFIG)
  if(GRADWIRE_PROGRAMS)
    find_package(prometheus-cpp REQUIRED CONFIG)
    find_package(spdlog REQUIRED CONFIG)
    find_package(yaml-cpp REQUIRED CONFIG)
    if(NOT TARGET yaml-cpp::yaml-cpp)  # before 0.8
      add_library(yaml-cpp::yaml-cpp ALIAS yaml-cpp)
    endif()
  endif()
  if(GRADWIRE_TESTS)
    find_package(GTest REQUIRED)
    find_package(benchmark REQUIRED)
  endif()
  if(GRADWIRE_PYTHON)
    find_package(Python3 REQUIRED COMPONENTS Interpreter Development.Module)
    find_package(pybind11 REQUIRED CONFIG)
  endif()
endmacro()

# Lets the C++ files of a target share the parsed foreign headers of its kind: library, program or test. Flags and definitions
# must be the same for all targets of a kind, else the compiler says that the parsed headers are invalid.
function(gradwire_precompile target kind)
  if(NOT GRADWIRE_PRECOMPILE)
    return()
  endif()
  set(prefix gradwire_prefix_${kind})
  set(folder ${PROJECT_SOURCE_DIR}/deploy/cmake/prefix)
  if(NOT TARGET ${prefix})
    if(kind STREQUAL library)
      add_library(${prefix} STATIC ${folder}/main.cc)
    else()
      add_executable(${prefix} ${folder}/main.cc)
    endif()
    target_link_libraries(${prefix} PRIVATE gradwire_options gradwire_warnings protobuf::libprotobuf absl::statusor)
    if(kind STREQUAL test)
      target_link_libraries(${prefix} PRIVATE gradwire_test_options GTest::gmock GTest::gtest)
      target_precompile_headers(${prefix} PRIVATE ${folder}/test.h)
    else()
      target_precompile_headers(${prefix} PRIVATE ${folder}/library.h)
    endif()
  endif()
  target_precompile_headers(${target} REUSE_FROM ${prefix})
endfunction()

# gradwire_library(NAME SRCS a.cc b.cc DEPS other::target [PUBLIC_DEPS ...])
function(gradwire_library name)
  cmake_parse_arguments(ARG "" "" "SRCS;DEPS;PUBLIC_DEPS" ${ARGN})
  if(ARG_SRCS)
    add_library(${name} STATIC ${ARG_SRCS})
    # Private: who links the library compiles as they like, and has nothing of this repository on the include path.
    target_link_libraries(${name} PRIVATE gradwire_options PUBLIC ${ARG_PUBLIC_DEPS}
                          PRIVATE gradwire_warnings ${ARG_DEPS})
    gradwire_precompile(${name} library)
  else()
    add_library(${name} INTERFACE)
    target_link_libraries(${name} INTERFACE ${ARG_PUBLIC_DEPS} ${ARG_DEPS})
  endif()
endfunction()

# gradwire_binary(NAME SRCS main.cc DEPS ...): a program in build/<preset>/bin.
function(gradwire_binary name)
  cmake_parse_arguments(ARG "" "" "SRCS;DEPS" ${ARGN})
  add_executable(${name} ${ARG_SRCS})
  target_link_libraries(${name} PRIVATE gradwire_options gradwire_warnings ${ARG_DEPS})
  gradwire_precompile(${name} program)
endfunction()

# gradwire_test(NAME GROUP unit SRCS a_test.cc DEPS ...): a GoogleTest program, labelled with its group for tests/run.
function(gradwire_test name)
  cmake_parse_arguments(ARG "" "GROUP" "SRCS;DEPS" ${ARGN})
  add_executable(${name} ${ARG_SRCS})
  target_link_libraries(${name} PRIVATE gradwire_options gradwire_warnings gradwire_test_options ${ARG_DEPS}
                        GTest::gmock GTest::gtest GTest::gtest_main)
  gradwire_precompile(${name} test)
  set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/tests)
  if(GRADWIRE_SANITIZE MATCHES thread)  # tests/tsan: makes the distribution's absl::Mutex visible
    target_sources(${name} PRIVATE ${PROJECT_SOURCE_DIR}/tests/tsan/absl_mutex.cc)
    target_link_options(${name} PRIVATE @${PROJECT_SOURCE_DIR}/tests/tsan/wrap.txt)
    target_link_libraries(${name} PRIVATE absl::synchronization)
  endif()
  add_test(NAME ${name} COMMAND ${name})
  set_tests_properties(${name} PROPERTIES LABELS ${ARG_GROUP} TIMEOUT 600)
  set_property(GLOBAL APPEND PROPERTY GRADWIRE_TESTS_${ARG_GROUP} ${name})
endfunction()

# gradwire_bench(NAME SRCS a_bench.cc DEPS ...): a benchmark program, run by tests/bench/run.
function(gradwire_bench name)
  cmake_parse_arguments(ARG "" "" "SRCS;DEPS" ${ARGN})
  add_executable(${name} ${ARG_SRCS})
  target_link_libraries(${name} PRIVATE gradwire_options gradwire_warnings ${ARG_DEPS})
  gradwire_precompile(${name} program)
  set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/bench)
endfunction()
