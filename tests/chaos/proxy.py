"""The network between one worker and one server: it can be cut, and nothing that was under way arrives."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading

_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing discards what was not sent, and tells the peer


class Proxy:
    """Listens on a port of its own and passes on to `address` (grpc://HOST:PORT). Ends with its process."""

    def __init__(self, address: str):
        host, port = address.removeprefix("grpc://").rsplit(":", 1)
        self._to = (host, int(port))
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._cut = False
        self._listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def address(self) -> str:
        return "grpc://{}:{}".format(*self._listener.getsockname())

    def cut(self) -> None:
        """When it returns nothing more goes through, and connections break."""
        with self._lock:
            self._cut = True
            for end in self._open:
                self._reset(end)

    def mend(self) -> None:
        with self._lock:
            self._cut = False

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
