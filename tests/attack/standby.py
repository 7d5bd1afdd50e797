"""A standby that does what it is told: it follows a server, takes records or does not, and reads or does not."""

from __future__ import annotations

import queue
import struct
import threading

import grpc

_HEADER = struct.Struct("<4xB3xI4xQ")  # proto/JOURNAL.md: type, bucket, round
_UPDATE = 2
_PATIENCE_S = 60.0


class Standby:
    """One Follow stream. `takes`: every record is acknowledged as it comes."""

    def __init__(self, rpc, channel, name: str = "standby", takes: bool = False, **opened):
        self._rpc = rpc
        self._takes = takes
        self._requests: queue.Queue = queue.Queue()
        self.hello = None
        self.in_sync = threading.Event()
        self.records = 0
        open_ = rpc.replication.FollowOpen(name=name, **opened)
        self._requests.put(rpc.replication.FollowRequest(open=open_))
        self.call = rpc.Replication(channel).Follow(iter(self._requests.get, None))

    def fall_silent(self) -> None:
        self._takes = False

    def beat(self) -> None:
        self._requests.put(self._rpc.replication.FollowRequest())

    def follow(self) -> grpc.RpcError | None:
        """Reads until the stream ends: with which error."""
        first = True  # piece of a record
        try:
            for message in self.call:
                if message.HasField("hello"):
                    self.hello = message.hello
                if message.HasField("beat"):
                    (self.in_sync.set if message.beat.in_sync else self.in_sync.clear)()
                    self.beat()
                if not message.HasField("record"):
                    continue
                if first:
                    header = _HEADER.unpack_from(message.frame)
                first = message.record.last
                if message.record.last:
                    self.records += 1
                    self._take(message.record.job, header)
        except grpc.RpcError as error:
            return error
        return None

    def _take(self, job: int, header: tuple) -> None:
        if not self._takes:
            return
        kind, bucket, number = header
        version = number + 1 if kind == _UPDATE else number
        taken = self._rpc.replication.Taken(job=job, bucket=bucket, version=version)
        self._requests.put(self._rpc.replication.FollowRequest(taken=[taken]))

    def follow_beside(self) -> threading.Thread:
        thread = threading.Thread(target=self.follow, daemon=True)
        thread.start()
        return thread

    def end(self) -> None:
        self._requests.put(None)
        self.call.cancel()
