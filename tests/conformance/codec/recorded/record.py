"""Records which elements the quickstart's workers send: what tagc_recorded_test replays.

    python tests/conformance/codec/recorded/record.py [steps | gradients]...

Trains the quickstart's model as `deploy/quickstart --fast` does where steps are pushed, and as it does without where
gradients are (2 workers, TAGC with as many bits as cells of 8 hold: all that is chosen is sent), but through one tcp://
server behind a proxy that reads the index of every push frame: with one shard, positions count through the matrices from
the last to the first (common/job/layout.h). It writes, per round and worker, the ascending positions as Rice-coded gaps (proto/WIRE.md,
"Index codes"):

    u32 tensors, then u32 elements of each; u32 records, then per record u32 round, u32 worker, u32 bytes, the bytes.
"""

from __future__ import annotations

import itertools
import json
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path

HERE = Path(__file__).resolve().parent
EXAMPLE = HERE.parents[3] / "client/examples/gpt"
sys.path.insert(0, str(EXAMPLE))

import quickstart
from model import Gpt, GptConfig
from worker import WorkerSettings

PREFACE, PREFACE_BYTES = struct.pack("<8sHH", b"GWIRETCP", 2, 2), 16  # proto/TCP.md: an end that speaks version 2
PACKET_BYTES, MESSAGE = 20, 4  # of that version
CHUNK_BYTES, CHUNK = 64, struct.pack("<IB", 0x31465747, 1)  # proto/WIRE.md: its magic and version
SEGMENT_BYTES, INDEX, LIST = 24, 6, 20
KNOWN = {1, 4, 5, INDEX, 7, LIST}  # in such pushes are learning rates, small tensors, ranges and cells, too


@dataclass(frozen=True)
class Recording:
    """What is trained, and which of its rounds are kept."""

    run: quickstart.Run
    steps: int  # of the whole run; what lies behind the last of `rounds` is not trained
    rounds: tuple[int, ...]


CODEC = "tagc:density=0.01,cells=8,warmup_rounds=40,warmup_density=0.05"
# Rates are the best that the sweep had found when these were recorded. Round 1 has the highest density; later ones have
# the one that stays, where one shard's part of it changes a lot.
RECORDINGS = {
    "steps": Recording(replace(quickstart.TAGC, codec=CODEC, lr=0.003, betas=(0.9, 0.99)), 120, (1, *range(54, 64))),
    "gradients": Recording(replace(quickstart.TAGC_GRADIENT, codec=CODEC, lr=0.002, betas=(0.9, 0.95)), 400,
                           (1, *range(249, 258))),
}


def bits_of(data: bytes) -> str:
    """The bit stream of an index, the first bit first."""
    return "".join(f"{byte:08b}"[::-1] for byte in data)


def decode_index(coding: int, payload: bytes, begin: int, count: int) -> list[int]:
    """Positions of an index ("Index codes" of proto/WIRE.md)."""
    if coding == 0:
        return []
    if coding == 1:
        return list(range(begin, begin + count))
    if coding == 2:
        return [begin + i for i, bit in enumerate(bits_of(payload)) if bit == "1"]
    if coding in (4, 5):
        width = "H" if coding == 4 and count <= 1 << 16 else "I"
        return [begin + p for p in struct.unpack(f"<{len(payload) // struct.calcsize(width)}{width}", payload)]
    if coding not in (3, 6):
        raise ValueError(f"unknown index coding {coding}")
    stretches = coding == 6
    n, k = struct.unpack_from("<IB", payload)
    width, least = struct.unpack_from("<BI", payload, 5) if stretches else (0, 1)
    bits, at, next_position, positions = bits_of(payload[10 if stretches else 5 :]), 0, begin, []

    def take(count: int) -> int:
        nonlocal at
        at += count
        return int(bits[at - count : at][::-1] or "0", 2)

    for _ in range(n):
        one = bits.index("1", at)
        quotient, at = one - at, one + 1
        first = next_position + (quotient << k | take(k))
        last = first + least + take(width)
        positions += range(first, last)
        next_position = last + 1 if stretches else last
    return positions


