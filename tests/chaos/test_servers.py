"""A shard server dies at each failpoint while four workers train, and is started again: the digest at the end is that of
a run in which nothing died."""

from __future__ import annotations

import dataclasses
import subprocess

import pytest

from cluster import WORKER, Cluster, Setup

SHORT = Setup(rounds=100)
LARGE = Setup(rounds=12, large=True)
NORMS = Setup(rounds=60, optimizer="lans")  # shards exchange norms, twice in a round
NORMS_OF_FOUR = Setup(rounds=60, optimizer="lans", shards=4)
SKIPS = Setup(rounds=60, skips=True)  # shards agree on which rounds they skip
WIDE = Setup(rounds=100, codec="tagc:density=0.05,cells=16")  # whose frames fill a segment of the journal
TWO_PHASES = Setup(rounds=101, codec="powersgd:rank=2")  # even rounds sum P, odd ones Q and make the step
SNAPSHOTS = Setup(rounds=100, large=True, pause_ms=60)  # long enough for three of them where others use the machine, too

# The worker's: test_workers.py.
OF_WORKERS = ("worker.", "checkpoint.")


@dataclasses.dataclass(frozen=True)
class Place:
    name: str
    hit: int
    setup: Setup = SHORT
    shard: int = 0

    def __str__(self) -> str:
        text = f"{self.name}:{self.hit}" + ("-large" if self.setup.large else "")
        text += "-two_phases" if self.setup.codec.startswith("powersgd") else ""
        text += "-skips" if self.setup.skips else ""
        return text + (f"-{self.setup.shards}shards" if self.setup.shards > 2 else "") + (f"-shard{self.shard}" if self.shard else "")


# A process that has just been started dies before anybody needs it.
AT_START = [
    Place("epoch.before_write", 1),
    Place("file.before_rename", 1),
    Place("epoch.after_write", 1),
    Place("file.before_rename", 2),  # the lineage
]
# It dies while it recovers.
IN_RECOVERY = [Place("recovery.after_snapshot", 1), Place("recovery.after_record", 20),
               Place("recovery.before_serving", 1)]
# It dies in the middle of the work.
AT_WORK = [
    Place("file.before_rename", 3),  # the job
    Place("job.before_rename", 1),
    Place("job.after_rename", 1),
    Place("initialize.before_journal", 2),
    Place("initialize.before_journal", 2, shard=1),
    Place("initialize.between_buckets", 2),
    Place("initialize.between_buckets", 2, shard=1),
    Place("push.chunk_merged", 300),
    Place("push.chunk_merged", 200, LARGE),
    Place("round.before_close", 100),
    Place("norms.before_exchange", 40, NORMS),
    Place("norms.before_exchange", 41, NORMS_OF_FOUR, shard=3),
    Place("norms.after_exchange", 40, NORMS),
    Place("norms.after_exchange", 41, NORMS, shard=1),
    Place("norms.after_exchange", 40, NORMS_OF_FOUR, shard=2),
    Place("norms.before_write", 81, NORMS),  # some buckets of the round are written
    Place("norms.before_write", 82, NORMS_OF_FOUR, shard=1),
    Place("norms.before_exchange", 40, SKIPS),  # in a round that is skipped, as all of even numbers
    Place("norms.after_exchange", 40, SKIPS),
    Place("norms.after_exchange", 42, SKIPS, shard=1),
    Place("norms.after_exchange", 41, SKIPS),
    Place("norms.before_write", 82, SKIPS),
    Place("norms.before_write", 85, SKIPS, shard=1),
    Place("round.before_journal", 101),
    # Between the phases of a step, and behind it, in some bucket: two on shard 0, three on shard 1.
    Place("push.chunk_merged", 610, TWO_PHASES),
    Place("round.before_close", 150, TWO_PHASES),
    Place("round.before_journal", 153, TWO_PHASES, shard=1),
    Place("journal.record.torn", 155, TWO_PHASES),
    Place("version.after_visible", 157, TWO_PHASES, shard=1),
    Place("version.after_visible", 159, TWO_PHASES),
    Place("journal.segment.before_header", 1),  # the initial parameters are not in it
    Place("journal.segment.before_header", 1, shard=1),
    Place("journal.segment.before_header", 2, WIDE),
    Place("journal.segment.after_header", 2, WIDE),
    Place("journal.segment.full", 1, WIDE),
    Place("journal.record.before_write", 100),
    Place("journal.record.torn", 100),
    Place("journal.record.torn", 12, LARGE),
    Place("journal.record.after_write", 101, shard=1),
    Place("journal.sync.before", 4),
    Place("journal.sync.after", 4),
    Place("version.before_visible", 100),
    Place("version.after_visible", 102, shard=1),
    Place("answer.before_chunk", 401),
    Place("answer.before_chunk", 300, LARGE),
    Place("push.before_ack", 402),
    Place("file.before_rename", 4, SNAPSHOTS),  # the manifest
    Place("snapshot.between_files", 1, SNAPSHOTS),
    Place("snapshot.before_rename", 1, SNAPSHOTS),
    Place("snapshot.after_rename", 2, SNAPSHOTS, shard=1),
    Place("snapshot.removing_old", 1, SNAPSHOTS),
    Place("journal.cut.before", 1, SNAPSHOTS),
    Place("journal.cut.between", 1, SNAPSHOTS),
    Place("journal.cut.after", 1, SNAPSHOTS),
]


