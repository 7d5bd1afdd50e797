"""Sessions whose arrays lie on a device: on a CUDA device where there is one; else the same package over a device that the
host plays, and that does everything as late as it may (host_device.cc)."""

import ctypes
import os
import pathlib
import subprocess
import sys

import pytest

import gradwire

torch = pytest.importorskip("torch")
HOST_DEVICE = (12, 0)  # kDLExtDev
ON_HOST_DEVICE = os.environ.get("GRADWIRE_TEST_DEVICE") == "host"


class DLTensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
                ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
                ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
                ("byte_offset", ctypes.c_uint64)]


class DLManagedTensor(ctypes.Structure):
    _fields_ = [("tensor", DLTensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_lent = {}  # address of the capsule's struct -> what it refers to


@_Deleter
def _delete(address):
    del _lent[address]


class DeviceArray:
    """A contiguous CPU tensor that says it lies on the host's device; counts the streams it was made ready for."""

    def __init__(self, tensor, device=HOST_DEVICE):
        self.tensor = tensor
        self.device = device
        self.streams = []

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, *, stream=None):
        self.streams.append(stream)
        shape = (ctypes.c_int64 * self.tensor.dim())(*self.tensor.shape)
        strides = (ctypes.c_int64 * self.tensor.dim())(*self.tensor.stride())
        managed = DLManagedTensor()
        managed.tensor = DLTensor(self.tensor.data_ptr(), *self.device, self.tensor.dim(), 2, self.tensor.itemsize * 8, 1,
                                  shape, strides, 0)
        managed.deleter = ctypes.cast(_delete, ctypes.c_void_p).value
        _lent[ctypes.addressof(managed)] = (managed, shape, strides, self.tensor)
        return _new_capsule(ctypes.addressof(managed), b"dltensor", None)


@pytest.fixture
def on_device():
    """Puts CPU tensors there; what it returns has DLPack, and shares memory with them where the host plays the device."""
    if ON_HOST_DEVICE:
        return DeviceArray
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return lambda tensor: tensor.cuda()


def values(array):
    return array.tensor if isinstance(array, DeviceArray) else array.cpu()


SHAPES = ((300, 41), (41,), (200, 50))


def make_job(name, **options):
    return gradwire.JobSpec(name, [gradwire.TensorSpec(f"w{i}", shape) for i, shape in enumerate(SHAPES)], **options)


def make_tensors(seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def train(servers, job, place, steps=25, resume_from=None, save=None):
    parameters = [place(p) for p in make_tensors(0)]
    with gradwire.join(servers, job, parameters, "worker", resume_from=resume_from) as session:
        for step in range(steps):
            gradients = [place(g) for g in make_tensors(100 + session.version)]
            if step % 2:
                session.exchange(gradients, lr=0.01)
            else:
                session.begin_round(lr=0.01)
                for i in reversed(range(len(SHAPES))):
                    session.tensor_ready(i, gradients[i])
                session.end_round()
        if save is not None:
            session.save(save)
        return session.digest(), parameters


@pytest.mark.parametrize("options", [
    {"codec": "tagc:density=0.05"}, {"codec": "tagc:density=0.05", "push": "step", "optimizer": "step"},
    {"codec": "dense:values=fp32", "optimizer": "adamw"}, {"codec": "dense:values=fixed16", "optimizer": "sgd"}])
def test_same_bits_as_in_host_memory(addresses, on_device, options):
    servers = addresses(2)
    expected, host = train(servers, make_job("host", **options), lambda t: t)
    found, there = train(servers, make_job("device", **options), on_device)
    assert found == expected
    for a, b in zip(host, there, strict=True):
        assert torch.equal(a, values(b))


def test_checkpoints_go_from_one_place_to_the_other(addresses, on_device, tmp_path):
    servers = addresses(1)
    options = {"codec": "tagc:density=0.05", "push": "step", "optimizer": "step"}
    digests = set()
    for number, places in enumerate([(lambda t: t, lambda t: t), (on_device, lambda t: t), (lambda t: t, on_device)]):
        job = make_job(f"moved-{number}", **options)
        train(servers, job, places[0], 10, save=tmp_path / "checkpoint")
        digests.add(train(servers, job, places[1], 10, resume_from=tmp_path / "checkpoint")[0])
    assert len(digests) == 1


def test_what_lies_elsewhere_is_refused(addresses, on_device):
    servers = addresses(1)
    parameters = [on_device(p) for p in make_tensors(0)]
    with pytest.raises(ValueError, match="several places"):
        gradwire.join(servers, make_job("mixed"), [*parameters[:2], make_tensors(0)[2]])
    with pytest.raises(ValueError, match="parameter 'w0' must be C-contiguous"):
        gradwire.join(servers, make_job("strided"), [on_device(torch.zeros(41, 300)).t() if not ON_HOST_DEVICE else
                                                     DeviceArray(torch.zeros(41, 300).t()), *parameters[1:]])
    with pytest.raises(TypeError, match="parameter 'w1' must be float32"):
        gradwire.join(servers, make_job("half"), [parameters[0], on_device(torch.zeros(41).half()), parameters[2]])
    with pytest.raises(gradwire.GradwireError, match="codec topk.*tagc and dense"):
        gradwire.join(servers, make_job("codec", codec="topk:density=0.1"), parameters)
    with gradwire.join(servers, make_job("place"), parameters) as session:
        session.begin_round(lr=0.1)
        with pytest.raises(TypeError, match="gradient of 'w1' lies in host memory"):
            session.tensor_ready("w1", torch.zeros(41))
        with pytest.raises(ValueError, match="gradient of 'w1' has shape"):
            session.tensor_ready("w1", on_device(torch.zeros(40)))
        for i, shape in enumerate(SHAPES):
            session.tensor_ready(i, on_device(torch.zeros(shape)))
        session.end_round()
    host = [p.clone() for p in make_tensors(0)]
    with gradwire.join(servers, make_job("host"), host) as session:
        session.begin_round(lr=0.1)
        with pytest.raises(TypeError, match="gradient of 'w0' lies on a device"):
            session.tensor_ready("w0", on_device(torch.zeros(SHAPES[0])))


def test_producers_are_given_the_sessions_stream(addresses):
    if not ON_HOST_DEVICE:
        pytest.skip("needs arrays that record their streams")
    parameters = [DeviceArray(p) for p in make_tensors(0)]
    with gradwire.join(addresses(1), make_job("streams"), parameters) as session:
        gradients = [DeviceArray(torch.ones(shape)) for shape in SHAPES]
        session.exchange(gradients, lr=0.1)
        streams = {s for array in (*gradients, *parameters) for s in array.streams}
        assert streams == {session._device.stream}
        assert not any(g.tensor.data_ptr() in {lent[3].data_ptr() for lent in _lent.values()} for g in gradients)
    assert _lent


class OnHostDevice(torch.nn.Parameter):
    """A parameter in host memory that says by DLPack that it lies on the host's device."""

    def __dlpack_device__(self):
        return HOST_DEVICE

    def __dlpack__(self, *, stream=None):
        return DeviceArray(self.data).__dlpack__(stream=stream)


def make_model(place):
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(40, 60), torch.nn.Tanh(), torch.nn.Linear(60, 10), torch.nn.Linear(10, 10))
    if place == "cuda":
        return model.cuda()
    if place == "host device":
        for module in model:
            for name, p in list(module.named_parameters(recurse=False)):
                setattr(module, name, OnHostDevice(p.data))
    return model


@pytest.mark.parametrize("options", [{}, {"codec": "dense:values=fp32", "weight_decay": 0.01}, {"overlap": False}])
def test_optimizer(addresses, options):
    from gradwire.torch import ShardedOptimizer

    place = "host device" if ON_HOST_DEVICE else "cuda"
    if place == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    servers = addresses(2)
    digests = set()
    for number, where in enumerate(["cpu", place]):
        model = make_model(where)
        # Gradients are made on the CPU in both, so that they have the same bits.
        twin = make_model("cpu")
        with ShardedOptimizer(model, servers=servers, job=f"optimizer-{number}", lr=0.01, **options) as optimizer:
            for step in range(10):
                for p, q in zip(model.parameters(), twin.parameters(), strict=True):
                    q.data.copy_(p.data)
                twin.zero_grad()
                torch.manual_seed(step)
                twin(torch.randn(16, 40)).square().mean().backward()
                for p, q in zip(model.parameters(), twin.parameters(), strict=True):
                    if where == "host device":
                        p.grad = OnHostDevice(q.grad.clone())
                    else:
                        p.grad = q.grad.to(p.device)
                optimizer.step()
                optimizer.zero_grad()
            digests.add(optimizer.digest())
    assert len(digests) == 1


def test_backward_on_a_cuda_device(addresses):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    from gradwire.torch import ShardedOptimizer

    model = make_model("cuda")
    with ShardedOptimizer(model, servers=addresses(1), job="backward", lr=0.01) as optimizer:
        losses = []
        for step in range(20):
            torch.manual_seed(step)
            loss = model(torch.randn(16, 40, device="cuda")).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert losses[-1] < losses[0]


def test_without_a_device_the_join_says_so(addresses):
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    arrays = [DeviceArray(p, (2, 0)) for p in make_tensors(0)]
    with pytest.raises((gradwire.FailedPrecondition, ValueError), match="backend 'cuda'|has one device"):
        gradwire.join(addresses(1), make_job("none"), arrays)


def test_the_same_on_the_device_that_the_host_plays():
    """All of this file again, by another process with the other package."""
    folder = pathlib.Path(gradwire._core.__file__).resolve().parents[2] / "python_host_device"
    if ON_HOST_DEVICE:
        pytest.skip("this is that process")
    if not folder.exists():
        pytest.skip(f"{folder} is not built")
    run = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__],
                         env={**os.environ, "PYTHONPATH": str(folder), "GRADWIRE_TEST_DEVICE": "host"},
                         capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
