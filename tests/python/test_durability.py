"""Jobs that outlive their servers, and snapshots as files that PyTorch loads."""

import json
import subprocess
import time

import pytest

torch = pytest.importorskip("torch")
safetensors_torch = pytest.importorskip("safetensors.torch")

import gradwire
from conftest import server_binary
from gradwire.torch import ShardedOptimizer


def make_model(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(24, 96), torch.nn.LayerNorm(96), torch.nn.Linear(96, 24, bias=False))


def train(model, optimizer, steps):
    for step in steps:
        optimizer.zero_grad()
        x = torch.randn(16, 24, generator=torch.Generator().manual_seed(step))
        torch.nn.functional.mse_loss(model(x), x.roll(1, dims=1)).backward()
        optimizer.step()


def run_cli(*arguments):
    command = [server_binary().with_name("gradwire"), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def assert_loads(path, model):
    """The snapshot's parameters are a state_dict with the values of `model`."""
    loaded = make_model(seed=1)
    loaded.load_state_dict(safetensors_torch.load_file(path))
    for name, value in model.state_dict().items():
        assert torch.equal(value, loaded.state_dict()[name]), name


def test_snapshot_is_a_state_dict(servers):
    model = make_model()
    server, = servers(1, durable=True)
    with ShardedOptimizer(model, servers=[server.address], job="j", codec="dense:fp32", durability="fsync") as optimizer:
        train(model, optimizer, range(5))
        taken = json.loads(run_cli("snapshot", "j", "--servers", server.address, "--json"))
        assert taken[0]["version"] == optimizer.session.version
    snapshot = server.data / "jobs" / "j.job" / "snapshots" / f"{taken[0]['version']:020}"
    assert_loads(snapshot / "parameters.safetensors", model)
    state = safetensors_torch.load_file(snapshot / "state.safetensors")
    assert state["second_moment/0.weight"].shape == (96, 24) and state["second_moment/0.weight"].abs().sum() > 0


def test_a_shard_that_is_away_is_tried_again_as_long_as_is_asked(servers):
    model = make_model()
    server, = servers(1, durable=True)
    with ShardedOptimizer(model, servers=[server.address], job="j", codec="dense:fp32", durability="fsync",
                          reconnect_timeout=1.0) as optimizer:
        train(model, optimizer, range(2))
        server.process.kill()
        server.process.wait()
        begin = time.monotonic()
        with pytest.raises(gradwire.Unavailable):
            train(model, optimizer, range(2, 4))
        assert time.monotonic() - begin < 40, "the default is a minute"


def test_shards_are_put_together_by_restore(servers, tmp_path):
    model = make_model()
    old = servers(3, durable=True)
    with ShardedOptimizer(model, servers=[s.address for s in old], job="j", durability="interval:500",
                          run_elements=256) as optimizer:
        train(model, optimizer, range(5))
        version = optimizer.session.version
    for server in old:
        server.stop()
    whole = tmp_path / "whole"
    run_cli("restore", "--from", ",".join(str(s.data) for s in old), "--to", whole)
    assert_loads(whole / "jobs" / "j.job" / "snapshots" / f"{version:020}" / "parameters.safetensors", model)
    assert "all is well" in run_cli("verify", whole, *(s.data for s in old))


@pytest.mark.parametrize("durability", ["fsync", "interval:200"])
def test_training_goes_on_after_a_server_was_killed(servers, durability):
    undisturbed = make_model()
    with ShardedOptimizer(undisturbed, servers=[s.address for s in servers(2)], job="j") as optimizer:
        train(undisturbed, optimizer, range(6))
    model = make_model()
    durable = servers(2, durable=True)
    with ShardedOptimizer(model, servers=[s.address for s in durable], job="j", durability=durability,
                          on_disk_failure="continue") as optimizer:
        train(model, optimizer, range(3))
        durable[1].kill_and_restart()
        train(model, optimizer, range(3, 6))
        assert optimizer.session.version == 7
    for name, value in undisturbed.state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name


def test_durable_jobs_need_a_data_directory(servers):
    with pytest.raises(gradwire.FailedPrecondition, match="--data-dir"):
        ShardedOptimizer(make_model(), servers=[servers(1)[0].address], job="j", durability="fsync")


@pytest.mark.parametrize("options, message", [
    ({"durability": "fsync:5"}, "only 'interval' takes a number"), ({"durability": "interval:0"}, "from 1 to 600000"),
    ({"durability": "interval:x"}, "'interval:500'"), ({"durability": "always"}, "'none', 'interval', 'fsync'"),
    ({"durability": "fsync", "on_disk_failure": "stop"}, "'wait', 'continue'"),
])
def test_unknown_durability_is_named(options, message):
    with pytest.raises(ValueError, match=message):
        ShardedOptimizer(make_model(), servers=["grpc://127.0.0.1:1"], job="j", **options)
