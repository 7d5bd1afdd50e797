"""Accelerate around ShardedOptimizer, TensorBoard, and what callbacks say where they do not fit: one worker, in this process."""

import time

import pytest

torch = pytest.importorskip("torch")
accelerate = pytest.importorskip("accelerate")
lightning = pytest.importorskip("lightning")
transformers = pytest.importorskip("transformers")
event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")

import gradwire
import gradwire.lightning
import gradwire.transformers
from gradwire._callbacks import Shards
from gradwire._waiting import ask, workers_of
from gradwire.torch import ShardedOptimizer


def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))


def batches(count):
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        inputs = torch.randn(16, 8, generator=generator)
        yield inputs, inputs[:, :3] * 2


@pytest.mark.parametrize("clip", ["norm", "value"])
def test_accelerate_accumulates_clips_and_schedules_for_a_sharded_optimizer(server, clip):
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)

    def train(make):
        model = accelerator.prepare(network())
        made = make(model)
        schedule = torch.optim.lr_scheduler.StepLR(made, 4, gamma=0.5)
        optimizer, schedule = accelerator.prepare(made, schedule)
        norms = []
        for inputs, wanted in batches(24):
            with accelerator.accumulate(model):
                accelerator.backward(torch.nn.functional.mse_loss(model(inputs), wanted))
                if accelerator.sync_gradients and clip == "norm":
                    norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.05).item())
                elif accelerator.sync_gradients:
                    accelerator.clip_grad_value_(model.parameters(), 0.01)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        return model, made, norms

    # SGD: AdamW's steps would be nearly the same without clipping.
    expected, theirs, norms = train(lambda model: torch.optim.SGD(model.parameters(), lr=0.5))
    found, mine, mine_norms = train(lambda model: ShardedOptimizer(model, servers=server, job=f"accelerate-{clip}", optimizer="sgd",
                                                                   codec="dense:fp32", lr=0.5))
    mine.close()
    assert mine.param_groups[0]["lr"] == theirs.param_groups[0]["lr"] < 0.5
    assert mine_norms == pytest.approx(norms, rel=1e-5) and all(norm > 0.05 for norm in norms)
    for p, q in zip(found.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-6)


def test_accelerate_saves_and_loads_the_state_of_a_sharded_optimizer(server, tmp_path):
    accelerator = accelerate.Accelerator(cpu=True)
    model = accelerator.prepare(network())
    with ShardedOptimizer(model, servers=server, job="saved", codec="dense:fp32", lr=0.1) as made:
        optimizer = accelerator.prepare(made)
        for inputs, wanted in batches(3):
            optimizer.zero_grad()
            accelerator.backward(torch.nn.functional.mse_loss(model(inputs), wanted))
            optimizer.step()
        accelerator.save_state(tmp_path)
        made.param_groups[0]["lr"] = 0.7
        accelerator.load_state(tmp_path)
        assert made.param_groups[0]["lr"] == 0.1
        assert (tmp_path / "optimizer.bin").stat().st_size < 10_000
        made.reset_parameters()  # load_state wrote into the model, the same values here
        accelerator.backward(torch.nn.functional.mse_loss(model(inputs), wanted))
        optimizer.step()


def test_tensorboard_shows_what_progress_tells(server, tmp_path):
    from torch.utils.tensorboard import SummaryWriter

    model = network()
    with SummaryWriter(tmp_path) as writer, ShardedOptimizer(model, servers=server, job="shown", lr=0.1) as optimizer:
        with gradwire.Progress(optimizer, every=0.1, file=None, writer=writer):
            for inputs, wanted in batches(20):
                optimizer.zero_grad()
                torch.nn.functional.mse_loss(model(inputs), wanted).backward()
                optimizer.step()
                time.sleep(0.03)
        pushed = optimizer.stats()["pushed_bytes"]
    events = event_accumulator.EventAccumulator(str(tmp_path)).Reload()
    tags = {f"gradwire/{name}" for name in ("steps_per_second", "pushed_bytes_per_step", "pulled_bytes_per_step", "saved", "waiting",
                                            "members")}
    assert set(events.Tags()["scalars"]) == tags
    for tag in tags:
        steps = [event.step for event in events.Scalars(tag)]
        assert len(steps) >= 2 and steps == sorted(steps) and steps[-1] == 20
    told, last = 0.0, 0
    for event in events.Scalars("gradwire/pushed_bytes_per_step"):
        told, last = told + event.value * (event.step - last), event.step
    assert told == pytest.approx(pushed, rel=0.2)  # without what came before the first step


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = network()

    def training_step(self, batch):
        return torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Net(torch.nn.Module):
    """As the Trainer wants it."""

    def __init__(self):
        super().__init__()
        self.net = network()

    def forward(self, inputs, labels):
        return {"loss": torch.nn.functional.mse_loss(self.net(inputs), labels)}


