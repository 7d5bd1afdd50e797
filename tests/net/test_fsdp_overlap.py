"""FSDP over a link that takes longer for a unit's gradients than the encoder: units are encoded while earlier ones travel."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from hosts import Hosts, start_shard, why_not

WHY_NOT = why_not()
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))
pytest.importorskip("torch")

LINK_BIT_S = 30e6
UNITS = 4  # of 512 x 512, 6 bits each: 197 kB, 52 ms of the link


@pytest.mark.parametrize("generation", ["FSDP1", "FSDP2"])
def test_a_unit_is_encoded_while_the_one_before_travels(tmp_path, generation):
    traces = [tmp_path / f"{rank}.json" for rank in range(2)]
    with Hosts({"ranks": None, "shard": LINK_BIT_S}) as hosts:
        server = f"tcp://{hosts.address('shard')}:7000"
        start_shard(hosts, "shard", server, tmp_path)
        ranks = [hosts.popen("ranks", [sys.executable, pathlib.Path(__file__).with_name("fsdp_worker.py"), generation, tmp_path / "store",
                                       traces[rank], server],
                             stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                             env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "RANK": str(rank),
                                  "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"})
                 for rank in range(2)]
        said = [rank.communicate(timeout=120)[0] for rank in ranks]
        assert [rank.returncode for rank in ranks] == [0, 0], said
    for rank, path in enumerate(traces):
        events = [event for event in json.loads(path.read_text())["traceEvents"]
                  if event["ph"] == "X" and event["cat"] == "worker" and "bucket" in event["args"]]
        encoded = sorted((event for event in events if event["name"] == "encode"), key=lambda event: event["ts"])
        arrived = {event["args"]["bucket"]: event["ts"] + event["dur"] for event in events if event["name"] == "acknowledged"}
        buckets = [event["args"]["bucket"] for event in encoded]
        assert len(buckets) == len(set(buckets)) >= UNITS and set(buckets) == set(arrived)
        for before, event in zip(buckets, encoded[1:], strict=False):
            end = event["ts"] + event["dur"]
            assert end < arrived[before], f"rank {rank}: bucket {event['args']['bucket']} waited until {before} was there"
        last = encoded[-1]["ts"] + encoded[-1]["dur"]
        assert sum(arrived[bucket] > last for bucket in buckets) >= UNITS - 1, "nearly all of it still travels when all is encoded"
