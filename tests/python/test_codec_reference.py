"""What the library makes of gradients, next to each codec's definition in references.py: real workers push to a real shard and
pull the means, so encoder, residual, frames, merging and the agreement on scales are all in it."""

import concurrent.futures
import functools
import itertools
import math

import numpy as np
import pytest

import gradwire
import references as ref
from conftest import ROOT, Server, server_binary

RUN = 64  # elements: the tensors below have several runs, of odd lengths
SHAPES = {"embed.weight": (41, 15), "attention.weight": (5, 7, 11), "mlp.weight": (25, 13), "norm.weight": (35,),
          "bias": (5,), "scalar": ()}
SEED = 29
STEPS = 6
SCALES = (1.0, 0.5, 2.0, 2.0, 0.125, 1.0)  # so that exponents rise and fall, and what exceeds them shows


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    if not server_binary().exists():
        pytest.skip(f"{server_binary()} is not built")
    running = Server(tmp_path_factory.mktemp("server"), "server", "--max-jobs=1000")
    yield running.address
    running.stop()


@pytest.fixture
def name(request):
    return "".join(c if c.isalnum() else "-" for c in request.node.name)[-120:]


def gradients_of(shapes, worker, step):
    """Multiples of 2^-15 within +-4 with heavy tails and some zeros: float32 and float64 make the same sums of them."""
    found = []
    for t, shape in enumerate(shapes.values()):
        n = math.prod(shape)
        u = ref.uniforms(ref.combine(ref.combine(worker, step), t), 3 * n).reshape(3, n)
        x = np.rint((u[0] - 0.5) * u[1] ** 2 * 2**14) / 2**12
        found.append(np.where(u[2] < 0.1, 0, x) * SCALES[step % STEPS])
    return found


def means(server, name, shapes, codec, gradients, **options):
    """What workers pull in each step: means[step][tensor], flat. gradients(worker, step)."""
    workers, steps = options.pop("workers"), options.pop("steps", STEPS)
    job = gradwire.JobSpec(name, [gradwire.TensorSpec(n, s) for n, s in shapes.items()], optimizer="none", codec=codec,
                           rules=[], workers=workers, run_elements=RUN, seed=SEED, lease_ms=600_000, **options)

    def work(w):
        memory = [np.zeros(s, np.float32) for s in shapes.values()]
        found = []
        with gradwire.join(server, job, memory, f"worker-{w}", pull="mean") as session:
            for step in range(steps):
                values = gradients(w, step)
                session.exchange([g.astype(np.float32).reshape(s) for g, s in zip(values, shapes.values(), strict=True)],
                                 lr=1.0)
                found.append([m.astype(np.float64).ravel() for m in memory])
            assert session.stats()["deferred_elements"] == 0
        return found

    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        every = list(pool.map(work, range(workers)))
    for other in every[1:]:
        for a, b in zip(itertools.chain(*every[0]), itertools.chain(*other), strict=True):
            np.testing.assert_array_equal(a, b, "workers pulled different means")
    return every[0]


def compare(server, name, codec, definition, workers, tolerance=2e-6, unit=1.0, **options):
    def gradients(w, step):
        return [(unit * g).astype(np.float32).astype(np.float64) for g in gradients_of(SHAPES, w, step)]

    found = means(server, name, SHAPES, codec, gradients, workers=workers, **options)
    reference = definition(SHAPES, workers, SEED, RUN)
    for step in range(STEPS):
        wanted = reference.step([gradients(w, step) for w in range(workers)])
        for tensor, x, y in zip(SHAPES, found[step], wanted, strict=True):
            np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance,
                                       err_msg=f"{codec}, {workers} workers, step {step}, {tensor}")


def quantised(scheme, feedback=False, **options):
    return functools.partial(ref.Quantised, scheme=functools.partial(scheme, **options), feedback=feedback)


