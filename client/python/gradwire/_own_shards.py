"""Shards in the processes of the workers themselves."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import pathlib
import socket
from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist

from ._shard_server import ShardServer

_ANYWHERE = ("192.0.2.1", 9)  # TEST-NET-1: asks which way out there is, nothing is sent
_BOOT_ID = pathlib.Path("/proc/sys/kernel/random/boot_id")


def _reaches(target: tuple[str, int]) -> str | None:
    """The address of this host on the way to another; None where that is itself, or there is no way."""
    with contextlib.suppress(OSError):
        for family, kind, protocol, _, address in socket.getaddrinfo(*target, type=socket.SOCK_DGRAM):
            with socket.socket(family, kind, protocol) as way:
                way.connect(address)
                here = str(way.getsockname()[0])
                if not ipaddress.ip_address(here.partition("%")[0]).is_loopback:
                    return here
    return None


def _network() -> tuple[str, int]:
    """What processes share that reach each other at 127.0.0.1: the machine, and its network as they see it."""
    return _BOOT_ID.read_text(), os.stat("/proc/self/ns/net").st_ino


def _host_for_others() -> str:
    master = (os.environ.get("MASTER_ADDR", ""), int(os.environ.get("MASTER_PORT", "0") or 0))
    if (host := (_reaches(master) if master[0] else None) or _reaches(_ANYWHERE)) is None:
        raise ValueError("no address of this host is known by which others reach it: pass host=")
    return host


def _gathered(mine: Any, group: Any) -> list[Any]:
    all_: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(all_, mine, group=group)
    return all_


@contextlib.contextmanager
def own_shards(*, host: str | None = None, transport: str = "grpc", process_group: Any = None,
               data_dir: str | os.PathLike[str] | None = None, flags: Sequence[str] = ()) -> Iterator[list[str]]:
    """A shard in the process of every worker, in the place of servers that somebody has started: yields what to pass as `servers`.

        torch.distributed.init_process_group("gloo")
        with gradwire.torch.own_shards() as servers, ShardedOptimizer(model, servers=servers, job="lm", workers=size) as optimizer:
            ...

    All processes of `process_group` (None: the default one; it must be there) enter it together, tell each other where their shards
    are, and wait for each other at its end. What a worker sends to its own shard does not cross the network, nor the kernel. Where a
    process dies its shard dies with it: where torchrun starts the workers again the job goes on from a checkpoint (resume_from), or
    from data_dir, a folder of this rank's own, if it has a durability (durability="interval").

    host: this host's name or address for the others; None: 127.0.0.1 where all of them are on one host, else the address towards
    MASTER_ADDR. Whoever reaches it may speak with the shard: keep it inside a network of your own. transport: "grpc" or "tcp".
    flags: of gradwire-server.

    Errors: RuntimeError without a process group; on every rank where one could not listen.
    """
    if transport not in ("grpc", "tcp"):
        raise ValueError(f"transport={transport!r} must be 'grpc' or 'tcp'")
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError("own_shards() needs a process group, by which workers tell each other where their shards are: "
                           'torch.distributed.init_process_group("gloo") before it')
    if dist.get_rank(process_group) < 0:
        raise ValueError("own_shards(): this process is not in process_group")
    one_host = len(set(_gathered(_network(), process_group))) == 1
    server, why = None, ""
    try:
        at = host or ("127.0.0.1" if one_host else _host_for_others())
        server = ShardServer(f"{transport}://{f'[{at}]' if ':' in at else at}:0", data_dir=data_dir, flags=flags)
    except Exception as error:  # whatever it is, the others wait to hear of it
        why = str(error) or repr(error)
    with contextlib.ExitStack() as stack:
        if server is not None:
            stack.callback(server.stop, 0)
        told = _gathered((server.addresses[0] if server is not None else "", why), process_group)
        if failed := [f"rank {rank}: {why}" for rank, (_, why) in enumerate(told) if why]:
            raise RuntimeError(f"shards did not come up: {'; '.join(failed)}")
        yield [address for address, _ in told]
        dist.barrier(process_group)  # until all workers have left
