"""Where the time of a round goes: the file of gradwire.Trace, of two workers and two shards."""

import collections
import concurrent.futures
import json
import logging
import os
import pathlib
import subprocess
import threading

import numpy as np
import pytest

import gradwire

from test_session import in_parallel

ROOT = pathlib.Path(__file__).resolve().parents[2]
FIRST, ROUNDS = 3, 2
OF_WORKERS = {"encode", "send", "acknowledged", "received", "decode", "step"}
OF_SHARDS = {"merge", "finish", "record", "apply", "answer"}


def make_job(name, columns=40, **options):
    """With 400 columns the job is so large that the session has threads of its own."""
    tensors = [gradwire.TensorSpec("embed.weight", (50, columns)), gradwire.TensorSpec("norm.weight", (64,))]
    return gradwire.JobSpec(name, tensors, run_elements=256, bucket_bytes=4096, **options)


def make_arrays(job, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(tensor.shape, dtype=np.float32) for tensor in job.tensors]


def train(servers, job, index, trace, steps=8):
    """Returns the session's digest."""
    with gradwire.join(servers, job, make_arrays(job), f"worker-{index}", trace=trace) as session:
        for step in range(steps):
            session.exchange(make_arrays(job, seed=100 * index + step), lr=0.01)
        return session.digest()


def events_of(path):
    file = json.loads(path.read_text())
    assert all(event["ph"] in "XMsf" for event in file["traceEvents"])
    return file, [event for event in file["traceEvents"] if event["ph"] == "X"]


@pytest.mark.parametrize(("codec", "columns"), [("dense:values=fp32", 400), ("tagc:density=0.05", 400),
                                                ("dense:values=fp32", 40)])
def test_a_trace_has_every_stage_of_every_bucket(addresses, tmp_path, codec, columns):
    servers = addresses(2)
    job = make_job("traced", columns, codec=codec, workers=2)
    paths = [tmp_path / f"{index}.json" for index in range(2)]
    in_parallel(2, lambda i: train(servers, job, i, gradwire.Trace(paths[i], FIRST, ROUNDS)))
    for index, path in enumerate(paths):
        file, events = events_of(path)
        assert file["otherData"]["clock"] == "the steady clock of shard 0"
        processes = {process["name"]: process for process in file["otherData"]["processes"]}
        assert set(processes) == {"shard 0", "shard 1", f"worker-{index}"}
        assert all(process["dropped_events"] == 0 and "missing" not in process for process in processes.values())
        assert processes["shard 0"]["clock_error_us"] == 0 and processes["shard 1"]["clock_error_us"] > 0
        assert {event["args"]["round"] for event in events} == set(range(FIRST, FIRST + ROUNDS))
        seen = collections.defaultdict(set)  # (process, round, stage) -> (bucket, shard)
        merged = collections.defaultdict(set)  # (round, shard, bucket) -> workers
        for event in events:
            args = event["args"]
            assert event["dur"] >= 0
            if "bucket" in args:
                seen[event["cat"], args["round"], event["name"]].add((args["bucket"], args["shard"]))
            if event["name"] == "merge":
                merged[args["round"], args["shard"], args["bucket"]].add(args["worker"])
        slices = seen["worker", FIRST, "encode"]
        assert len(slices) > 2 and {shard for _, shard in slices} == {0, 1}
        for round_ in range(FIRST, FIRST + ROUNDS):
            for category, stages in (("worker", OF_WORKERS), ("shard", OF_SHARDS)):
                for stage in stages:
                    assert seen[category, round_, stage] == slices, (category, round_, stage)
        assert len(merged) == ROUNDS * len(slices)
        assert all(workers == {"worker-0", "worker-1"} for workers in merged.values())
        tensors = {event["args"]["tensor"] for event in events if event["name"] == "ready"}
        assert tensors == {tensor.name for tensor in job.tensors}
        assert sum(event["name"] == "end round" for event in events) == ROUNDS
        # Clocks agree: what is sent is merged later, and what is answered is received later.
        error_us = sum(process["clock_error_us"] for process in processes.values())
        arrows = collections.defaultdict(dict)
        for event in file["traceEvents"]:
            if event["ph"] in "sf":
                arrows[event["name"], event["id"]][event["ph"]] = event["ts"]
        whole = [ends for ends in arrows.values() if len(ends) == 2]
        assert len(whole) == 2 * ROUNDS * len(slices)
        assert all(ends["s"] <= ends["f"] + error_us for ends in whole)


def test_the_tool_traces_the_shards_of_a_job_that_trains(addresses, tmp_path):
    servers, path, done = addresses(2), tmp_path / "t.json", threading.Event()
    tool = pathlib.Path(os.environ.get("GRADWIRE_BIN", ROOT / "build/release/bin")) / "gradwire"

    def keep_training():
        job = make_job("running")
        with gradwire.join(servers, job, make_arrays(job), "worker") as session:
            while not done.is_set():
                session.exchange([np.ones_like(p) for p in make_arrays(job)], lr=1e-6)

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        training = pool.submit(keep_training)
        try:
            command = [tool, "trace", "running", "--servers", ",".join(servers), "--rounds=2", "--out", path, "--json"]
            while (told := subprocess.run(command, capture_output=True, text=True)).returncode != 0:
                assert "running" in told.stderr and not training.done(), told.stderr  # it has not joined yet
        finally:
            done.set()
        training.result()
    told = json.loads(told.stdout)
    file, events = events_of(path)
    assert [process["name"] for process in file["otherData"]["processes"]] == ["shard 0", "shard 1"]
    assert {event["args"]["round"] for event in events} == {told["first_round"], told["last_round"]}
    assert told["last_round"] == told["first_round"] + 1
    assert OF_SHARDS <= {event["name"] for event in events}


def test_without_a_trace_nothing_is_written_and_bits_are_the_same(addresses, tmp_path):
    servers = addresses(2)
    traces = [None, gradwire.Trace(tmp_path / "t.json", 1, 3)]
    first, second = (train(servers, make_job(f"job-{i}"), 0, trace) for i, trace in enumerate(traces))
    assert first == second
    assert [path.name for path in tmp_path.glob("*.json")] == ["t.json"]


def test_a_session_that_ends_before_writes_what_there_is(addresses, tmp_path, caplog):
    path = tmp_path / "t.json"
    with caplog.at_level(logging.INFO, logger="gradwire"):
        train(addresses(1), make_job("short"), 0, gradwire.Trace(path, 2, 100), steps=3)
    _, events = events_of(path)
    assert {event["args"]["round"] for event in events} == {2, 3}


def test_what_cannot_be_is_refused(addresses, tmp_path):
    servers, job = addresses(1), make_job("refused")
    with pytest.raises(gradwire.InvalidArgument, match="trace.rounds is 0"):
        gradwire.join(servers, job, make_arrays(job), "w", trace=gradwire.Trace(tmp_path / "t.json", rounds=0))
    with pytest.raises(gradwire.InvalidArgument, match="there is no folder"):
        gradwire.join(servers, job, make_arrays(job), "w", trace=gradwire.Trace(tmp_path / "none" / "t.json"))
