"""The main job: trains a byte-level GPT through shard servers, dense and TAGC-compressed, and compares.

Starts 2 shard servers and 2 workers as separate processes on this machine for every run; leaves report.json,
report.html and plots. `deploy/quickstart` installs and builds what this needs, then calls it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from gradwire.torch import DEFAULT_CODEC
from report import conclusions, write_report
from worker import WorkerSettings

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
SWEEP = HERE / "sweep.json"  # made by --sweep: validation losses by steps, run, beta2 and learning rate
RATES = (0.0015, 0.002, 0.003, 0.004)  # what --sweep tries with each beta2, the same for all runs
BETA2S = (0.95, 0.99)
SHARDS = 2
WORKERS = 2


@dataclass(frozen=True)
class Run:
    """One way to train the same model on the same data."""

    name: str
    title: str
    codec: str
    push: str
    optimizer: str
    lr: float
    betas: tuple[float, float]
    weight_decay: float
    warmup_fraction: float = 0.05  # of the steps: learning-rate warm-up
    clip_norm: float = 1.0
    backend: str = "auto"  # of servers and workers
    update_codec: str = ""  # of the way back
    residual_decay: float | None = None  # of pushed steps; None: the default


@dataclass(frozen=True)
class Plan:
    """How long and how often."""

    steps: int
    seeds: tuple[int, ...]
    runs: tuple[Run, ...]
    sequences: int = 8
    evaluations: int = 8


@dataclass
class Outcome:
    """What one run with one seed gave."""

    run: Run
    seed: int
    curve: list[dict] = field(default_factory=list)  # worker 0's evaluations
    results: list[dict] = field(default_factory=list)  # per worker
    shards: list[dict] = field(default_factory=list)  # gradwire job describe, per shard

    @property
    def val_loss(self) -> float:
        return self.curve[-1]["val_loss"]


DENSE = Run("dense", "dense AdamW", "dense:fp32", "gradient", "adamw", 2e-3, (0.9, 0.95), 0.1)
STEPS = Run("steps", "uncompressed, pushing steps", "dense:fp32", "step", "step", 2e-3, (0.9, 0.95), 0.1)
TAGC = Run("tagc", "TAGC, pushing steps", DEFAULT_CODEC, "step", "step", 3e-3, (0.9, 0.99), 0.1)
TAGC_GRADIENT = replace(DENSE, name="tagc_gradient", title="TAGC, pushing gradients", codec=DEFAULT_CODEC)
# BytePS-Compress's setting: 0.1 % of the elements each way, values in two bytes.
TOP_K = "topk:density=0.001,values=fp16"
TWO_WAY = replace(TAGC, name="two_way", title="top-k 0.1 % both ways", codec=TOP_K, update_codec=TOP_K, lr=6e-3,
                  residual_decay=1.0)  # an element waits for hundreds of steps: nothing of it may be forgotten
ALL = (DENSE, STEPS, TAGC, TAGC_GRADIENT, TWO_WAY)
USUAL, FAST = (DENSE, STEPS, TAGC, TAGC_GRADIENT), (DENSE, TAGC)  # without and with --fast


def binary(name: str) -> str:
    folder = Path(os.environ.get("GRADWIRE_BIN", ROOT / "build/release/bin"))
    path = folder / name
    if not path.exists():
        raise SystemExit(f"error: {path} does not exist; run deploy/quickstart, or set GRADWIRE_BIN to its folder")
    return str(path)


def start_server(stack: ExitStack, folder: Path, shard: int, backend: str) -> str:
    """Starts a shard server on a free port; returns its address. It is ended with the stack."""
    port_file = folder / f"shard-{shard}.address"
    log = stack.enter_context(open(folder / f"shard-{shard}.log", "w"))
    process = subprocess.Popen(
        [binary("gradwire-server"), "--listen", "grpc://127.0.0.1:0", "--port-file", str(port_file), "--backend", backend],
        stdout=log,
        stderr=subprocess.STDOUT,
    )
    stack.callback(stop, process)
    deadline = time.monotonic() + 20
    while not (port_file.exists() and port_file.read_text().strip()):
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"error: the shard server did not start; see {log.name}:\n{Path(log.name).read_text()}")
        time.sleep(0.05)
    return port_file.read_text().strip()


def stop(process: subprocess.Popen) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def describe(job: str, address: str) -> dict:
    """What a shard server itself says of the job: bytes it received, digest of its parameters."""
    done = subprocess.run(
        [binary("gradwire"), "job", "describe", job, "--servers", address, "--digest", "--json"],
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    return json.loads(done.stdout)[0]["status"]


def follow(process: subprocess.Popen, outcome: Outcome, plan: Plan) -> None:
    """Reads a worker's lines; prints progress of worker 0."""
    for line in process.stdout:
        event = json.loads(line)
        if event.get("done"):
            outcome.results.append(event)
            continue
        outcome.curve.append(event)
        print(
            f"  {outcome.run.name:<14} seed {outcome.seed}  step {event['step']:>5}/{plan.steps}"
            f"  train {event['train_loss']:.3f}  val {event['val_loss']:.4f}  {event['seconds_per_step']:.3f} s/step"
            f"  push {event['pushed_bytes'] / event['step'] / 1024:,.1f} KiB/step",
            flush=True,
        )


