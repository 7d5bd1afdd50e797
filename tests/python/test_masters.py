"""Parameters that are not contiguous float32: the shards keep float32 masters of them."""

import copy

import pytest

torch = pytest.importorskip("torch")

import gradwire
from gradwire.torch import LocalSGD, ShardedOptimizer
from test_torch import assert_close, in_parallel, seeded

LR = 0.02
HALVES = [torch.bfloat16, torch.float16]


def network(dtype):
    return seeded(0, lambda: torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))).to(dtype)


def loss_of(model, step, worker=0):
    x = torch.randn(16, 6, generator=torch.Generator().manual_seed(100 * step + worker))
    return torch.nn.functional.mse_loss(model(x.to(model[0].weight.dtype)).float(), x[:, :3] * 2)


def sharded(model, servers, job="masters", **options):
    return ShardedOptimizer(model, servers=servers, job=job, codec="dense:values=fp32", **{"lr": LR, **options})


class WithMasters:
    """What people write around torch.optim.AdamW for a 16-bit model."""

    def __init__(self, model, **options):
        self.parameters = list(model.parameters())
        self.masters = [torch.nn.Parameter(p.detach().float()) for p in self.parameters]
        self.optimizer = torch.optim.AdamW(self.masters, lr=LR, weight_decay=0.0, **options)

    @torch.no_grad()
    def step(self, gradients=None):
        for i, (p, m) in enumerate(zip(self.parameters, self.masters, strict=True)):
            m.grad = p.grad.float() if gradients is None else gradients[i]
        self.optimizer.step()
        for p, m in zip(self.parameters, self.masters, strict=True):
            p.copy_(m)


@pytest.mark.parametrize("options", [{}, {"overlap": True}, {"pull": "params"}, {"loss_scale": 128.0}], ids=str)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_a_16_bit_model_trains_as_with_masters(addresses, dtype, options):
    options = dict(options)
    scale = options.pop("loss_scale", 1.0)
    model, reference = network(dtype), network(dtype)
    theirs = WithMasters(reference)
    with sharded(model, addresses(2), **options) as optimizer:
        optimizer.loss_scale = scale
        for step in range(30):
            for m, o in ((model, optimizer), (reference, theirs)):
                m.zero_grad()
                (loss_of(m, step) * (scale if m is model else 1.0)).backward()
                o.step()
        for ours, master in zip(optimizer._masters.tensors, theirs.masters, strict=True):
            torch.testing.assert_close(ours, master.detach(), rtol=0, atol=1e-5 if scale == 1.0 else 5e-3)
        for p, master in zip(model.parameters(), optimizer._masters.tensors, strict=True):
            assert p.dtype == dtype and torch.equal(p, master.to(dtype))
    # Steps that 16 bits would round away have added up.
    moved = [(m - p.float()).abs().max() for p, m in zip(network(dtype).parameters(), theirs.masters, strict=True)]
    assert min(moved) > 5 * LR


def test_workers_agree_and_take_the_mean_of_16_bit_gradients(addresses):
    reference = network(torch.bfloat16)
    theirs = WithMasters(reference)
    for step in range(10):
        sums = [torch.zeros_like(m) for m in theirs.masters]
        for worker in range(2):
            reference.zero_grad()
            loss_of(reference, step, worker).backward()
            for total, p in zip(sums, reference.parameters(), strict=True):
                total += p.grad.float()
        theirs.step([total / 2 for total in sums])
    servers = addresses(2)

    def train(worker):
        model = network(torch.bfloat16)
        with sharded(model, servers, workers=2, worker=f"w{worker}", pull=("update", "params_bf16")[worker]) as optimizer:
            for step in range(10):
                model.zero_grad()
                loss_of(model, step, worker).backward()
                optimizer.step()
        return model

    first, second = in_parallel(2, train)
    assert_close(first, reference, 0.02)
    for p, q in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(p, q)


def test_a_refused_gradient_leaves_the_model_where_the_masters_are(addresses):
    servers = addresses(1)

    def train(worker):
        model = network(torch.bfloat16)
        with sharded(model, servers, workers=2, worker=f"w{worker}") as optimizer:
            for step in range(4):
                model.zero_grad()
                loss_of(model, step, worker).backward()
                if worker == step == 1:
                    model[0].bias.grad[0] = torch.nan
                    with pytest.raises(gradwire.InvalidArgument, match="non-finite"):
                        optimizer.step()
                else:
                    optimizer.step()
                for p, master in zip(model.parameters(), optimizer._masters.tensors, strict=True):
                    assert torch.equal(p, master.to(p.dtype))
        return model

    assert_close(*in_parallel(2, train), tolerance=0)


def test_a_grad_scaler_trains_a_float16_model(addresses):
    model = network(torch.float16)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=100)
    losses = []
    with sharded(model, addresses(1), nonfinite="skip") as optimizer:
        for step in range(60):
            model.zero_grad()
            loss = loss_of(model, step)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.item())
        assert optimizer.stats()["nonfinite_rounds"] > 0
    assert 1.0 < scaler.get_scale() < 2.0**20
    assert sum(losses[-5:]) < 0.5 * sum(losses[:5])


