"""The line that tells how a job goes, and what TensorBoard gets."""

import io
import re
import threading
import time

import numpy as np
import pytest

import gradwire
from test_session import in_parallel, make_job, make_parameters


class Writer:
    def __init__(self):
        self.scalars = {}

    def add_scalar(self, tag, value, step):
        self.scalars.setdefault(tag, []).append((step, value))


class Terminal(io.StringIO):
    def isatty(self):
        return True


def train(session, steps, pause=0.0):
    for _ in range(steps):
        session.exchange([np.ones_like(p) for p in make_parameters()], lr=0.01)
        time.sleep(pause)


def test_tells_what_the_session_counts(addresses):
    job = make_job("told", codec="dense:fp32")
    elements = sum(p.size for p in make_parameters())
    with gradwire.join(addresses(2), job, make_parameters(), "w") as session:
        train(session, 5)
        file, writer = io.StringIO(), Writer()
        before = session.stats()
        with gradwire.Progress(session, every=0.2, file=file, writer=writer):
            train(session, 10, pause=0.1)
        after = session.stats()
    lines = file.getvalue().splitlines()
    assert len(lines) >= 2
    for line in lines:
        assert re.fullmatch(r"job 'told': step \d+, [\d.]+ steps/s; per step [\d.]+ k?B pushed, [\d.]+ k?B pulled( \(float32: "
                            r"[\d.]+ times as much\))?; \d+% of the time waiting; 1 members", line), line
    assert lines[-1].startswith("job 'told': step 15, ")
    steps = [step for step, _ in writer.scalars["gradwire/steps_per_second"]]
    assert steps == sorted(steps) and steps[-1] == 15 and len(steps) == len(lines)
    told = [(step, value) for step, value in writer.scalars["gradwire/pushed_bytes_per_step"]]
    sent, last = 0.0, 5
    for step, value in told:
        sent, last = sent + value * (step - last), step
    assert sent == pytest.approx(after["pushed_bytes"] - before["pushed_bytes"])
    assert 4 * elements < sent / 10 < 4.5 * elements
    # A line may come within a step, whose bytes it counts and not yet the step: a bound holds for all of them together only.
    pulled = after["pulled_bytes"] - before["pulled_bytes"]
    assert 0.8 < 10 * 8 * elements / (sent + pulled) <= 1
    for tag in ("steps_per_second", "pushed_bytes_per_step", "pulled_bytes_per_step", "saved"):
        assert [step for step, _ in writer.scalars[f"gradwire/{tag}"]] == steps
    for (_, rate), (_, pushed), (_, pulled), (_, saved) in zip(*(writer.scalars[f"gradwire/{tag}"] for tag in (
            "steps_per_second", "pushed_bytes_per_step", "pulled_bytes_per_step", "saved"))):
        assert saved == pytest.approx(8 * elements / (pushed + pulled) if rate and pushed + pulled else 0.0)


def test_who_is_late_is_named(addresses, tmp_path):
    pytest.importorskip("matplotlib")
    servers, job = addresses(2), make_job("late", codec="dense:fp32", workers=3)
    file, writer = io.StringIO(), Writer()

    def work(worker):
        with gradwire.join(servers, job, make_parameters(), f"w{worker}") as session:
            if worker > 0:
                return train(session, 21, pause=0.1 if worker == 2 else 0.0)
            train(session, 1)
            with gradwire.Progress(session, every=0.5, file=file, writer=writer) as progress:
                train(session, 20)
            progress.report(tmp_path / "late.svg")

    in_parallel(3, work)
    lines = file.getvalue().splitlines()
    # The last line may have begun behind the last round.
    shares = [int(found[1]) for line in lines if (found := re.search(r"members; late: w2 \((\d+)% of the time\)", line))]
    assert len(shares) >= len(lines) - 1 >= 2 and max(shares) > 50, lines
    most = {worker: max((share for _, share in writer.scalars.get(f"gradwire/late/w{worker}", [])), default=0) for worker in range(3)}
    assert most[2] > 0.5 > max(most[0], most[1])
    assert "<!-- for w2 -->" in (tmp_path / "late.svg").read_text()


def test_frames_that_come_too_late_are_counted_by_worker(addresses):
    servers, job = addresses(1), make_job("left-out", codec="dense:fp32", workers=3, quorum=2)
    file, looks, far_ahead, was_late, over = io.StringIO(), *(threading.Event() for _ in range(4))

    def work(worker):
        if worker == 2:  # who joins behind its first look counts as well
            looks.wait(60)
        with gradwire.join(servers, job, make_parameters(), f"w{worker}") as session:
            if worker == 0:
                with gradwire.Progress(session, every=600, file=file):
                    looks.set()
                    train(session, 40)
                    far_ahead.set()
                    while not was_late.is_set():
                        train(session, 1, pause=0.01)
                return over.set()
            if worker == 1:  # w0's rounds close by its frames, for w2 sends none
                while not over.is_set():
                    train(session, 1)
                return
            train(session, 10)  # a quorum's first 8 rounds wait for all
            far_ahead.wait(60)
            train(session, 1)
            was_late.set()
            over.wait(60)  # whoever has left is not told of

    in_parallel(3, work)
    assert re.search(r"; late: .*w2 \((\d+% of the time, )?\d+ frames? came too late\)", file.getvalue()), file.getvalue()


