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


# Names as the models have them: torch.nn.Transformer (made here), nanoGPT, GPT-2, Llama, BERT, T5 (those of their sources).
NAMED = {
    "attention": ["transformer.h.0.attn.c_attn.weight", "h.3.attn.c_proj.weight", "model.layers.1.self_attn.q_proj.weight",
                  "model.layers.1.self_attn.o_proj.weight", "bert.encoder.layer.0.attention.self.query.weight",
                  "bert.encoder.layer.0.attention.output.dense.weight", "encoder.block.0.layer.0.SelfAttention.q.weight"],
    "embedding": ["transformer.wte.weight", "transformer.wpe.weight", "model.embed_tokens.weight",
                  "bert.embeddings.word_embeddings.weight", "shared.weight", "model.shared.weight"],
    "mlp": ["transformer.h.0.mlp.c_fc.weight", "h.3.mlp.c_proj.weight", "model.layers.1.mlp.gate_proj.weight",
            "bert.encoder.layer.0.intermediate.dense.weight", "encoder.block.0.layer.1.DenseReluDense.wi.weight",
            "layers.0.shared_mlp.output_linear.weight"],
    "head": ["lm_head.weight"],
}


@pytest.mark.parametrize(("codec", "push", "most", "rounds", "back"), [
    ("topk:density=0.1", None, 3, "sync", ""), ("topk:density=0.1,values=int8", None, 3, "sync", "union:values=int4"),
    ("topk:density=0.1,values=int8", "gradient", 3, "sync", "union:values=int6"),
    ("topk:density=0.1,values=int8", "gradient", 2, "sync", "union:values=int4"),
    ("dgc:density=0.1,values=fp16", None, 3, "sync", "union:values=int6"),
    ("dgc:density=0.1,values=fp16", None, None, "sync", "union:values=int4"),
    ("topk:density=0.1,values=int8", None, 3, "async", ""),
    ("tagc", None, 3, "sync", ""), ("zen:values=fp16", None, 3, "sync", ""),
])
def test_what_was_pushed_in_few_bits_comes_back_in_few(addresses, codec, push, most, rounds, back):
    common = {"servers": addresses(1), "codec": codec, "push": push, "rounds": rounds, "max_workers": most}
    with ShardedOptimizer(torch.nn.Linear(40, 60), job="back", **common) as made:
        assert made.job.update_codec == back
    with ShardedOptimizer(torch.nn.Linear(40, 60), job="other-pull", pull="params", **common) as made:
        assert made.job.update_codec == back, "workers of a job may pull differently"
    with ShardedOptimizer(torch.nn.Linear(40, 60), job="as-it-is", update_codec="", **common) as made:
        assert made.job.update_codec == ""


def test_attention_and_embeddings_may_travel_dense(addresses):
    class Translator(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = torch.nn.Embedding(300, 32)
            self.transformer = torch.nn.Transformer(32, 2, 1, 1, 64)

    for role, names in NAMED.items():
        assert {name: gradwire.guess_role(name, (64, 64)) for name in names} == dict.fromkeys(names, role)
    rules = gradwire.default_rules("topk:density=0.05", ("attention", "embedding"))
    torch.manual_seed(0)
    model = Translator()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with ShardedOptimizer(model, servers=addresses(1), job="selective", codec="topk:density=0.05", rules=rules) as optimizer:
        tokens = model.embed(torch.arange(300).reshape(100, 3))
        model.transformer(tokens, tokens).square().mean().backward()
        optimizer.step()
    changed = {name: (p != before[name]).float().mean().item() for name, p in model.named_parameters()}
    sparse = {name for name, share in changed.items() if share < 0.06}
    assert sparse == {f"transformer.{part}.layers.0.linear{i}.weight" for part in ("encoder", "decoder") for i in (1, 2)}
    assert min(share for name, share in changed.items() if name not in sparse) > 0.4
    # Beside a codec that is dense in itself only what was asked for.
    assert [(r.codec, tuple(r.roles)) for r in gradwire.default_rules("thc", ("attention",))] == [("dense:values=fixed16", ("attention",))]
    with pytest.raises(ValueError, match="'attn'.*attention"):
        ShardedOptimizer(torch.nn.Linear(4, 4), servers=["grpc://127.0.0.1:1"], job="x", rules=gradwire.default_rules("tagc", ("attn",)))


@pytest.mark.parametrize(("codec", "named", "push", "optimizer"), [
    ("topk:density=0.1", None, "step", "step"), ("efsignsgd", "step", "step", "step"),
    ("topk:density=0.1", "adamw", "gradient", "adamw"), ("tagc", "lion", "gradient", "lion"),
    ("dgc:density=0.1", "adamw", "gradient", "adamw"),
])
def test_a_named_optimizer_decides_what_is_pushed(addresses, codec, named, push, optimizer):
    with ShardedOptimizer(torch.nn.Linear(40, 60), servers=addresses(1), job="defaults", codec=codec, optimizer=named,
                          lr=1e-3) as made:
        assert (made.job.push, made.job.optimizer) == (push, optimizer)