def test_what_16_bits_drop_is_in_a_checkpoint(addresses):
    servers = addresses(1)
    model = network(torch.bfloat16)
    with sharded(model, servers, "before") as optimizer:
        for step in range(5):
            model.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
        state, digest = copy.deepcopy(optimizer.state_dict(checkpoint=True)), optimizer.digest()
        masters = [m.clone() for m in optimizer._masters.tensors]
    again = network(torch.bfloat16)
    with sharded(again, servers, "behind", resume_from=state) as optimizer:
        assert optimizer.digest() == digest
        for m, before, p, q in zip(optimizer._masters.tensors, masters, again.parameters(), model.parameters(), strict=True):
            assert torch.equal(m, before) and not torch.equal(m, p.float()) and torch.equal(p, q)


@pytest.mark.parametrize("through", [lambda p: p.detach(), lambda p: p.data], ids=["torch", "data"])
def test_writes_into_16_bit_parameters_are_noticed_and_brought_to_all(addresses, through):
    model = network(torch.bfloat16)

    def step(number):
        model.zero_grad()
        loss_of(model, number).backward()
        optimizer.step()

    with sharded(model, addresses(1)) as optimizer:
        step(0)
        optimizer._watch._due = 0.0
        step(1)
        before = [m.clone() for m in optimizer._masters.tensors]
        with torch.no_grad():
            through(model[0].weight)[0, 0] = 3.0
        with pytest.raises(gradwire.FailedPrecondition, match="reset_parameters"):
            step(2)
        optimizer.reset_parameters()
        assert model[0].weight[0, 0] == 3.0 and optimizer._masters.tensors[0][0, 0] == 3.0
        before[0][0, 0] = 3.0
        for m, expected in zip(optimizer._masters.tensors, before, strict=True):
            assert torch.equal(m, expected)  # the bits that 16 do not hold are still there
        step(3)


def test_what_is_written_behind_the_last_step_stays(addresses, tmp_path):
    model = network(torch.bfloat16)
    with sharded(model, addresses(1)) as optimizer:
        loss_of(model, 0).backward()
        optimizer.step()
        with torch.no_grad():
            model[0].weight.fill_(3.0)
        optimizer.save(tmp_path / "checkpoint")
        assert (model[0].weight == 3.0).all()
    assert (model[0].weight == 3.0).all()


def test_a_model_in_channels_last_trains_as_it_does_in_torch(addresses):
    def make():
        return seeded(3, lambda: torch.nn.Conv2d(3, 4, 3)).to(memory_format=torch.channels_last)

    model, reference = make(), make()
    theirs = torch.optim.AdamW(reference.parameters(), lr=LR, weight_decay=0.0)
    with sharded(model, addresses(2)) as optimizer:
        for step in range(6):
            x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(step)).to(memory_format=torch.channels_last)
            for m, o in ((model, optimizer), (reference, theirs)):
                m.zero_grad()
                m(x).square().sum().backward()
                o.step()
    assert model.weight.is_contiguous(memory_format=torch.channels_last)
    assert_close(model, reference)


@pytest.mark.parametrize("scale", [1.0, 4.0])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_transposed_parameter_trains_as_it_does_in_torch(addresses, overlap, scale):
    def make():
        model = network(torch.float32)
        model[0].weight = torch.nn.Parameter(seeded(4, lambda: torch.randn(6, 8)).t())
        return model

    model, reference = make(), make()
    theirs = torch.optim.AdamW(reference.parameters(), lr=LR, weight_decay=0.0)
    with sharded(model, addresses(1), overlap=overlap) as optimizer:
        optimizer.loss_scale = scale
        for step in range(4):
            for m, o in ((model, optimizer), (reference, theirs)):
                o.zero_grad()
                (loss_of(m, step) * (scale if m is model else 1.0)).backward()
                o.step()
    assert not model[0].weight.is_contiguous()
    assert_close(model, reference, 1e-5)


@pytest.mark.parametrize("codec", ["zen", "adaptive", "dense:fp32"])
def test_sparse_gradients_of_embeddings_are_those_of_torch(addresses, codec):
    def make():
        return seeded(1, lambda: torch.nn.Embedding(50, 4, sparse=True))

    model, reference = make(), make()
    theirs = torch.optim.SGD(reference.parameters(), lr=LR)
    with ShardedOptimizer(model, servers=addresses(2), job="embedding", codec=codec, optimizer="sgd", push="gradient",
                          lr=LR) as optimizer:
        for step in range(6):
            rows = torch.randint(0, 50, (8,), generator=torch.Generator().manual_seed(step))  # some of them twice
            for m, o in ((model, optimizer), (reference, theirs)):
                m.zero_grad()
                m(rows).square().sum().backward()
                assert m.weight.grad.is_sparse
                o.step()
    assert_close(model, reference)


