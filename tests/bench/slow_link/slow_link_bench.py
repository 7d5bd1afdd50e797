"""How long after TensorReady each of several shards has a round's frames, with one of them behind a slow link.

The worker and each shard server are hosts of their own: network namespaces, the shards' links limited by token buckets.
What a shard has received is counted by the kernel behind its bucket; headers count, too (1 to 5 %). The worker pushes
dense float32 gradients, all of them ready at once. Needs root (ip, tc).

  tests/bench/run slow_link [--mbit=400] [--slower=10] [--mib=16] [--rounds=3] [--transport=tcp] [--encode-threads=1]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "tests/net"))

from hosts import Hosts, start_shard, why_not
from slow_link_worker import TENSOR_BYTES, Settings

SHARDS = tuple(f"shard-{i}" for i in range(4))
SLOW = SHARDS[0]  # behind the slow link: the first one that a bucket is encoded for
WORKER = "worker-0"
PORT = 7070
OTHERS_RATE = 0.85  # the aim: of their links
MOST_S = 120.0  # for a round
POLL_S = 0.001  # between polls, beside their own milliseconds


class Worker:
    """The process of slow_link_worker.py. RuntimeError where it says something else than it should, such as nothing."""

    def __init__(self, hosts: Hosts, settings: Settings):
        program = Path(__file__).with_name("slow_link_worker.py")
        self._process = hosts.popen(WORKER, [sys.executable, program, json.dumps(asdict(settings))],
                                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        self.expect("joined")

    def expect(self, line: str) -> None:
        told = self._process.stdout.readline()
        if told != f"{line}\n":
            raise RuntimeError(f"{WORKER} said {told!r} instead of {line!r}")

    def begin_round(self) -> float:
        """time.monotonic() as the first tensor is ready."""
        self._process.stdin.write("go\n")
        told = self._process.stdout.readline()
        if not told:
            raise RuntimeError(f"{WORKER} ended in a round")
        return float(told)

    def end_round(self) -> None:
        self.expect("ended")


def times_of_round(worker: Worker, hosts: Hosts, payload: int) -> list[float]:
    """Seconds from the first tensor_ready until each shard's link has brought it `payload` bytes; at most MOST_S."""
    before = hosts.delivered_bytes_of_all()
    begin = worker.begin_round()
    found: dict[str, float] = {}
    while len(found) < len(SHARDS) and time.monotonic() - begin < MOST_S:
        brought = hosts.delivered_bytes_of_all()
        now = time.monotonic()
        for shard in SHARDS:
            if brought[shard] - before[shard] >= payload:
                found.setdefault(shard, now - begin)
        time.sleep(POLL_S)
    worker.end_round()
    return [found.get(shard, MOST_S) for shard in SHARDS]


def rate_mbit(args: argparse.Namespace, shard: str) -> float:
    return args.mbit / args.slower if shard == SLOW else args.mbit


def measure(args: argparse.Namespace) -> list[list[float]]:
    """By round and shard."""
    rates_bit_s = {WORKER: None, **{shard: 1e6 * rate_mbit(args, shard) for shard in SHARDS}}
    payload = args.mib << 20
    with tempfile.TemporaryDirectory() as folder, Hosts(rates_bit_s) as hosts:
        servers = [f"{args.transport}://{hosts.address(shard)}:{PORT}" for shard in SHARDS]
        for shard, server in zip(SHARDS, servers, strict=True):
            start_shard(hosts, shard, server, Path(folder))
        worker = Worker(hosts, Settings(servers, len(SHARDS) * payload // TENSOR_BYTES, args.encode_threads, MOST_S))
        times_of_round(worker, hosts, 0)  # calibrates, too
        return [times_of_round(worker, hosts, payload) for _ in range(args.rounds)]


def main() -> None:
    parser = argparse.ArgumentParser(prog="tests/bench/run slow_link", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=float, default=400, help="rate of the other links")
    parser.add_argument("--slower", type=float, default=10, help="how many times slower the slow one is")
    parser.add_argument("--mib", type=int, default=16, help="of frames for each shard and round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--transport", choices=("tcp", "grpc"), default="tcp")
    parser.add_argument("--encode-threads", type=int, default=1)
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    reason = why_not()
    if reason is not None:
        sys.exit(f"tests/bench/run slow_link: {reason}")
    rounds = measure(args)
    machine = f"{platform.machine()}, {os.cpu_count()} cores"
    print(f"slow_link on {machine}\n  {args.mib} MiB to each of {len(SHARDS)} shards over {args.transport}://, links "
          f"of {args.mbit:g} Mbit/s, one {args.slower:g} times slower; median of {args.rounds} rounds")
    rows = []
    for i, shard in enumerate(SHARDS):
        link = rate_mbit(args, shard)
        seconds = statistics.median(times[i] for times in rounds)
        mbit = args.mib * (1 << 20) * 8 / 1e6 / seconds
        target = 0.0 if shard == SLOW else OTHERS_RATE
        rows.append({"case": f"shard {i}" + (", slow link" if shard == SLOW else ""), "value": seconds, "unit": "s",
                     "ratio": mbit / link, "ratio_to": "its link", "target": target, "met": mbit / link >= target})
        print(f"{rows[-1]['case']:<20} has its frames after {seconds:7.3f} s  {mbit:7.1f} Mbit/s  {mbit / link:6.3f}x of "
              + ("its link" if shard == SLOW else f"its link  target {target:g}  {'met' if rows[-1]['met'] else 'missed'}"))
    args.json.write_text(json.dumps({"name": "slow_link", "machine": machine, "rows": rows, "seconds": rounds}, indent=2) + "\n")


if __name__ == "__main__":
    main()
