"""`cmake --install`: what is there, and projects that know nothing but the prefix."""

from __future__ import annotations

import os
import pathlib
import platform
import re
import shlex
import shutil

import pytest

from conftest import ROOT, run, serving

FITTED = "weight 3.0000\n"
LIBRARY = "lib/libgradwire_client.so"


def example(folder: pathlib.Path) -> pathlib.Path:
    """The README's program, alone in a folder."""
    return pathlib.Path(shutil.copy(ROOT / "client/examples/quick.cc", folder))


def test_only_what_is_meant_for_others_is_installed(prefix):
    found = {str(path.relative_to(prefix)) for path in prefix.rglob("*") if not path.is_dir()}
    assert {re.sub(r"\.so\.[\d.]+$", ".so", path) for path in found} == {
        "bin/gradwire", "bin/gradwire-server", LIBRARY, "lib/pkgconfig/gradwire.pc", "include/gradwire/c.h",
        "include/gradwire/session.h", "include/gradwire/v1/job.pb.h",
        *(f"lib/cmake/gradwire/gradwire{name}.cmake" for name in ("Config", "ConfigVersion", "Targets", "Targets-release"))}


def test_nothing_names_the_checkout(prefix):
    for path in (*prefix.glob("lib/cmake/**/*.cmake"), *prefix.glob("lib/pkgconfig/*")):
        assert str(ROOT) not in path.read_text(), path
    for path in (*prefix.glob("bin/*"), prefix / LIBRARY):
        assert "RUNPATH" not in run("readelf", "-d", path), path


def test_the_library_exports_what_its_headers_declare(prefix):
    symbols = [line.split(maxsplit=2)[2] for line in run("nm", "-DC", "--defined-only", prefix / LIBRARY).splitlines()]
    public = re.compile(r"(?:(?:typeinfo|typeinfo name|vtable) for )?gradwire::(?:Session::|OpenCudaDevice|v1::)"
                        r"|gradwire_[a-z_]+$|.*google::protobuf::Arena::CreateMaybeMessage<gradwire::v1::")
    assert any(symbol.startswith("gradwire::Session::Join(") for symbol in symbols)
    declared = set(re.findall(r"^(?!static|[ /]).*\b(gradwire_\w+)\(", (prefix / "include/gradwire/c.h").read_text(), re.M))
    assert {symbol for symbol in symbols if symbol.startswith("gradwire_")} == declared
    assert [symbol for symbol in symbols if not public.match(symbol)] == []


def test_installed_programs_have_the_version_of_the_package(prefix):
    version = run("pkg-config", "--modversion", "gradwire", PKG_CONFIG_PATH=str(prefix / "lib/pkgconfig"))
    for program in ("gradwire", "gradwire-server"):
        assert run(prefix / "bin" / program, "--version") == version


def test_find_package(prefix, tmp_path):
    project = tmp_path / "outside"
    shutil.copytree(ROOT / "tests/package/outside", project)
    example(project)
    run("cmake", "-G", "Ninja", "-S", project, "-B", tmp_path / "build", f"-DCMAKE_PREFIX_PATH={prefix}")
    run("cmake", "--build", tmp_path / "build")
    with serving(prefix / "bin/gradwire-server", tmp_path) as addresses:
        assert run(tmp_path / "build/quick", *addresses) == FITTED


def test_pkg_config(prefix, tmp_path):
    flags = shlex.split(run("pkg-config", "--cflags", "--libs", "gradwire",
                            PKG_CONFIG_PATH=str(prefix / "lib/pkgconfig")))
    run("c++", "-std=c++20", example(tmp_path), *flags, f"-Wl,-rpath,{prefix}/lib", "-o", tmp_path / "quick")
    with serving(prefix / "bin/gradwire-server", tmp_path) as addresses:
        assert run(tmp_path / "quick", *addresses) == FITTED


def test_c_compiler_needs_the_library_alone(prefix, tmp_path):
    run("cc", "-std=c99", "-pedantic-errors", "-Wall", "-Wextra", "-Werror", ROOT / "client/examples/quick.c", f"-I{prefix}/include",
        f"-L{prefix}/lib", "-lgradwire_client", f"-Wl,-rpath,{prefix}/lib", "-o", tmp_path / "quick-c")
    with serving(prefix / "bin/gradwire-server", tmp_path) as addresses:
        assert run(tmp_path / "quick-c", *addresses) == FITTED


def owners(path: pathlib.Path) -> set[str]:
    """Debian packages of the libraries that a program or library names itself, but for those that every Debian has."""
    needed = set(re.findall(r"NEEDED.*\[(.+)\]", run("readelf", "-d", path))) - {"libc.so.6", "libm.so.6", "libgcc_s.so.1"}
    lines = [line.split() for line in run("ldd", path).splitlines()]
    files = [os.path.realpath(words[2]) for words in lines if words[0] in needed and words[1] == "=>"]
    return {line.split(":")[0] for line in run("dpkg-query", "-S", *files).splitlines()}


def test_packages_that_installed_programs_need_are_listed(prefix):
    release = platform.freedesktop_os_release()
    if (release["ID"], release.get("VERSION_ID")) != ("debian", "12"):
        pytest.skip("deploy/packages.runtime has the names of Debian 12")
    listed = {line for line in (ROOT / "deploy/packages.runtime").read_text().splitlines() if line[:1] not in ("", "#")}
    needed = set.union(*map(owners, (prefix / "bin/gradwire", prefix / "bin/gradwire-server", prefix / LIBRARY)))
    assert needed == listed
