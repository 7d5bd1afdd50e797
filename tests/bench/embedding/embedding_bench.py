"""A table of embeddings of which a batch touches few rows: seconds, bytes and memory of a step, beside DistributedDataParallel.

  ddp          nn.Embedding, whose gradient is dense: an all-reduce of the table
  ddp sparse   nn.Embedding(sparse=True): gloo gathers the rows of all workers
  zen          nn.Embedding(sparse=True) and ShardedOptimizer with codec zen: the shards add the rows

Workers and shard servers are hosts of their own: network namespaces, with links limited by token buckets. Needs root (ip, tc),
and memory: dense DDP takes three tables per worker, Gradwire two, and two more for all shards together; systems for which
there is too little are left out, with a word.

Rows are drawn evenly, where workers have hardly one in common, or as words are (zipf: row k as often as 1 / k), where they have many
and a batch touches fewer than it draws.

  tests/bench/run embedding [--rows=10000000] [--width=64] [--drawn=0.0001,0.001] [--law=even|zipf] [--link=1G] [--steps=5]
                            [--workers=2] [--shards=2] [--together] [--systems="ddp;ddp sparse;zen"]
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
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "tests/net"))

from embedding_worker import LAWS, SYSTEMS, Settings
from hosts import INTERFACE, Hosts, start_shard, why_not

SHARD_PORT, MASTER_PORT = 7070, 29500
TABLES = {"ddp": 3.2, "ddp sparse": 1.2, "zen": 2.2}  # of memory, per worker
SHARD_TABLES = 2.1  # of all shards together
MOST_SECONDS = 3600
UNITS = {"K": 1e3, "M": 1e6, "G": 1e9}


def rate_of(link: str) -> float | None:
    return None if link == "none" else float(link[:-1]) * UNITS[link[-1]]


def memory_bytes(kind: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith(f"{kind}:"):
            return int(line.split()[1]) << 10
    raise RuntimeError(f"/proc/meminfo has no {kind}")


def resident_bytes(process: subprocess.Popen) -> int:
    """The peak of a server."""
    for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    return 0


def measure(args: argparse.Namespace, system: str, drawn: int) -> dict:
    """What came out of a run; {"error": why} where it failed."""
    workers = [f"worker-{i}" for i in range(args.workers)]
    count = args.shards if system == "zen" else 0
    shards = [workers[i % args.workers] if args.together else f"shard-{i}" for i in range(count)]
    with tempfile.TemporaryDirectory() as folder, Hosts(dict.fromkeys([*workers, *shards], rate_of(args.link))) as hosts:
        servers = [f"tcp://{hosts.address(shard)}:{SHARD_PORT + i}" for i, shard in enumerate(shards)]
        daemons = [start_shard(hosts, shard, server, Path(folder)) for shard, server in zip(shards, servers, strict=True)]
        started = []
        for i, worker in enumerate(workers):
            settings = Settings(system, args.rows, args.width, drawn, args.law, args.steps, i, args.workers, servers, args.run_elements, args.bucket_bytes,
                                hosts.address(workers[0]), MASTER_PORT, INTERFACE)
            program = Path(__file__).with_name("embedding_worker.py")
            log = open(Path(folder) / f"{worker}.log", "w+")
            started.append((hosts.popen(worker, [sys.executable, program, json.dumps(asdict(settings))], stdout=subprocess.PIPE,
                                        stderr=log, text=True), log))
        found = []
        for process, log in started:
            told, _ = process.communicate(timeout=MOST_SECONDS)
            if process.returncode != 0:
                if process.returncode < 0:
                    return {"error": f"a worker was ended by signal {-process.returncode}, by 9 where memory runs out"}
                log.seek(0)
                return {"error": (log.read().strip().splitlines() or [f"ended with {process.returncode}"])[-1]}
            found.append(json.loads(told.splitlines()[-1]))
        shard_bytes = sum(resident_bytes(daemon) for daemon in daemons)
    return {"ms": 1e3 * statistics.median([statistics.fmean(step) for step in zip(*(f["seconds"] for f in found), strict=True)]),
            "sent_bytes": statistics.fmean(f["sent_bytes"] for f in found),
            "received_bytes": statistics.fmean(f["received_bytes"] for f in found),
            "worker_bytes": max(f["peak_bytes"] for f in found), "shard_bytes": shard_bytes,
            "sums": [f["sum"] for f in found]}


def main() -> None:
    parser = argparse.ArgumentParser(prog="tests/bench/run embedding", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--drawn", default="0.0001,0.001", help="rows that a batch draws, of all")
    parser.add_argument("--law", choices=LAWS, default="even", help="by which it draws them")
    parser.add_argument("--link", default="1G", help="of each host, each way, in bit/s such as 100M; none: as fast as the machine")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--shards", type=int, default=2)
    parser.add_argument("--together", action="store_true", help="shard i on the host of worker i, as the paper's nodes; else on hosts of their own")
    parser.add_argument("--run-elements", type=int, default=4096, help="of zen: elements that are dealt to a shard as one")
    parser.add_argument("--bucket-bytes", type=int, default=0, help="of zen's job; 0: its default")
    parser.add_argument("--systems", default=";".join(SYSTEMS))
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    if unknown := set(args.systems.split(";")) - set(SYSTEMS):
        parser.error(f"no such system: {', '.join(sorted(unknown))}; there are {', '.join(SYSTEMS)}")
    reason = why_not()
    if reason is not None:
        sys.exit(f"tests/bench/run embedding: {reason}")
    table = 4 * args.rows * args.width
    machine = f"{platform.machine()}, {os.cpu_count()} cores"
    print(f"embedding on {machine}\n  {args.rows:,} rows x {args.width} ({table / 1e9:.2f} GB as float32), {args.workers} workers, "
          f"{args.shards} shards{' on the same hosts' if args.together else ''}, links of {args.link}, {args.law} draws; "
          f"median of {args.steps} steps, the workers' mean\n"
          f"{'drawn':>9} {'system':<12}{'ms/step':>10}{'sent':>10}{'received':>10}   MB a worker and step; peak of a worker, of all shards",
          flush=True)
    rows = []
    for share in (float(text) for text in args.drawn.split(",")):
        drawn = round(share * args.rows)
        for system in args.systems.split(";"):
            need = (TABLES[system] * args.workers + (SHARD_TABLES if system == "zen" else 0)) * table
            if need > memory_bytes("MemAvailable"):
                print(f"{share:>9.3%} {system:<12} left out: it needs about {need / 1e9:.0f} GB of memory", flush=True)
                continue
            found = measure(args, system, drawn)
            if "error" in found:
                print(f"{share:>9.3%} {system:<12} failed: {found['error']}", flush=True)
                continue
            rows.append({"case": f"{system}, {share:.3%} drawn", "share": share, "system": system, "unit": "ms",
                         "value": found["ms"], **found})
            print(f"{share:>9.3%} {system:<12}{found['ms']:>10.0f}{found['sent_bytes'] / 1e6:>10.2f}"
                  f"{found['received_bytes'] / 1e6:>10.2f}   {found['worker_bytes'] / 1e9:.2f} GB, "
                  f"{found['shard_bytes'] / 1e9:.2f} GB", flush=True)
    for row in rows:
        if row["system"] != "zen":
            continue
        for other in rows:
            if other["share"] == row["share"] and other is not row:
                print(f"{row['share']:>9.3%} zen makes {other['value'] / row['value']:.2f} times the steps of {other['system']}")
    args.json.write_text(json.dumps({"name": "embedding", "machine": machine, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