def decode_number(data: bytes) -> tuple[int, int]:
    """A number at the beginning of data ("Coded integers" of proto/WIRE.md), and its bytes."""
    value = 0
    for at, byte in enumerate(data[:5]):
        value |= (byte & 127) << (7 * at)
        if byte < 128:
            return value, at + 1
    raise ValueError("a number has no end")


def encode_rice(positions: list[int], k: int) -> bytes:
    """Gaps, from position 0 on, as index coding 3."""
    bits, previous = [], -1
    for position in positions:
        gap = position - previous - 1
        bits.append("0" * (gap >> k) + "1" + (f"{gap & ((1 << k) - 1):0{k}b}"[::-1] if k else ""))
        previous = position
    stream = "".join(bits)
    stream += "0" * (-len(stream) % 8)
    packed = bytes(int(stream[i : i + 8][::-1], 2) for i in range(0, len(stream), 8))
    return struct.pack("<IB", len(positions), k) + packed


class Proxy:
    """Passes connections on to a tcp:// server, and keeps the positions of push frames."""

    def __init__(self, server: tuple[str, int], rounds: tuple[int, ...]) -> None:
        self._server = server
        self._rounds = rounds
        self.positions: dict[tuple[int, int], list[int]] = defaultdict(list)  # by round and incarnation
        self.error = ""  # what was not understood, and is missing above
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            client, _ = self._listener.accept()
            server = socket.create_connection(self._server)
            threading.Thread(target=self._pump, args=(client, server, Pushes(self)), daemon=True).start()
            threading.Thread(target=self._pump, args=(server, client, None), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, pushes: Pushes | None) -> None:
        try:
            while data := source.recv(1 << 20):
                target.sendall(data)
                if pushes:
                    pushes.take(data)
        except OSError:
            pass
        except (ValueError, struct.error) as error:
            self.error = self.error or str(error)
        for end in (source, target):
            end.close()

    def add(self, round_: int, incarnation: int, positions: list[int]) -> None:
        if round_ in self._rounds:
            self.positions[round_, incarnation] += positions


class Pushes:
    """What a client sends on one connection. ValueError where it is not what proto/TCP.md and proto/WIRE.md say."""

    def __init__(self, proxy: Proxy) -> None:
        self._proxy = proxy
        self._begun = False  # the preface was seen
        self._buffer = b""

    def take(self, data: bytes) -> None:
        self._buffer += data
        if not self._begun and len(self._buffer) >= PREFACE_BYTES:
            expect(self._buffer, PREFACE, "a connection begins")
            self._buffer, self._begun = self._buffer[PREFACE_BYTES:], True
        while self._begun and len(self._buffer) >= PACKET_BYTES:
            kind, code, reserved, control, body = struct.unpack_from("<BBHII", self._buffer)
            if not 1 <= kind <= 7 or code or reserved:
                raise ValueError(f"a packet of type {kind} and code {code}: is its header still {PACKET_BYTES} bytes?")
            end = PACKET_BYTES + control + body
            if len(self._buffer) < end:
                break
            if kind == MESSAGE and body:
                self._chunk(self._buffer[end - body : end])
            self._buffer = self._buffer[end:]

    def _chunk(self, chunk: bytes) -> None:
        expect(chunk, CHUNK, "a chunk begins")
        kind, segments, round_, incarnation = struct.unpack_from("<5xB8xHQ16xQ", chunk)
        at = CHUNK_BYTES
        for _ in range(segments if kind == 1 else 0):
            type_, param, size, begin, count = struct.unpack_from("<BB2xIQI", chunk, at)
            payload = chunk[at + SEGMENT_BYTES : at + SEGMENT_BYTES + size]
            if type_ not in KNOWN:
                raise ValueError(f"a segment of type {type_}")
            if type_ == LIST:
                param &= 7  # above are the bits of its integers
                if param:
                    length, first = decode_number(payload)
                    payload = payload[first : first + length]
            if type_ in (INDEX, LIST):
                self._proxy.add(round_, incarnation, decode_index(param, payload, begin, count))
            at += SEGMENT_BYTES + (size + 7) // 8 * 8
        if kind == 1 and at != len(chunk):
            raise ValueError(f"the segments of a chunk of {len(chunk)} bytes end at {at}")


