"""What a wheel holds; and what a fresh environment has behind `pip install .`: servers, tool, package, every example."""

from __future__ import annotations

import json
import pathlib
import re
import shutil
import sys
import sysconfig
import tomllib
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from conftest import ROOT, run, serving

PACKAGE = ROOT / "client/python/gradwire"
EXAMPLES = ROOT / "client/examples"
TORCHRUN = ("ddp", "fsdp")  # what torchrun starts,
OWN = ("own",)  # and needs no server,
LOOPS = ("with_accelerate", "with_trainer", "with_lightning")  # in other people's loops,
PAIRS = ("quick", "local", "with_jax")  # and what is started twice by itself
PUSHED = r"[1-9]\d* kB pushed|pushed [1-9]\d* (?:bytes|kB)"
# One of several processes that share this machine, and no download of models.
ALONE = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    # Warnings as errors, which pip builds without, only for ccache: these are then the objects of build/release.
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "pip", "wheel", ROOT, "--no-build-isolation", "--no-deps", "--no-index", "-w", folder,
        "--config-settings=cmake.define.GRADWIRE_WERROR=ON")
    return next(folder.glob("gradwire-*.whl"))


def pip_install(folder: pathlib.Path, *what: object) -> None:
    run(folder / "bin/pip", "install", "-q", "--disable-pip-version-check", "-c", ROOT / "deploy/requirements.txt", *what,
        timeout=3000)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[pathlib.Path]:
    """A new virtual environment, as on a bare machine: `pip install .` fetches what builds it and what it needs."""
    folder = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", folder)
    pip_install(folder, f"{ROOT}[torch]", "--config-settings=cmake.define.GRADWIRE_WERROR=ON")
    yield folder
    shutil.rmtree(folder)  # gigabytes


@pytest.fixture(scope="module")
def loops(environment) -> pathlib.Path:
    """The same, and from here on with what other people's loops come in."""
    pip_install(environment, "-r", ROOT / "deploy/requirements.loops.txt")
    return environment


def test_holds_the_package_and_the_programs_alone(wheel):
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    extension = "gradwire/_core" + sysconfig.get_config_var("EXT_SUFFIX")
    sources = {f"gradwire/{path.name}" for path in PACKAGE.iterdir() if path.suffix in (".py", ".pyi", ".typed")}
    assert names == sources | {extension, "gradwire/bin/gradwire", "gradwire/bin/gradwire-server"}


def test_the_demo_needs_numpy_alone(wheel, tmp_path):
    run(sys.executable, "-m", "venv", tmp_path / "bare")
    pip_install(tmp_path / "bare", wheel)
    python = tmp_path / "bare/bin/python"
    assert "torch" not in run(python, "-m", "pip", "list")
    printed = run(python, "-m", "gradwire", "demo", "--steps=40", cwd=tmp_path)
    assert re.search(r"step +39: loss \d+\.\d+\neach worker pushed", printed), printed


def test_trains_on_its_own_servers(environment, tmp_path):
    python = environment / "bin/python"
    where = run(python, "-c", "import gradwire; print(gradwire.__file__)", cwd=tmp_path)
    assert pathlib.Path(where.strip()).is_relative_to(environment)
    with serving(environment / "bin/gradwire-server", tmp_path) as addresses:
        printed = run(python, ROOT / "client/examples/quick.py", *addresses, cwd=tmp_path)
        assert re.fullmatch(r"loss \d+\.\d+, pushed \d+ bytes\n", printed), printed
        listed = run(environment / "bin/gradwire", "job", "list", f"--servers={','.join(addresses)}")
        assert "quick" in listed


def test_the_demo_needs_nothing_else(environment, tmp_path):
    printed = run(environment / "bin/python", "-m", "gradwire", "demo", "--steps=40", cwd=tmp_path)
    assert re.search(r"step +39: loss \d+\.\d+\neach worker pushed", printed), printed


def started_by_torchrun(environment, example, addresses, folder):
    return run(environment / "bin/torchrun", "--standalone", "--nproc-per-node=2", EXAMPLES / f"{example}.py", *addresses,
               cwd=folder, timeout=300, **ALONE)


@pytest.mark.parametrize("example", TORCHRUN)
def test_trains_in_a_loop_of_torch(environment, example, tmp_path):
    with serving(environment / "bin/gradwire-server", tmp_path) as addresses:
        assert re.findall(PUSHED, started_by_torchrun(environment, example, addresses, tmp_path))


@pytest.mark.parametrize("example", OWN)
def test_trains_on_shards_of_its_own(environment, example, tmp_path):
    assert re.findall(PUSHED, started_by_torchrun(environment, example, (), tmp_path))


def test_all_say_the_same_version(environment):
    python = environment / "bin/python"
    code = "import importlib.metadata as m, gradwire; print(m.version('gradwire'), gradwire.__version__)"
    package, module = run(python, "-c", code).split()
    assert package == module
    for program in ("gradwire", "gradwire-server"):
        assert run(environment / "bin" / program, "--version").strip() == package


@pytest.mark.parametrize("example", LOOPS)
def test_trains_in_the_loop_of(loops, example, tmp_path):
    with serving(loops / "bin/gradwire-server", tmp_path) as addresses:
        assert re.findall(PUSHED, started_by_torchrun(loops, example, addresses, tmp_path))


@pytest.mark.parametrize("example", PAIRS)
def test_trains_two_workers_of(loops, example, tmp_path):
    def work(rank):
        number = () if example == "quick" else (rank,)
        return run(loops / "bin/python", EXAMPLES / f"{example}.py", *number, *addresses, cwd=tmp_path, timeout=300,
                   RANK=str(rank), WORLD_SIZE="2", **ALONE)

    with serving(loops / "bin/gradwire-server", tmp_path) as addresses, ThreadPoolExecutor() as threads:
        printed = list(threads.map(work, range(2)))
        assert re.findall(PUSHED, printed[0]), printed


def test_these_are_all_examples():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*TORCHRUN, *OWN, *LOOPS, *PAIRS}


def test_pip_builds_without_werror(tmp_path):
    define = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["scikit-build"]["cmake"]["define"]
    run("cmake", "-G", "Ninja", "-S", ROOT, "-B", tmp_path, "-DGRADWIRE_CUDA=OFF", f"-DPython3_EXECUTABLE={sys.executable}",
        f"-Dpybind11_DIR={run(sys.executable, '-m', 'pybind11', '--cmakedir').strip()}",
        *(f"-D{name}={value}" for name, value in define.items()))
    commands = [entry["command"] for entry in json.loads((tmp_path / "compile_commands.json").read_text())]
    assert any("client/python/src/core.cc" in command for command in commands)
    assert not [command for command in commands if "-Werror" in command]