def all_failpoints() -> list[str]:
    return subprocess.run([WORKER, "--failpoints"], capture_output=True, text=True, check=True).stdout.split()


@pytest.mark.ci
def test_every_failpoint_of_the_server_has_a_run():
    names = {name for name in all_failpoints() if not name.startswith(OF_WORKERS)}
    assert names == {place.name for place in [*AT_START, *IN_RECOVERY, *AT_WORK]}


@pytest.mark.parametrize("place", AT_START, ids=str)
def test_killed_at_its_start(place, tmp_path, undisturbed, report):
    with Cluster(tmp_path, place.setup) as job:
        victim = job.servers[1]
        victim.start(f"{place.name}:{place.hit}")
        job.wait_until_killed(victim.process)
        serving = victim.start_again()
        job.start_servers()
        job.start_workers()
        report(job, "server at its start", place, undisturbed(place.setup), serving=serving)


# Of these continuous integration runs those that take different ways through recovery.
_IN_CI = ("initialize.between_buckets", "round.before_journal", "journal.record.torn", "journal.sync.after",
          "version.after_visible", "snapshot.before_rename", "journal.cut.between")
CASES = [pytest.param(place, durability, id=f"{place}-{durability}",
                      marks=[pytest.mark.ci] if (place.name in _IN_CI or place.setup == NORMS_OF_FOUR) and durability == "fsync" else [])
         for place in AT_WORK for durability in ("fsync", "interval") if durability == "fsync" or place.setup in (SHORT, WIDE, NORMS)]


@pytest.mark.parametrize(("place", "durability"), CASES)
def test_killed_at_work(place, durability, tmp_path, undisturbed, report):
    with Cluster(tmp_path, place.setup, durability) as job:
        victim = job.servers[place.shard]
        victim.start(f"{place.name}:{place.hit}")
        job.start_servers()
        job.start_workers()
        killed = job.wait_until_killed(victim.process)
        serving = victim.start_again()
        report(job, f"server, {durability}", place, undisturbed(place.setup), killed_ns=killed, serving=serving)


@pytest.mark.parametrize("place", IN_RECOVERY, ids=str)
def test_killed_while_it_recovers(place, tmp_path, undisturbed, report):
    with Cluster(tmp_path, place.setup) as job:
        job.start_servers()
        job.start_workers()
        job.wait_for_version(place.setup.rounds // 2)
        victim = job.servers[1]
        killed = victim.process.kill()
        victim.start(f"{place.name}:{place.hit}")
        job.wait_until_killed(victim.process)
        serving = victim.start_again()
        report(job, "server, in recovery", place, undisturbed(place.setup), killed_ns=killed, serving=serving, kills=2)
