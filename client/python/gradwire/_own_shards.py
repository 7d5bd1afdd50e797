"""Shards in the processes of the workers themselves."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist

from ._errors import GradwireError
from ._shard_server import ShardServer

_ANYWHERE = ("192.0.2.1", 9)  # TEST-NET-1: asks which way out there is, nothing is sent


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


def _own_host(workers: int) -> str:
    if int(os.environ.get("LOCAL_WORLD_SIZE", "0")) == workers:
        return "127.0.0.1"
    master = (os.environ.get("MASTER_ADDR", ""), int(os.environ.get("MASTER_PORT", "0") or 0))
    if (host := (_reaches(master) if master[0] else None) or _reaches(_ANYWHERE)) is None:
        raise ValueError("no address of this host is known by which others reach it: pass host=")
    return host


@contextlib.contextmanager
def own_shards(*, host: str | None = None, transport: str = "grpc", process_group: Any = None,
               data_dir: str | os.PathLike[str] | None = None, flags: Sequence[str] = ()) -> Iterator[list[str]]:
    """A shard in the process of every worker, in the place of servers that somebody has started: yields what to pass as `servers`.

        torch.distributed.init_process_group("gloo")
        with gradwire.torch.own_shards() as servers, ShardedOptimizer(model, servers=servers, job="lm", workers=size) as optimizer:
            ...

    All processes of `process_group` (None: the default one; it must be there) enter it together, and tell each other where their
    shards are. What a worker sends to its own shard does not cross the network, nor the kernel. At the end of its `with` a shard
    waits until all workers have left, at most a minute. Where a process dies its shard dies with it: the job goes on from a
    checkpoint (resume_from), or from data_dir, which is a folder of this rank's own, where torchrun starts the workers again.

    host: this host's name or address for the others; None: 127.0.0.1 where torchrun says that all of them are on one host, else the
    address towards MASTER_ADDR. Whoever reaches it may speak with the shard: keep it inside a network of your own. transport:
    "grpc" or "tcp". flags: of gradwire-server.

    Errors: RuntimeError without a process group; on every rank where one could not listen.
    """
    if transport not in ("grpc", "tcp"):
        raise ValueError(f"transport={transport!r} must be 'grpc' or 'tcp'")
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError("own_shards() needs a process group, by which workers tell each other where their shards are: "
                           'torch.distributed.init_process_group("gloo") before it')
    workers = dist.get_world_size(process_group)
    server, why = None, ""
    try:
        at = host or _own_host(workers)
        server = ShardServer(f"{transport}://{f'[{at}]' if ':' in at else at}:0", data_dir=data_dir, flags=flags)
    except (GradwireError, ValueError, OSError) as error:
        why = str(error)
    told: list[tuple[str, str]] = [("", "")] * workers
    dist.all_gather_object(told, (server.addresses[0] if server else "", why), group=process_group)
    failed = [f"rank {rank}: {why}" for rank, (_, why) in enumerate(told) if why]
    if server is None or failed:
        if server is not None:
            server.stop(0)
        raise RuntimeError(f"shards did not come up: {'; '.join(failed)}")
    with server:
        yield [address for address, _ in told]
