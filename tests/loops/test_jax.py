"""gradwire.jax against optax, and its example."""

import os
import pathlib
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")
jnp = jax.numpy

import gradwire
from gradwire.jax import ShardedTransformation

ROOT = pathlib.Path(__file__).resolve().parents[2]
LR, STEPS = 0.01, 8


def start(dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 2)
    return {"a": {"kernel": jax.random.normal(keys[0], (6, 40)).astype(dtype), "bias": jnp.zeros(40, dtype)},
            "b": [jax.random.normal(keys[1], (40, 3)).astype(dtype)]}


def loss_of(params, step, worker=0):
    x = jax.random.normal(jax.random.key(2 * step + worker), (16, 6)).astype(params["b"][0].dtype)
    y = jnp.tanh(x @ params["a"]["kernel"] + params["a"]["bias"]) @ params["b"][0]
    return jnp.square(y - 2 * x[:, :3]).mean().astype(jnp.float32)


def mean_of(params, step, worker=0):
    """The gradients of two workers' batches, as one."""
    return jax.tree.map(lambda a, b: (a + b) / 2, *(jax.grad(loss_of)(params, step, w) for w in range(2)))


def train(optimizer, gradients_of, params, worker=0, wrap=jax.jit, ours=None):
    state = optimizer.init(params)
    if ours is not None:
        params = ours.parameters(params)

    def step(params, state, number):
        updates, state = optimizer.update(gradients_of(params, number, worker), state, params)
        return optax.apply_updates(params, updates), state

    step = wrap(step)
    for number in range(STEPS):
        params, state = step(params, state, number)
    return jax.block_until_ready(params)


def assert_close(found, expected, tolerance=1e-5):
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=tolerance)


