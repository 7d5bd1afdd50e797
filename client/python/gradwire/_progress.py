"""How a job goes, in a line for people and in scalars for TensorBoard."""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from typing import Any, Protocol, TextIO

from ._errors import FailedPrecondition
from ._late import Late, Lateness
from ._session import Session

_POLL_SECONDS = 0.2
_KEPT = 4096  # of what was told, for report(); then every other one goes
_BYTES_PER_ELEMENT = 4  # float32
_LATE_SHARE = 0.02  # of the time: for less nobody is called late
_MOST_LATE = 3  # whom a line names, and a picture draws


class ScalarWriter(Protocol):
    """What torch.utils.tensorboard.SummaryWriter and others have."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> Any: ...


class Progress:
    """Tells every few seconds how a job goes, while a `with` lasts.

        with gradwire.Progress(optimizer, writer=SummaryWriter()):
            for batch in loader:
                ...

    source: a Session, or what has one: ShardedOptimizer, LocalSGD, DDPState (silent on processes that others speak for). every:
    seconds between two lines. file: where the line goes, by default standard error: on a terminal it is written over, elsewhere
    each is a line of its own; None: nowhere. writer: has add_scalar(tag, value, step), as TensorBoard's SummaryWriter; it gets
    gradwire/steps_per_second, pushed_bytes_per_step, pulled_bytes_per_step, saved (as float32 the bytes would be so many times as
    many), waiting (the share of time that went by in waiting for others), members and, for each worker that was late once,
    late/WORKER. Steps without news are told of too: the rate is 0 then. report() draws all of them.

    Late is who alone is awaited, while all others have sent what they may, and with a quorum whose gradients come too late: the line
    names the three worst, with the share of the time that this takes. (Where rounds travel meanwhile, as with overlap=True of
    LocalSGD, the rounds wait, and workers perhaps not.) Where no step ends between two lines, the line says what this worker waits
    for. The shards know; each is asked once for a line.
    """

    def __init__(self, source: Any, *, every: float = 10.0, file: TextIO | None = sys.stderr, writer: ScalarWriter | None = None):
        if not every > 0:
            raise ValueError(f"every={every!r} must be a number of seconds above 0")
        self._session: Session | None = source if isinstance(source, Session) else source.session
        self._every, self._file, self._writer = every, file, writer
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gradwire-progress")
        self._wrote = 0  # characters of the line that is on the terminal
        self._told: list[dict[str, Any]] = []
        self._ever_late: set[str] = set()

    def __enter__(self) -> Progress:
        if self._session is not None:
            self._elements = sum(math.prod(tensor.shape) for tensor in self._session.job.tensors)
            self._late = Lateness(self._session._servers, self._session.job.name, self._session.worker)
            self._last, self._at = self._session.stats(), time.monotonic()
            self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._session is None:
            return
        self._over.set()
        self._thread.join()
        self._tell(last=True)
        if self._wrote and self._file is not None:
            print(file=self._file, flush=True)

    def _run(self) -> None:
        # A wait in a daemon thread is not ended when the interpreter ends: this thread ends by itself then.
        due = self._at + self._every
        while not self._over.wait(min(_POLL_SECONDS, self._every)) and threading.main_thread().is_alive():
            if time.monotonic() >= due:
                self._tell()
                due = max(due + self._every, time.monotonic())

    def _tell(self, last: bool = False) -> None:
        assert self._session is not None
        late = self._late.look() if self._late.answered or not last else {}  # who leaves waits for nobody that is gone
        now, at = self._session.stats(), time.monotonic()
        seconds, steps = at - self._at, now["steps"] - self._last["steps"]
        per_step = {name: (now[name] - self._last[name]) / max(steps, 1) for name in ("pushed_bytes", "pulled_bytes")}
        sent = sum(per_step.values())
        values = {
            "steps_per_second": steps / seconds,
            "pushed_bytes_per_step": per_step["pushed_bytes"],
            "pulled_bytes_per_step": per_step["pulled_bytes"],
            "saved": 2 * _BYTES_PER_ELEMENT * self._elements / sent if steps and sent else 0.0,
            "waiting": min(1.0, (now["wait_seconds"] - self._last["wait_seconds"]) / seconds),
            "members": now["members"],
        }
        self._last, self._at = now, at
        late = {name: of for name, of in late.items() if of.share >= _LATE_SHARE or of.left_out}
        self._ever_late.update(late)
        self._told.append({"step": now["steps"], "skipped_rounds": now["skipped_rounds"], **values,
                           "late": {name: of.share for name, of in late.items()}})
        if len(self._told) > _KEPT:
            del self._told[1::2]
        if self._writer is not None:
            first = self._session.start_step  # of a worker that was started again: its curves go on
            for name, value in values.items():
                self._writer.add_scalar(f"gradwire/{name}", value, first + int(now["steps"]))
            for name in sorted(self._ever_late):
                self._writer.add_scalar(f"gradwire/late/{name}", late.get(name, Late()).share, first + int(now["steps"]))
        if self._file is not None:
            waits = "" if steps or last else self._late.waits_for()
            self._write(f"job {self._session.job.name!r}: step {now['steps']:,.0f}, {_three(values['steps_per_second'])} steps/s; per step "
                        f"{_size(per_step['pushed_bytes'])} pushed, {_size(per_step['pulled_bytes'])} pulled"
                        + (f" (float32: {_three(values['saved'])} times as much)" if values["saved"] else "")
                        + f"; {values['waiting']:.0%} of the time waiting; {now['members']:.0f} members"
                        + (f"; waits for {waits}" if waits else _said(late)))

    def report(self, path: str | os.PathLike[str]) -> None:
        """Draws what was told so far, over this worker's steps: their rate, bytes each way, the share of time spent waiting,
        members; of a long run 2,000 to 4,000 points. The file's ending says as what: .svg, .png, .pdf. Nothing on processes that
        others speak for. Raises FailedPrecondition before the first line, RuntimeError where matplotlib is not installed.
        """
        if self._session is None:
            return
        told = list(self._told)
        if not told:
            raise FailedPrecondition(f"nothing was told yet: the first news come after {self._every:g} seconds, or with the end of "
                                     "the `with`")
        try:
            from matplotlib.figure import Figure
        except ImportError:
            raise RuntimeError("report() draws with matplotlib: pip install matplotlib") from None
        steps = [entry["step"] for entry in told]
        sending = [entry for entry in told if entry["pushed_bytes_per_step"]]  # others are times without a step
        figure = Figure(figsize=(8, 8), layout="constrained")
        rate, sent, waiting, members = figure.subplots(4, 1, sharex=True)
        figure.suptitle(f"job {self._session.job.name!r}: {steps[-1]:,.0f} steps of this worker, {told[-1]['skipped_rounds']:,.0f} "
                        "rounds went on without it", fontsize=10)
        dense = _BYTES_PER_ELEMENT * self._elements
        for axis, label, key in ((rate, "steps per second", "steps_per_second"), (waiting, "share of time waiting", "waiting"),
                                 (members, "workers", "members")):
            axis.plot(steps, [entry[key] for entry in told], marker=".", linewidth=1)
            axis.set_ylabel(label)
            axis.set_ylim(bottom=0)
        total: dict[str, float] = {}
        for entry in told:
            for name, share in entry["late"].items():
                total[name] = total.get(name, 0.0) + share
        for name in sorted(total, key=total.__getitem__, reverse=True)[:_MOST_LATE]:
            waiting.plot(steps, [entry["late"].get(name, 0.0) for entry in told], linewidth=1, linestyle="--", label=f"for {name}")
        if total:
            waiting.legend(frameon=False, fontsize=8)
        for name in ("pushed", "pulled"):
            sent.plot([entry["step"] for entry in sending], [entry[f"{name}_bytes_per_step"] for entry in sending], marker=".",
                      linewidth=1, label=name)
        sent.set_ylabel("bytes per step")
        sent.set_yscale("log")
        for axis in (rate, sent, waiting, members):
            axis.grid(alpha=0.3)
        sent.axhline(dense, color="#888888", linestyle=":", linewidth=1, label="float32, each way")
        sent.legend(frameon=False, fontsize=8)
        waiting.set_ylim(top=1)
        members.set_xlabel("step")
        figure.savefig(path)

    def _write(self, line: str) -> None:
        assert self._file is not None
        if self._file.isatty():
            print("\r" + line.ljust(self._wrote), end="", file=self._file, flush=True)
            self._wrote = len(line)
        else:
            print(line, file=self._file, flush=True)


def _said(late: dict[str, Late]) -> str:
    named = []
    for name, of in sorted(late.items(), key=lambda item: (item[1].share, item[1].left_out), reverse=True)[:_MOST_LATE]:
        costs = [f"{of.share:.0%} of the time"] if of.share >= _LATE_SHARE else []
        if of.left_out:
            costs.append(f"{of.left_out:,} frame{'s' * (of.left_out > 1)} came too late")
        named.append(f"{name} ({', '.join(costs)})")
    return "; late: " + ", ".join(named) if named else ""


def _three(number: float) -> str:
    """Three digits, or all of a larger number."""
    return f"{number:,.0f}" if number >= 99.95 else f"{number:.3g}"


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 999.5:
            return f"{_three(count)} {unit}"
        count /= 1000
    return f"{_three(count)} GB"
