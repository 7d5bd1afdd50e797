"""A shard server in the process of a worker."""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Sequence

from . import _core

logger = logging.getLogger("gradwire")
_LOOK_SECONDS = 0.01


class ShardServer:
    """A shard server in this process, which other processes and machines reach at `addresses`, as they reach gradwire-server.

        with gradwire.ShardServer("grpc://10.0.0.5:7070") as server:
            ...

    Sessions of this process that are given one of these addresses, letter for letter, reach it past the network. What it computes
    it computes in threads of its own, without the GIL. It ends with this object, and its jobs with it, but for what is in its
    data_dir. A fork has no server, and reaches its parent's as others do.

    listen: where, for others too; port 0 takes a free one; a host that others can dial, not 0.0.0.0, or this process would not
    know its own server by the address that they share. data_dir: where jobs of durability "interval" or "fsync" are kept. flags:
    others of gradwire-server; --drain-ms means nothing here, where stop() waits. It logs to standard error, from warnings on
    (--log-level).

    Errors: ValueError for flags; Unavailable where the address is taken. Thread-safe, but a second stop() may return before the first
    has ended.
    """

    def __init__(self, listen: str = "grpc://127.0.0.1:0", *, data_dir: str | os.PathLike[str] | None = None, flags: Sequence[str] = ()):
        if isinstance(flags, str):
            raise ValueError(f"flags={flags!r}: a list of flags, each a string")
        command = ["--listen", listen]
        if not any(flag.split("=")[0] == "--log-level" for flag in flags):
            command += ["--log-level", "warning"]
        if data_dir is not None:
            command += ["--data-dir", os.fspath(data_dir)]
        self._server = _core.Server([*command, *flags])
        self._end = weakref.finalize(self, self._server.stop)

    @property
    def addresses(self) -> list[str]:
        """What others dial, one for each that it listens at."""
        return list(self._server.addresses)

    def stop(self, wait: float = 60.0) -> None:
        """Ends it as soon as none of its jobs has workers, at the latest after `wait` seconds: other workers may still want the last
        round's update. Who has not joined yet is not waited for. Nothing if it was called before. Errors: DataLoss where rounds of
        a durable job were not written."""
        end = time.monotonic() + wait
        while self._end.alive and (in_use := self._server.in_use()) and time.monotonic() < end:
            time.sleep(_LOOK_SECONDS)
        if self._end.alive and wait and in_use:
            logger.warning("the shard server at %s ends, though workers are in its jobs: it has waited %g s for them",
                           ", ".join(self.addresses), wait)
        self._end()

    def __enter__(self) -> ShardServer:
        return self

    def __exit__(self, kind: object, *exc: object) -> None:
        self.stop(60.0 if kind is None else 0.0)
