"""Workers that are killed and started again, cells that run again, scripts that run twice; and jobs that nobody uses."""

import json
import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

torch = pytest.importorskip("torch")

import gradwire
from conftest import Server, server_binary
from gradwire import _entry, _identity, _waiting
from gradwire.torch import ShardedOptimizer, load_parameters

SCRIPT = textwrap.dedent("""
    import os, sys, time
    import torch
    from gradwire.torch import ShardedOptimizer
    servers, job, steps, workers, then = sys.argv[1].split(","), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 4)
    optimizer = ShardedOptimizer(model, servers=servers, job=job, codec="dense:fp32", lr=1e-2, workers=workers)
    print("joined", optimizer.session.worker, optimizer.session.version, flush=True)
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 8)).square().sum().backward()
        optimizer.step()
    print("trained", optimizer.session.version, optimizer.digest(), flush=True)
    if then == "wait":
        time.sleep(600)
""")


class Script:
    """A process that trains; `then` is "wait" or "exit"."""

    def __init__(self, servers, job, steps=3, workers=1, then="exit", **environment):
        environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")} | environment
        self.process = subprocess.Popen([sys.executable, "-c", SCRIPT, ",".join(servers), job, str(steps), str(workers), then],
                                        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)

    def line(self):
        line = self.process.stdout.readline().split()
        assert line, self.process.stderr.read()
        return line

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def errors(self):
        """Of a process that ends."""
        return self.process.communicate(timeout=300)[1]


@pytest.fixture
def script():
    """Starts scripts, and ends those that a test leaves."""
    started = []

    def start(*arguments, **more):
        started.append(Script(*arguments, **more))
        return started[-1]

    yield start
    for process in started:
        process.kill()


def run_cli(*arguments):
    command = [server_binary().with_name("gradwire"), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def describe(server, job):
    return json.loads(run_cli("job", "describe", job, "--servers", server, "--json"))[0]["status"]


def small(job, servers, model=None, **more):
    return ShardedOptimizer(model or torch.nn.Linear(8, 4), servers=servers, job=job, codec="dense:fp32", lr=1e-2, **more)


def train(model, optimizer, steps=1):
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 8)).square().sum().backward()
        optimizer.step()


# Who is who -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [{}, {"RANK": "0", "WORLD_SIZE": "1"}])
def test_a_worker_that_was_killed_takes_its_place_again(addresses, script, rank):
    servers = addresses(2)
    first = script(servers, "j", then="wait", **rank)
    _, name, version = first.line()
    assert version == "0" and (name == "rank-0") == bool(rank)
    digest = first.line()[2]
    first.kill()
    again = script(servers, "j", steps=0, **rank)
    assert again.line() == ["joined", name, "4"]
    assert again.line()[2] == digest
    assert "goes on with it, the first, from step 3 (start_step; version 4)" in again.errors()


def test_two_processes_of_a_host_have_two_names(addresses, script):
    servers = addresses(1)
    both = [script(servers, "j", workers=2) for _ in range(2)]
    names = {process.line()[1] for process in both}
    assert len(names) == 2
    assert len({process.line()[2] for process in both}) == 1


def test_a_lost_workers_place_is_waited_for(addresses, script, caplog):
    servers = addresses(1)
    lost = script(servers, "j", then="wait", RANK="7")
    lost.line(), lost.line()
    lost.kill()
    with caplog.at_level(logging.INFO, "gradwire"), small("j", servers, worker="another") as optimizer:
        assert optimizer.session.version == 4
    assert "worker another waits for a place, of members that may be gone: rank-7" in caplog.text


def test_a_place_that_becomes_free_between_two_looks_is_taken(monkeypatch):
    tried = []

    def make():
        tried.append(None)
        if len(tried) == 1 or memory == 0:
            raise gradwire.ResourceExhausted("max_workers is 1")
        return "joined"

    monkeypatch.setattr(_entry, "ask", lambda servers, job: [{"joined": 0, "workers": []}])
    job = gradwire.JobSpec("j", [gradwire.TensorSpec("w", (4,))])
    memory = 1
    assert _entry.admitted(make, lambda: None, ["s"], job, "w", 10) == "joined"
    memory = 0
    with pytest.raises(gradwire.ResourceExhausted):
        _entry.admitted(make, lambda: None, ["s"], job, "w", 10)
    assert len(tried) == 4