def samples(count):
    return [{"inputs": one, "labels": of_one} for inputs, wanted in batches(count) for one, of_one in zip(inputs, wanted, strict=True)]


def test_the_trainer_of_one_process_steps_a_sharded_optimizer(server, tmp_path):
    """Of several it wraps the model in DistributedDataParallel, which the callback is for."""

    def train(make):
        model = Net()
        optimizer = make(model)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        arguments = transformers.TrainingArguments(str(tmp_path), max_steps=12, per_device_train_batch_size=16, use_cpu=True,
                                                   report_to="none", save_strategy="no", disable_tqdm=True, max_grad_norm=0.5)
        transformers.Trainer(model, arguments, train_dataset=samples(12), optimizers=(optimizer, schedule)).train()
        return model, optimizer

    expected, _ = train(lambda model: torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.0))
    found, optimizer = train(lambda model: ShardedOptimizer(model, servers=server, job="trainer", codec="dense:fp32", lr=0.05))
    optimizer.close()
    assert optimizer.stats()["steps"] == 12
    for p, q in zip(found.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-5)


def test_callbacks_say_what_they_are_for(tmp_path):
    with pytest.raises(TypeError, match="SingleDeviceStrategy trains a Module; it takes a DistributedDataParallel.*strategy=\"ddp\""):
        lightning.Trainer(max_steps=1, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
                          callbacks=gradwire.lightning.ThroughShards(servers="grpc://127.0.0.1:1", job="alone"),
                          enable_progress_bar=False).fit(Module(), list(batches(1)))

    trainer = transformers.Trainer(Net(), transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to="none"),
                                   train_dataset=samples(1))
    trainer.add_callback(gradwire.transformers.ThroughShards(trainer, servers="grpc://127.0.0.1:1", job="alone"))
    with pytest.raises(TypeError, match="the Trainer trains a Net; it takes a DistributedDataParallel: start with torchrun"):
        trainer.train()


@pytest.fixture
def group(tmp_path, monkeypatch):
    """A process group of this process alone. What starts one leaves its addresses behind."""
    for name in ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    yield lambda: torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def test_lightning_leaves_the_job_where_training_raises(server, group):
    class Stops(Module):
        def training_step(self, batch):
            if self.global_step == 2:
                raise KeyError("the third step")
            return super().training_step(batch)

    shards = gradwire.lightning.ThroughShards(servers=server, job="raises", lease_ms=60_000)
    strategy = lightning.pytorch.strategies.DDPStrategy(process_group_backend="gloo")
    trainer = lightning.Trainer(max_steps=5, accelerator="cpu", devices=1, strategy=strategy, logger=False, enable_checkpointing=False,
                                enable_progress_bar=False, callbacks=[shards])
    with pytest.raises(KeyError, match="the third step"):
        trainer.fit(Stops(), torch.utils.data.DataLoader(list(batches(5)), batch_size=None))
    assert shards.state is None and shards.stats()["steps"] == 2
    assert workers_of(ask([server], "raises")) == {}


def test_a_trainer_trains_twice_and_not_without_its_callback(server, group):
    group()
    model = torch.nn.parallel.DistributedDataParallel(network())
    shards = Shards(server, "twice", {})
    (inputs, wanted), = batches(1)
    for _ in range(2):
        shards.begin(model, "")
        torch.nn.functional.mse_loss(model(inputs), wanted).backward()
        shards.end()
        assert shards.state is None and shards.stats()["steps"] == 1
    shards.begin(model, "")  # of a training that raises
    shards.begin(model, "")
    shards.end()
    assert workers_of(ask([server], "twice")) == {}
    with pytest.raises(gradwire.FailedPrecondition, match="training has ended"):
        torch.nn.functional.mse_loss(model(inputs), wanted).backward()


def test_what_takes_hooks_of_its_own_is_refused():
    class FullySharded(torch.nn.Module):
        def register_comm_hook(self, state, hook):
            raise AssertionError("it was asked to")

    with pytest.raises(TypeError, match="another kind"):
        Shards("grpc://127.0.0.1:1", "refused", {}).begin(FullySharded(), "another kind")
