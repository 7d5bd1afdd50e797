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
    assert re.fullmatch(r"loss \d+\.\d+, pushed \d+ bytes per step\n", done.stdout), done.stdout


@pytest.mark.parametrize("name", ["gradwire-quick", "gradwire-quick-c"])
def test_quick_cpp_and_c(addresses, name):
    binary = pathlib.Path(server_binary()).with_name(name)
    if not binary.exists():
        pytest.skip(f"{binary} is not built")
    done = subprocess.run([binary, *addresses(2)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "weight 3.0000\n"
