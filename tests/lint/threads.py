#!/usr/bin/env python3
"""Compiles every target with clang, warnings and -Wthread-safety as errors, as far as the warnings: no code is made."""

from __future__ import annotations

import argparse
import pathlib
import subprocess
import sys

from tree import ROOT, Unit, compiled, in_parallel, need, report


BATCH = 8  # sources of a target that are parsed as one, since their headers take most of the time


def batches(units: list[Unit]) -> list[list[Unit]]:
    """Sources of one target and the same arguments together; alone, what includes itself (Highway's foreach_target.h)."""
    found: dict[object, list[list[Unit]]] = {}
    for unit in units:
        alone = "foreach_target.h" in (ROOT / unit.path).read_text()
        of = found.setdefault(unit.path if alone else (unit.target, unit.arguments), [[]])
        if len(of[-1]) == BATCH:
            of.append([])
        of[-1].append(unit)
    return [batch for of in found.values() for batch in of]


def locks(unit: Unit) -> bool:
    """Whether the source or the header of its name has to do with locks; what others do wrong with them, clang cannot see."""
    source = ROOT / unit.path
    texts = [file.read_text() for file in (source, source.with_suffix(".h")) if file.exists()]
    return any(word in text for text in texts for word in ("Mutex", "mutex", "ABSL_"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--like", type=pathlib.Path, help="the build/lint of another checkout, for its settings")
    parser.add_argument("--locks", action="store_true",
                        help="only what has to do with locks and, since CI does not build them, benchmarks: a third of the time")
    parser.add_argument("files", nargs="*", help="these files alone")
    options = parser.parse_args()
    need("clang++-14")
    units = [unit for unit in compiled(options.like) if not options.files or unit.path in options.files]
    if options.locks:
        units = [unit for unit in units if locks(unit) or unit.path.startswith("tests/bench/")]
    prefix = []
    if not options.files:
        parsed = ROOT / "build/lint/prefix.pch"
        subprocess.run(["clang++-14", "-std=c++20", "-DGTEST_HAS_PTHREAD=1", f"-I{ROOT}", "-x", "c++-header",
                        str(ROOT / "deploy/cmake/prefix/test.h"), "-o", str(parsed)], check=True)
        prefix = ["-include-pch", str(parsed)]

    def check(batch: list[Unit]) -> list[str]:
        text = "".join(f'#include "{ROOT / unit.path}"\n' for unit in batch)
        # Braces may be left out around an array that is one pointer (kernels/cuda/bodies/lanes.cuh).
        done = subprocess.run(["clang++-14", "-fsyntax-only", *prefix, *batch[0].arguments, "-Wthread-safety", "-Werror",
                               "-Wno-missing-braces", "-fno-caret-diagnostics", "-x", "c++", "-"], cwd=ROOT, input=text,
                              text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
        if done.returncode == 0:
            return []
        if len(batch) > 1:  # each by itself: what is found is its own, not that of two names that meet
            return [found for unit in batch for found in check([unit])]
        return [done.stdout.replace(f"{ROOT}/", "").strip()]

    return report(found for of in in_parallel(check, batches(units)) for found in of)


if __name__ == "__main__":
    sys.exit(main())
