#!/usr/bin/env python3
"""Compiles every target with clang, warnings and -Wthread-safety as errors, as far as the warnings: no code is made."""

from __future__ import annotations

import argparse
import pathlib
import subprocess
import sys

from tree import ROOT, Unit, compiled, in_parallel, need, report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--like", type=pathlib.Path, help="the build/lint of another checkout, for its settings")
    parser.add_argument("files", nargs="*", help="these files alone")
    options = parser.parse_args()
    need("clang++-14")
    units = [unit for unit in compiled(options.like) if not options.files or unit.path in options.files]
    prefix = []
    if not options.files:
        parsed = ROOT / "build/lint/prefix.pch"
        subprocess.run(["clang++-14", "-std=c++20", "-DGTEST_HAS_PTHREAD=1", f"-I{ROOT}", "-x", "c++-header",
                        str(ROOT / "deploy/cmake/prefix/test.h"), "-o", str(parsed)], check=True)
        prefix = ["-include-pch", str(parsed)]

    def check(unit: Unit) -> str:
        # Braces may be left out around an array that is one pointer (kernels/cuda/bodies/lanes.cuh).
        done = subprocess.run(["clang++-14", "-fsyntax-only", *prefix, *unit.arguments, "-Wthread-safety", "-Werror",
                               "-Wno-missing-braces", "-fno-caret-diagnostics", str(ROOT / unit.path)], cwd=ROOT,
                              text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
        return "" if done.returncode == 0 else done.stdout.replace(f"{ROOT}/", "").strip()

    return report(found for found in in_parallel(check, units) if found)


if __name__ == "__main__":
    sys.exit(main())
