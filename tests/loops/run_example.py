"""An example of client/examples as it is, or over plain DistributedDataParallel: run_example.py OUT MODE EXAMPLE [ARGUMENT...]

MODE: "plain" (all-reduce in the hook's place), or a codec; "default" is the hook's own. OUT.<rank> gets the parameters at the
end and what the session counted.
"""

import functools
import os
import runpy
import sys

import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

import gradwire.torch

out, mode, *sys.argv = sys.argv[1:]
made = []


class AllReduce:
    """DDPState's face, for PyTorch's own hook."""

    process_group = None

    def __init__(self, model, **where):
        made.append((model, self))

    def stats(self):
        return {"pushed_bytes": 0}

    def close(self, drain=True):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        pass


class Watched(gradwire.torch.DDPState):
    def __init__(self, model, **where):
        super().__init__(model, **where)
        made.append((model, self))

    def close(self, drain=True):
        self.counted = self.stats() or self.counted
        super().close(drain)


if mode == "plain":
    gradwire.torch.DDPState = AllReduce
    gradwire.torch.ddp_hook = lambda state, bucket: allreduce_hook(state.process_group, bucket)
    gradwire.torch.ddp_hook.__annotations__ = allreduce_hook.__annotations__
else:
    gradwire.torch.DDPState = Watched if mode == "default" else functools.partial(Watched, codec=mode)

torch.use_deterministic_algorithms(True)
runpy.run_path(sys.argv[0], run_name="__main__")
(model, state), = made
torch.save({"parameters": {name: p.detach() for name, p in model.named_parameters()},
            "counted": getattr(state, "counted", None)}, f"{out}.{os.environ['RANK']}")