SOME = (2, 0.4)  # rounds of warm-up and the first density
CODECS = {
    "dense:fp32": quantised(ref.fp32),
    "dense:bf16": quantised(ref.bf16, feedback=True),
    "dense:fixed32": functools.partial(ref.Fixed, bits=32, headroom=8),
    "dense:fixed16": functools.partial(ref.Fixed, bits=16, headroom=1),
    "fp16": quantised(ref.fp16, feedback=True),
    "onebit": quantised(ref.onebit, feedback=True),
    "signsgd": quantised(ref.signsgd),
    "signum:momentum=0.9": functools.partial(ref.Signum, momentum=0.9),
    "signum:momentum=0": quantised(ref.signsgd),
    "efsignsgd": quantised(ref.efsignsgd, feedback=True),
    "terngrad": quantised(ref.terngrad),
    "terngrad:clip=1.5": quantised(ref.terngrad, clip=1.5),
    "qsgd:bits=2": quantised(ref.qsgd, bits=2),
    "qsgd:bits=4": quantised(ref.qsgd, bits=4),
    "linear:bits=3,norm=l2": quantised(ref.qsgd, bits=3, norm="l2"),
    "linear:bits=8,norm=max": quantised(ref.qsgd, bits=8, norm="max"),
    "natural:bits=3,norm=max": quantised(ref.natural, bits=3, norm="max"),
    "natural:bits=5,norm=l2": quantised(ref.natural, bits=5, norm="l2"),
    "topk:density=0.2": functools.partial(ref.TopK, density=0.2),
    "topk:density=0.07,values=fp16": functools.partial(ref.TopK, density=0.07, values="fp16"),
    "topk:density=0.2,values=bf16": functools.partial(ref.TopK, density=0.2, values="bf16"),
    "topk:density=0.2,values=int8": functools.partial(ref.TopK, density=0.2, values="int8"),
    "topk:density=0.2,values=int6": functools.partial(ref.TopK, density=0.2, values="int6"),
    "topk:density=0.2,values=2bit": functools.partial(ref.TopK, density=0.2, values="2bit"),
    "topk:density=0.2,values=int4,warmup_rounds=2,warmup_density=0.4":
        functools.partial(ref.TopK, density=0.2, values="int4", warmup=SOME),
    "threshold:value=0.5": functools.partial(ref.Threshold, value=0.5),
    "threshold:value=0.25,values=int8": functools.partial(ref.Threshold, value=0.25, values="int8"),
    "randomk:density=0.3": functools.partial(ref.RandomK, density=0.3),
    "randomk:density=0.1,values=bf16": functools.partial(ref.RandomK, density=0.1, values="bf16"),
    "dgc:density=0.2,momentum=0.75": functools.partial(ref.Dgc, density=0.2, momentum=0.75),
    "dgc:density=0.2,momentum=0.5,nesterov=true": functools.partial(ref.Dgc, density=0.2, momentum=0.5, nesterov=True),
    "dgc:density=0.2,values=fp16,momentum=0.5": functools.partial(ref.Dgc, density=0.2, values="fp16", momentum=0.5),
    "dgc:density=0.2,momentum=0.5,clip=6,warmup_rounds=2,warmup_density=0.4":
        functools.partial(ref.Dgc, density=0.2, momentum=0.5, clip=6.0, warmup=SOME),
    "zen": functools.partial(ref.Sparse, feedback=False),
    "zen:index=coo,values=fp16": functools.partial(ref.Sparse, values="fp16", feedback=False),
    "zen:index=bitmap,values=bf16,run=4": functools.partial(ref.Sparse, values="bf16", feedback=False),
    "adaptive": functools.partial(ref.Sparse, feedback=False),
    "uniform:bits=4": functools.partial(ref.Uniform, bits=4),
    "uniform:bits=8": functools.partial(ref.Uniform, bits=8),
    "uniform:bits=3,rounding=stochastic": functools.partial(ref.Uniform, bits=3, stochastic=True),
    "thc:bits=2,granularity=20,p=0.1": functools.partial(ref.Thc, bits=2, granularity=20, p=0.1),
    "thc:bits=4": functools.partial(ref.Thc, bits=4, granularity=30, p=1 / 32),
    "powersgd:rank=1": functools.partial(ref.PowerSgd, rank=1),
    "powersgd:rank=3": functools.partial(ref.PowerSgd, rank=3),
    # The sketch with four times the cells that peeling needs: nothing is deferred, which `means` asserts.
    "tagc:density=0.2": functools.partial(ref.Tagc, bits=8, own=5, density=0.2),
    "tagc:density=0.2,cells=8": functools.partial(ref.Tagc, bits=8, density=0.2),
    "tagc:density=0.2,cells=8,form=sketch,slack=4": functools.partial(ref.Tagc, bits=8, density=0.2),
    "tagc:density=0.07,cells=16,warmup_rounds=2,warmup_density=0.4":
        functools.partial(ref.Tagc, bits=16, density=0.07, warmup=SOME),
    "tagc:density=0.2,cells=32": functools.partial(ref.Tagc, bits=32, density=0.2),
    "tagc:density=0.2,bits=2": functools.partial(ref.Tagc, bits=8, own=2, density=0.2),
    "tagc:density=0.2,bits=2,cells=32": functools.partial(ref.Tagc, bits=32, own=2, density=0.2),
    "tagc:density=0.2,bits=4,form=sketch,slack=4": functools.partial(ref.Tagc, bits=8, own=4, density=0.2),
    "tagc:density=0.2,bits=7,cells=16": functools.partial(ref.Tagc, bits=16, own=7, density=0.2),
}
LOOSE = {"powersgd": 1e-4, "thc": 1e-5}  # products of matrices in float32


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("codec", CODECS)
def test_means_are_those_of_the_definition(server, name, codec, workers):
    scheme = codec.partition(":")[0]
    # Levels of sevenths: multiples of 2^-15 would lie in the middle between two of them.
    unit = 0.7236 if scheme == "uniform" else 1.0
    compare(server, name, codec, CODECS[codec], workers, LOOSE.get(scheme, 2e-6), unit)