@pytest.mark.parametrize("wrap", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_two_workers_go_the_way_of_optax(server, wrap):
    schedule = optax.linear_schedule(LR, 0.0, STEPS)
    expected = train(optax.adamw(schedule, weight_decay=0.1), mean_of, start())

    def ours(worker):
        optimizer = ShardedTransformation(servers=server, job="jax", codec="dense:fp32", learning_rate=schedule, workers=2,
                                          worker=f"w{worker}", weight_decay=0.1)
        params = train(optimizer, jax.grad(loss_of), start(), worker, wrap, ours=optimizer)
        optimizer.close()
        return params

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(ours, range(2))
    assert_close(first, expected)
    assert_close(second, expected)


def test_goes_into_a_chain_and_goes_on_where_the_job_is(server):
    def optimizer():
        return ShardedTransformation(servers=server, job="on", codec="dense:fp32", optimizer="sgd",
                                     learning_rate=lambda count: 0.1 / (1 + count))

    first = optimizer()
    params = train(optax.chain(optax.clip(0.1), first), jax.grad(loss_of), start())
    first.close()
    again = optimizer()
    state = again.init(start())
    assert state.count == STEPS
    assert_close(again.parameters(start()), params)
    updates, state = again.update(jax.tree.map(jnp.zeros_like, params), state, again.parameters(start()))
    assert_close(optax.apply_updates(again.parameters(start()), updates), params)
    again.close()


@pytest.mark.parametrize("case", ["behind a restart", "gathered", "a checkpoint"])
def test_parameters_that_are_not_the_jobs_are_refused(server, case):
    first = ShardedTransformation(servers=server, job=case.replace(" ", "-"), codec="dense:fp32", optimizer="sgd", learning_rate=0.1)
    ours = optax.MultiSteps(first, 2) if case == "gathered" else first
    params = start()
    state = ours.init(params)
    gradients = jax.grad(loss_of)(params, 0)
    updates, state = ours.update(gradients, state, params)
    if case == "behind a restart":
        jax.block_until_ready(updates)
        first.close()
        ours = ShardedTransformation(servers=server, job="behind-a-restart", codec="dense:fp32", optimizer="sgd", learning_rate=0.1)
        state = ours.init(params)
    else:
        params = optax.apply_updates(params, updates)
    if case == "a checkpoint":
        params = jax.tree.map(lambda p: 0.9 * p, params)
    with pytest.raises(Exception, match="not the job's: 'a.bias'|not the job's: 'a.kernel'"):
        jax.block_until_ready(ours.update(gradients, state, params))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_rounding_is_no_difference(server, dtype):
    """Of a single element that goes through 0, and of one that is all but 0."""
    optimizer = ShardedTransformation(servers=server, job=f"round-{jnp.dtype(dtype).name}", codec="dense:fp32", optimizer="sgd",
                                      learning_rate=1.0)
    params = {"gate": jnp.full((1,), 0.01, dtype), "bias": jnp.zeros(3, dtype)}
    state = optimizer.init(params)
    steps = np.random.default_rng(1).normal(0, 1e-3, 400)
    for number, step in enumerate(steps):
        gradients = {"gate": jnp.full((1,), step, dtype), "bias": jnp.full(3, 1e-7 * (-1) ** number, dtype)}
        updates, state = optimizer.update(gradients, state, params)
        params = optax.apply_updates(params, updates)
    jax.block_until_ready(params)
    optimizer.close()


def test_close_waits_for_the_steps_that_were_dispatched(server):
    optimizer = ShardedTransformation(servers=server, job="dispatched", codec="dense:fp32", optimizer="sgd", learning_rate=0.01)
    params = {"w": jnp.ones((512, 512)) / 512}
    state = optimizer.init(params)

    @jax.jit
    def step(params, state):
        gradients = jax.grad(lambda p: jnp.square(jnp.tanh(p["w"] @ p["w"] @ p["w"])).mean())(params)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    session = optimizer.session
    for _ in range(30):
        params, state = step(params, state)
    optimizer.close()
    assert session.stats()["steps"] == 30


def test_masters_of_bfloat16_add_up_what_it_rounds_away(server):
    optimizer = ShardedTransformation(servers=server, job="half", codec="dense:fp32", optimizer="sgd", learning_rate=1.0)
    params = {"w": jnp.ones(1000, jnp.bfloat16), "scale": jnp.float32(1)}
    state = optimizer.init(params)
    for _ in range(64):
        updates, state = optimizer.update({"w": jnp.full(1000, 2.0**-11, jnp.bfloat16), "scale": jnp.float32(0.5)}, state, params)
        params = optax.apply_updates(params, updates)
    np.testing.assert_array_equal(params["w"].astype(jnp.float32), 1 - 64 * 2.0**-11)
    assert params["scale"] == 1 - 64 * 0.5
    optimizer.close()


def test_what_does_not_go_is_said(server):
    optimizer = ShardedTransformation(servers=server, job="said")
    with pytest.raises(TypeError, match="outside of jit"):
        jax.jit(optimizer.init)(start())
    with pytest.raises(TypeError, match="parameter 'w' is int32"):
        optimizer.init({"w": jnp.zeros(3, jnp.int32)})
    state = optimizer.init(start())
    with pytest.raises(gradwire.FailedPrecondition, match="make another one"):
        optimizer.init(start())
    with pytest.raises(ValueError, match="needs the parameters"):
        optimizer.update(start(), state)
    with pytest.raises(Exception, match="not finite|non-finite|NaN"):
        jax.block_until_ready(optimizer.update(jax.tree.map(lambda p: p * jnp.nan, start()), state, start()))
    optimizer.close()


def test_example(server):
    example = [sys.executable, ROOT / "client/examples/with_jax.py"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    workers = [subprocess.Popen([*example, str(w), server], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                text=True) for w in range(2)]
    said = [worker.communicate(timeout=240)[0] for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0], said
    losses = [float(x) for x in re.findall(r"loss ([0-9.]+)", said[0])]
    assert len(losses) == 4 and losses[-1] < 0.4 * losses[0]
    assert "failed" not in "".join(said), said
