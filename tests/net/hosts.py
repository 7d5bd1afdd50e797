"""Hosts as network namespaces: a bridge, and for each host a link whose rate a token bucket limits in either direction.

    with Hosts({"worker-0": None, "shard-0": 100e6}) as hosts:
        hosts.popen("worker-0", ["ping", "-c1", hosts.address("shard-0")]).wait()

Needs root, `ip` and `tc`. Everything is in namespaces of its own: the machine's own interfaces stay as they are.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

INTERFACE = "eth0"  # of a host
_NETWORK = "10.77.0"
_MTU_BYTES = 1500
_LEAST_BURST_BYTES = 8 << 10  # some packets; larger pieces the kernel cuts. What a quiet link saves up must not matter
_BURST_SECONDS = 0.004  # a timer tick, in which the bucket must not run over
_QUEUE = "50ms"  # of packets that wait at the bucket; later ones are dropped
_START_SECONDS = 30  # for a shard server
_serial = itertools.count()


def why_not() -> str | None:
    """Why there can be no such hosts on this machine; None: there can. Makes one and takes it away."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"there is no {tool}: deploy/bootstrap --chaos installs it"
    try:
        with Hosts({"probe": 1e9}):
            return None
    except RuntimeError as error:
        return str(error)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


class Hosts:
    """The namespaces of some hosts, and the processes started in them, which end with them. Not thread-safe."""

    def __init__(self, rates_bit_s: Mapping[str, float | None], congestion: str = ""):
        """rates_bit_s: of each host's link, each way; None: as fast as the machine is. congestion: the control of TCP
        on all hosts, such as "cubic"; empty: the system's.
        """
        self._rates_bit_s = dict(rates_bit_s)
        self._index = {host: i for i, host in enumerate(self._rates_bit_s)}
        self._congestion = congestion
        self._prefix = f"gw-{os.getpid()}-{next(_serial)}"
        self._hub = f"{self._prefix}-hub"
        self._processes: list[subprocess.Popen] = []

    def _namespace(self, host: str) -> str:
        return f"{self._prefix}-{self._index[host]}"

    def _port(self, host: str) -> str:
        """The hub's end of a host's link."""
        return f"port{self._index[host]}"

    def address(self, host: str) -> str:
        return f"{_NETWORK}.{self._index[host] + 1}"

    def __enter__(self) -> Hosts:
        """RuntimeError where a command fails, with what it said."""
        try:
            self._make()
        except BaseException:
            self._unmake()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        self._unmake()

    def _make(self) -> None:
        _run("ip", "netns", "add", self._hub)
        _run("ip", "-n", self._hub, "link", "add", "hub", "type", "bridge")
        _run("ip", "-n", self._hub, "link", "set", "hub", "up")
        for host, rate_bit_s in self._rates_bit_s.items():
            self._make_host(host)
            if rate_bit_s is not None:
                self._limit(host, rate_bit_s)

    def _make_host(self, host: str) -> None:
        namespace, port = self._namespace(host), self._port(host)
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

    def _limit(self, host: str, rate_bit_s: float) -> None:
        burst = max(_LEAST_BURST_BYTES, int(rate_bit_s / 8 * _BURST_SECONDS))
        for where, device in ((self._namespace(host), INTERFACE), (self._hub, self._port(host))):
            _run("tc", "-n", where, "qdisc", "add", "dev", device, "root", "tbf", "rate", f"{rate_bit_s:.0f}bit",
                 "burst", str(burst), "latency", _QUEUE)

    def _unmake(self) -> None:
        for namespace in [self._hub, *map(self._namespace, self._index)]:
            with contextlib.suppress(RuntimeError):
                _run("ip", "netns", "delete", namespace)

    def popen(self, host: str, command: Sequence[str | os.PathLike[str]], **options: Any) -> subprocess.Popen:
        """Starts a program on a host; `options` are those of subprocess.Popen. It is killed if the hosts end first."""
        process = subprocess.Popen(["ip", "netns", "exec", self._namespace(host), *command], **options)
        self._processes.append(process)
        return process

    def delivered_bytes(self, host: str) -> int:
        """What the link has brought to a host so far: counted behind the token bucket, with headers."""
        return self._sent_by_ports("show", "dev", self._port(host))[self._port(host)]

    def delivered_bytes_of_all(self) -> dict[str, int]:
        """The same of every host, for the price of one process, some milliseconds."""
        sent = self._sent_by_ports("show")
        return {host: sent[self._port(host)] for host in self._index}

    def _sent_by_ports(self, *shown: str) -> dict[str, int]:
        links = json.loads(_run("ip", "-n", self._hub, "-statistics", "-json", "link", *shown))
        return {link["ifname"]: link["stats64"]["tx"]["bytes"] for link in links}


def start_shard(hosts: Hosts, host: str, address: str, folder: Path) -> subprocess.Popen:
    """A shard server of the build in GRADWIRE_BIN, once it listens at `address`; `folder` takes a file of its own."""
    ready = folder / f"{host}-{address.rpartition(':')[2]}.addresses"  # several may run on a host
    binary = Path(os.environ["GRADWIRE_BIN"]) / "gradwire-server"
    shard = hosts.popen(host, [binary, "--listen", address, "--port-file", ready, "--log-level", "warning"])
    deadline = time.monotonic() + _START_SECONDS
    while not ready.exists():
        if shard.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"{host}: gradwire-server did not come up")
        time.sleep(0.02)
    return shard