def test_a_lease_that_is_lengthened_once_is_no_sign_of_life(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(_entry.time, "monotonic", lambda: now[0])
    leases = _entry.Leases()

    def alive(at, left):
        now[0] = at
        return leases.alive([{"workers": [{"worker": "w", "incarnation": "1", "awaited": False, "connected": True,
                                           "lease_left_ms": int(left * 1000)}]}], at, ["w"])

    assert [alive(*look) for look in ((0, 10), (3, 7), (9, 7), (12, 4))] == [False] * 4
    assert alive(15, 10)


def test_members_that_live_keep_their_places_and_names(addresses):
    servers = addresses(1)
    with small("j", servers, worker="here", lease_ms=1500):
        with pytest.raises(gradwire.ResourceExhausted, match="max_workers is 1.*alive: here"):
            small("j", servers, worker="another", lease_ms=1500)
    model = torch.nn.Linear(8, 4)
    with small("two", servers, model, worker="here", max_workers=2, lease_ms=1500) as here:
        job = here.job

        def join():
            return gradwire.join(servers, job, [torch.zeros(4, 8), torch.zeros(4)], "here")

        with pytest.raises(gradwire.AlreadyExists, match="worker 'here' is here and connected.*alive: here"):
            join()
        train(model, here)


@pytest.mark.parametrize("environment, workers, name", [
    ({"GRADWIRE_WORKER": "mine", "RANK": "3"}, (1, 1), "mine"), ({"RANK": "3"}, (1, 1), "rank-3"),
    ({"RANK": "3", "WORLD_SIZE": "4"}, (4, 4), "rank-3"), ({"RANK": "0", "WORLD_SIZE": "1"}, (2, 2), None),
    ({"KUBERNETES_SERVICE_HOST": "10.0.0.1", "HOSTNAME": "train-0"}, (1, 1), "train-0"), ({}, (1, 1), None),
])
def test_where_names_come_from(monkeypatch, environment, workers, name):
    for variable in ("GRADWIRE_WORKER", "RANK", "WORLD_SIZE", "KUBERNETES_SERVICE_HOST", "HOSTNAME"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    first, second = (_identity.take_name("names", workers) for _ in range(2))
    other = _identity.take_name("another job", workers)
    if name is not None:
        assert first.text == name
    assert second.text == f"{first.text}-2" and other.text == first.text
    first.release()
    again = _identity.take_name("names", workers)
    assert again.text == first.text
    for taken in (second, other, again):
        taken.release()


def test_a_worker_leaves_when_its_process_ends(addresses, script):
    servers = addresses(1)
    ends = script(servers, "j")
    ends.line(), ends.line()
    ends.errors()
    assert int(describe(servers[0], "j")["joined"]) == 0


def test_a_cell_that_runs_again_is_the_same_worker(addresses, caplog):
    servers = addresses(1)
    model = torch.nn.Linear(8, 4)
    first = small("j", servers, model)
    train(model, first)
    with caplog.at_level(logging.INFO, "gradwire"):
        second = small("j", servers, model)  # the same model: the hooks of the first one are gone
    assert first.closed and second.session.worker == first.session.worker and second.session.version == 2
    assert "makes another optimizer for it" in caplog.text
    train(model, second)
    second.close()


def test_a_newcomer_whose_schedule_begins_anew_does_not_end_the_others(addresses):
    servers, newcomers = addresses(2), []
    model = torch.nn.Linear(8, 4)

    def come_in():
        other = torch.nn.Linear(8, 4)
        try:
            with small("j", servers, other, max_workers=2) as optimizer:
                train(other, optimizer, 200)
        except gradwire.GradwireError as error:
            newcomers.append(error)

    with small("j", servers, model, max_workers=2) as optimizer:
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        thread = threading.Thread(target=come_in)
        for step in range(200):
            if step == 5:
                thread.start()
            train(model, optimizer)
            schedule.step()
            time.sleep(0 if newcomers else 0.01)
        thread.join()
    assert len(newcomers) == 1 and "which is in the job for longer" in str(newcomers[0]), newcomers
    assert optimizer.session.version == 201


# What exists ----------------------------------------------------------------------------------------------------------


def test_an_optimizer_that_was_left_says_why(addresses):
    servers = addresses(1)
    models = [torch.nn.Linear(8, 4) for _ in range(2)]
    first, second = (small("j", servers, model) for model in models)
    with pytest.raises(gradwire.FailedPrecondition, match="another one for the same job.*job= of their own"):
        train(models[0], first)
    train(models[1], second)
    second.close()
    with pytest.raises(gradwire.FailedPrecondition, match="has left job 'j': it was closed"):
        train(models[1], second)


def test_a_script_that_runs_twice_is_told_what_it_goes_on_with(addresses, caplog):
    servers = addresses(2)
    model = torch.nn.Linear(8, 4)
    with small("j", servers, model) as optimizer:
        train(model, optimizer, 3)
    fresh = torch.nn.Linear(8, 4)
    with small("j", servers, fresh) as optimizer:
        assert optimizer.session.version == 4 and torch.equal(fresh.weight, model.weight)
    assert "goes on with it, the first, from step 3 (start_step; version 4)" in caplog.text and "were replaced by those of the shards" in caplog.text
    with pytest.raises(gradwire.AlreadyExists, match="is at version 4.*exist='error'"):
        small("j", servers, exist="error")
    with pytest.raises(ValueError, match="exist='maybe' must be one of"):
        small("j", servers, exist="maybe")


def test_a_job_begins_anew_where_that_is_asked_for(addresses):
    servers = addresses(2)
    start = torch.nn.Linear(8, 4).state_dict()

    def fresh():
        model = torch.nn.Linear(8, 4)
        model.load_state_dict(start)
        return model

    reference = fresh()
    train(reference, torch.optim.AdamW(reference.parameters(), lr=1e-2, weight_decay=0), 3)
    for exist in ("error", "new", "new"):  # each run from the same weights, as plain torch does
        model = fresh()
        with small("j", servers, model, exist=exist) as optimizer:
            assert optimizer.session.start_version == 0
            train(model, optimizer, 3)
        torch.testing.assert_close(model.weight, reference.weight)


def test_a_job_that_is_trained_is_not_begun_anew(addresses):
    servers = addresses(1)
    model = torch.nn.Linear(8, 4)
    with small("j", servers, model, worker="busy", lease_ms=1500) as optimizer:
        train(model, optimizer)
        with pytest.raises(gradwire.AlreadyExists, match="has workers: busy"):
            small("j", servers, worker="other", exist="new", lease_ms=1500)
        train(model, optimizer)


# States ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, lost", [("j", "all"), ("another", "all"), ("j", "one")])
def test_a_state_begins_a_job_that_the_servers_do_not_have(servers, tmp_path, caplog, name, lost):
    running = servers(2)
    at = [s.address for s in running]
    model = torch.nn.Linear(8, 4)
    with small("j", at, model) as optimizer:
        train(model, optimizer, 3)
        torch.save(optimizer.state_dict(checkpoint=True), tmp_path / "state.pt")
        weight = model.weight.detach().clone()
        if name == "another":
            train(model, optimizer)
    for server in running if name == "j" and lost == "all" else running[1:] if lost == "one" else []:
        server.kill_and_restart()
    fresh = torch.nn.Linear(8, 4)
    with small(name, at, fresh, resume_from=torch.load(tmp_path / "state.pt")) as optimizer:
        assert torch.equal(fresh.weight, weight) and optimizer.session.version == 0
        train(fresh, optimizer, 2)
        assert not torch.equal(fresh.weight, weight)
    assert "begins anew with the parameters of version 4 of job 'j', with this worker's residuals" in caplog.text


@pytest.mark.parametrize("exist", ["join", "new"])
def test_a_damaged_file_costs_no_shard_its_job(servers, tmp_path, exist):
    running = servers(2)
    at = [s.address for s in running]
    model = torch.nn.Linear(8, 4)
    with small("j", at, model) as optimizer:
        train(model, optimizer, 3)
        optimizer.save(tmp_path / "state")
    if exist == "join":  # shard 0 has it, and cannot go on with it
        running[1].kill_and_restart()
    damaged = bytearray((tmp_path / "state").read_bytes())
    damaged[-5] ^= 1
    (tmp_path / "damaged").write_bytes(damaged)
    with pytest.raises(gradwire.DataLoss, match="/damaged' is damaged"):
        small("j", at, resume_from=tmp_path / "damaged", exist=exist)
    assert int(_waiting.ask(at, "j")[0]["version"]) == 4
    with small("j", at, model, resume_from=tmp_path / "state", exist=exist) as optimizer:
        assert optimizer.session.version == 0


@pytest.mark.parametrize("ranks", [False, True])
def test_one_state_does_not_make_one_worker_of_two(addresses, tmp_path, monkeypatch, ranks):
    """rank 0 has saved for all, as with DistributedDataParallel."""
    servers = addresses(2)
    if ranks:
        monkeypatch.setenv("RANK", "0")
    model = torch.nn.Linear(8, 4)
    with small("j", servers, model, max_workers=2) as optimizer:
        train(model, optimizer, 3)
        saved = optimizer.state_dict(checkpoint=True)
    monkeypatch.setattr(_entry, "_ENDING_SECONDS", 0.5)
    with small("j", servers, model, max_workers=2, resume_from=saved) as optimizer:
        assert optimizer.session.resumed
        if ranks:
            monkeypatch.setenv("RANK", "1")
        refused = gradwire.FailedPrecondition if ranks else gradwire.AlreadyExists
        with pytest.raises(refused, match="would go on as one.*leaves resume_from out"):
            gradwire.join(servers, optimizer.job, [p.detach().clone() for p in model.parameters()],
                          resume_from=_written(saved, tmp_path))
        train(model, optimizer)


def test_a_state_that_was_copied_does_not_make_one_worker_of_two_hosts(addresses, tmp_path):
    """With worker= the name is the same wherever it runs."""
    servers = addresses(2)
    model = torch.nn.Linear(8, 4)
    with small("j", servers, model, worker="w", max_workers=2) as optimizer:
        train(model, optimizer, 3)
        optimizer.save(tmp_path / "state")
        with pytest.raises(gradwire.AlreadyExists, match="another process goes on from the same checkpoint"):
            gradwire.join(servers, optimizer.job, [p.detach().clone() for p in model.parameters()], "w",
                          resume_from=tmp_path / "state", start_timeout=1)
        version, weight = optimizer.session.version, model.weight.detach().clone()
        train(model, optimizer)
        assert optimizer.session.version == version + 1 and not torch.equal(model.weight, weight)
        optimizer.save(tmp_path / "state")
    with small("j", servers, model, worker="w", max_workers=2, resume_from=tmp_path / "state") as optimizer:
        assert optimizer.session.resumed


def _written(state, folder):
    state["gradwire"]["checkpoint"].numpy().tofile(folder / "checkpoint")
    return folder / "checkpoint"


def test_a_state_of_another_model_begins_nothing(addresses, tmp_path):
    servers = addresses(1)
    with small("j", servers) as optimizer:
        optimizer.save(tmp_path / "state")
    with pytest.raises(gradwire.FailedPrecondition, match="no parameter 'weight' of 30 elements"):
        small("k", servers, torch.nn.Linear(6, 5), resume_from=tmp_path / "state")


class Rich(torch.nn.Module):
    """With a buffer, a tied and a frozen parameter."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Linear(8, 16, bias=False)
        self.norm = torch.nn.BatchNorm1d(16)
        self.frozen = torch.nn.Linear(16, 16).requires_grad_(False)
        self.head = torch.nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        return self.frozen(self.norm(self.embed(x))) @ self.head.weight


def test_a_snapshot_loads_into_a_model_with_more_than_trained_parameters(servers):
    server, = servers(1, durable=True)
    torch.manual_seed(0)
    model = Rich()
    with ShardedOptimizer(model, servers=[server.address], job="j", codec="dense:fp32", durability="fsync") as optimizer:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(4, 8)).square().sum().backward()
            optimizer.step()
        version = json.loads(run_cli("snapshot", "j", "--servers", server.address, "--json"))[0]["version"]
    path = server.data / "jobs" / "j.job" / "snapshots" / f"{version:020}" / "parameters.safetensors"
    loaded = Rich()
    load_parameters(loaded, path)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert torch.equal(parameter, loaded.get_parameter(name)), name
    assert torch.equal(loaded.head.weight, model.embed.weight)
    with pytest.raises(ValueError, match="the module has none of this name"):
        load_parameters(torch.nn.Linear(8, 4), path)
    more = Rich()
    more.frozen.requires_grad_(True)
    with pytest.raises(ValueError, match="'frozen.weight' requires gradients and is not in the snapshot"):
        load_parameters(more, path)


# Silence --------------------------------------------------------------------------------------------------------------


def until(condition):
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def goes_on(optimizer):
    try:
        optimizer.step()
    except gradwire.DeadlineExceeded:
        return False
    return True


def test_who_is_waited_for_is_told(addresses, script, caplog, monkeypatch):
    monkeypatch.setattr(gradwire._waiting, "FIRST_SECONDS", 1.5)
    servers = addresses(2)
    other = script(servers, "j", steps=2, workers=2, then="wait", RANK="1", WORLD_SIZE="2")
    other.line()
    model = torch.nn.Linear(8, 4)
    with small("j", servers, model, worker="me", workers=2, round_timeout=15.0) as optimizer:
        train(model, optimizer, 2)
        until(lambda: optimizer.stats()["members"] == 2)
        with pytest.raises(gradwire.DeadlineExceeded, match=r"Waits for rank-1 \(no frame yet\)"):
            train(model, optimizer)
        assert "job 'j': round 3 waits for rank-1 (no frame yet)" in caplog.text
        other.kill()
        until(lambda: goes_on(optimizer))  # when the lease of the other has ended
        until(lambda: optimizer.stats()["members"] == 1)
        train(model, optimizer)
    assert "worker 'rank-1' gave no sign of life for 10000 ms; training goes on with 1 worker" in caplog.text


def test_workers_that_have_not_come_are_told(addresses, caplog, monkeypatch):
    monkeypatch.setattr(gradwire._waiting, "FIRST_SECONDS", 1.0)
    model = torch.nn.Linear(8, 4)
    with small("j", addresses(1), model, worker="me", workers=2, round_timeout=4.0) as optimizer:
        with pytest.raises(gradwire.DeadlineExceeded, match=r"workers: 1 of 2 have joined \(me;"):
            train(model, optimizer)
    assert "waits for workers: 1 of 2 have joined (me; start the others" in caplog.text


def test_a_shard_that_is_away_is_told_and_so_is_its_return(servers, caplog):
    server, = servers(1, durable=True)
    model = torch.nn.Linear(8, 4)
    with caplog.at_level(logging.INFO, "gradwire"):
        with small("j", [server.address], model, durability="fsync") as optimizer:
            train(model, optimizer)
            server.kill_and_restart()
            train(model, optimizer)
    assert f"shard 0 at {server.address}: " in caplog.text and "It is tried again for 1m" in caplog.text
    assert f"shard 0 at {server.address} is back after" in caplog.text


def test_a_lost_server_is_told_with_its_address_and_what_to_do(servers):
    gone, = servers(1)
    model = torch.nn.Linear(8, 4)
    with small("j", [gone.address], model) as optimizer:
        train(model, optimizer)
        gone.process.kill()
        with pytest.raises(gradwire.Unavailable) as lost:
            train(model, optimizer, 3)
    assert f"shard 0 at {gone.address}: this server is lost" in str(lost.value)
    assert "start the server again and the job anew" in str(lost.value)


def test_the_server_tells_who_leaves(tmp_path):
    server = Server(tmp_path, "told", "--log-level", "info")
    try:
        small("j", [server.address], worker="me").close()
        assert "job j worker me incarnation" in (log := (tmp_path / "told.log").read_text()) and "left; 0 workers stay" in log
    finally:
        server.stop()


# Jobs that nobody uses ------------------------------------------------------------------------------------------------


def test_jobs_without_workers_end_after_a_time(tmp_path):
    server = Server(tmp_path, "brief", "--unused-job-ms", "300", "--max-jobs", "2", "--data-dir", tmp_path / "data")
    try:
        for number in range(5):
            small(f"j{number}", [server.address]).close()
            until(lambda n=number: f"j{n}" not in run_cli("job", "list", "--servers", server.address))
        assert "job j4 ended: no workers for" in (tmp_path / "brief.log").read_text()
        with small("used", [server.address], durability="fsync"):
            time.sleep(1)
            assert "training" in run_cli("job", "list", "--servers", server.address)
        time.sleep(1)
        assert "durable" in run_cli("job", "list", "--servers", server.address)
    finally:
        server.stop()


def test_jobs_without_workers_are_named_and_pruned(tmp_path):
    server = Server(tmp_path, "full", "--max-jobs", "3", "--data-dir", tmp_path / "data")
    at = ["--servers", server.address]
    try:
        small("kept", [server.address], durability="fsync").close()
        small("idle", [server.address]).close()
        with small("busy", [server.address]):
            with pytest.raises(gradwire.ResourceExhausted, match="without workers: 'idle' .*`gradwire job prune`.*durable, "
                                                                 "without workers, kept until deleted: 'kept'"):
                small("more", [server.address])
            listed = run_cli("job", "list", *at)
            assert "unused for 0 s, durable" in listed or "unused for" in listed
            assert [line.split()[4] for line in listed.splitlines() if " busy " in line] == ["1"]
            assert "idle" not in run_cli("job", "prune", "--unused-s", "3600", *at)
            pruned = run_cli("job", "prune", "--unused-s", "0", *at)
            assert "job idle, unused for" in pruned and "deleted" in pruned and "job kept" in pruned and "busy" not in pruned
            small("more", [server.address]).close()
    finally:
        server.stop()
