"""Runs of `training`: what is asked for, made with real processes, and what came out."""

from __future__ import annotations

import contextlib
import json
import lzma
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT / "tests/net"), str(ROOT / "tests/bench/lib")]

from hosts import INTERFACE, Hosts, start_shard
from json_lines import append_line, read_lines
from systems import Place, System
from worker import Settings

DEADLINE_SECONDS = 1800
WARM_PERIODS = 3  # that do not count: a job's first step makes two rounds, DistributedDataParallel's remakes its buckets
SHARD_PORT, MASTER_PORT = 7070, 29500
UNITS = {"K": 1e3, "M": 1e6, "G": 1e9}
LOOPBACK = "loopback"  # in the place of a link: no hosts of their own


@dataclass(frozen=True)
class Run:
    """One run of one system. `turn` tells repeated ones apart. link: bit/s of each host, each way, such as 100M; none: as fast
    as the machine; loopback: no hosts. compute_ms: of a sleep in the place of computing; 0: it computes."""

    system: str
    model: str
    workers: int
    link: str
    compute_ms: float
    steps: int  # measured, or all where it is evaluated
    lr: float
    evaluate_every: int = 0
    seed: int = 1
    turn: int = 0
    shards: int = 2
    together: bool = False  # shard i runs on the host of worker i
    scheme: str = "tcp"
    congestion: str = ""
    bucket_bytes: int = 0


@dataclass(frozen=True)
class Outcome:
    """seconds: of each measured step, the mean over its period, of all workers. Bytes: per worker and step, with headers."""

    seconds: list[float]
    curve: list[list[float]]  # [step, validation loss] of the first worker
    parameters: int
    sent_bytes: float
    received_bytes: float
    error: str = ""
    machine: str = ""


class FinishedRuns:
    """Runs and their outcomes, a JSON line each: those of a compressed archive, and those of a file, which win and to which new
    ones are added. One process at a time."""

    def __init__(self, path: Path, archive: Path | None = None):
        self._path = path
        self._known: dict[Run, Outcome] = {}
        archived = lzma.decompress(archive.read_bytes()).splitlines() if archive is not None and archive.exists() else []
        for entry in [*map(json.loads, archived), *read_lines(path)]:
            self._known[Run(**entry["run"])] = Outcome(**entry["outcome"])

    def keep(self, archive: Path) -> None:
        lines = (json.dumps(_entry(run, outcome), separators=(",", ":")) + "\n" for run, outcome in self._known.items())
        archive.write_bytes(lzma.compress("".join(lines).encode(), preset=9))

    def find(self, run: Run) -> Outcome | None:
        return self._known.get(run)

    def make(self, run: Run, trace: str = "") -> Outcome:
        """Makes a run and keeps what came out, unless something else went wrong than training itself."""
        try:
            outcome = execute(run, trace)
        except (OSError, RuntimeError) as error:  # hosts or servers could not be had
            outcome = failed(str(error))
        if outcome.error and not (run.evaluate_every and "finite" in outcome.error):
            return outcome
        self._known[run] = outcome
        append_line(self._path, _entry(run, outcome))
        return outcome

    def __iter__(self) -> Iterator[tuple[Run, Outcome]]:
        return iter(self._known.items())


def _entry(run: Run, outcome: Outcome) -> dict:
    return {"run": asdict(run), "outcome": asdict(outcome)}


def failed(why: str) -> Outcome:
    return Outcome([], [], 0, 0, 0, why, machine())


def machine() -> str:
    return f"{platform.machine()}, {os.cpu_count()} cores"


def rate_of(link: str) -> float | None:
    """100M -> 1e8 bit/s; none: None. ValueError for anything else."""
    if link == "none":
        return None
    if len(link) < 2 or link[-1] not in UNITS:
        raise ValueError(f"link {link!r}: a rate in bit/s such as 100M or 1G, or none")
    return float(link[:-1]) * UNITS[link[-1]]


