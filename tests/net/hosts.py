"""Hosts as network namespaces: a bridge, and for each host a link whose rate a token bucket limits in either direction.

    with Hosts(["worker-0", "shard-0"], rate_bit_s=100e6) as hosts:
        hosts.popen("worker-0", ["ping", "-c1", hosts.address("shard-0")]).wait()

Needs root, `ip` and `tc`. Everything is in namespaces of its own: the machine's own interfaces stay as they are.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from typing import Any

INTERFACE = "eth0"  # of a host
_NETWORK = "10.77.0"
_MTU_BYTES = 1500
_LEAST_BURST_BYTES = 128 << 10  # more than the largest packet that the kernel hands to a link in one piece
_BURST_SECONDS = 0.004  # a timer tick, in which the bucket must not run over
_QUEUE = "50ms"  # of packets that wait at the bucket; later ones are dropped


def why_not() -> str | None:
    """Why there can be no namespaces on this machine; None: there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"there is no {tool} (Debian: iproute2)"
    probe = f"gw-probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    if made.returncode != 0:
        return f"ip netns add: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "delete", probe], check=True)
    return None


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")


class Hosts:
    """The namespaces of some hosts. Not thread-safe; processes that were started in them should have ended at the end."""

    def __init__(self, names: Sequence[str], rate_bit_s: float | None = None, congestion: str = ""):
        """rate_bit_s: of each host's link, each way; None: as fast as the machine is. congestion: the control of TCP on all
        hosts, such as "cubic"; empty: the system's.
        """
        self._names = list(names)
        self._rate_bit_s = rate_bit_s
        self._congestion = congestion
        self._hub = f"gw-{os.getpid()}-hub"

    def _namespace(self, host: str) -> str:
        return f"gw-{os.getpid()}-{self._names.index(host)}"

    def address(self, host: str) -> str:
        return f"{_NETWORK}.{self._names.index(host) + 1}"

    def __enter__(self) -> Hosts:
        reason = why_not()
        if reason is not None:
            raise RuntimeError(reason)
        try:
            self._make()
        except BaseException:
            self._unmake()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._unmake()

    def _make(self) -> None:
        _run("ip", "netns", "add", self._hub)
        _run("ip", "-n", self._hub, "link", "add", "hub", "type", "bridge")
        _run("ip", "-n", self._hub, "link", "set", "hub", "up")
        for i, host in enumerate(self._names):
            namespace, port = self._namespace(host), f"port{i}"
            _run("ip", "netns", "add", namespace)
            _run("ip", "-n", self._hub, "link", "add", port, "mtu", str(_MTU_BYTES), "type", "veth", "peer", "name",
                 INTERFACE, "netns", namespace)
            _run("ip", "-n", self._hub, "link", "set", port, "master", "hub", "up")
            _run("ip", "-n", namespace, "address", "add", f"{self.address(host)}/24", "dev", INTERFACE)
            for device in ("lo", INTERFACE):
                _run("ip", "-n", namespace, "link", "set", device, "up")
            if self._congestion:  # of the route: a namespace may not choose every control as its default
                _run("ip", "-n", namespace, "route", "replace", f"{_NETWORK}.0/24", "dev", INTERFACE, "proto", "kernel",
                     "scope", "link", "src", self.address(host), "congctl", self._congestion)
            if self._rate_bit_s is None:
                continue
            burst = max(_LEAST_BURST_BYTES, int(self._rate_bit_s / 8 * _BURST_SECONDS))
            for where, device in ((namespace, INTERFACE), (self._hub, port)):
                _run("tc", "-n", where, "qdisc", "add", "dev", device, "root", "tbf", "rate", f"{self._rate_bit_s:.0f}bit",
                     "burst", str(burst), "latency", _QUEUE)

    def _unmake(self) -> None:
        for namespace in [self._hub, *map(self._namespace, self._names)]:
            with contextlib.suppress(RuntimeError):
                _run("ip", "netns", "delete", namespace)

    def popen(self, host: str, command: Sequence[str | os.PathLike[str]], **options: Any) -> subprocess.Popen:
        """Starts a program on a host; `options` are those of subprocess.Popen."""
        return subprocess.Popen(["ip", "netns", "exec", self._namespace(host), *command], **options)
