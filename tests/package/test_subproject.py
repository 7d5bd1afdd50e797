"""Gradwire as a part of another project's build. parent/CMakeLists.txt looks at the settings of that project itself."""

from __future__ import annotations

import json
import pathlib
import shlex

import pytest

from conftest import BUILD, ROOT, run, serving

PARENT = ROOT / "tests/package/parent"


def configure(build: pathlib.Path, *options: str) -> dict[str, list[str]]:
    """The command of each source file."""
    run("cmake", "-G", "Ninja", "-S", PARENT, "-B", build, f"-DGRADWIRE={ROOT}", *options)
    commands = json.loads((build / "compile_commands.json").read_text())
    return {command["file"]: shlex.split(command["command"]) for command in commands}


@pytest.mark.parametrize("fetch", ["OFF", "ON"])
def test_leaves_the_parents_flags_alone_and_adds_the_library_only(tmp_path, fetch):
    commands = configure(tmp_path, f"-DFETCH={fetch}")
    gradwire = tmp_path / ("_deps/gradwire-build" if fetch == "ON" else "gradwire")
    own = commands.pop(str(PARENT / "own.cc"))
    assert [word for word in own if word.startswith(("-I", "-W", "-O", "-f", "-s"))] == ["-Wall", "-std=gnu++14"]
    quick = commands.pop(str(ROOT / "client/examples/quick.cc"))
    paths = {word.removeprefix("-I") for word in quick if word.startswith(("-I", "/")) and not word.endswith(".cc")}
    assert paths - {quick[0]} == {str(ROOT / "client/cpp/include"), str(gradwire / "proto")}
    assert [word for word in quick if word.startswith(("-W", "-O", "-f", "-std"))] == ["-Wall", "-std=gnu++20"]

    folders = {pathlib.Path(file).relative_to(ROOT).parts[0] for file in commands if pathlib.Path(file).is_relative_to(ROOT)}
    assert folders == {"client", "common", "kernels"}  # and protobuf's files in the build: no programs, tests or CUDA
    for file, command in commands.items():
        assert "-Werror" not in command and not file.endswith(".cu"), file
        assert "-std=c++20" in command, file
        assert "-ffp-contract=off" in command or file.endswith(".pb.cc"), file


def test_a_program_of_the_parent_trains(tmp_path):
    # Kept from run to run. Several files at once and unoptimised, which takes a quarter of the time.
    build = ROOT / "build/parent"
    configure(build, "-DCMAKE_BUILD_TYPE=Debug", "-DCMAKE_UNITY_BUILD=ON", "-DCMAKE_CXX_COMPILER_LAUNCHER=ccache")
    run("cmake", "--build", build, "--target", "quick", "own")
    with serving(BUILD / "bin/gradwire-server", tmp_path) as addresses:
        assert run(build / "programs/quick", *addresses) == "weight 3.0000\n"