@contextlib.contextmanager
def _on_hosts(run: Run, folder: Path) -> Iterator[tuple[Settings, list]]:
    """The settings that all workers share, and for each worker what starts a program where it is."""
    workers = [f"worker-{i}" for i in range(run.workers)]
    count = run.shards if System(run.system).uses_shards else 0
    own = System(run.system).own_shards
    shards = [f"worker-{i % run.workers}" if run.together or own else f"shard-{i}" for i in range(count)]
    with Hosts(dict.fromkeys([*workers, *shards], rate_of(run.link)), run.congestion) as hosts:
        servers = [f"{run.scheme}://{hosts.address(host)}:{SHARD_PORT + i}" for i, host in enumerate(shards)]
        for host, listen in zip(shards, servers, strict=True):
            if not own:
                start_shard(hosts, host, listen, folder)
        starts = [lambda command, host=worker, **options: hosts.popen(host, command, **options) for worker in workers]
        yield _shared(run, servers, hosts.address(workers[0]), MASTER_PORT, INTERFACE), starts


@contextlib.contextmanager
def _on_loopback(run: Run) -> Iterator[tuple[Settings, list]]:
    import socket

    import gradwire

    with contextlib.ExitStack() as stack:
        servers = []
        if System(run.system).uses_shards:
            servers = stack.enter_context(gradwire.local_cluster(shards=run.shards, transport=run.scheme)).servers
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        yield _shared(run, servers, "127.0.0.1", port, ""), [subprocess.Popen] * run.workers


def _shared(run: Run, servers: list[str], master: str, port: int, interface: str) -> Settings:
    skipped = 0 if run.evaluate_every else WARM_PERIODS * System(run.system).period
    steps = skipped + run.steps
    place = Place(worker=0, workers=run.workers, servers=servers, master=master, port=port, interface=interface,
                  bucket_bytes=run.bucket_bytes, trace="", traced_round=1 + steps // 2)
    return Settings(system=run.system, model=run.model, compute_ms=run.compute_ms, place=place, steps=steps, skipped_steps=skipped,
                    lr=run.lr, seed=run.seed, evaluate_every=run.evaluate_every)


def execute(run: Run, trace: str = "") -> Outcome:
    """trace: a file's name with {worker} in it; empty: none. An outcome with `error` where a worker fails. RuntimeError where
    hosts cannot be had."""
    if System(run.system).own_shards and (run.link == LOOPBACK or run.shards != run.workers):
        raise RuntimeError(f"{run.system}: as many shards as workers, on hosts of their own")
    place = _on_loopback(run) if run.link == LOOPBACK else None
    with tempfile.TemporaryDirectory() as folder, place or _on_hosts(run, Path(folder)) as (shared, starts):
        processes = []
        for i, start in enumerate(starts):
            settings = replace(shared, place=replace(shared.place, worker=i, trace=trace.format(worker=f"worker-{i}")))
            log = Path(folder) / f"worker-{i}.log"
            with open(log, "wb") as errors:
                command = [sys.executable, str(Path(__file__).with_name("worker.py")), json.dumps(asdict(settings))]
                processes.append((start(command, stdout=subprocess.PIPE, stderr=errors, text=True), log))
        try:
            why = _wait(processes)
            found = [json.loads(process.stdout.read().splitlines()[-1]) for process, _ in processes] if not why else []
        finally:
            for process, _ in processes:
                process.kill()
                process.wait()
    if why:
        return failed(why)
    period = System(run.system).period
    seconds = [sum(f["seconds"][i : i + period]) / period for f in found for i in range(0, len(f["seconds"]), period)]
    mean = {way: sum(f[way] for f in found) / len(found) for way in ("sent_bytes", "received_bytes")}
    return Outcome(seconds if not run.evaluate_every else [], found[0]["curve"], found[0]["parameters"], **mean,
                   machine=machine())


def _wait(processes: list[tuple[subprocess.Popen, Path]]) -> str:
    """Until all have ended; or why the first one failed that did."""
    end = time.monotonic() + DEADLINE_SECONDS
    while time.monotonic() < end:
        codes = [process.poll() for process, _ in processes]
        for code, (_, log) in zip(codes, processes, strict=True):
            if code not in (None, 0):
                return (log.read_text(errors="replace").strip().splitlines() or [f"a worker ended with {code}"])[-1]
        if all(code == 0 for code in codes):
            return ""
        time.sleep(0.05)
    return f"not done in {DEADLINE_SECONDS} s"
