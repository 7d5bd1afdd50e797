"""What the gates share: the files of the tree, and how clang compiles them."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import itertools
import json
import os
import pathlib
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable

ROOT = pathlib.Path(__file__).resolve().parents[2]
JOBS = int(os.environ.get("GRADWIRE_JOBS") or os.cpu_count() or 1)


@functools.cache
def files(*patterns: str) -> list[str]:
    """Those that are or could be committed, by their paths from the root; git's patterns."""
    done = subprocess.run(["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *patterns], cwd=ROOT,
                          capture_output=True, text=True, check=True)
    return [path for path in done.stdout.splitlines() if (ROOT / path).is_file()]


def need(program: str) -> None:
    """Ends a gate, as skipped, where a program is not installed."""
    if shutil.which(program) is None:
        print(f"{program} is not installed (deploy/bootstrap --lint)")
        sys.exit(77)


def report(found: Iterable[str]) -> int:
    """Prints findings as they come, each once; the exit status of a gate."""
    told = set()
    for finding in found:
        if finding not in told:
            print(finding, flush=True)
        told.add(finding)
    return 1 if told else 0


@dataclasses.dataclass(frozen=True)
class Unit:
    """A source file of ours and clang's arguments for it."""
    path: str
    arguments: tuple[str, ...]
    target: str


def compiled(build: pathlib.Path | None = None) -> list[Unit]:
    """Every C++ source that some target compiles, once. `build`: the configured build/lint of another checkout, whose
    generated files and settings serve for this one."""
    if build is None:
        subprocess.run(["bash", "-c", f"source {shlex.quote(str(ROOT / 'deploy/lib.sh'))}; build lint gradwire_generated"],
                       env={**os.environ, "GRADWIRE_UNITY": ""}, check=True)
        build = ROOT / "build/lint"
    home = build.parent.parent
    units = {}
    for entry in json.loads((build / "compile_commands.json").read_text()):
        path = pathlib.Path(entry["file"]).relative_to(home)
        if path.parts[0] == "build" or path.suffix == ".c" or not (ROOT / path).exists():
            continue
        command = shlex.split(entry["command"])
        begin = next(i for i, word in enumerate(command) if word.endswith("clang++-14"))  # behind ccache
        kept = [word for before, word in itertools.pairwise(command[begin:])
                if word not in ("-c", "-o") and before not in ("-c", "-o")]
        # No code is made: without what only code depends on, one prefix serves for all.
        kept = [word for word in kept if not word.startswith(("-f", "-O", "-pthread"))]
        kept = [word if str(build) in word else word.replace(f"-I{home}", f"-I{ROOT}") for word in kept]
        units.setdefault(str(path), Unit(str(path), tuple(kept), command[command.index("-o") + 1].partition(".dir/")[0]))
    return sorted(units.values(), key=lambda unit: unit.path)


def in_parallel(call, units: list):
    """Results in the order of `units`, each as soon as it is there."""
    with concurrent.futures.ThreadPoolExecutor(JOBS) as pool:
        for done, result in enumerate(pool.map(call, units), 1):
            yield result
            if sys.stderr.isatty():
                print(f"\r{done}/{len(units)}", end="", file=sys.stderr)
