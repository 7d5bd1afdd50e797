#!/usr/bin/env python3
"""Walls of the layout: which folder includes what of ours, and where each foreign library may be seen."""

from __future__ import annotations

import re
import sys

from tree import ROOT, files, report

# What a file of a folder may include of ours; files of proto/ are included as gradwire/v1/ and etcd/.
MAY_INCLUDE = {
    "kernels": {"kernels"},
    "common": {"common", "kernels", "proto"},
    "server": {"server", "common", "kernels", "proto"},
    "client": {"client", "common", "kernels", "proto"},
    "tests": {"tests", "server", "client", "common", "kernels", "proto"},
}
# Beyond that: a file that puts two of them together.
MAY_ALSO_INCLUDE = {"client/python/src/server.cc": {"server"}}  # a shard server in the process of Python
OURS = {"client": "client", "common": "common", "etcd": "proto", "gradwire": "client", "gradwire/v1": "proto",
        "kernels": "kernels", "server": "server", "tests": "tests", "..": "a path that is not from the root"}

CODECS = ("dense", "homomorphic", "powersgd", "quantized", "sparse", "tagc")

# What may be seen in few places: how it shows, where it may, and what to do elsewhere. Tests may speak for themselves.
FENCED = [
    (re.compile(r'#include\s*[<"](grpc|grpcpp)/|#include\s*[<"][\w/]+\.grpc\.pb\.h'),
     ("common/transport/grpc/", "tests/"), "gRPC is behind common/transport/transport.h: use a Channel or a Listener"),
    (re.compile(r'#include\s*[<"]boost/'),
     ("common/transport/asio/", "server/lease/https_client.cc", "tests/"),
     "Boost is behind common/transport and server/lease/https_client.h"),
    (re.compile(r'#include\s*[<"](cuda\w*|cub|thrust|cooperative_groups|nv)(/|\.h)'),
     ("kernels/cuda/", "tests/gpu/"), "CUDA is behind kernels/backend.h"),
    (re.compile(r"std::(get|get_if|holds_alternative)<(\w*::)?\w+Spec>"),
     ("common/job/", *(f"common/codec/{kind}/" for kind in CODECS), "tests/"),
     "a codec's kind is known to its folder and to common/codec/registry.cc: ask its CodecFamily"),
    (re.compile(r"\bIsAsync\("),
     ("server/job/by_rounds.cc", "common/", "client/", "tests/"),
     "what the kind of a job's rounds means for a server is chosen in server/job/by_rounds.cc: ask Rounds, Flow, PastRounds or Answers"),
    (re.compile(r"\b(secure_)?getenv\s*\("),
     ("common/config/", "tests/"), "the environment is read by EnvironmentVariable of common/config/environment.h"),
]


def owner(included: str) -> str | None:
    """The folder of an included path, or None for one that is not ours."""
    parts = included.split("/")
    if len(parts) < 2:
        return None
    return OURS.get("/".join(parts[:2])) or OURS.get(parts[0])


def findings(path: str, text: str) -> list[str]:
    found = []
    here = path.split("/")[0]
    may = MAY_INCLUDE.get(here, set()) | MAY_ALSO_INCLUDE.get(path, set())
    for number, line in enumerate(text.splitlines(), 1):
        if match := re.match(r'\s*#\s*include\s*[<"]([^">]+)[">]', line):
            there = owner(match[1])
            if there is not None and there not in may:
                found.append(f"{path}:{number}: {here}/ includes {match[1]} ({there}), and may include {', '.join(sorted(may))}: "
                             "move what both need there")
        code = line.split("//")[0]
        found += [f"{path}:{number}: {remedy}" for pattern, places, remedy in FENCED
                  if pattern.search(code) and not path.startswith(places)]
    return found


def main() -> int:
    return report([finding for path in files("*.h", "*.cc", "*.cu", "*.cuh") for finding in findings(path, (ROOT / path).read_text())])


if __name__ == "__main__":
    sys.exit(main())