def test_workers_take_the_mean_of_sparse_gradients(addresses):
    """Beside a dense layer; with a scaled loss, and rows that a worker's batch does not touch."""
    class Words(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.nn.Embedding(30, 4, sparse=True)
            self.head = torch.nn.Linear(4, 1)

        def loss(self, step, worker):
            rows = torch.randint(0, 10 + 20 * worker, (5,), generator=torch.Generator().manual_seed(10 * step + worker))
            return self.head(self.table(rows)).square().mean()

    reference = seeded(1, Words)
    theirs = torch.optim.SGD(reference.parameters(), lr=LR)
    for step in range(8):
        theirs.zero_grad()
        gradients = [torch.zeros_like(p) for p in reference.parameters()]
        for worker in range(2):
            reference.zero_grad()
            reference.loss(step, worker).backward()
            for total, p in zip(gradients, reference.parameters(), strict=True):
                total += p.grad.to_dense()
        for total, p in zip(gradients, reference.parameters(), strict=True):
            p.grad = total / 2
        theirs.step()
    servers = addresses(2)
    models = [seeded(1, Words) for _ in range(2)]

    def run(worker):
        with ShardedOptimizer(models[worker], servers=servers, job="words", worker=f"w{worker}", workers=2, codec="zen",
                              optimizer="sgd", push="gradient", lr=LR) as optimizer:
            optimizer.loss_scale = 128.0
            for step in range(8):
                optimizer.zero_grad()
                (models[worker].loss(step, worker) * 128.0).backward()
                optimizer.step()

    in_parallel(2, run)
    for model in models:
        assert_close(model, reference)


def test_a_table_that_a_batch_leaves_out_costs_nothing(addresses):
    model, reference = (seeded(1, lambda: torch.nn.ModuleDict({"table": torch.nn.Embedding(50, 4, sparse=True),
                                                               "head": torch.nn.Linear(4, 1)})) for _ in range(2))
    theirs = torch.optim.SGD(reference.parameters(), lr=LR)
    with ShardedOptimizer(model, servers=addresses(2), job="left-out", codec="zen", optimizer="sgd", push="gradient",
                          lr=LR) as optimizer:
        for step in range(5):
            for m, o in ((model, optimizer), (reference, theirs)):
                o.zero_grad()
                inputs = m["table"](torch.tensor([step, 7])) if step != 2 else torch.ones(2, 4)
                m["head"](inputs).square().sum().backward()
                o.step()
        assert optimizer._zeros is None, "no gradient of zeros was made for the table"
    assert_close(model, reference)


def test_a_sparse_gradient_that_is_only_said_to_be_coalesced_is_summed(addresses):
    model, reference = (seeded(1, lambda: torch.nn.Embedding(50, 4, sparse=True)) for _ in range(2))
    theirs = torch.optim.SGD(reference.parameters(), lr=LR)
    with ShardedOptimizer(model, servers=addresses(1), job="said", codec="zen", optimizer="sgd", push="gradient", lr=LR) as optimizer:
        for m, o in ((model, optimizer), (reference, theirs)):
            m.weight.grad = torch.sparse_coo_tensor(torch.tensor([[9, 3, 9]]), torch.arange(12.0).view(3, 4), (50, 4))
            if m is model:
                m.weight.grad._coalesced_(True)
            o.step()
    assert_close(model, reference)


def test_a_sparse_gradient_that_is_not_finite_is_refused_by_its_element(addresses):
    table = torch.nn.Embedding(50, 4, sparse=True)
    with ShardedOptimizer(table, servers=addresses(1), job="bad", codec="zen", optimizer="sgd", push="gradient", lr=LR) as optimizer:
        (table(torch.tensor([7])) * torch.tensor([1.0, float("inf"), 1.0, 1.0])).sum().backward()
        with pytest.raises(gradwire.InvalidArgument, match=r"'weight' has a non-finite element in round \d: index 29 is inf"):
            optimizer.step()


def test_local_steps_of_a_16_bit_model(addresses):
    model = network(torch.bfloat16)
    with LocalSGD(torch.optim.SGD(model.parameters(), lr=0.2), model, every=4, servers=addresses(1), job="local") as optimizer:
        losses = []
        for step in range(80):
            model.zero_grad()
            loss = loss_of(model, step)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert sum(losses[-5:]) < 0.5 * sum(losses[:5])


def test_other_types_are_refused_by_name(addresses):
    model = network(torch.float64)
    with pytest.raises(TypeError, match="parameter '0.weight' is torch.float64; Gradwire takes float32, bfloat16 and float16"):
        sharded(model, ["grpc://127.0.0.1:1"])


def test_host_memory_is_the_hosts_whatever_the_default_device_is():
    from gradwire import _place

    with torch.device("meta"):
        assert _place.host_copy(torch.ones(3, device="cpu")).tolist() == [1, 1, 1]
