"""FSDPState against plain FSDP doing the same: fully_shard, and with --wrapper FullyShardedDataParallel."""

import functools
import re

import pytest

import gradwire
from references import as_int8
from test_ddp import STEPS, assert_same_trajectory, assert_trains_as_well, example, run, trained

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
gradwire_torch = pytest.importorskip("gradwire.torch")
fsdp = pytest.importorskip("torch.distributed.fsdp")
pytestmark = pytest.mark.skipif(not hasattr(getattr(fsdp, "FSDPModule", None), "set_custom_reduce_scatter"),
                                reason="FSDPState needs torch 2.9")


GENERATIONS = ["FSDP2", "FSDP1"]


@pytest.fixture
def train(tmp_path):
    runs = iter(range(100))
    return lambda *flags, **how: trained(tmp_path / f"run-{next(runs)}", "--fsdp", *flags, **how)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Plain FSDP, with the same flags."""
    return functools.cache(lambda *flags, **how: trained(tmp_path_factory.mktemp("plain") / "run", "--fsdp", *flags, **how))


@pytest.mark.parametrize("flags", [
    (),
    ("--bare", "--sgd", "--lr", 0.2),
    pytest.param(("--frozen",), marks=pytest.mark.slow),
    pytest.param(("--clip", 0.1), marks=pytest.mark.slow),
    pytest.param(("--accumulate", 3, "--no-sync"), marks=pytest.mark.slow),
    pytest.param(("--accumulate", 3), marks=pytest.mark.slow),
    pytest.param(("--together",), marks=pytest.mark.slow),
    pytest.param(("--checkpoint",), marks=pytest.mark.slow),
    ("--wrapper",),
    ("--wrapper", "--flat"),
    pytest.param(("--wrapper", "--kept"), marks=pytest.mark.slow),
    pytest.param(("--kept",), marks=pytest.mark.slow),
    pytest.param(("--wrapper", "--bare", "--sgd", "--lr", 0.2), marks=pytest.mark.slow),
    pytest.param(("--wrapper", "--frozen"), marks=pytest.mark.slow),
    pytest.param(("--wrapper", "--clip", 0.1), marks=pytest.mark.slow),
    pytest.param(("--wrapper", "--accumulate", 3, "--no-sync"), marks=pytest.mark.slow),
    pytest.param(("--wrapper", "--accumulate", 3), marks=pytest.mark.slow),
    pytest.param(("--wrapper", "--checkpoint"), marks=pytest.mark.slow),
], ids=lambda flags: " ".join(map(str, flags)) or "plain")
def test_dense_goes_the_way_of_reduce_scatter(train, plain, addresses, flags):
    found = train("--servers", *addresses(2), *flags)
    assert_same_trajectory(found, plain(*flags))


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), ("--wrapper",)], ids=GENERATIONS)
def test_each_of_three_ranks_has_its_part(train, plain, addresses, flags):
    """Of layers whose rows do not divide by three."""
    assert_same_trajectory(train("--servers", *addresses(2), *flags, processes=3), plain(*flags, processes=3))


def test_a_rank_pulls_the_means_of_its_own_part(train, addresses):
    found = train("--servers", *addresses(1))
    for process in found:
        elements = sum(value.numel() for value in process["net"].values())
        per_step = process["stats"]["pulled_bytes"] / 20
        assert process["stats"]["pushed_bytes"] / 20 >= 4 * elements
        assert 2 * elements < per_step < 3 * elements, "half of what is pushed, where parts meet, and headers"


def test_sparse_codecs_leave_out_what_they_promise(train, addresses):
    pushed = [train("--servers", *addresses(1), "--codec", codec)[0]["stats"]["pushed_bytes"]
              for codec in ("dense:fp32", "topk:density=0.1,values=int8")]
    assert pushed[1] < pushed[0] / 12, "11.5 bits for one of ten elements, and headers"


def assert_gathered(process, as_int8s, ranks=2):
    """Forward passes see what NumPy makes of each rank's part; each rank's own part stays what it was, and is seen behind close()."""
    own = process["net"]["0.weight"]
    parts = [as_int8(part.numpy()) if as_int8s else part.numpy() for part in own.chunk(ranks)]
    assert process["gathered"].float().numpy() == pytest.approx(np.concatenate(parts), rel=1e-6)
    assert torch.equal(process["gathered"], own) == (not as_int8s)
    assert torch.equal(process["gathered behind close"], own)


def test_parameters_are_gathered_as_int8(train, plain, addresses):
    found = train("--servers", *addresses(2), "--gather", "int8", "--gathered")
    assert found[0]["losses"] == pytest.approx(plain()[0]["losses"], rel=0.02)
    for process in found:
        assert_gathered(process, True)


@pytest.mark.slow
@pytest.mark.parametrize("flags, as_int8s", [
    (("--codec", ""), True), (("--codec", "tagc:density=0.1"), True), (("--codec", "dense:bf16"), False), ((), False),
    (("--codec", "", "--gather", "exact"), False), (("--codec", "", "--own-gather"), False),
], ids=["default", "TAGC", "bf16", "dense", "exact", "another"])
def test_by_default_where_the_codec_is_not_dense(train, addresses, flags, as_int8s):
    for process in train("--servers", *addresses(1), "--gathered", *flags):
        assert_gathered(process, as_int8s)


@pytest.mark.slow
def test_units_that_are_gathered_ahead(train, addresses):
    """What FSDP waits for later comes out the same."""
    runs = [train("--servers", *addresses(1), "--gather", "int8", *flags) for flags in ((), ("--ahead",))]
    assert_same_trajectory(*runs)


@pytest.mark.slow
@pytest.mark.parametrize("flags", [("--frozen",), ("--bare", "--sgd", "--lr", 0.2), ("--checkpoint",), ("--accumulate", 3, "--no-sync")],
                         ids=lambda flags: " ".join(map(str, flags)))
def test_int8_goes_with_what_units_may_be(train, plain, addresses, flags):
    found = train("--servers", *addresses(1), "--gather", "int8", "--gathered", *flags)
    assert found[0]["losses"] == pytest.approx(plain(*flags)[0]["losses"], rel=0.03)
    for process in found:
        assert_gathered(process, True)


@pytest.mark.slow
def test_int8_with_three_ranks_whose_parts_differ(train, plain, addresses):
    found = train("--servers", *addresses(1), "--gather", "int8", "--gathered", processes=3)
    assert found[0]["losses"] == pytest.approx(plain(processes=3)[0]["losses"], rel=0.03)
    for process in found:
        assert_gathered(process, True, ranks=3)


@pytest.mark.slow
def test_int8_of_what_is_computed_in_bfloat16(train, plain, addresses):
    flags = ("--parameters", "bfloat16")
    found = train("--servers", *addresses(1), "--gather", "int8", "--gathered", *flags)
    assert found[0]["losses"] == pytest.approx(plain(*flags)[0]["losses"], rel=0.05)
    for process in found:
        own = process["net"]["0.weight"].bfloat16()
        expected = np.concatenate([as_int8(part.float().numpy()) for part in own.chunk(2)])
        assert process["gathered"].float().numpy() == pytest.approx(expected, rel=2**-7)
        assert not torch.equal(process["gathered"], own) and torch.equal(process["gathered behind close"], own)


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), ("--wrapper",)], ids=GENERATIONS)
def test_gradients_that_are_reduced_as_bfloat16(train, plain, addresses, flags):
    flags = ("--reduce", "bfloat16", *flags)
    found, expected = (run[0]["losses"] for run in (train("--servers", *addresses(1), *flags), plain(*flags)))
    assert found == pytest.approx(expected, rel=0.02)


@pytest.mark.slow
def test_the_default_trains_as_well_for_fewer_bytes(train, plain, addresses):
    # Parts are padded to powers of two.
    assert_trains_as_well(train, plain, addresses, at_most=1.01, pushed=4, pulled=5)


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), ("--wrapper",)], ids=GENERATIONS)
def test_a_sparse_codec_that_pushes_steps_trains_as_well(train, plain, addresses, flags):
    assert_trains_as_well(train, plain, addresses, "tagc:density=0.01", (*STEPS, *flags), at_most=1.01, pushed=12)


def test_a_rule_leaves_a_unit_out_of_compression(train, addresses):
    """Layer-selective, as TAGC excludes attention and embeddings: modules that are units by themselves."""
    servers = addresses(2)
    found, without = (train("--servers", *servers, "--job", job, "--codec", "tagc:density=0.01", *STEPS, *flags)[0]
                      for job, flags in (("exact", ("--exact", "0.*")), ("all", ())))
    unit = sum(value.numel() for name, value in found["net"].items() if name.startswith("0."))
    more = (found["stats"]["pushed_bytes"] - without["stats"]["pushed_bytes"]) / 20
    assert 0.8 * 4 * unit < more < 1.05 * 4 * unit, "nearly none of it was sent before"


def test_rules_for_roles_that_no_unit_has_are_refused():
    rules = gradwire.default_rules("tagc:density=0.01", ("attention", "embedding"))
    with pytest.raises(ValueError, match="role 'attention'.*fully_shard.*Rule"):
        gradwire_torch.FSDPState(torch.nn.Linear(2, 2), servers=[], job="roles", rules=rules)


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), ("--push", "step"), ("--wrapper",)], ids=" ".join)
def test_a_gradient_that_is_not_finite_spoils_the_step_of_all(train, addresses, flags):
    found = train("--servers", *addresses(1), "--nan-at", 3, *flags)
    for process in found:
        assert all(loss == loss for loss in process["losses"][:3])
        assert all(value.isnan().any() for value in process["net"].values())


@pytest.mark.slow
@pytest.mark.parametrize("flags, said", [
    (("--reduce", "float16"), r"reduces torch.float16: means of float32 or bfloat16"),
    (("--wrapper", "--reduce", "float16"), r"reduces torch.float16: means of float32 or bfloat16"),
    (("--idle",), r"gave no gradients to .*2.*: every unit"),
    (("--wrapper", "--idle"), r"gave no gradients to .*2.*: every unit"),
    (("--hook",), r"\(root\) has a hook that sees reduced gradients"),
    (("--wrapper", "--gather", "int8"), r'gather="int8" needs fully_shard'),
    (("--own-gather", "--gather", "int8"), r"would take the place of what set_custom_all_gather"),
    (("--codec", "", "--own-gather-of-one"), r"this process would do, and others would not"),
    (("--nan-at", 3, "--nonfinite", "refuse"), r"InvalidArgument.*tensor '[\w()]+\.\d'.*nan"),
], ids=["float16", "FSDP1 float16", "idle", "FSDP1 idle", "hook", "FSDP1 int8", "another int8", "one rank", "refused"])
def test_or_an_error_says_why(tmp_path, addresses, flags, said):
    code, text = run(tmp_path / "run", "--fsdp", "--servers", *addresses(1), *flags)
    assert code != 0
    assert re.search(said, text), text


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), ("--wrapper",)], ids=GENERATIONS)
def test_one_process_has_nothing_to_reduce(tmp_path, addresses, flags):
    code, text = run(tmp_path / "run", "--fsdp", "--servers", *addresses(1), *flags, processes=1)
    assert code != 0 and "leave FSDPState out" in text, text


def test_a_format_that_is_none_is_refused():
    with pytest.raises(ValueError, match="'int4' is not one of exact, int8"):
        gradwire_torch.FSDPState(torch.nn.Linear(2, 2), servers="grpc://127.0.0.1:1", job="no format", gather="int4")


def test_a_model_that_is_not_sharded_is_refused():
    with pytest.raises(TypeError, match="fully_shard"):
        gradwire_torch.FSDPState(torch.nn.Linear(2, 2), servers="grpc://127.0.0.1:1", job="not sharded")


@pytest.mark.slow
def test_example(addresses):
    printed = example("fsdp.py", addresses(2))
    assert re.search(r"step 100: loss [01]\.\d+, \d+ kB pushed, \d+ kB pulled", printed), printed
