#!/usr/bin/env python3
"""Runs clang-tidy with the checks of .clang-tidy over what was changed: seconds for each file are too long for all."""

from __future__ import annotations

import argparse
import pathlib
import subprocess
import sys
import tempfile

from tree import ROOT, Unit, compiled, in_parallel, need, report

BATCH = 8  # files at a time


def check(units: list[Unit]) -> list[str]:
    """Several as one: what they include is looked at once. Each by itself where that does not compile."""
    with tempfile.NamedTemporaryFile("w", suffix=".cc") as together:
        together.writelines(f'#include "{ROOT / unit.path}"\n' for unit in units)
        together.flush()
        file = together.name if len(units) > 1 else str(ROOT / units[0].path)
        done = subprocess.run(["clang-tidy-14", "--quiet", f"--config-file={ROOT / '.clang-tidy'}", file, "--", "-w",
                               *units[0].arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.replace(f"{ROOT}/", "").splitlines() if ": error: " in line]
    if len(units) > 1 and any("[clang-diagnostic-error" in line for line in lines):
        return [line for unit in units for line in check([unit])]
    return lines or ([done.stderr] if done.returncode != 0 else [])


def batches(units: list[Unit]) -> list[list[Unit]]:
    """Of one target each: names in anonymous namespaces are unique there."""
    found: dict[tuple, list[list[Unit]]] = {}
    for unit in units:
        same = found.setdefault((unit.target, unit.arguments), [[]])
        if len(same[-1]) == BATCH:
            same.append([])
        same[-1].append(unit)
    return [batch for same in found.values() for batch in same]


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False).stdout


def changed(base: str | None) -> list[str]:
    """What differs from `base`, or from where this branch left the upstream one."""
    return git("diff", "--name-only", base or git("merge-base", "HEAD", "@{upstream}").strip() or "HEAD").split()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--like", type=pathlib.Path, help="the build/lint of another checkout, for its settings")
    parser.add_argument("--all", action="store_true", help="every file")
    parser.add_argument("--base", help="what differs from this commit (default: from where the branch left its upstream)")
    parser.add_argument("files", nargs="*", help="these files alone")
    options = parser.parse_args()
    need("clang-tidy-14")
    wanted = set(options.files or changed(options.base))
    if not options.all and not wanted:
        print("nothing differs from upstream; tests/lint/tidy.py --all looks at every file")
        return 77
    units = [unit for unit in compiled(options.like) if options.all or unit.path in wanted]
    return report(finding for found in in_parallel(check, batches(units)) for finding in found)


if __name__ == "__main__":
    sys.exit(main())
