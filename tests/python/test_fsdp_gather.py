"""Parameters as int8 against NumPy's reading of the same: messages, without processes."""

import pytest

from references import as_int8

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
gather = pytest.importorskip("gradwire._fsdp_gather")

PARTS = [gather.Part(300 * 77, exact=False), gather.Part(13, exact=True), gather.Part(130, exact=False), gather.Part(0, exact=False),
         gather.Part(128, exact=False), gather.Part(1, exact=False), gather.Part(6, exact=True)]
LENGTH = sum(part.length for part in PARTS)


def passed_on(*ranks, parts=PARTS):
    """What all of them see."""
    one = gather.Int8Gather(parts)
    messages = [one.encode(values) for values in ranks]
    assert len({message.numel() for message in messages}) == 1 and messages[0].numel() % 8 == 0
    output = torch.full((len(ranks) * ranks[0].numel(),), float("nan"), dtype=ranks[0].dtype)
    one.decode(torch.cat(messages), output)
    return output.view(len(ranks), -1)


def drawn(ranks, dtype=torch.float32):
    generator = torch.Generator().manual_seed(3)
    return [(torch.randn(LENGTH, generator=generator) * torch.logspace(-3, 3, LENGTH)).to(dtype) for _ in range(ranks)]


def expected(values, parts=PARTS):
    out, begin = [], 0
    for part in parts:
        own = values[begin : begin + part.length].float().numpy()
        out.append(own if part.exact else as_int8(own))
        begin += part.length
    return np.concatenate(out)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_float32(ranks):
    sent = drawn(ranks)
    for got, values in zip(passed_on(*sent), sent, strict=True):
        assert got.numpy() == pytest.approx(expected(values), rel=1e-6)


@pytest.mark.parametrize("dtype, digits", [(torch.bfloat16, 7), (torch.float16, 10), (torch.float64, 22)])
@pytest.mark.parametrize("parts", [PARTS, PARTS[:3], PARTS[1:4], PARTS[4:]], ids=len)
def test_other_floats(dtype, digits, parts):
    length = sum(part.length for part in parts)
    sent = [values[:length] for values in drawn(3, dtype)]
    for got, values in zip(passed_on(*sent, parts=parts), sent, strict=True):
        assert got.float().numpy() == pytest.approx(expected(values, parts), rel=2**-digits, abs=2**-24)


def test_bytes():
    message = gather.Int8Gather([gather.Part(1 << 20, exact=False), gather.Part(1024, exact=True)]).encode(torch.ones((1 << 20) + 1024))
    assert message.dtype == torch.uint8
    assert message.numel() == (1 << 20) + (1 << 20) // 128 * 4 + 4 * 1024


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_nan_with_its_block_alone(value):
    values = torch.ones(512)
    values[200] = value
    got = passed_on(values, parts=[gather.Part(512, exact=False)])[0]
    assert got[128:256].isnan().all() and torch.equal(got[:128], torch.ones(128)) and torch.equal(got[256:], torch.ones(256))


@pytest.mark.parametrize("value, most", [(0.0, 0.0), (1e-45, 1e-45), (1e-38, 1e-40), (3.4e38, 2e36)])
def test_the_limits_of_float32(value, most):
    values = torch.full((256,), value)
    got = passed_on(values, parts=[gather.Part(256, exact=False)])[0]
    assert got.isfinite().all() and (got - values).abs().max() <= most