def test_a_round_that_does_not_end_says_whom_it_waits_for(addresses):
    servers, job = addresses(1), make_job("open", codec="dense:fp32", workers=2)
    file, long_enough, over = io.StringIO(), threading.Event(), threading.Event()

    def work(worker):
        with gradwire.join(servers, job, make_parameters(), f"w{worker}") as session:
            if worker == 1:
                train(session, 1)
                long_enough.wait(10)
                train(session, 1)
                over.wait(10)
                return
            with gradwire.Progress(session, every=0.3, file=file):
                threading.Timer(1.5, long_enough.set).start()
                train(session, 2)
            over.set()

    in_parallel(2, work)
    assert "; waits for w1 (no frame yet)\n" in file.getvalue(), file.getvalue()
    assert re.search(r"; late: w1 \([1-9]\d+% of the time\)\n", file.getvalue()), file.getvalue()


def test_outlives_its_session(addresses):
    session, file = gradwire.join(addresses(1), make_job("left"), make_parameters(), "w"), io.StringIO()
    with gradwire.Progress(session, every=0.1, file=file):
        train(session, 2)
        session.leave()
        time.sleep(0.3)
    assert len(file.getvalue().splitlines()) >= 2 and "step 2, " in file.getvalue()


def test_a_terminal_has_one_line(addresses):
    with gradwire.join(addresses(1), make_job("terminal"), make_parameters(), "w") as session:
        file = Terminal()
        with gradwire.Progress(session, every=0.1, file=file):
            train(session, 5, pause=0.1)
    assert file.getvalue().count("\n") == 1 and file.getvalue().endswith("\n") and file.getvalue().count("\r") >= 2


def test_report_draws_what_was_told(addresses, tmp_path):
    pytest.importorskip("matplotlib")
    with gradwire.join(addresses(1), make_job("drawn", codec="topk:density=0.1"), make_parameters(), "w") as session:
        with gradwire.Progress(session, every=0.1, file=None) as progress:
            with pytest.raises(gradwire.FailedPrecondition, match="nothing was told yet: the first news come after 0.1 seconds"):
                progress.report(tmp_path / "early.svg")
            train(session, 5, pause=0.1)
        progress.report(tmp_path / "progress.svg")
        progress.report(tmp_path / "progress.png")
    assert not (tmp_path / "early.svg").exists()
    text = (tmp_path / "progress.svg").read_text()
    for said in ("job 'drawn': 5 steps of this worker, 0 rounds", "steps per second", "pushed", "pulled", "float32, each way", "workers"):
        assert f"<!-- {said}" in text, said
    assert (tmp_path / "progress.png").read_bytes().startswith(b"\x89PNG")


def test_takes_what_has_a_session(addresses):
    torch = pytest.importorskip("torch")
    from gradwire.torch import ShardedOptimizer

    model, file = torch.nn.Linear(20, 20), io.StringIO()
    with ShardedOptimizer(model, servers=addresses(1), job="optimizer", lr=0.1) as optimizer:
        with gradwire.Progress(optimizer, every=60, file=file):
            for _ in range(3):
                optimizer.zero_grad()
                model(torch.ones(20)).sum().backward()
                optimizer.step()
    assert "step 3, " in file.getvalue()
    from gradwire.torch import LocalSGD

    with LocalSGD(torch.optim.SGD(model.parameters(), lr=0.1), model, every=2, servers=addresses(1), job="local") as local:
        with gradwire.Progress(local, every=60, file=file):
            for _ in range(4):
                model(torch.ones(20)).sum().backward()
                local.step()
    assert "job 'local': step 2, " in file.getvalue()


def test_numbers_are_written_out():
    from gradwire._progress import _size, _three

    assert [_three(number) for number in (0, 0.1234, 12.34, 99.96, 999.6, 12345.6)] == ["0", "0.123", "12.3", "100", "1,000", "12,346"]
    assert [_size(number) for number in (999, 999.7, 123456, 2.5e9)] == ["999 B", "1 kB", "123 kB", "2.5 GB"]


def test_is_silent_where_others_speak():
    class Led:
        session = None

    file = io.StringIO()
    with gradwire.Progress(Led(), file=file) as progress:
        pass
    progress.report("nowhere/progress.svg")
    assert file.getvalue() == ""
    with pytest.raises(ValueError, match="every=0"):
        gradwire.Progress(Led(), every=0)
