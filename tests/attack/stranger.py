"""A worker of nobody's making: joins a job of its own and sends frames that it made by hand (proto/WIRE.md)."""

from __future__ import annotations

import queue
import re
import struct
import threading

_POLYNOMIAL = 0x82F63B78  # CRC-32C, reflected
_TABLE = []
for _byte in range(256):
    for _ in range(8):
        _byte = _byte >> 1 ^ (_POLYNOMIAL if _byte & 1 else 0)
    _TABLE.append(_byte)

LAST, ABSTAIN = 1, 2
PUSH, INITIALIZE = 1, 2
_MAGIC = 0x31465747
_DENSE_F32 = 2
_SEGMENT_ELEMENTS = 65536
_SEGMENTS_PER_CHUNK = 8


def _extend(state: int, data: bytes) -> int:
    for byte in data:
        state = _TABLE[(state ^ byte) & 0xFF] ^ state >> 8
    return state


def _apply(columns: list[int], state: int) -> int:
    out = 0
    for bit in range(32):
        if state >> bit & 1:
            out ^= columns[bit]
    return out


def _extend_by_zeros(state: int, count: int) -> int:
    """As _extend(state, bytes(count)): a linear map of the state, raised to a power."""
    step = [_extend(1 << bit, b"\0") for bit in range(32)]
    while count:
        if count & 1:
            state = _apply(step, state)
        step = [_apply(step, column) for column in step]
        count >>= 1
    return state


def zeros_segment(begin: int, count: int) -> bytes:
    head = struct.pack("<BBHIQI", _DENSE_F32, 0, 0, 4 * count, begin, count)
    crc = _extend_by_zeros(_extend(0xFFFFFFFF, head), 4 * count) ^ 0xFFFFFFFF
    return head + struct.pack("<I", crc) + bytes(4 * count + 4 * (count % 2))


class Stranger:
    """A member of the job of `spec`, and one stream of pushes. Ends with the channel."""

    def __init__(self, rpc, channel, spec, *, name: str = "stranger", incarnation: int = 7, shards: tuple = (),
                 shard_count: int = 1):
        self.rpc = rpc
        self.stub = rpc.Worker(channel)
        self.identity = rpc.worker.WorkerIdentity(job=spec.name, worker=name, incarnation=incarnation)
        self.spec = spec
        self.shards = shards
        self.shard_count = shard_count
        self.digests: dict[int, int] = {}
        self.acks: queue.Queue = queue.Queue()

    def join(self, timeout: float = 60.0):
        return self.stub.Join(self.rpc.worker.JoinRequest(identity=self.identity, spec=self.spec,
                                                          shard_count=self.shard_count, may_initialize=True,
                                                          shards=self.shards), timeout=timeout)

    def open_push(self, *, reads: bool = True) -> None:
        """`reads`: whether it ever looks at the answers."""
        self._outgoing: queue.Queue = queue.Queue()
        self._outgoing.put(self.rpc.worker.PushMessage(open=self.identity))
        self.pushes = self.stub.Push(iter(self._outgoing.get, None))
        if reads:
            threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        try:
            for ack in self.pushes:
                self.acks.put(ack)
        except Exception as error:  # the stream ended: whoever waits is told
            self.acks.put(error)

    def chunk(self, kind: int, bucket: int, round_: int, flags: int, segments: tuple = (), number: int = 0) -> bytes:
        body = b"".join(segments)
        head = struct.pack("<IBBHIHHQIIIIQIII", _MAGIC, 1, kind, flags, bucket, 0, len(segments), round_, number,
                           self.digests.get(bucket, 0), len(body), 0, self.identity.incarnation, 0, 0, 0)
        return head + struct.pack("<I", _extend(0xFFFFFFFF, head) ^ 0xFFFFFFFF) + body

    def send(self, frame: bytes, pull: tuple = ()) -> None:
        self._outgoing.put(self.rpc.worker.PushMessage(frame=frame, pull=pull))

    def learn_digest(self, bucket: int) -> None:
        """A frame with a wrong one is refused with the right one."""
        self.digests.pop(bucket, None)
        self.send(self.chunk(INITIALIZE, bucket, 0, LAST))
        refused = self.acks.get(timeout=60)
        found = re.search(r"this bucket has 0x([0-9a-f]{8})", getattr(refused, "message", ""))
        assert found, refused
        self.digests[bucket] = int(found[1], 16)

    def upload(self, bucket: int, elements: int, *, unfinished: bool = False) -> None:
        """Initial parameters, all zeros, or all but the last of their chunks."""
        self.learn_digest(bucket)
        in_chunk = _SEGMENT_ELEMENTS * _SEGMENTS_PER_CHUNK
        for number, begin in enumerate(range(0, elements, in_chunk)):
            end = min(elements, begin + in_chunk)
            if end == elements and unfinished:
                return
            segments = tuple(zeros_segment(at, min(_SEGMENT_ELEMENTS, end - at)) for at in range(begin, end, _SEGMENT_ELEMENTS))
            self.send(self.chunk(INITIALIZE, bucket, 0, LAST if end == elements else 0, segments, number))

    def initialize(self, bucket: int, elements: int):
        """The acknowledgement, or the error that ended the stream."""
        self.upload(bucket, elements)
        return self.acks.get(timeout=60)

    def abstain(self, bucket: int, round_: int, pull: tuple = ()) -> None:
        self.send(self.chunk(PUSH, bucket, round_, LAST | ABSTAIN), pull)