def expect(data: bytes, wanted: bytes, what: str) -> None:
    if not data.startswith(wanted):
        raise ValueError(f"{what} with {data[:len(wanted)].hex(' ')}, and should with {wanted.hex(' ')}")


def train(recording: Recording, proxy: Proxy) -> None:
    """The workers of the quickstart, for the first of its steps."""
    run = recording.run
    with ExitStack() as stack:
        processes = []
        for worker in range(quickstart.WORKERS):
            settings = WorkerSettings(
                servers=[f"tcp://127.0.0.1:{proxy.port}"], job="gpt", worker=worker, workers=quickstart.WORKERS, seed=1,
                steps=max(recording.rounds) + 1, sequences=8, lr=run.lr,
                warmup_steps=round(recording.steps * run.warmup_fraction), clip_norm=run.clip_norm, push=run.push,
                optimizer=run.optimizer, codec=run.codec, update_codec="", residual_decay=run.residual_decay,
                betas=run.betas, weight_decay=run.weight_decay, evaluations=1, backend="auto")
            process = subprocess.Popen([sys.executable, str(EXAMPLE / "worker.py"), json.dumps(asdict(settings))])
            stack.callback(quickstart.stop, process)
            processes.append(process)
        while any(process.poll() is None for process in processes):
            if proxy.error:
                raise SystemExit(f"error: this reads another format than workers write: {proxy.error}")
            threading.Event().wait(0.05)
        if any(process.returncode != 0 for process in processes):
            raise SystemExit("error: a worker failed")


def record(recording: Recording, out: Path) -> None:
    sizes = [p.numel() for p in reversed(list(Gpt(GptConfig(), 1).parameters())) if p.ndim >= 2]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gradwire-")))
        log, address = stack.enter_context(open(folder / "log", "w")), folder / "address"
        server = subprocess.Popen([quickstart.binary("gradwire-server"), "--listen", "tcp://127.0.0.1:0",
                                   "--port-file", str(address)], stdout=log, stderr=log)
        stack.callback(quickstart.stop, server)
        while not (address.exists() and address.read_text().strip()):
            if server.poll() is not None:
                raise SystemExit("error: the shard server did not start")
            threading.Event().wait(0.05)
        proxy = Proxy(("127.0.0.1", int(address.read_text().strip().rsplit(":", 1)[1])), recording.rounds)
        train(recording, proxy)
    workers = sorted({incarnation for _, incarnation in proxy.positions})
    wanted = set(itertools.product(recording.rounds, workers))
    if proxy.positions.keys() != wanted or len(workers) != quickstart.WORKERS:
        raise SystemExit(f"error: rounds are missing; there are {sorted(proxy.positions)} (round, incarnation)")
    records = []
    for (round_, incarnation), sent in sorted(proxy.positions.items()):
        data = encode_rice(sorted(set(sent)), 4 if round_ < 20 else 6)
        records.append(struct.pack("<III", round_, workers.index(incarnation), len(data)) + data)
    head = struct.pack(f"<{len(sizes) + 1}I", len(sizes), *sizes)
    out.write_bytes(head + struct.pack("<I", len(records)) + b"".join(records))
    print(f"{out}: {len(records)} records, {out.stat().st_size} bytes")


def main() -> None:
    for name in sys.argv[1:] or RECORDINGS:
        record(RECORDINGS[name], HERE / f"{name}.bin")


if __name__ == "__main__":
    main()
