"""Names of parameters: a model that was wrapped has those of the model itself, and what names none is said."""

import pytest

torch = pytest.importorskip("torch")

from gradwire.torch import ShardedOptimizer, load_parameters
from test_training_loop import loss_of, network, sharded

NAMES = ["0.weight", "0.bias", "2.weight", "2.bias"]


class Wrapped(torch.nn.Module):
    """As torch.compile and DataParallel name it."""

    def __init__(self, *names):
        super().__init__()
        self.add_module(names[0], Wrapped(*names[1:]) if len(names) > 1 else network())


def names_of(optimizer):
    return [t.name for t in optimizer.job.tensors]


@pytest.mark.parametrize("names", [("_orig_mod",), ("module", "_orig_mod")])
def test_a_wrapped_model_is_in_the_job_of_the_model_itself(addresses, names):
    servers, model, wrapped = addresses(1), network(), Wrapped(*names)
    with sharded(model, servers) as optimizer:
        loss_of(model, 0).backward()
        optimizer.step()
        state = optimizer.state_dict(checkpoint=True)
    key = ".".join([*names, "0.bias"])
    with sharded(wrapped, servers, "again", resume_from=state, roles={key: "head", "2.weight": "mlp"}) as optimizer:
        assert names_of(optimizer) == NAMES
        assert [t.role for t in optimizer.job.tensors] == [None, "head", "mlp", None]


def test_a_part_that_is_called_as_wrappers_are_keeps_its_name(addresses):
    model = torch.nn.ModuleDict({"module": torch.nn.Linear(2, 2)})
    model.register_parameter("weight", torch.nn.Parameter(torch.zeros(3)))
    with sharded(model, addresses(1)) as optimizer:
        assert sorted(names_of(optimizer)) == ["module.bias", "module.weight", "weight"]


def test_roles_of_no_parameter_are_refused():
    model = network()
    model[2].bias.requires_grad_(False)
    with pytest.raises(ValueError, match="roles: no parameter is called '1.weight'.*'0.weight'"):
        ShardedOptimizer(model, servers="grpc://127.0.0.1:1", job="roles", roles={"2.bias": "bias", "1.weight": "mlp"})


@pytest.mark.parametrize("file_of", [NAMES, [f"_orig_mod.{name}" for name in NAMES]])
@pytest.mark.parametrize("make", [network, lambda: Wrapped("_orig_mod")])
def test_a_snapshot_fits_a_wrapped_model(tmp_path, monkeypatch, make, file_of):
    values = {name: p.detach().numpy() for name, p in zip(file_of, network(1).parameters(), strict=True)}
    monkeypatch.setattr("gradwire._snapshot.read_safetensors", lambda _: values)
    model = make()
    load_parameters(model, tmp_path)
    for p, value in zip(model.parameters(), values.values(), strict=True):
        assert torch.equal(p, torch.from_numpy(value))


def test_numbers_of_another_order_are_said(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 2))
    path = tmp_path / "parameters.safetensors"
    safetensors = pytest.importorskip("safetensors.torch")
    safetensors.save_file({f"param.{i}": p.detach() for i, p in enumerate([*model[1].parameters(), *model[0].parameters()])}, path)
    with pytest.raises(ValueError, match=r"'param.0' is \[2, 3\] .*another order than the module's"):
        load_parameters(model, path)
    safetensors.save_file({f"param.{i}": p.detach() for i, p in enumerate(model[0].parameters())}, path)
    with pytest.raises(ValueError, match="'param.2' requires gradients and is not in the snapshot: its parameters have no names"):
        load_parameters(model, path)


def test_units_of_fsdp_keep_names_apart():
    from gradwire._fsdp_units import _names_of

    assert _names_of(["", "module.layers.0", "_orig_mod.head"]) == {"": "(root)", "module.layers.0": "layers.0", "_orig_mod.head": "head"}
    assert _names_of(["", "module"]) == {"": "(root)", "module": "module"}
