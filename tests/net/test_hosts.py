"""The namespaces are what the benchmark of networks takes them for: apart, connected, and as slow as asked."""

import json
import subprocess
import sys

import pytest

from hosts import INTERFACE, Hosts, why_not

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))


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
    with Hosts(["a", "b"]) as hosts:
        assert connect(hosts, 'end.sendall(b"hello")', "print(end.recv(9).decode())") == ("", "hello\n")
        links = json.loads(output(hosts, "a", "ip", "-json", "link"))
        assert {link["ifname"] for link in links} == {"lo", INTERFACE}


def test_either_direction_of_a_link_has_its_token_bucket():
    with Hosts(["a"], rate_bit_s=8e6) as hosts:
        for namespace, device in ((hosts._namespace("a"), INTERFACE), (hosts._hub, "port0")):
            shown = subprocess.run(["tc", "-n", namespace, "-json", "qdisc", "show", "dev", device], check=True,
                                   capture_output=True, text=True)
            (bucket,) = json.loads(shown.stdout)
            assert bucket["kind"] == "tbf" and bucket["options"]["rate"] == 1_000_000  # bytes


@pytest.mark.parametrize("control", ["reno", "cubic"])
def test_hosts_have_the_congestion_control_asked_for(control):
    with Hosts(["a", "b"], congestion=control) as hosts:
        assert connect(hosts, CONGESTION, CONGESTION) == (f"{control}\n", f"{control}\n")


def test_nothing_is_left_behind():
    with Hosts(["a", "b"], rate_bit_s=1e9) as hosts:
        names = [hosts._hub, hosts._namespace("a"), hosts._namespace("b")]
        there = subprocess.run(["ip", "netns", "list"], check=True, capture_output=True, text=True).stdout
        assert all(name in there for name in names)
    after = subprocess.run(["ip", "netns", "list"], check=True, capture_output=True, text=True).stdout
    assert not any(name in after for name in names)
