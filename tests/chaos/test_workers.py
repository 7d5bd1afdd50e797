"""A worker dies in the middle of a round and is started again: from its checkpoint, to the digest of a run in which
nothing died; from an old checkpoint or without one, to one digest everywhere, and the others notice nothing."""

from __future__ import annotations

import pytest

from cluster import Cluster
from test_servers import LARGE, OF_WORKERS, SHORT, TWO_PHASES, Place, all_failpoints

AT_WORK = [
    Place("worker.frame.encoded", 201),
    Place("worker.frame.half_sent", 37, LARGE),
    Place("worker.frame.sent", 202),
    Place("worker.frame.acked", 201),
    Place("worker.update.applied", 203),
    *(Place(name, hit, TWO_PHASES) for name in ("worker.frame.sent", "worker.frame.acked", "worker.update.applied")
      for hit in (202, 205, 208, 211)),  # in either phase
    Place("checkpoint.before_rename", 40),
    Place("checkpoint.after_rename", 40),
]
VICTIM = 2


def test_every_failpoint_of_the_worker_has_a_run():
    assert {name for name in all_failpoints() if name.startswith(OF_WORKERS)} == {place.name for place in AT_WORK}


def kill_one(job: Cluster, place: Place) -> tuple[int, dict]:
    """Starts the job, lets one worker die and starts it again. When it died, and how its second session began."""
    job.start_servers()
    job.start_workers({VICTIM: f"{place.name}:{place.hit}"})
    victim = job.workers[VICTIM]
    killed = job.wait_until_killed(victim.process)
    victim.start()
    return killed, victim.wait_until_joined(2)


_IN_CI = ("worker.frame.sent", "checkpoint.before_rename")


@pytest.mark.parametrize("place", [pytest.param(p, id=str(p), marks=[pytest.mark.ci] if p.name in _IN_CI else [])
                                   for p in AT_WORK])
def test_killed_and_back_from_its_checkpoint(place, tmp_path, undisturbed, report):
    with Cluster(tmp_path, place.setup, checkpoints=True) as job:
        killed, start = kill_one(job, place)
        assert start["resumed"]
        report(job, "worker, from its checkpoint", place, undisturbed(place.setup), killed_ns=killed)


@pytest.mark.ci
def test_killed_and_back_as_a_newcomer(tmp_path, report):
    place = Place("worker.frame.sent", 202)
    with Cluster(tmp_path, SHORT) as job:
        killed, start = kill_one(job, place)
        assert not start["resumed"]
        report(job, "worker, as a newcomer", place, None, killed_ns=killed)
        check_the_others(job)


def test_back_from_an_old_checkpoint_with_what_it_had_not_sent(tmp_path, report):
    place = Place("worker.frame.sent", 402)
    with Cluster(tmp_path, SHORT, checkpoints=True, worker_flags=["--checkpoint-every", 20]) as job:
        killed, start = kill_one(job, place)
        assert not start["resumed"]
        assert start["start_version"] > 20
        report(job, "worker, old checkpoint", place, None, killed_ns=killed)
        check_the_others(job)


def check_the_others(job: Cluster) -> None:
    """Nothing of theirs came too late, and the servers recover to what they have."""
    for worker in job.workers:
        if worker.index != VICTIM:
            assert worker.events()[-1]["not_included"] == 0
    for server in job.servers:
        server.process.kill()
        server.start_again()
    job.finish()
