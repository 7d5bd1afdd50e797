"""Console scripts of the wheel. The process becomes the program, so signals and exit status are the program's own."""

import os
import pathlib
import sys
from typing import NoReturn


def _become(name: str) -> NoReturn:
    program = pathlib.Path(__file__).with_name("bin") / name
    os.execv(program, [name, *sys.argv[1:]])


def server() -> NoReturn:
    _become("gradwire-server")


def tool() -> NoReturn:
    _become("gradwire")