def execute(run: Run, seed: int, plan: Plan) -> Outcome:
    """Trains once: fresh servers, fresh workers. Raises SystemExit with the logs if anything fails."""
    outcome = Outcome(run, seed)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gradwire-")))
        servers = [start_server(stack, folder, shard, run.backend) for shard in range(SHARDS)]
        threads, processes = [], []
        for worker in range(WORKERS):
            settings = WorkerSettings(
                servers=servers,
                job="gpt",
                worker=worker,
                workers=WORKERS,
                seed=seed,
                steps=plan.steps,
                sequences=plan.sequences,
                lr=run.lr,
                warmup_steps=round(plan.steps * run.warmup_fraction),
                clip_norm=run.clip_norm,
                push=run.push,
                optimizer=run.optimizer,
                codec=run.codec,
                update_codec=run.update_codec,
                residual_decay=run.residual_decay,
                betas=run.betas,
                weight_decay=run.weight_decay,
                evaluations=plan.evaluations,
                backend=run.backend,
            )
            errors = stack.enter_context(open(folder / f"worker-{worker}.log", "w+"))
            process = subprocess.Popen(
                [sys.executable, str(HERE / "worker.py"), json.dumps(asdict(settings))],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            stack.callback(stop, process)
            thread = threading.Thread(target=follow, args=(process, outcome, plan))
            thread.start()
            threads.append(thread)
            processes.append((process, errors))
        for (process, errors), thread in zip(processes, threads):
            thread.join()
            if process.wait() != 0:
                errors.seek(0)
                raise SystemExit(f"error: a worker of run {run.name} failed:\n{errors.read()[-4000:]}")
        outcome.shards = [describe("gpt", server) for server in servers]
    check(outcome)
    return outcome


def check(outcome: Outcome) -> None:
    """Every replica must equal the shards, bit for bit."""
    wanted = [shard["parameters_sha256"] for shard in outcome.shards]
    for result in outcome.results:
        if result["shard_digests"] != wanted:
            raise SystemExit(
                f"error: run {outcome.run.name}, worker {result['worker']}: parameters differ from the shards'\n"
                f"  worker: {result['shard_digests']}\n  shards: {wanted}"
            )


def summarize(run: Run, outcomes: list[Outcome], plan: Plan) -> dict:
    """One entry of report.json: means over workers and seeds; bytes are what the shard servers counted."""
    frames = [shard for outcome in outcomes for shard in outcome.shards]
    worker_steps = plan.steps * WORKERS * len(outcomes)
    pushed = sum(int(shard["push_bytes"]) for shard in frames) / worker_steps
    pulled = sum(int(shard["pull_bytes"]) for shard in frames) / worker_steps
    decoded = sum(int(shard["update_elements"]) for shard in frames)
    deferred = sum(int(shard["deferred_elements"]) for shard in frames)
    parameters = outcomes[0].results[0]["parameters"]
    losses = [outcome.val_loss for outcome in outcomes]
    return {
        "title": run.title,
        "steps": plan.steps,
        "val_loss": statistics.fmean(losses),
        "val_loss_by_seed": dict(zip((str(o.seed) for o in outcomes), losses)),
        # Worker 0's: the others also wait while it evaluates.
        "seconds_per_step": statistics.median(
            r["seconds_per_step"] for o in outcomes for r in o.results if r["worker"] == 0
        ),
        "push_bytes_per_step": pushed,
        "pull_bytes_per_step": pulled,
        "push_compression": 4 * parameters / pushed,
        "pull_compression": 4 * parameters / pulled,
        "deferred_fraction": deferred / max(1, decoded + deferred),
        "workers": WORKERS,
        "shards": SHARDS,
        "codec": run.codec,
        "update_codec": run.update_codec,
        "push": run.push,
        "backend": run.backend,
        "optimizer": run.optimizer,
        "lr": run.lr,
        "beta2": run.betas[1],
        "parameters": parameters,
        "curves": {str(o.seed): o.curve for o in outcomes},
        "parameters_sha256": {str(o.seed): [s["parameters_sha256"] for s in o.shards] for o in outcomes},
    }


def print_table(runs: dict[str, dict]) -> None:
    header = ("run", "lr", "beta2", "val loss", "s/step", "push KiB/step", "pull KiB/step", "push ratio", "pull ratio", "deferred")
    rows = [
        (
            run["title"],
            f"{run['lr']:g}",
            f"{run['beta2']:g}",
            f"{run['val_loss']:.4f}",
            f"{run['seconds_per_step']:.3f}",
            f"{run['push_bytes_per_step'] / 1024:,.1f}",
            f"{run['pull_bytes_per_step'] / 1024:,.1f}",
            f"{run['push_compression']:.1f}x",
            f"{run['pull_compression']:.1f}x",
            f"{run['deferred_fraction']:.4%}",
        )
        for run in runs.values()
    ]
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    for row in [header, *rows]:
        print("  ".join(cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths))))


