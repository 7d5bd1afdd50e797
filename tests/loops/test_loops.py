"""The examples for other people's loops, under torchrun with two processes: over shards as over plain DistributedDataParallel."""

import functools
import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
EXAMPLES = ("ddp", "with_accelerate", "with_trainer", "with_lightning")

torch = pytest.importorskip("torch")
for package in ("accelerate", "transformers", "lightning"):
    pytest.importorskip(package)


@functools.cache
def torchrun(out, script, *arguments):
    """What both processes saved, and what they printed."""
    script = pathlib.Path(__file__).with_name(script)
    ran = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", script, out, *arguments],
                         env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1",
                              "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"},
                         capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return [torch.load(f"{out}.{rank}") for rank in range(2)], ran.stdout + ran.stderr


def run(out, mode, example, *servers):
    return torchrun(out, "run_example.py", mode, ROOT / f"client/examples/{example}.py", *servers)


def plain(example, folder):
    return run(folder / f"{example}-plain", "plain", example, "unused")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("loops")


def determined(name, value):
    """Without the biases of attention's keys, which no loss depends on: their gradients are rounding, which Adam makes steps of."""
    width = value.shape[0] // 3
    return torch.cat([value[:width], value[2 * width:]]) if name.endswith("c_attn.bias") else value


def last_loss(said):
    return float(re.findall(r"loss'?:? '?([0-9.]+)", said)[-1])


@pytest.mark.parametrize("example", EXAMPLES)
def test_dense_goes_the_way_of_all_reduce(example, folder, server):
    expected, _ = plain(example, folder)
    found, _ = run(folder / f"{example}-dense", "dense:fp32", example, server)
    assert found[0]["counted"]["steps"] > 0
    assert found[0]["parameters"].keys() == expected[0]["parameters"].keys()
    for name, value in expected[0]["parameters"].items():
        assert torch.equal(found[0]["parameters"][name], found[1]["parameters"][name]), "replicas differ"
        torch.testing.assert_close(determined(name, found[0]["parameters"][name]), determined(name, value), rtol=0, atol=1e-6)


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_default_trains_as_well_for_fewer_bytes(example, folder, server):
    expected, plainly = plain(example, folder)
    found, said = run(folder / f"{example}-default", "default", example, server)
    assert last_loss(said) <= 1.03 * last_loss(plainly)  # of a batch, 3 digits; 1.010 to 1.021 came out
    elements = sum(value.numel() for value in expected[0]["parameters"].values())
    counted = found[0]["counted"]
    assert counted["pushed_bytes"] < 4 * elements * counted["steps"] / 6


FRAMEWORKS = ["accelerate", "trainer", "lightning"]
OF_TORCH = ["ddp", "fsdp", "sharded"]


def train(loop, mode, precision, steps, folder, *servers):
    where = () if mode == "plain" else servers
    found, _ = torchrun(folder / f"{loop}-{mode}-{precision}-{steps}", "loop_worker.py", loop, mode, precision, str(steps), *where)
    assert len(found[0]["losses"]) == steps
    assert bool(found[0]["counted"]) == (mode != "plain")
    return found


def loss_of(found):
    """Of the last 100 batches of both processes."""
    for process in found:
        assert sum(process["losses"][-100:]) < 0.5 * sum(process["losses"][:100]), "it did not learn"
    return sum(sum(process["losses"][-100:]) for process in found)


@pytest.mark.parametrize("loop", [*OF_TORCH, *FRAMEWORKS, "accelerate-sharded"])
def test_dense_goes_the_way_of_torch_under_torchrun(loop, folder, server):
    expected, found = train(loop, "plain", "fp32", 40, folder), train(loop, "dense", "fp32", 40, folder, server)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine["losses"] == pytest.approx(theirs["losses"], rel=1e-5)
        for name, value in theirs["parameters"].items():
            torch.testing.assert_close(mine["parameters"][name], value, rtol=0, atol=1e-6)


@pytest.mark.parametrize("loop", [*OF_TORCH, *FRAMEWORKS, "accelerate-sharded"])
def test_one_percent_by_tagc_trains_as_well(loop, folder, server):
    """Steps of which TAGC sends 1 %, against AdamW at its best rate, in the same loop: 0.98 came out, with FSDP 1.003."""
    expected, found = (train(loop, mode, "fp32", 300, folder, server) for mode in ("plain", "tagc"))
    assert loss_of(found) <= 1.01 * loss_of(expected)
    counted, elements = found[0]["counted"], sum(value.numel() for value in found[0]["parameters"].values())
    assert counted["steps"] == 300
    assert counted["pushed_bytes"] < 4 * elements * 300 / (12 if loop == "fsdp" else 30)  # FSDP pads its parts


def test_local_steps_train_under_torchrun(folder, server):
    """75 rounds of four steps each: 0.99 came out, 0.96 by default, and 0.986 by TAGC of 1 % that loses no residual."""
    expected, dense, default, tagc = (train("local", mode, "fp32", 300, folder, server) for mode in ("plain", "dense", "default", "tagc"))
    assert loss_of(dense) <= 1.01 * loss_of(expected)
    assert loss_of(default) <= 1.01 * loss_of(expected)
    assert loss_of(tagc) <= 1.01 * loss_of(expected)
    assert default[0]["counted"]["steps"] == tagc[0]["counted"]["steps"] == 75


@pytest.mark.parametrize("loop", ["ddp", *FRAMEWORKS])
def test_mixed_precision_stays_the_loops(loop, folder, server):
    expected, found = (train(loop, mode, "bf16", 40, folder, server)[0]["losses"] for mode in ("plain", "dense"))
    exact = train(loop, "plain", "fp32", 40, folder)[0]["losses"]
    assert expected != pytest.approx(exact, rel=1e-5), "it computed as float32"
    assert found == pytest.approx(expected, rel=0.01)
