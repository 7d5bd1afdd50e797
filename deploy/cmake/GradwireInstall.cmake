# What `cmake --install` copies: the programs, the client library with its public headers, and what find_package and
# pkg-config read. And what a wheel has beside its Python sources.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

if(GRADWIRE_PROGRAMS)
  install(TARGETS gradwire-server gradwire RUNTIME COMPONENT programs)
endif()

# The component python is the wheel's alone (pyproject.toml); gradwire/_programs.py starts the programs.
if(GRADWIRE_PYTHON)
  install(TARGETS gradwire_core DESTINATION gradwire COMPONENT python EXCLUDE_FROM_ALL)
  if(GRADWIRE_PROGRAMS)
    install(TARGETS gradwire-server gradwire RUNTIME DESTINATION gradwire/bin COMPONENT python EXCLUDE_FROM_ALL)
  endif()
endif()

# Installed, the client library is a shared one. Its users then find and link what its headers name, Abseil's status and
# protobuf; gRPC, Boost, Highway and the rest are its own affair. It exports its own names alone, so that a program with
# another Boost or Highway in it keeps those apart. As a part of another build it is static (client/cpp): there one
# compiler sees one set of headers.
add_library(gradwire_client_shared SHARED $<TARGET_OBJECTS:gradwire_client>)
set(exported ${PROJECT_SOURCE_DIR}/client/cpp/exported.map)
target_link_libraries(gradwire_client_shared PUBLIC absl::status absl::statusor protobuf::libprotobuf
                      PRIVATE gradwire_options gradwire_client)
target_link_options(gradwire_client_shared PRIVATE -Wl,--version-script=${exported})
target_compile_features(gradwire_client_shared INTERFACE cxx_std_20)
# Before 1.0 a minor version may break programs that were linked with the one before.
set_target_properties(gradwire_client_shared PROPERTIES
  OUTPUT_NAME gradwire_client EXPORT_NAME client LINKER_LANGUAGE CXX LINK_DEPENDS ${exported}
  LIBRARY_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/lib
  VERSION ${PROJECT_VERSION} SOVERSION ${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR})

install(TARGETS gradwire_client_shared EXPORT gradwire COMPONENT library INCLUDES DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(FILES ${PROJECT_SOURCE_DIR}/client/cpp/include/gradwire/c.h ${PROJECT_SOURCE_DIR}/client/cpp/include/gradwire/session.h
        DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/gradwire COMPONENT library)
install(FILES ${PROJECT_BINARY_DIR}/proto/gradwire/v1/job.pb.h
        DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/gradwire/v1 COMPONENT library)

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/gradwire)
configure_package_config_file(${CMAKE_CURRENT_LIST_DIR}/gradwireConfig.cmake.in
  ${PROJECT_BINARY_DIR}/gradwireConfig.cmake INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/gradwireConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(EXPORT gradwire NAMESPACE gradwire:: FILE gradwireTargets.cmake DESTINATION ${package_dir} COMPONENT library)
install(FILES ${PROJECT_BINARY_DIR}/gradwireConfig.cmake ${PROJECT_BINARY_DIR}/gradwireConfigVersion.cmake
        DESTINATION ${package_dir} COMPONENT library)

# From where gradwire.pc lies to the prefix, so that the whole may be installed, or moved, anywhere.
file(RELATIVE_PATH to_prefix /prefix/${CMAKE_INSTALL_LIBDIR}/pkgconfig /prefix)
string(REGEX REPLACE "/$" "" to_prefix ${to_prefix})
configure_file(${CMAKE_CURRENT_LIST_DIR}/gradwire.pc.in ${PROJECT_BINARY_DIR}/gradwire.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/gradwire.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig COMPONENT library)
