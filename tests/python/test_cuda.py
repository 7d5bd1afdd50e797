"""Training loops whose model lies on an NVIDIA GPU, next to torch's own on the same GPU and to the same on the CPU. Skipped where
there is none; tests/gpu/run runs them."""

import pytest

torch = pytest.importorskip("torch")

from conftest import Server
from gradwire.torch import LocalSGD, ShardedOptimizer
from test_ddp import assert_same_trajectory, plain, train  # noqa: F401  (fixtures)
from test_torch import assert_close, in_parallel, seeded

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def network(dtype=torch.float32):
    return seeded(0, lambda: torch.nn.Sequential(
        torch.nn.Linear(64, 96), torch.nn.Tanh(), torch.nn.LayerNorm(96), torch.nn.Linear(96, 96), torch.nn.Tanh(),
        torch.nn.Linear(96, 16))).to("cuda", dtype)


def loss_of(model, step):
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(step)).cuda()
    return torch.nn.functional.mse_loss(model(x.to(next(model.parameters()).dtype)).float(), torch.roll(x, 1, dims=1)[:, :16])


def given_gradients(model, optimizer, steps=12):
    """Steps by gradients that are the same wherever the model lies."""
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=generator).to(p.device, p.dtype)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("options", [
    {}, {"codec": "dense:fp32"}, {"codec": "dense:bf16"}, {"codec": "dense:fixed16", "optimizer": "sgd"}, {"codec": "tagc:density=0.05,form=sketch"},
    {"place": "host"}, {"codec": "topk:density=0.05,values=int8"}, {"codec": "thc:bits=4"}, {"codec": "dgc:density=0.05"},
    {"codec": "zen"}, {"codec": "powersgd:rank=2"}, {"codec": "dense:fp32", "clip_norm": 0.5},
    {"codec": "dense:fp32", "optimizer": "lamb"}, {"codec": "dense:fp32", "rounds": "bounded:1"}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_codec_gives_the_bits_of_a_model_on_the_cpu(addresses, options, dtype):
    servers = addresses(3)
    found = []
    for name, model in (("cpu", network(dtype).cpu()), ("cuda", network(dtype))):
        # By name: workers draw what they round by.
        with ShardedOptimizer(model, servers=servers, job=name, worker="one", lr=0.01, **options) as optimizer:
            given_gradients(model, optimizer)
            optimizer.drain()
            found.append((optimizer.digest(), [p.detach().cpu() for p in model.parameters()]))
    assert found[0][0] == found[1][0]
    for a, b in zip(found[0][1], found[1][1], strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("codec", ["", "tagc:density=0.05"])
def test_servers_on_the_gpu_give_the_same_bits(tmp_path, codec):
    digests = set()
    for backend in ("cpu", "cuda"):
        servers = [Server(tmp_path, f"{backend}-{i}", f"--backend={backend}") for i in range(2)]
        try:
            model = network()
            with ShardedOptimizer(model, servers=[s.address for s in servers], job="gpu", lr=0.01,
                                  **({"codec": codec} if codec else {})) as optimizer:
                given_gradients(model, optimizer)
                digests.add(optimizer.digest())
        finally:
            for server in servers:
                server.stop()
    assert len(digests) == 1


@pytest.mark.parametrize("place", ["auto", "host"])
@pytest.mark.parametrize("overlap", [False, True])
def test_follows_adamw_on_a_stream_of_its_own(addresses, place, overlap):
    """Backward is far behind the host: whoever reads gradients too early gets those of the step before."""
    model, reference = network(), network()
    theirs = torch.optim.AdamW(reference.parameters(), lr=1e-3)
    busy, side = torch.randn(4096, 4096, device="cuda"), torch.cuda.Stream()
    with ShardedOptimizer(model, servers=addresses(2), job="adamw", lr=1e-3, weight_decay=0.01, codec="dense:fp32",
                          overlap=overlap, place=place) as ours:
        for step in range(15):
            for m, optimizer in ((model, ours), (reference, theirs)):
                optimizer.zero_grad()
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    for _ in range(4):
                        busy @ busy
                    loss_of(m, step).backward()
                    optimizer.step()
                torch.cuda.current_stream().wait_stream(side)
    assert_close(model, reference, 1e-5)


@pytest.mark.parametrize("place", ["auto", "host"])
def test_half_precision_with_a_grad_scaler_as_torch(addresses, place):
    model, reference = network(), network()
    losses = {}
    with ShardedOptimizer(model, servers=addresses(2), job="amp", lr=1e-3, weight_decay=0.01, codec="dense:fp32",
                          place=place) as ours:
        for m, optimizer in ((model, ours), (reference, torch.optim.AdamW(reference.parameters(), lr=1e-3))):
            scaler = torch.amp.GradScaler("cuda")
            losses[m] = []
            for step in range(60):
                optimizer.zero_grad()
                with torch.autocast("cuda", torch.float16):
                    loss = loss_of(m, step)
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                losses[m].append(loss.item())
    assert losses[model] == pytest.approx(losses[reference], rel=0.02)


@pytest.mark.parametrize("place", ["auto", "host"])
def test_an_overflow_on_one_worker_skips_the_step_of_both(addresses, place):
    servers = addresses(2)

    def work(worker):
        model = network()
        scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
        with ShardedOptimizer(model, servers=servers, job="skip", worker=f"w{worker}", workers=2, lr=1e-3, codec="dense:fp32",
                              nonfinite="skip", place=place) as optimizer:
            for step in range(8):
                optimizer.zero_grad()
                loss = loss_of(model, 10 * step + worker) * (float("inf") if (worker, step) == (1, 3) else 1.0)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                assert optimizer.skipped == (step == 3)
            return optimizer.digest(), scaler.get_scale()

    assert len(set(in_parallel(2, work))) == 1


def test_parameters_can_be_replaced_where_they_lie_in_host_memory(addresses):
    model, other = network(), network()
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(0.5)
    with ShardedOptimizer(model, servers=addresses(2), job="reset", lr=0.01, place="host") as optimizer:
        given_gradients(model, optimizer, 3)
        model.load_state_dict(other.state_dict())
        optimizer.reset_parameters()
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(p, q)
        given_gradients(model, optimizer, 3)


def test_local_steps_learn_by_default(addresses):
    model = network()
    losses = []
    with LocalSGD(torch.optim.AdamW(model.parameters(), 3e-3), model, every=4, servers=addresses(2), job="local") as optimizer:
        for step in range(80):
            optimizer.zero_grad()
            loss = loss_of(model, step)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert sum(losses[-8:]) < 0.9 * sum(losses[:8])


@pytest.mark.parametrize("codec", ["dense:fp32", "", "tagc:density=0.5"])
def test_ddp_hook(train, plain, addresses, codec):  # noqa: F811
    found = train("--servers", *addresses(2), "--codec", codec, "--device", "cuda", "--steps", 60)
    dense = plain("--device", "cuda", "--steps", 60)
    assert all(torch.equal(a, b) for a, b in zip(found[0]["net"].values(), found[1]["net"].values(), strict=True))
    if codec == "dense:fp32":
        assert_same_trajectory(found, dense)
    assert sum(found[0]["losses"][-20:]) < 1.1 * sum(dense[0]["losses"][-20:])
