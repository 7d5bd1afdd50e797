"""How long after TensorReady each of several shards has a round's frames, with one of them behind a slow link.

Each shard server runs in a network namespace of its own, behind a token bucket on the worker's end of a veth pair. What a
shard has received is what that end has sent, counted by the kernel behind the bucket; headers count, too (1 to 5 %). One
worker pushes dense float32 gradients, all of them ready at once. Needs root (ip, tc); takes what it made away again.

  tests/bench/run slow_link [--mbit=400] [--slower=10] [--mib=16] [--rounds=3] [--transport=tcp] [--encode-threads=1]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np

import gradwire

SHARDS = 4
SLOW = 0  # the shard behind the slow link: the first one that a bucket is encoded for
PORT = 7070
OTHERS_RATE = 0.85  # the aim: of their links
MOST_S = 120.0  # for a round


def run(*command: object) -> None:
    subprocess.run([str(part) for part in command], check=True)


class Link:
    """A shard server in a namespace, and the veth pair to it. Names are of this process."""

    def __init__(self, shard: int, mbit: float, transport: str, stack: ExitStack):
        self.name = f"gwsl{os.getpid()}-{shard}"  # at most 15 characters
        subnet = f"10.{200 + os.getpid() % 50}.{shard}"
        run("ip", "netns", "add", self.name)
        stack.callback(subprocess.run, ["ip", "netns", "del", self.name], check=False)  # and the pair with it
        run("ip", "link", "add", self.name, "type", "veth", "peer", "name", "eth0", "netns", self.name)
        run("ip", "addr", "add", f"{subnet}.1/24", "dev", self.name)
        run("ip", "link", "set", self.name, "up")
        for command in (f"addr add {subnet}.2/24 dev eth0", "link set eth0 up", "link set lo up"):
            run("ip", "-n", self.name, *command.split())
        run("tc", "qdisc", "add", "dev", self.name, "root", "tbf", "rate", f"{mbit}mbit", "burst", "128kb", "latency", "100ms")
        server = subprocess.Popen(["ip", "netns", "exec", self.name, f"{os.environ['GRADWIRE_BIN']}/gradwire-server",
                                   f"--listen={transport}://0.0.0.0:{PORT}"], stdout=subprocess.DEVNULL,
                                  stderr=subprocess.DEVNULL)
        stack.callback(server.wait)
        stack.callback(server.terminate)
        self.address = f"{transport}://{subnet}.2:{PORT}"

    def sent_bytes(self) -> int:
        return int(Path(f"/sys/class/net/{self.name}/statistics/tx_bytes").read_text())


def times_of_round(session: gradwire.Session, gradients: list[np.ndarray], links: list[Link], payload: int) -> list[float]:
    """Seconds from the first tensor_ready until each link has carried `payload` bytes."""
    session.begin_round(0.1)
    before = [link.sent_bytes() for link in links]
    begin = time.monotonic()
    for t, gradient in enumerate(gradients):
        session.tensor_ready(t, gradient)
    found: list[float | None] = [None] * len(links)
    while None in found and time.monotonic() - begin < MOST_S:
        for i, link in enumerate(links):
            if found[i] is None and link.sent_bytes() - before[i] >= payload:
                found[i] = time.monotonic() - begin
        time.sleep(0.001)
    session.end_round(MOST_S)
    return [MOST_S if at is None else at for at in found]


def measure(args: argparse.Namespace) -> list[list[float]]:
    """By round and shard."""
    with ExitStack() as stack:
        rates = [args.mbit / args.slower if shard == SLOW else args.mbit for shard in range(SHARDS)]
        links = [Link(shard, rate, args.transport, stack) for shard, rate in enumerate(rates)]
        shapes = [(1 << 20,)] * (args.mib * SHARDS // 4)  # of 4 MiB each
        tensors = [gradwire.TensorSpec(f"t{i}", shape) for i, shape in enumerate(shapes)]
        job = gradwire.JobSpec(name="slow-link", tensors=tensors, optimizer="sgd", codec="dense:fp32", push="gradient")
        gradients = [np.full(shape, 0.01, np.float32) for shape in shapes]
        options = {} if args.encode_threads == 1 else {"encode_threads": args.encode_threads}
        with gradwire.join([link.address for link in links], job, [np.zeros(s, np.float32) for s in shapes], "worker-0",
                           start_timeout=MOST_S, **options) as session:
            times_of_round(session, gradients, links, 0)  # calibrates, too
            payload = args.mib << 20
            return [times_of_round(session, gradients, links, payload) for _ in range(args.rounds)]


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
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("tc") is None:
        sys.exit("slow_link: needs root, ip and tc, for network namespaces and token buckets")
    rounds = measure(args)
    machine = f"{platform.machine()}, {os.cpu_count()} cores"
    print(f"slow_link on {machine}\n  {args.mib} MiB to each of {SHARDS} shards over {args.transport}://, links of "
          f"{args.mbit:g} Mbit/s, one {args.slower:g} times slower; median of {args.rounds} rounds")
    rows = []
    for shard in range(SHARDS):
        link = args.mbit / args.slower if shard == SLOW else args.mbit
        seconds = statistics.median(times[shard] for times in rounds)
        mbit = args.mib * (1 << 20) * 8 / 1e6 / seconds
        target = 0.0 if shard == SLOW else OTHERS_RATE
        rows.append({"case": f"shard {shard}" + (", slow link" if shard == SLOW else ""), "value": seconds, "unit": "s",
                     "ratio": mbit / link, "ratio_to": "its link", "target": target, "met": mbit / link >= target})
        print(f"{rows[-1]['case']:<20} has its frames after {seconds:7.3f} s  {mbit:7.1f} Mbit/s  {mbit / link:6.3f}x of "
              + ("its link" if shard == SLOW else f"its link  target {target:g}  {'met' if rows[-1]['met'] else 'missed'}"))
    args.json.write_text(json.dumps({"name": "slow_link", "machine": machine, "rows": rows, "seconds": rounds}, indent=2) + "\n")


if __name__ == "__main__":
    main()
