"""Records which elements the quickstart's workers send: what tagc_recorded_test replays.

    python tests/conformance/codec/recorded/record.py

Trains the quickstart's model as `deploy/quickstart --fast` does (2 workers, TAGC at its defaults, pushing steps), but
through one tcp:// server behind a proxy that reads the index of every push frame: with one shard, positions count
through the matrices from the last to the first (common/job/layout.h). It writes, per round and worker, the ascending
positions as Rice-coded gaps (proto/WIRE.md, "Index codes"):

    u32 tensors, then u32 elements of each; u32 records, then per record u32 round, u32 worker, u32 bytes, the bytes.
"""

from __future__ import annotations

import json
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

HERE = Path(__file__).resolve().parent
EXAMPLE = HERE.parents[3] / "client/examples/gpt"
sys.path.insert(0, str(EXAMPLE))

import quickstart
from model import Gpt, GptConfig
from worker import WorkerSettings

ROUNDS = (1, *range(54, 64))  # the highest density; the one that stays, where one shard's part of it changes a lot
STEPS = 120  # of --fast, and the best there when this was recorded:
LR, BETAS = 0.003, (0.9, 0.99)
PACKET_BYTES, MESSAGE = 16, 4  # proto/TCP.md
CHUNK_BYTES, SEGMENT_BYTES, INDEX, LISTED = 64, 24, 6, 18  # proto/WIRE.md


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
    n, k = struct.unpack_from("<IB", payload)
    bits, at, position, positions = bits_of(payload[5:]), 0, begin - 1, []
    for _ in range(n):
        one = bits.index("1", at)
        low = bits[one + 1 : one + 1 + k][::-1]
        position += ((one - at) << k | int(low or "0", 2)) + 1
        positions.append(position)
        at = one + 1 + k
    return positions


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

    def __init__(self, server: tuple[str, int]) -> None:
        self._server = server
        self.positions: dict[tuple[int, int], list[int]] = defaultdict(list)  # by round and incarnation
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            client, _ = self._listener.accept()
            server = socket.create_connection(self._server)
            threading.Thread(target=self._pump, args=(client, server, True), daemon=True).start()
            threading.Thread(target=self._pump, args=(server, client, False), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, pushes: bool) -> None:
        buffer, preface = b"", PACKET_BYTES  # a client's first bytes, as long as a packet's header
        try:
            while data := source.recv(1 << 20):
                target.sendall(data)
                if pushes:
                    buffer += data
                    if len(buffer) >= preface:
                        buffer, preface = self._packets(buffer[preface:]), 0
        except OSError:
            pass
        for end in (source, target):
            end.close()

    def _packets(self, buffer: bytes) -> bytes:
        """Reads whole packets; returns what is left."""
        while len(buffer) >= PACKET_BYTES:
            kind, control, body = struct.unpack_from("<B3xII", buffer)
            end = PACKET_BYTES + control + body
            if len(buffer) < end:
                break
            if kind == MESSAGE and body:
                self._chunk(buffer[end - body : end])
            buffer = buffer[end:]
        return buffer

    def _chunk(self, chunk: bytes) -> None:
        kind, segments, round_, incarnation = struct.unpack_from("<5xB8xHQ16xQ", chunk)
        at = CHUNK_BYTES
        for _ in range(segments if kind == 1 else 0):
            type_, param, size, begin, count = struct.unpack_from("<BB2xIQI", chunk, at)
            payload = chunk[at + SEGMENT_BYTES : at + SEGMENT_BYTES + size]
            if type_ == LISTED and payload:
                payload = payload[4 : 4 + struct.unpack_from("<I", payload)[0]]
            if type_ in (INDEX, LISTED) and round_ in ROUNDS:
                self.positions[round_, incarnation] += decode_index(param, payload, begin, count)
            at += SEGMENT_BYTES + (size + 7) // 8 * 8


def train(proxy_port: int, steps: int) -> None:
    """The workers of `deploy/quickstart --fast`, for the first of its steps."""
    run = quickstart.TAGC
    with ExitStack() as stack:
        processes = []
        for worker in range(quickstart.WORKERS):
            settings = WorkerSettings(
                servers=[f"tcp://127.0.0.1:{proxy_port}"], job="gpt", worker=worker, workers=quickstart.WORKERS, seed=1,
                steps=steps, sequences=8, lr=LR,
                warmup_steps=round(STEPS * run.warmup_fraction), clip_norm=run.clip_norm, push=run.push,
                optimizer=run.optimizer, codec=run.codec, update_codec="", residual_decay=run.residual_decay,
                betas=BETAS, weight_decay=run.weight_decay, evaluations=1, backend="auto")
            process = subprocess.Popen([sys.executable, str(EXAMPLE / "worker.py"), json.dumps(asdict(settings))])
            stack.callback(quickstart.stop, process)
            processes.append(process)
        if any(process.wait() != 0 for process in processes):
            raise SystemExit("error: a worker failed")


def main() -> None:
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "steps.bin"
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
        proxy = Proxy(("127.0.0.1", int(address.read_text().strip().rsplit(":", 1)[1])))
        train(proxy.port, max(ROUNDS) + 1)
    workers = sorted({incarnation for _, incarnation in proxy.positions})
    records = []
    for (round_, incarnation), sent in sorted(proxy.positions.items()):
        data = encode_rice(sorted(set(sent)), 4 if round_ < 20 else 6)
        records.append(struct.pack("<III", round_, workers.index(incarnation), len(data)) + data)
    head = struct.pack(f"<{len(sizes) + 1}I", len(sizes), *sizes)
    out.write_bytes(head + struct.pack("<I", len(records)) + b"".join(records))
    print(f"{out}: {len(records)} records, {out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
