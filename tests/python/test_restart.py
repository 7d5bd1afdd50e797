"""Loops that torchrun starts again when one of their processes was killed: they go on where the job is."""

import os
import pathlib
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("gradwire.torch")

WORKER = pathlib.Path(__file__).with_name("restart_worker.py")
LOOPS = ["sharded", "local", "own"]
STEPS, NEVER = 80, "-1"


@pytest.fixture
def train(tmp_path, addresses):
    """train(loop, die): what the two processes saved, on servers of their own."""
    def run(loop, die):
        out, servers = tmp_path / f"die-{die}", () if loop == "own" else addresses(2)
        ran = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1",
                              WORKER, out, loop, str(STEPS), die, *servers], capture_output=True, text=True, timeout=150,
                             env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"})
        assert ran.returncode == 0, ran.stdout + ran.stderr
        return [torch.load(f"{out}.{rank}") for rank in range(2)]

    return run


@pytest.mark.slow
@pytest.mark.parametrize("loop", LOOPS)
def test_what_is_killed_between_steps_goes_on_by_the_bits_of_an_undisturbed_run(train, loop):
    found, expected = train(loop, "29"), train(loop, NEVER)
    for mine, theirs in zip(found, expected, strict=True):
        # What one of them had sent of the round that the other was killed in is not sent again.
        assert mine["begin"] in ((28, 32) if loop == "local" else (30, 31))
        assert theirs["begin"] == 0
        assert mine["losses"] == theirs["losses"][mine["begin"]:]
        assert all(map(torch.equal, mine["parameters"], theirs["parameters"]))


@pytest.mark.slow
@pytest.mark.parametrize("loop", LOOPS)
def test_what_is_killed_at_any_moment_goes_on(train, loop):
    """A round may then have one worker's gradients on one shard, and nothing on another."""
    found, expected = train(loop, "20+0.02"), train(loop, NEVER)

    def last(run):
        return sum(sum(process["losses"][-10:]) for process in run)

    assert all(process["begin"] >= 20 for process in found)
    assert all(map(torch.equal, found[0]["parameters"], found[1]["parameters"]))
    assert last(found) == pytest.approx(last(expected), rel=0.1)
