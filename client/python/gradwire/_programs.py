"""The programs that come with the package, and the wheel's console scripts for them, which become the program: signals and
exit status are its own."""

import os
import pathlib
import shutil
import sys
from typing import NoReturn


def find_program(name: str, on_path: bool = True) -> pathlib.Path:
    """In the wheel beside the package; in a build tree where the build puts it; else on PATH. FileNotFoundError: nowhere."""
    package = pathlib.Path(__file__).parent
    for program in (package / "bin" / name, package.parents[1] / "bin" / name):
        if os.access(program, os.X_OK):
            return program
    found = shutil.which(name) if on_path else None
    if found is None:
        raise FileNotFoundError(f"{name} is not beside the package {package}{' nor on PATH' if on_path else ''}: install the "
                                "wheel, or build it (deploy/quickstart)")
    return pathlib.Path(found)


def _become(name: str) -> NoReturn:
    # Not from PATH: that is where this script itself is found.
    os.execv(find_program(name, on_path=False), [name, *sys.argv[1:]])


def server() -> NoReturn:
    _become("gradwire-server")


def tool() -> NoReturn:
    _become("gradwire")
