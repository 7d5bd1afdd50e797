"""A table of embeddings of which a batch touches few rows: seconds, bytes and memory of a step, beside DistributedDataParallel.

  ddp          nn.Embedding, whose gradient is dense: an all-reduce of the table
  ddp sparse   nn.Embedding(sparse=True): gloo gathers the rows of all workers
  zen          nn.Embedding(sparse=True) and ShardedOptimizer with codec zen: the shards add the rows

Workers and shard servers are hosts of their own: network namespaces, with links limited by token buckets. Needs root (ip, tc),
and memory: dense DDP takes three tables per worker, Gradwire two, and two more for all shards together; systems for which
there is too little are left out, with a word.

Memory is what lies in memory of a worker (the largest) and of all shards together: the peak of the whole run, which the start makes
(parameters travel), by how much the peak while steps are made exceeds what was there before the first (steps), and by how much the
peak of the steps that count exceeds what was there before these (grown). The last lines say what grows with the table, and what with
the rows that a batch touches.

Rows are drawn evenly, where workers have hardly one in common, or as words are (zipf: row k as often as 1 / k), where they have many
and a batch touches fewer than it draws.

  tests/bench/run embedding --rows=1000000,10000000 --drawn=1000,10000    # two tables, by as many rows
  tests/bench/run embedding [--rows=10000000] [--width=64] [--drawn=0.0001,0.001] [--law=even|zipf] [--link=1G] [--steps=5]
                            [--workers=2] [--shards=2] [--together] [--systems="ddp;ddp sparse;zen"] [--archive]
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
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "tests/net"))

from embedding_worker import LAWS, SYSTEMS, Settings
from hosts import INTERFACE, Hosts, start_shard, why_not

SHARD_PORT, MASTER_PORT = 7070, 29500
TABLES = {"ddp": 3.2, "ddp sparse": 1.2, "zen": 2.2}  # of memory, per worker
SHARD_TABLES = 2.1  # of all shards together
ARCHIVE = Path(__file__).with_name("results.json")
UNITS = {"K": 1e3, "M": 1e6, "G": 1e9}


def rate_of(link: str) -> float | None:
    return None if link == "none" else float(link[:-1]) * UNITS[link[-1]]


def memory_bytes(kind: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith(f"{kind}:"):
            return int(line.split()[1]) << 10
    raise RuntimeError(f"/proc/meminfo has no {kind}")


class Memory:
    """What lies in memory of some processes together, and its peaks, which it begins anew with each look."""

    def __init__(self, processes: list[subprocess.Popen]):
        self._folders = [Path(f"/proc/{process.pid}") for process in processes]
        self._looks: list[tuple[int, int]] = []  # bytes that were there, the peak since the last look

    def look(self) -> None:
        self._looks.append((self._bytes("VmRSS"), self._bytes("VmHWM")))
        for folder in self._folders:
            (folder / "clear_refs").write_text("5")  # the peak becomes what is there

    def _bytes(self, kind: str) -> int:
        lines = [line for folder in self._folders for line in (folder / "status").read_text().splitlines()]
        return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{kind}:"))

    def found(self) -> dict[str, int]:
        """Behind the three looks of a run: before the first step, before those that count, behind the last."""
        (before, _), (warm, _), _ = self._looks
        peaks = [peak for _, peak in self._looks]
        return {"bytes": max(peaks), "steps_bytes": max(peaks[1:]) - before, "grown_bytes": peaks[2] - warm}


@dataclass(frozen=True)
class Worker:
    process: subprocess.Popen
    log: TextIO

    def told(self) -> dict:
        """The next thing that it says, between what libraries print. RuntimeError: why it ended without a word."""
        for line in self.process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        code = self.process.wait()
        if code < 0:
            raise RuntimeError(f"a worker was ended by signal {-code}, by 9 where memory runs out")
        self.log.seek(0)
        raise RuntimeError((self.log.read().strip().splitlines() or [f"ended with {code}"])[-1])

    def go_on(self) -> None:
        self.process.stdin.write("\n")
        self.process.stdin.flush()


def measure(args: argparse.Namespace, system: str, table_rows: int, drawn: int) -> dict:
    """What came out of a run. RuntimeError: why it failed."""
    names = [f"worker-{i}" for i in range(args.workers)]
    count = args.shards if system == "zen" else 0
    shards = [names[i % args.workers] if args.together else f"shard-{i}" for i in range(count)]
    with tempfile.TemporaryDirectory() as folder, Hosts(dict.fromkeys([*names, *shards], rate_of(args.link))) as hosts:
        servers = [f"tcp://{hosts.address(shard)}:{SHARD_PORT + i}" for i, shard in enumerate(shards)]
        daemons = [start_shard(hosts, shard, server, Path(folder)) for shard, server in zip(shards, servers, strict=True)]
        workers = []
        for i, name in enumerate(names):
            settings = Settings(system, table_rows, args.width, drawn, args.law, args.steps, i, args.workers, servers, args.run_elements,
                                args.bucket_bytes, hosts.address(names[0]), MASTER_PORT, INTERFACE)
            program = Path(__file__).with_name("embedding_worker.py")
            log = open(Path(folder) / f"{name}.log", "w+")
            workers.append(Worker(hosts.popen(name, [sys.executable, program, json.dumps(asdict(settings))], stdin=subprocess.PIPE,
                                              stdout=subprocess.PIPE, stderr=log, text=True), log))
        of_workers = [Memory([worker.process]) for worker in workers]
        of_shards = Memory(daemons)
        found = [worker.told() for worker in workers]
        while "stopped" in found[0]:
            for memory in (*of_workers, of_shards):
                memory.look()
            for worker in workers:
                worker.go_on()
            found = [worker.told() for worker in workers]
    memory = {f"shard_{kind}": value for kind, value in of_shards.found().items()}
    memory |= {f"worker_{kind}": max(one.found()[kind] for one in of_workers) for kind in of_shards.found()}
    return {"ms": 1e3 * statistics.median([statistics.fmean(step) for step in zip(*(f["seconds"] for f in found), strict=True)]),
            "sent_bytes": statistics.fmean(f["sent_bytes"] for f in found),
            "received_bytes": statistics.fmean(f["received_bytes"] for f in found),
            "touched": statistics.fmean(f["touched"] for f in found), **memory, "sums": [f["sum"] for f in found]}


def growth(rows: list[dict]) -> Iterator[str]:
    """What grows with the table, at as many rows drawn; what with the rows drawn, in one table; and what a touched row takes."""
    for system in dict.fromkeys(row["system"] for row in rows):
        cases = sorted((row for row in rows if row["system"] == system), key=lambda row: (row["rows"], row["drawn"]))
        for fixed, other, words in (("drawn", "rows", "rows drawn, a table of {:g} times the rows"),
                                    ("rows", "touched", "rows in the table, {:.3g} times as many touched")):
            for value in sorted({row[fixed] for row in cases}):
                of_these = [row for row in cases if row[fixed] == value]
                first, last = of_these[0], of_these[-1]
                if first is not last:
                    yield f"{system}, {value:,} {words.format(last[other] / first[other])}: {_compared(first, last)}"
        yield f"{system}, {_each([row for row in cases if row['rows'] == cases[-1]['rows']])}"


def _compared(first: dict, last: dict) -> str:
    moved = [row["sent_bytes"] + row["received_bytes"] for row in (first, last)]
    memory = "; ".join(f"{words} steps {first[f'{who}_steps_bytes'] / 1e6:.1f} to {last[f'{who}_steps_bytes'] / 1e6:.1f} MB, "
                       f"grown {first[f'{who}_grown_bytes'] / 1e6:.1f} to {last[f'{who}_grown_bytes'] / 1e6:.1f} MB"
                       for who, words in (("worker", "of a worker"), ("shard", "of shards")) if last[f"{who}_bytes"])
    return f"time x{last['ms'] / first['ms']:.2f}, bytes x{moved[1] / moved[0]:.2f}; memory {memory}"


def _each(cases: list[dict]) -> str:
    """A touched row, beyond what the case with the fewest takes."""
    last = cases[-1]
    few = cases[0] if len(cases) > 1 else dict.fromkeys(last, 0)
    each = {key: (last[key] - few[key]) / (last["touched"] - few["touched"])
            for key in ("ms", "sent_bytes", "received_bytes", "worker_steps_bytes", "shard_steps_bytes")}
    return (f"each touched row{' more' if few['touched'] else ''} of {last['rows']:,}: {1e3 * each['ms']:.3g} us, "
            f"{each['sent_bytes']:.0f} bytes sent, {each['received_bytes']:.0f} received, memory of steps "
            f"{each['worker_steps_bytes']:,.0f} bytes of a worker, {each['shard_steps_bytes']:,.0f} of shards")


def numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tests/bench/run embedding", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=numbers, default="10000000", help="of the table; separated by commas, of several")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--drawn", type=numbers, default="0.0001,0.001", help="rows that a batch draws: below 1 of all, else so many")
    parser.add_argument("--law", choices=LAWS, default="even", help="by which it draws them")
    parser.add_argument("--link", default="1G", help="of each host, each way, in bit/s such as 100M; none: as fast as the machine")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--shards", type=int, default=2)
    parser.add_argument("--together", action="store_true",
                        help="shard i on the host of worker i, as the paper's nodes; else on hosts of their own")
    parser.add_argument("--run-elements", type=int, default=0, help="of zen: elements that are dealt to a shard as one (default: what zen takes)")
    parser.add_argument("--bucket-bytes", type=int, default=0, help="of zen's job; 0: its default")
    parser.add_argument("--systems", default=";".join(SYSTEMS))
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--archive", action="store_true", help="keep the figures in the repository, too, in the place of others of these settings")
    args = parser.parse_args()
    if unknown := set(args.systems.split(";")) - set(SYSTEMS):
        parser.error(f"no such system: {', '.join(sorted(unknown))}; there are {', '.join(SYSTEMS)}")
    return args


def make_case(args: argparse.Namespace, system: str, table_rows: int, drawn: int) -> dict | None:
    """Measures and prints it; None, with a word, where it cannot be measured."""
    case = f"{table_rows:>11,}{drawn:>9,} {system:<11}"
    need = 4 * table_rows * args.width * (TABLES[system] * args.workers + (SHARD_TABLES if system == "zen" else 0))
    if need > memory_bytes("MemAvailable"):
        print(f"{case} left out: it needs about {need / 1e9:.0f} GB of memory", flush=True)
        return None
    try:
        found = measure(args, system, table_rows, drawn)
    except RuntimeError as error:
        print(f"{case} failed: {error}", flush=True)
        return None
    memory = "".join(f"{found[f'{who}_{kind}'] / 1e6:>{width},.{digits}f}" for who in ("worker", "shard")
                     for kind, width, digits in (("bytes", 10, 0), ("steps_bytes", 9, 1), ("grown_bytes", 9, 1)))
    print(f"{case}{found['ms']:>9.1f}{found['sent_bytes'] / 1e6:>10.3f}{found['received_bytes'] / 1e6:>10.3f}{memory}", flush=True)
    return {"case": f"{system}, {table_rows:,} rows, {drawn:,} drawn", "rows": table_rows, "drawn": drawn, "system": system, "unit": "ms",
            "value": found["ms"], **found}


def main() -> None:
    args = parse()
    reason = why_not()
    if reason is not None:
        sys.exit(f"tests/bench/run embedding: {reason}")
    machine = f"{platform.machine()}, {os.cpu_count()} cores"
    tables = [int(count) for count in args.rows]
    sizes = ", ".join(f"{4 * count * args.width / 1e9:.3g}" for count in tables)
    print(f"embedding on {machine}\n  rows of {args.width} (tables of {sizes} GB as float32), {args.workers} workers, "
          f"{args.shards} shards{' on the same hosts' if args.together else ''}, links of {args.link}, {args.law} draws; "
          f"median of {args.steps} steps, the workers' mean; MB of a worker and step, MB of memory\n"
          f"{'':62}{'a worker:':>10}{'':18}{'shards:':>10}\n"
          f"{'rows':>11}{'drawn':>9} {'system':<11}{'ms/step':>9}{'sent':>10}{'received':>10}"
          + f"{'peak':>10}{'steps':>9}{'grown':>9}" * 2, flush=True)
    rows = [row for table_rows in tables
            for drawn in dict.fromkeys(round(count if count >= 1 else count * table_rows) for count in args.drawn)
            for system in args.systems.split(";") if (row := make_case(args, system, table_rows, drawn)) is not None]
    for row in rows:
        for other in rows:
            if row["system"] == "zen" and other is not row and (other["rows"], other["drawn"]) == (row["rows"], row["drawn"]):
                print(f"{row['rows']:>11,}{row['drawn']:>9,} zen makes {other['ms'] / row['ms']:.2f} times the steps of {other['system']}")
    print("\n".join(growth(rows)))
    settings = {name: value for name, value in vars(args).items() if name not in ("json", "archive")}
    report = {"name": "embedding", "machine": machine, "settings": settings, "rows": rows}
    args.json.write_text(json.dumps(report, indent=2) + "\n")
    complete = len(rows) == len(tables) * len(set(args.drawn)) * len(args.systems.split(";"))
    if args.archive and not complete:
        print("not archived: cases are missing")
    elif args.archive:
        kept = [other for other in json.loads(ARCHIVE.read_text()) if other["settings"] != settings]
        ARCHIVE.write_text(json.dumps([*kept, report], indent=2) + "\n")


if __name__ == "__main__":
    main()