def run_plan(plan: Plan, out: Path, unequal: str) -> dict:
    """Every run with every seed; writes the report after each, so that an interrupted one leaves what it has.

    `unequal`: what `untried` said of these runs.
    """
    report: dict = {"runs": {}, "plan": {"steps": plan.steps, "seeds": list(plan.seeds), "sequences": plan.sequences},
                    "untried": unequal}
    outcomes: dict[str, list[Outcome]] = {run.name: [] for run in plan.runs}
    total = len(plan.runs) * len(plan.seeds)
    for i, (seed, run) in enumerate((s, r) for s in plan.seeds for r in plan.runs):
        print(f"[{i + 1}/{total}] {run.title} ({run.codec}, push={run.push}), seed {seed}", flush=True)
        outcomes[run.name].append(execute(run, seed, plan))
        report["runs"] = {r.name: summarize(r, outcomes[r.name], plan) for r in plan.runs if outcomes[r.name]}
        write_report(report, out)
    return report


def on_each(runs: tuple[Run, ...], backends: list[str]) -> tuple[Run, ...]:
    """The same runs on each backend, side by side."""
    if len(backends) == 1:
        return tuple(replace(run, backend=backends[0]) for run in runs)
    return tuple(
        replace(run, backend=b, name=f"{run.name}@{b}", title=f"{run.title} ({b})") for run in runs for b in backends
    )


def check_backends(runs: dict[str, dict]) -> None:
    """The same run must end in the same bits on every backend."""
    digests: dict[str, dict] = {}
    for name, run in runs.items():
        first = digests.setdefault(name.split("@")[0], run["parameters_sha256"])
        if run["parameters_sha256"] != first:
            raise SystemExit(f"error: {name} ended with other parameters than on the first backend")
    print("The same bits on every backend (SHA-256 of the parameters, every seed).")


def sweep(plan: Plan, rates: Sequence[float], beta2s: Sequence[float]) -> None:
    """Trains each run on one seed with every learning rate and beta2, the same for all runs; keeps the table in the repository.

    Written after each, and what is there is not run again, so that a sweep that was interrupted goes on.
    """
    kept = json.loads(SWEEP.read_text()) if SWEEP.exists() else {}
    table = kept.setdefault(str(plan.steps), {})
    for beta2, lr, run in itertools.product(beta2s, rates, plan.runs):
        losses = table.setdefault(run.name, {}).setdefault(f"{beta2:g}", {})
        if f"{lr:g}" in losses:
            continue
        tried = replace(run, lr=lr, betas=(run.betas[0], beta2))
        outcome = execute(tried, plan.seeds[0], replace(plan, evaluations=1))
        losses[f"{lr:g}"] = round(outcome.val_loss, 4)
        print(f"sweep  {run.name:<14} beta2 {beta2:<5g} lr {lr:<8g} val {outcome.val_loss:.4f}", flush=True)
        SWEEP.write_text(json.dumps(kept, indent=2) + "\n")


