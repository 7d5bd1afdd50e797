"""The network in front of a server: it can be cut, and nothing that was under way arrives; it can flip bits."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import threading

_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing discards what was not sent, and tells the peer


class Proxy:
    """Listens on a port of its own and passes on to `address` (SCHEME://HOST:PORT). Ends with its process."""

    def __init__(self, address: str):
        self._scheme, rest = address.split("://")
        host, port = rest.rsplit(":", 1)
        self._to = (host, int(port))
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._cut = False
        self._flips: list[random.Random] = []
        self.flipped = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def address(self) -> str:
        return "{}://{}:{}".format(self._scheme, *self._listener.getsockname())

    def cut(self) -> None:
        """When it returns nothing more goes through, and connections break."""
        with self._lock:
            self._cut = True
            for end in self._open:
                self._reset(end)

    def mend(self) -> None:
        with self._lock:
            self._cut = False

    def flip(self, seed: int) -> None:
        """Of what passes next, in either direction, one bit is another one."""
        with self._lock:
            self._flips.append(random.Random(seed))

    def _damaged(self, data: bytes) -> bytes:
        if not self._flips:
            return data
        rng = self._flips.pop()
        bit = rng.randrange(8 * len(data))
        self.flipped += 1
        return data[:bit // 8] + bytes([data[bit // 8] ^ 1 << bit % 8]) + data[bit // 8 + 1:]

    def _accept(self) -> None:
        while True:
            client, _ = self._listener.accept()
            try:
                server = socket.create_connection(self._to, timeout=5)
            except OSError:
                self._reset(client)
                continue
            server.settimeout(None)
            with self._lock:
                if self._cut:
                    self._reset(client)
                    self._reset(server)
                    continue
                self._open |= {client, server}
            for ends in ((client, server), (server, client)):
                threading.Thread(target=self._pump, args=ends, daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                with self._lock:
                    if self._cut:
                        return
                    data = self._damaged(data)
                target.sendall(data)
        with self._lock:
            for end in (source, target):
                if end in self._open:
                    self._open.remove(end)
                    self._reset(end)

    @staticmethod
    def _reset(end: socket.socket) -> None:
        with contextlib.suppress(OSError):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            end.shutdown(socket.SHUT_RDWR)  # wakes whoever reads from it
        end.close()
