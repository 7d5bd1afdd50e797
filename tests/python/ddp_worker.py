"""A process of test_ddp.py and test_fsdp.py: trains one small model in a way that its arguments choose, and saves what came out."""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
from pathlib import Path
from typing import Any

import gradwire
import torch
import torch.distributed as dist
import torch.distributed.checkpoint
import torch.distributed.checkpoint.state_dict
import torch.utils.checkpoint
from gradwire.torch import DDPState, FSDPState, ddp_hook
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

INPUTS, CLASSES, BATCH = 64, 10, 32


class Net(torch.nn.Sequential):
    idle = False  # the third layer takes no part
    checkpoint = False  # or is computed twice

    def __init__(self, *layers: torch.nn.Module, bare: bool):
        super().__init__(*layers)
        self.bare = bare  # nothing beside what its layers have
        if not bare:
            self.scale = torch.nn.Parameter(torch.linspace(0.5, 1.5, INPUTS))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        inputs = inputs.to(self[5].weight.dtype)
        if not self.bare:
            inputs = inputs * self.scale
        for number, layer in enumerate(self):
            if self.checkpoint and number == 2:
                inputs = torch.utils.checkpoint.checkpoint(layer, inputs, use_reentrant=True)
            elif not self.idle or number != 2:
                inputs = layer(inputs)
        return inputs * 1.0 if self.bare else inputs


def model_of(seed: int, bare: bool, images: bool) -> Net:
    torch.manual_seed(seed)
    if images:
        return Net(torch.nn.Unflatten(1, (4, 4, 4)), torch.nn.ReLU(), torch.nn.Conv2d(4, 8, 3, padding=1), torch.nn.Flatten(),
                   torch.nn.LayerNorm(128), torch.nn.Linear(128, CLASSES), bare=bare).to(memory_format=torch.channels_last)
    return Net(torch.nn.Linear(INPUTS, 128), torch.nn.ReLU(), torch.nn.Linear(128, 128), torch.nn.ReLU(),
               torch.nn.LayerNorm(128), torch.nn.Linear(128, CLASSES), bare=bare)


def sharded(net: Net, reduce: str, together: bool, device: str, parameters: str, kept: bool) -> torch.nn.Module:
    """Over all processes: two units inside, or one of both layers, the last one if it is frozen or the net is bare, and the rest
    of the net, which then has no parameters."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=getattr(torch, parameters), reduce_dtype=getattr(torch, reduce))
    mesh = dist.init_device_mesh(device, (dist.get_world_size(),))
    units: list[Any] = [[net[0], net[2]]] if together else [net[0], net[2]]
    if net.bare or not net[5].weight.requires_grad:
        units += [net[4], net[5]]
    for unit in units:
        fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=not kept)
    return fully_shard(net, mesh=mesh, mp_policy=policy)


def wrapped_fully(net: Net, reduce: str, device: str, flat: bool, kept: bool) -> torch.nn.Module:
    """FSDP1, of the same units."""
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy

    strategy = ShardingStrategy.SHARD_GRAD_OP if kept else ShardingStrategy.FULL_SHARD

    wrap = functools.partial(FullyShardedDataParallel, use_orig_params=not flat, device_id=torch.device(device), sharding_strategy=strategy,
                             mixed_precision=MixedPrecision(reduce_dtype=getattr(torch, reduce)))
    for number in (0, 2, *((4, 5) if net.bare or not net[5].weight.requires_grad else ())):
        net[number] = wrap(net[number])
    return wrap(net)


class OwnGather:
    """Gathers parameters as torch does."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False) -> Any:
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


def gathered(layer: Any) -> torch.Tensor:
    """The matrix of a layer of its own unit, as the forward pass sees it."""
    layer.unshard()  # nothing, where it still is
    seen = layer.weight.detach().clone().cpu()
    return seen


def saved_steps(folder: Path) -> list[int]:
    """Of FSDP's checkpoints, those that are whole."""
    return sorted(int(step.name) for step in folder.glob("*") if (step / ".metadata").exists())


