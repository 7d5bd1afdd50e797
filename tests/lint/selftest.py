#!/usr/bin/env python3
"""Each gate fails where it must: faults are planted into a copy of the tree, and every one of them is to be found.

usage: tests/lint/selftest.py [GATE...]
"""

from __future__ import annotations

import pathlib
import shutil
import subprocess
import sys
import tempfile

from tree import ROOT, compiled, files

# By gate: files with faults (added to what is there already), and how each finding begins, with L for the first line.
FAULTS = {
    "walls.py": [
        ("kernels/planted.h", '#include "common/base/bytes.h"\n', ["L: kernels/ includes"]),
        ("common/planted.cc", '#include "server/daemon.h"\n#include <grpcpp/grpcpp.h>\n#include <boost/asio.hpp>\n'
         '#include <cuda_runtime.h>\nint a = getenv("A") != nullptr;\n#include "../proto/x.h"\n',
         ["L: common/ includes", "L+1: gRPC", "L+2: Boost", "L+3: CUDA", "L+4: the environment", "L+5: common/ includes"]),
        ("client/planted.cc", '// #include "server/daemon.h"\n#include "server/daemon.h"\n', ["L+1: client/ includes"]),
        ("server/planted.cc", '#include "gradwire/session.h"\n#include "gradwire/v1/worker.grpc.pb.h"\nbool a = IsAsync(job);\n',
         ["L: server/ includes", "L+1: gRPC", "L+2: what the kind"]),
        ("common/codec/planted.cc", "bool a = std::holds_alternative<TagcSpec>(spec);\n", ["L: a codec's kind"]),
    ],
    "lengths": [
        ("tests/planted.py", "pass\n" * 600, ["L+599: 600 lines"]),
        ("proto/planted.proto", "\n" * 700, ["L+599: 700 lines"]),
    ],
    "names.py": [
        ("planted.md", "# One\n`Codec::NewNothing`\n`common/codec/codec.xx`\n`--planted-flag`\n[a](nothing.md)\n[b](#two)\n[c](#one)\n",
         ["L+1: Codec::NewNothing", "L+2: common/codec/codec.xx", "L+3: --planted-flag", "L+4: link to nothing.md",
          "L+5: link to #two"]),
        ("common/planted.h", "// See proto/NOTHING.md.\n", ["L: proto/NOTHING.md"]),
    ],
    "format": [("common/planted.cc", "int  a;\n", ["L: is laid out otherwise"])],
    "shell": [
        ("deploy/planted", "#!/usr/bin/env bash\nrm -r $1/a\n", ["L+1:7: note: Double quote"]),
        ("deploy/planted.sh", "# shellcheck shell=sh\n[[ a = b ]]\n", ["L+1:1: warning: In POSIX sh"]),
    ],
    "python": [
        ("tests/planted.py", "import os\n", ["L:8: F401"]),
        ("deploy/planted", "#!/usr/bin/env python3\nimport os\n", ["L+1:8: F401"]),
        ("client/python/gradwire/planted.py", 'def f() -> int:\n    return ""\n', ["L+1: error: Incompatible return"]),
    ],
    "threads.py": [
        ("common/base/names.cc", """
#include "absl/synchronization/mutex.h"
struct Planted {
  absl::Mutex mu;
  int guarded ABSL_GUARDED_BY(mu) = 0;
  int Unguarded() { return guarded; }
};
""", ["L+5:28: error: reading variable 'guarded' requires holding mutex 'mu'"]),
    ],
    "tidy.py": [
        ("common/base/names.cc", """
#include <utility>
std::string Planted(std::string text) {
  std::string moved = std::move(text);
  return text + moved;
}
""", ["L+4:10: error: 'text' used after it was moved"]),
    ],
}
COMPILED = {"threads.py": "clang++-14", "tidy.py": "clang-tidy-14"}  # look at the named files, as build/lint compiles them


def copy_tree(to: pathlib.Path) -> None:
    for path in files():
        (to / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / path, to / path)
    (to / ".venv").symlink_to(ROOT / ".venv")
    subprocess.run(["git", "init", "-q"], cwd=to, check=True)


def unfound(gate: str, tree: pathlib.Path) -> list[str]:
    """Plants the faults of a gate; what it does not say then. Takes them out again."""
    missed = []
    before = {path: (tree / path).read_text() if (tree / path).exists() else None for path, _, _ in FAULTS[gate]}
    expected = []
    for path, text, findings in FAULTS[gate]:
        old = before[path] or ""
        (tree / path).write_text(old + text)
        first = old.count("\n") + 1
        for finding in findings:
            place, rest = finding.split(":", 1)
            expected.append(f"{path}:{first + int(place[2:] or 0)}:{rest}")
    command = [str(tree / "tests/lint" / gate)]
    if gate in COMPILED:
        command += [f"--like={ROOT / 'build/lint'}", *before]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)
    if done.returncode == 77:
        return []
    if done.returncode != 1:
        missed.append(f"tests/lint/{gate}: status {done.returncode}, not 1, where faults were planted: {done.stderr.strip()}")
    lines = done.stdout.splitlines()
    missed += [f"tests/lint/{gate}: did not say: {start}" for start in expected if not any(line.startswith(start) for line in lines)]
    for path, text in before.items():
        (tree / path).unlink() if text is None else (tree / path).write_text(text)
    return missed + ([done.stdout] if missed else [])


def main() -> int:
    gates = sys.argv[1:] or list(FAULTS)
    if any(shutil.which(COMPILED[gate]) for gate in gates if gate in COMPILED):
        compiled()  # makes build/lint
    with tempfile.TemporaryDirectory() as folder:
        copy_tree(pathlib.Path(folder))
        missed = [line for gate in gates for line in unfound(gate, pathlib.Path(folder))]
    for line in missed:
        print(line)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
