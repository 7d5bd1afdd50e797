"""Seconds of a training step over slow links, of DistributedDataParallel over gloo and of jobs on shard servers.

Workers and shard servers are hosts of their own: network namespaces whose links are limited in either direction by token
buckets. Needs root. Ways take turns; a figure is the median over all workers, turns and steps but the first ones.

  tests/bench/run network [--rates=100M,1G,none] [--ways=ddp,dense:fp32] [--turns=3] [--steps=12] [--trace=FOLDER]
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

from hosts import INTERFACE, Hosts, start_shard, why_not
from network_worker import Settings

UNITS = {"K": 1e3, "M": 1e6, "G": 1e9}
AIM = 1.05  # of DDP's step
WARM = 3  # steps, of which the first makes two rounds
DEADLINE_SECONDS = 900
PORT = 7070


def rate_of(text: str) -> float | None:
    """100M -> 1e8 bit/s; none: None."""
    return None if text == "none" else float(text[:-1]) * UNITS[text[-1]]


def run_once(way: str, rate: str, args: argparse.Namespace, trace: str) -> list[dict]:
    """What each worker printed."""
    workers = [f"worker-{i}" for i in range(args.workers)]
    shards = [f"shard-{i}" for i in range(args.shards)] if way not in ("alone", "ddp") else []
    rates_bit_s = dict.fromkeys([*workers, *shards], rate_of(rate))
    with tempfile.TemporaryDirectory() as folder, Hosts(rates_bit_s, args.congestion) as hosts:
        servers = [f"{args.scheme}://{hosts.address(shard)}:{PORT}" for shard in shards]
        for shard, listen in zip(shards, servers, strict=True):
            start_shard(hosts, shard, listen, Path(folder))
        processes = []
        for i, worker in enumerate(workers):
            settings = Settings(way=way, worker=i, workers=args.workers, steps=args.steps, sequences=args.sequences,
                                width=args.width, layers=args.layers, servers=servers,
                                master=hosts.address(workers[0]), interface=INTERFACE,
                                trace=trace.format(worker=worker) if trace else "",
                                bucket_bytes=args.bucket_bytes)
            processes.append(hosts.popen(worker, [sys.executable, Path(__file__).with_name("network_worker.py"),
                                                  json.dumps(asdict(settings))], stdout=subprocess.PIPE, text=True))
        results = []
        for worker, process in zip(workers, processes, strict=True):
            text, _ = process.communicate(timeout=DEADLINE_SECONDS)
            if process.returncode != 0:
                raise RuntimeError(f"{worker} of {way} at {rate} ended with {process.returncode}")
            results.append(json.loads(text.splitlines()[-1]))
        return results


def main() -> None:
    parser = argparse.ArgumentParser(prog="tests/bench/run network", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", default="100M,1G,none", help="of each host's link, each way, in bit/s")
    parser.add_argument("--ways", default="ddp,dense:fp32", help="ddp, alone, or codecs separated by ';'")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--shards", type=int, default=2)
    parser.add_argument("--scheme", default="tcp", choices=["tcp", "grpc"])
    parser.add_argument("--sequences", type=int, default=4, help="of 128 bytes, per worker and step")
    parser.add_argument("--width", type=int, default=256, help="of the model; with 6 layers 4.9 million parameters")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--bucket-bytes", type=int, default=0, help="of jobs on shard servers; 0: their default")
    parser.add_argument("--congestion", default="", help="control of TCP on all hosts, such as cubic; default: the system's")
    parser.add_argument("--trace", type=Path, help="a folder: traces of three steps of each way through shards")
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    reason = why_not()
    if reason is not None:
        sys.exit(f"tests/bench/run network: {reason}")
    if args.steps <= WARM:
        parser.error(f"--steps={args.steps}: at least {WARM + 1}, the first {WARM} do not count")
    ways = args.ways.split(";") if ";" in args.ways else args.ways.split(",")
    rates = args.rates.split(",")
    seconds: dict[tuple[str, str], list[float]] = {(way, rate): [] for rate in rates for way in ways}
    parameters = 0
    for turn in range(args.turns):
        for rate in rates:
            for way in ways if turn % 2 == 0 else reversed(ways):
                trace = ""
                if args.trace is not None and turn == 0:
                    args.trace.mkdir(parents=True, exist_ok=True)
                    trace = str(args.trace.resolve() / f"{way.replace(':', '_')}-{rate}-{{worker}}.json")
                for result in run_once(way, rate, args, trace):
                    seconds[way, rate].extend(result["seconds"][WARM:])
                    parameters = result["parameters"]
    machine = f"{platform.machine()}, {os.cpu_count()} cores"
    print(f"network on {machine}")
    congestion = args.congestion or Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
    print(f"  {args.workers} workers, {args.shards} shards over {args.scheme}://, {parameters / 1e6:.1f} million parameters; "
          f"{args.turns} turns of {args.steps} steps; congestion control {congestion}")
    rows = []
    for rate in rates:
        ddp = statistics.median(seconds["ddp", rate]) if "ddp" in ways else None
        for way in ways:
            value = statistics.median(seconds[way, rate])
            low, _, high = statistics.quantiles(seconds[way, rate], n=4)
            row = {"case": f"{way} at {rate}", "value": value * 1e3, "unit": "ms/step",
                   "quartiles": [low * 1e3, high * 1e3]}
            text = f"{row['case']:<24} {row['value']:>9.1f} ms/step  ({low * 1e3:.0f} to {high * 1e3:.0f})"
            if ddp is not None and way not in ("ddp", "alone"):
                row |= {"ratio": value / ddp, "ratio_to": "ddp", "target": AIM, "met": value / ddp <= AIM}
                text += f"  {value / ddp:.3f}x to DDP  target {AIM:g}  {'met' if row['met'] else 'missed'}"
            print(text)
            rows.append(row)
    args.json.write_text(json.dumps({"name": "network", "machine": machine, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
