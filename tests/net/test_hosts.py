"""The namespaces are what the benchmarks take them for: apart, connected, as slow as asked, and counted."""

import json
import os
import subprocess
import sys

import pytest

from hosts import INTERFACE, Hosts, why_not

WHY_NOT = why_not()
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))


def output(hosts, host, *command):
    process = hosts.popen(host, command, stdout=subprocess.PIPE, text=True)
    text, _ = process.communicate(timeout=60)
    assert process.returncode == 0, command
    return text


# `told` is what each end of a connection prints, of its socket `end`.
SERVE = """
import socket
with socket.create_server(("{address}", 7000)) as server:
    print("listening", flush=True)
    end = server.accept()[0]
    {told}
"""
DIAL = """
import socket
with socket.create_connection(("{address}", 7000)) as end:
    {told}
"""
CONGESTION = 'print(end.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(bytes(1)).decode())'


def connect(hosts, of_server, of_client):
    """Connects host a to host b; what the server's end printed, and what the client's."""
    address = hosts.address("b")
    server = hosts.popen("b", [sys.executable, "-c", SERVE.format(address=address, told=of_server)],
                         stdout=subprocess.PIPE, text=True)
    assert server.stdout.readline() == "listening\n"
    dialled = output(hosts, "a", sys.executable, "-c", DIAL.format(address=address, told=of_client))
    served, _ = server.communicate(timeout=60)
    assert server.returncode == 0
    return served, dialled


def test_hosts_reach_each_other_and_have_nothing_else():
    with Hosts({"a": None, "b": None}) as hosts:
        assert connect(hosts, 'end.sendall(b"hello")', "print(end.recv(9).decode())") == ("", "hello\n")
        links = json.loads(output(hosts, "a", "ip", "-json", "link"))
        assert {link["ifname"] for link in links} == {"lo", INTERFACE}


def test_either_direction_of_a_link_has_its_token_bucket():
    rates_bit_s = {"a": 8e6, "b": None, "c": 16e6}
    with Hosts(rates_bit_s) as hosts:
        for host, rate_bit_s in rates_bit_s.items():
            for namespace, device in ((hosts._namespace(host), INTERFACE), (hosts._hub, hosts._port(host))):
                shown = subprocess.run(["tc", "-n", namespace, "-json", "qdisc", "show", "dev", device], check=True,
                                       capture_output=True, text=True)
                rates = [q["options"]["rate"] for q in json.loads(shown.stdout) if q["kind"] == "tbf"]  # bytes
                assert rates == ([] if rate_bit_s is None else [rate_bit_s / 8])


def test_what_a_link_brings_is_counted():
    sent = 4 << 20
    with Hosts({"a": None, "b": 400e6}) as hosts:
        before = hosts.delivered_bytes_of_all()
        assert connect(hosts, "while end.recv(1 << 20): pass", f"end.sendall(bytes({sent}))") == ("", "")
        brought = {host: hosts.delivered_bytes(host) - before[host] for host in before}
        assert sent <= brought["b"] <= 1.1 * sent
        assert brought["a"] < 0.1 * sent  # acknowledgements


@pytest.mark.parametrize("control", ["reno", "cubic"])
def test_hosts_have_the_congestion_control_asked_for(control):
    with Hosts({"a": None, "b": None}, congestion=control) as hosts:
        assert connect(hosts, CONGESTION, CONGESTION) == (f"{control}\n", f"{control}\n")


def namespaces():
    return subprocess.run(["ip", "netns", "list"], check=True, capture_output=True, text=True).stdout


def test_nothing_is_left_behind():
    with Hosts({"a": 1e9, "b": 1e9}) as hosts:
        names = [hosts._hub, hosts._namespace("a"), hosts._namespace("b")]
        assert all(name in namespaces() for name in names)
        process = hosts.popen("a", ["sleep", "600"])
    assert not any(name in namespaces() for name in names)
    assert process.returncode is not None


def test_hosts_that_cannot_be_made_say_why(tmp_path, monkeypatch):
    tc = tmp_path / "tc"
    tc.write_text("#!/bin/sh\necho there is no tbf >&2\nexit 1\n")
    tc.chmod(0o755)
    before = namespaces()
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert "there is no tbf" in why_not()
    assert namespaces() == before
