"""The README's examples run as they are printed."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

from conftest import ROOT, server_binary


def test_quick_python(addresses):
    pytest.importorskip("torch")
    done = subprocess.run([sys.executable, ROOT / "client/examples/quick.py", *addresses(2)], capture_output=True,
                          text=True, timeout=120, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"loss \d+\.\d+, pushed \d+ bytes\n", done.stdout), done.stdout


def test_two_quick_workers_train_one_model_and_a_second_run_makes_no_step(addresses):
    pytest.importorskip("torch")
    servers = addresses(2)
    command = [sys.executable, ROOT / "client/examples/quick.py", *servers]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "WORLD_SIZE": "2"}
    for pushed in (r"[1-9]\d*", "0"):
        workers = [subprocess.Popen(command, env={**environment, "RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
                   for rank in range(2)]
        for worker in workers:
            told, _ = worker.communicate(timeout=120)
            assert worker.returncode == 0
            found = re.fullmatch(rf"loss (\d+\.\d+), pushed {pushed} bytes\n", told)
            assert found, told
            assert float(found[1]) < 0.5, "of 1 at first"


@pytest.mark.parametrize("name", ["gradwire-quick", "gradwire-quick-c"])
def test_quick_cpp_and_c(addresses, name):
    binary = pathlib.Path(server_binary()).with_name(name)
    if not binary.exists():
        pytest.skip(f"{binary} is not built")
    done = subprocess.run([binary, *addresses(2)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "weight 3.0000\n"
