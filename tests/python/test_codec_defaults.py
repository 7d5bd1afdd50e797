"""What each codec is trained by unless the user says otherwise; the codecs say so themselves (TrainingDefaults in C++)."""

import pytest

torch = pytest.importorskip("torch")

import gradwire
from gradwire import _core
from gradwire._job import default_optimizer
from gradwire.torch import ShardedOptimizer

# codec: what is pushed, the shards' optimizer for that, and for gradients; whether small tensors travel dense beside it.
DEFAULTS = {
    "dense": ("gradient", "adamw", "adamw", False),
    "tagc": ("step", "step", "adamw", True),
    "topk": ("step", "step", "adamw", True),
    "threshold": ("step", "step", "adamw", True),
    "randomk": ("step", "step", "adamw", True),
    "dgc": ("gradient", "sgd", "sgd", True),
    "zen": ("gradient", "adamw", "adamw", False),
    "adaptive": ("gradient", "adamw", "adamw", False),
    "fp16": ("gradient", "adamw", "adamw", False),
    "onebit": ("step", "step", "adamw", False),
    "signsgd": ("gradient", "sgd", "sgd", False),
    "signum": ("step", "step", "sgd", False),
    "efsignsgd": ("step", "step", "adamw", False),
    "terngrad": ("gradient", "adamw", "adamw", False),
    "qsgd": ("gradient", "adamw", "adamw", False),
    "linear": ("gradient", "adamw", "adamw", False),
    "natural": ("gradient", "adamw", "adamw", False),
    "uniform": ("gradient", "adamw", "adamw", False),
    "thc": ("gradient", "adamw", "adamw", False),
    "powersgd": ("step", "step", "adamw", False),
}


def test_every_codec_says_what_it_is_trained_by_unless_told(addresses):
    assert sorted(DEFAULTS) == sorted(_core.codec_names())
    servers = addresses(1)
    for codec, (push, optimizer, of_gradients, small_dense) in DEFAULTS.items():
        with ShardedOptimizer(torch.nn.Linear(40, 60), servers=servers, job=f"defaults-{codec}", codec=codec, lr=1e-3) as made:
            assert (codec, made.job.push, made.job.optimizer) == (codec, push, optimizer)
        assert (codec, default_optimizer(codec, "gradient")) == (codec, of_gradients)
        rules = [(rule.codec, tuple(rule.roles), rule.max_elements) for rule in gradwire.default_rules(codec)]
        assert (codec, rules) == (codec, [("dense:values=fixed16", ("norm", "bias"), 0),
                                          ("dense:values=fixed16", (), 1023)] if small_dense else [])


@pytest.mark.parametrize(("codec", "named", "push", "optimizer"), [
    ("topk:density=0.1", None, "step", "step"), ("efsignsgd", "step", "step", "step"),
    ("topk:density=0.1", "adamw", "gradient", "adamw"), ("tagc", "lion", "gradient", "lion"),
    ("dgc:density=0.1", "adamw", "gradient", "adamw"),
])
def test_a_named_optimizer_decides_what_is_pushed(addresses, codec, named, push, optimizer):
    with ShardedOptimizer(torch.nn.Linear(40, 60), servers=addresses(1), job="defaults", codec=codec, optimizer=named,
                          lr=1e-3) as made:
        assert (made.job.push, made.job.optimizer) == (push, optimizer)
