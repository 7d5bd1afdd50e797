"""Shard servers of one's own on this machine, for notebooks and tests."""

from __future__ import annotations

import os
import pathlib
import shutil
import signal
import subprocess
import tempfile
import time
import weakref
from collections.abc import Sequence

from ._errors import Unavailable
from ._programs import find_program

_START_SECONDS = 30.0
_STOP_SECONDS = 10.0
# Becomes the server, and leaves a watcher in its group, which removes the folder $0 and ends the group when whoever holds the
# other end of the pipe is gone, however that ended.
_WATCHED = 'exec 3<&0; { cat <&3 >/dev/null; rm -rf "$0"; kill 0; } & exec "$@" </dev/null 3<&-'
_LOG_LINES = 5


def _stop(owner: int, folder: pathlib.Path, processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Each process is the leader of its group, in which its watcher is."""
    if os.getpid() != owner:  # a fork of the process that started them
        return
    for number, seconds in ((signal.SIGTERM, _STOP_SECONDS), (signal.SIGKILL, _STOP_SECONDS)):
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, number)
        end = time.monotonic() + seconds
        for process in processes:
            try:
                process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                pass
    _close(processes)  # which ends the watchers that are left
    shutil.rmtree(folder, ignore_errors=True)


def _close(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        if process.stdin is not None:
            process.stdin.close()


class LocalCluster:
    """Running shard servers; what `local_cluster` makes. servers: their addresses, for `servers=`. They run until stop(), the end
    of its `with`, or of this process."""

    def __init__(self, shards: int, transport: str, data_dir: str | os.PathLike[str] | None, flags: Sequence[str]):
        if shards < 1:
            raise ValueError(f"shards={shards!r}: a cluster has at least one")
        if transport not in ("grpc", "tcp"):
            raise ValueError(f"transport={transport!r} must be 'grpc' or 'tcp'")
        if isinstance(flags, str):
            raise ValueError(f"flags={flags!r}: a list of flags, each a string")
        program = find_program("gradwire-server")
        if data_dir is not None:
            os.makedirs(data_dir, exist_ok=True)
        folder = pathlib.Path(tempfile.mkdtemp(prefix="gradwire-"))
        self._logs = [folder / f"server-{shard}.log" for shard in range(shards)]
        self._processes: list[subprocess.Popen[bytes]] = []
        self._end = weakref.finalize(self, _stop, os.getpid(), folder, self._processes)
        _running.add(self)
        ports = [folder / f"server-{shard}.addresses" for shard in range(shards)]
        try:
            for shard in range(shards):
                command = [str(program), "--listen", f"{transport}://127.0.0.1:0", "--port-file", str(ports[shard]),
                           "--drain-ms", "0"]
                if data_dir is not None:
                    command += ["--data-dir", str(pathlib.Path(data_dir) / f"shard-{shard}")]
                with open(self._logs[shard], "wb") as log:
                    self._processes.append(subprocess.Popen(
                        ["sh", "-c", _WATCHED, str(folder), *command, *flags], stdin=subprocess.PIPE, stdout=log,
                        stderr=subprocess.STDOUT, start_new_session=True))
            self.servers = [self._address(shard, ports[shard]) for shard in range(shards)]
        except BaseException:
            self.stop()
            raise

    def _address(self, shard: int, port_file: pathlib.Path) -> str:
        end = time.monotonic() + _START_SECONDS
        while True:
            if port_file.exists() and (written := port_file.read_text().split()):
                return written[0]
            gone = self._processes[shard].poll() is not None
            if gone or time.monotonic() > end:
                last = "\n".join(self.log(shard).splitlines()[-_LOG_LINES:])
                raise Unavailable(f"shard server {shard} {'ended' if gone else 'did not listen in time'}; it said:\n{last}")
            time.sleep(0.01)

    def log(self, shard: int) -> str:
        """What a server has said, until stop()."""
        return self._logs[shard].read_text(errors="replace")

    def stop(self) -> None:
        """Ends the servers and forgets their logs; nothing if it was called before."""
        self._end()
        _running.discard(self)

    def __enter__(self) -> LocalCluster:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()


_running: set[LocalCluster] = set()  # also those that nobody refers to any more


def _leave_to_parent() -> None:
    """In a fork: the servers are the parent's, and end with it."""
    for cluster in _running:
        _close(cluster._processes)


os.register_at_fork(after_in_child=_leave_to_parent)


def local_cluster(shards: int = 2, *, transport: str = "grpc", data_dir: str | os.PathLike[str] | None = None,
                  flags: Sequence[str] = ()) -> LocalCluster:
    """Starts shard servers on this machine, which other machines do not reach.

        with gradwire.local_cluster(shards=2) as cluster:
            optimizer = ShardedOptimizer(model, servers=cluster.servers, job="try")

    transport: "grpc" or "tcp". data_dir: jobs of durability "interval" or "fsync" are kept there, and a later cluster of as many
    shards goes on with them; None: they end with the cluster. flags: others of gradwire-server. Leave jobs before it stops: a
    session whose servers are gone waits for them. Errors: ValueError; FileNotFoundError (no gradwire-server); Unavailable, with
    what the server said.
    """
    return LocalCluster(shards, transport, data_dir, flags)