def sharded_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return dict(zip(("model", "optimizer"), torch.distributed.checkpoint.state_dict.get_state_dict(model, optimizer), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--store", type=Path, required=True, help="where the processes find each other; with torchrun whenever it starts them")
    parser.add_argument("--servers", nargs="*", default=[], help="none: plain DistributedDataParallel")
    parser.add_argument("--codec", default="dense:fp32", help="empty: the default")
    parser.add_argument("--job", default="ddp")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--per-host", type=int, default=1)
    parser.add_argument("--wrapped", action="store_true", help="rank 1's module has the name that torch.compile gives")
    parser.add_argument("--nan-at", type=int, default=-1, help="the step in which rank 1's gradient is not finite")
    parser.add_argument("--nonfinite", default="spread")
    parser.add_argument("--scaler", action="store_true", help="losses are scaled")
    parser.add_argument("--die-at", type=int, default=-1, help="the step in which rank 1 is killed, once")
    parser.add_argument("--fsdp", action="store_true", help="FSDP in the place of DistributedDataParallel")
    parser.add_argument("--wrapper", action="store_true", help="FSDP: FullyShardedDataParallel in the place of fully_shard")
    parser.add_argument("--flat", action="store_true", help="FSDP1: the optimizer sees the flat parameters, torch's default")
    parser.add_argument("--kept", action="store_true", help="FSDP: parameters stay gathered from forward to backward")
    parser.add_argument("--reduce", default="float32", help="FSDP: the type in which gradients are reduced")
    parser.add_argument("--no-sync", action="store_true", help="FSDP: gradients that are accumulated are reduced once")
    parser.add_argument("--clip", type=float, default=0.0, help="the norm of gradients is clipped to this")
    parser.add_argument("--together", action="store_true", help="FSDP: two layers are one unit")
    parser.add_argument("--checkpoint", action="store_true", help="FSDP: a layer is computed twice, in a backward of its own")
    parser.add_argument("--bare", action="store_true", help="FSDP: the root manages no parameters, and computes behind its last unit")
    parser.add_argument("--frozen", action="store_true", help="FSDP: the last unit is frozen")
    parser.add_argument("--sgd", action="store_true", help="SGD, whose steps have the size of gradients, in the place of AdamW")
    parser.add_argument("--zero", action="store_true", help="AdamW whose state is sharded, by torch's ZeroRedundancyOptimizer")
    parser.add_argument("--beta1", type=float, default=0.9, help="of AdamW")
    parser.add_argument("--beta2", type=float, default=0.999)
    parser.add_argument("--weight-decay", type=float, default=0.01)
    parser.add_argument("--push", default="gradient")
    parser.add_argument("--gather", help="FSDPState's")
    parser.add_argument("--gathered", action="store_true", help="FSDP: saves what the forward pass sees of the first unit's matrix")
    parser.add_argument("--own-gather", action="store_true", help="FSDP: parameters are gathered by another than torch's")
    parser.add_argument("--own-gather-of-one", action="store_true", help="FSDP: on rank 1 alone")
    parser.add_argument("--parameters", default="float32", help="the type that FSDP's passes compute in, or of DDP's model")
    parser.add_argument("--ahead", action="store_true", help="FSDP: the first two units are gathered ahead, beside each other")
    parser.add_argument("--hook", action="store_true", help="FSDP: a parameter has a hook that wants its reduced gradient")
    parser.add_argument("--alone", action="store_true", help="DDP: each process is a group, and a job, of its own")
    parser.add_argument("--unused", action="store_true", help="DDP: looks for unused parameters")
    parser.add_argument("--static", action="store_true", help="DDP: with a static graph")
    parser.add_argument("--images", action="store_true", help="DDP: a convolution, in channels_last")
    parser.add_argument("--idle", action="store_true", help="FSDP: one unit takes no part in the loss")
    parser.add_argument("--behind-close", action="store_true", help="another backward() when DDPState is closed")
    parser.add_argument("--device", default="cpu", help="of the model; all processes share one GPU")
    parser.add_argument("--exact", help="FSDP: the unit whose gradients travel as they are, by a rule")
    parser.add_argument("--compile", action="store_true", help="by torch.compile, on rank 1 alone: replicas are the same")
    parser.add_argument("--again", action="store_true", help="from the checkpoint of the run that was killed, as whenever torchrun has started it again")
    args = parser.parse_args()
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    again = args.again or restarts > 0
    dist.init_process_group("gloo", init_method=f"file://{args.store}{restarts or ''}", rank=int(os.environ["RANK"]),
                            world_size=int(os.environ["WORLD_SIZE"]))
    rank = dist.get_rank()
    net = model_of(0, args.bare, args.images).to(args.device)
    if not args.fsdp:
        net.to(getattr(torch, args.parameters))
    net[5].requires_grad_(not args.frozen)
    net.idle, net.checkpoint = args.idle, args.checkpoint
    if args.compile and args.fsdp and rank == 1:  # unit by unit: Dynamo leaves a loop over units alone
        net[0], net[2] = (torch.compile(net[number], backend="aot_eager") for number in (0, 2))
    wrapped = torch.nn.ModuleDict({"_orig_mod": net}) if args.wrapped and rank == 1 else net
    if args.wrapper:
        model = wrapped_fully(net, args.reduce, args.device, args.flat, args.kept)
    elif args.fsdp:
        model = sharded(net, args.reduce, args.together, args.device, args.parameters, args.kept)
        if args.own_gather or (args.own_gather_of_one and rank == 1):
            net[0].set_custom_all_gather(OwnGather())
    else:
        alone = [dist.new_group([each]) for each in range(dist.get_world_size())][rank] if args.alone else None
        model = DistributedDataParallel(net, process_group=alone, find_unused_parameters=args.unused, static_graph=args.static,
                                        bucket_cap_mb=25 if args.compile else 0.02)  # Dynamo wants more than its first MiB
    called = torch.compile(model, backend="aot_eager") if args.compile and not args.fsdp and rank == 1 else model
    groups = [dist.new_group(list(range(begin, begin + args.per_host))) for begin in range(0, dist.get_world_size(), args.per_host)]
    adamw = {"lr": args.lr, "betas": (args.beta1, args.beta2), "weight_decay": args.weight_decay}
    optimizer: torch.optim.Optimizer
    if args.sgd:
        optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    elif args.zero:
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **adamw)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), **adamw)
    teacher = torch.nn.Linear(INPUTS, CLASSES).to(args.device)
    data = torch.Generator().manual_seed(100 + rank)
    checkpoint = args.out.with_suffix(".checkpoint")
    begin = 0
    if again and args.fsdp:
        begin = saved_steps(checkpoint)[-1]
        kept = sharded_state(model, optimizer)
        torch.distributed.checkpoint.load(kept, checkpoint_id=checkpoint / str(begin))
        torch.distributed.checkpoint.state_dict.set_state_dict(model, optimizer, model_state_dict=kept["model"],
                                                               optim_state_dict=kept["optimizer"])
    elif again:
        saved = torch.load(checkpoint, weights_only=True)
        net.load_state_dict(saved["net"])
        optimizer.load_state_dict(saved["optimizer"])
        begin = saved["step"]
    losses = []
    scaler = torch.amp.GradScaler(args.device, enabled=args.scaler)
    with contextlib.ExitStack() as stack:
        state = None
        if args.servers:
            how = {"servers": args.servers, "job": f"{args.job}-{rank}" if args.alone else args.job, "nonfinite": args.nonfinite, "push": args.push} | (
                {"codec": args.codec} if args.codec else {})
            if args.exact:
                how["rules"] = [gradwire.Rule("dense:fp32", args.exact)]
            if args.fsdp:
                state = stack.enter_context(FSDPState(model, gather=args.gather, **how))
                if args.hook:
                    net.scale.register_post_accumulate_grad_hook(print)
            else:
                state = stack.enter_context(DDPState(
                    model if args.alone else wrapped, local_group=groups[rank // args.per_host] if args.per_host > 1 else None, **how))
                model.register_comm_hook(state, ddp_hook)
        for step in range(begin, args.steps):
            optimizer.zero_grad()
            if args.ahead:
                for unit in (net[0], net[2]):
                    unit.unshard(async_op=True)
            for part in range(args.accumulate):
                inputs = torch.randn(BATCH, INPUTS, generator=data).to(args.device)
                loss = torch.nn.functional.cross_entropy(called(inputs).float(), teacher(inputs).argmax(1))
                if step == args.nan_at and rank == 1:
                    loss = loss * float("nan")
                synchronized = part == args.accumulate - 1 or (args.fsdp and not args.no_sync)
                if args.fsdp and not args.wrapper:
                    model.set_requires_gradient_sync(synchronized)
                with contextlib.nullcontext() if synchronized or not hasattr(model, "no_sync") else model.no_sync():
                    scaler.scale(loss).backward()
            if args.clip and args.wrapper:
                model.clip_grad_norm_(args.clip)
            elif args.clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.item())
            if rank == 0 and not args.fsdp and not args.zero:
                torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1},
                           unfinished := checkpoint.with_suffix(".unfinished"))
                unfinished.rename(checkpoint)
            if args.fsdp and args.die_at >= 0 and step % 5 == 0:
                torch.distributed.checkpoint.save(sharded_state(model, optimizer), checkpoint_id=checkpoint / str(step + 1))
            if step == args.die_at and rank == 1 and not again:
                os._exit(9)
        values = {name.replace("_orig_mod.", ""): (value.full_tensor() if hasattr(value, "full_tensor") else value).cpu()
                  for name, value in (model if args.wrapper else net).state_dict().items()}
        found = {"net": values, "losses": losses, "begin": begin, "scale": scaler.get_scale(),
                 "stats": state.stats() if state else {}}
        if args.compile:
            from torch._dynamo.utils import counters  # seconds to import

            found["graphs"] = counters["stats"]["unique_graphs"]
        if args.gathered:
            found["gathered"] = gathered(net[0])
    if args.gathered:
        found["gathered behind close"] = gathered(net[0])
    if args.behind_close:
        try:
            model(inputs).sum().backward()
            found["refused"] = ""
        except gradwire.FailedPrecondition as error:
            found["refused"] = str(error)
    torch.save(found, args.out.with_suffix(f".{rank}"))
    dist.barrier()  # gloo may hang in destroy_process_group where another process has torn it down
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