@pytest.mark.parametrize("codec, update_codec", [
    ("dense:fp32", "dense:bf16"), ("dense:fp32", "onebit"), ("dense:fp32", "efsignsgd"), ("dense:fp32", "terngrad"),
    ("dense:fp32", "natural:bits=3,norm=max"), ("dense:fp32", "threshold:value=0.5"), ("signsgd", "signsgd"),
    ("topk:density=0.2", "topk:density=0.2"), ("randomk:density=0.3", "randomk:density=0.3"),
    ("topk:density=0.2", "union:values=int8"), ("topk:density=0.2", "union:values=int6"),
    ("topk:density=0.2,values=2bit", "union:values=2bit"),
    ("dense:fp32", "union:values=int4"), ("zen", "union:values=bf16"),
])
def test_means_are_compressed_as_gradients_are(server, name, codec, update_codec):
    """proto/TWO_WAY.md."""
    unions = {f"union:values={values}": functools.partial(ref.Union, values=values) for values in ref.VALUES}
    definition = functools.partial(ref.BothWays, push=CODECS[codec], update=(CODECS | unions)[update_codec])
    compare(server, name, codec, definition, 2, update_codec=update_codec)


def test_every_codec_has_a_definition():
    """Of the table in common/codec/README.md."""
    table = (ROOT / "common/codec/README.md").read_text()
    named = {line.split("`")[1].partition(":")[0] for line in table.splitlines() if line.startswith("| `")}
    assert named and named == {codec.partition(":")[0] for codec in CODECS}


@pytest.mark.parametrize("push, options, definition", [
    ("step", {"step_beta2": 0.75, "step_eps": 0.25}, {"beta2": 0.75, "epsilon": 0.25}),
    ("step", {"step_beta2": 0.75, "step_eps": 0.25, "residual_decay": 0.5},
     {"beta2": 0.75, "epsilon": 0.25, "decay": 0.5}),
    ("delta", {}, {}),
    ("delta", {"residual_decay": 0.5}, {"decay": 0.5}),
])
def test_residual_decays_before_a_step_or_a_delta(server, name, push, options, definition):
    compare(server, name, "topk:density=0.2", functools.partial(ref.TopK, density=0.2, **definition), 2, push=push,
            **options)


def test_halves_that_do_not_fit_stay_behind(server, name):
    """binary16 ends at 65504."""
    found = means(server, name, {"w": (3,)}, "fp16", lambda w, step: [np.array([1e5, -7e4, 1.0]) * (step == 0)], workers=1,
                  steps=2)
    np.testing.assert_array_equal(found[0][0], [65504, -65504, 1])
    np.testing.assert_array_equal(found[1][0], [34496, -4496, 0])


@pytest.mark.parametrize("codec", ["terngrad", "qsgd:bits=3", "linear:bits=2,norm=max", "natural:bits=3",
                                   "uniform:bits=2,rounding=stochastic"])
def test_what_chance_decides_is_the_gradient_in_the_mean(server, name, codec):
    """The same gradient over and over: the squared errors of the mean of all draws, over their variance, average 1."""
    steps, gradient = 400, gradients_of(SHAPES, 0, 0)
    found = means(server, name, SHAPES, codec, lambda w, step: gradient, workers=1, steps=steps)
    sent = np.array([np.concatenate(of_step) for of_step in found])
    varies = sent.std(axis=0) > 1e-3
    error = ((sent.mean(axis=0) - np.concatenate(gradient)) ** 2 / (sent.var(axis=0) / steps + 1e-12))[varies]
    assert varies.sum() > 900
    assert abs(error.mean() - 1) < 6 * math.sqrt(2 / error.size)


def test_random_positions_are_as_many_as_asked_for(server, name):
    steps, density = 200, 0.1
    found = means(server, name, {"w": (1001,)}, f"randomk:density={density}", lambda w, step: [np.ones(1001)], workers=1,
                  steps=steps)
    sent = np.array([of_step[0] != 0 for of_step in found])
    deviation = math.sqrt(density * (1 - density) / sent.size)
    assert abs(sent.mean() - density) < 5 * deviation
    assert np.abs(sent.mean(axis=0) - density).max() < 6 * deviation * math.sqrt(1001)