def losses_of(run: Run, steps: int) -> dict[tuple[float, float], float]:
    """By beta2 and learning rate, of the sweep of the nearest number of steps."""
    kept = json.loads(SWEEP.read_text()) if SWEEP.exists() else {}
    tables = {int(s): table[run.name] for s, table in kept.items() if run.name in table}
    nearest = tables[min(tables, key=lambda s: abs(s - steps))] if tables else {}
    return {(float(beta2), float(lr)): loss for beta2, losses in nearest.items() for lr, loss in losses.items()}


def tuned(run: Run, steps: int) -> Run:
    """At the best learning rate and beta2 of the sweep; as it is where it is in none."""
    losses = losses_of(run, steps)
    if not losses:
        return run
    beta2, lr = min(losses, key=losses.get)
    return replace(run, lr=lr, betas=(run.betas[0], beta2))


def untried(runs: tuple[Run, ...], steps: int) -> str:
    """Which runs the sweep has not tried as widely as it should; empty where the comparison is fair."""
    grid = set(itertools.product(BETA2S, RATES))
    lacks = {run.name: len(grid - losses_of(run, steps).keys()) for run in runs}
    if not any(lacks.values()):
        return ""
    return (f"The sweep has not tried all {len(grid)} pairs of beta2 and learning rate near {steps} steps; it lacks "
            + ", ".join(f"{count} of {name}" for name, count in lacks.items() if count)
            + ". deploy/quickstart --sweep goes on with it.")


def end_by_signals() -> None:
    """What kill and a terminal that closes send ends this program as Ctrl-C does: with its servers and workers."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # as nohup has it
            signal.signal(number, lambda number, _: sys.exit(128 + number))


def main() -> None:
    end_by_signals()
    parser = argparse.ArgumentParser(prog="deploy/quickstart", description=__doc__.splitlines()[0])
    parser.add_argument("--fast", action="store_true", help="two minutes: fewer steps, one seed, dense and tagc only")
    parser.add_argument("--steps", type=int, help="training steps per run (default 400; 120 with --fast)")
    parser.add_argument("--seeds", type=int, help="how many seeds (default 3; 1 with --fast)")
    parser.add_argument("--out", type=Path, default=ROOT / "build/quickstart", help="where the report goes")
    parser.add_argument("--sweep", type=float, nargs="*", metavar="LR",
                        help=f"instead: try these learning rates (default {RATES}) with each run and beta2")
    parser.add_argument("--beta2", type=float, nargs="+", default=BETA2S, help=f"of --sweep (default {BETA2S})")
    parser.add_argument("--backends", nargs="+", default=["auto"], metavar="NAME",
                        help="arithmetic of servers and workers: auto, cpu:avx2, reference, ...; several are compared")
    parser.add_argument("--runs", nargs="+", choices=[run.name for run in ALL], help="only these runs")
    args = parser.parse_args()
    steps = args.steps or (120 if args.fast else 400)
    runs = FAST if args.fast else USUAL
    if args.runs:
        runs = tuple(run for run in ALL if run.name in args.runs)
    unequal = untried(runs, steps)
    runs = tuple(tuned(run, steps) for run in runs)
    runs = on_each(runs, args.backends)
    plan = Plan(steps=steps, seeds=tuple(range(1, (args.seeds or (1 if args.fast else 3)) + 1)), runs=runs)
    args.out.mkdir(parents=True, exist_ok=True)
    if args.sweep is not None:
        sweep(plan, args.sweep or RATES, args.beta2)
        return
    report = run_plan(plan, args.out, unequal)
    print()
    print_table(report["runs"])
    if unequal and not args.fast:  # the report has it in any case
        print(f"\n{unequal}")
    for sentence in conclusions(report):
        print(f"\n{sentence}.")
    print("\nEvery worker's parameters equal the shards' bit for bit (SHA-256, checked after each run).")
    if len(args.backends) > 1:
        check_backends(report["runs"])
    print(f"Report: {args.out / 'report.html'}  (numbers: {args.out / 'report.json'})")


if __name__ == "__main__":
    main()
