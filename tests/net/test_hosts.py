"""The namespaces are what the benchmark of networks takes them for: apart, connected, and as slow as asked."""

import json
import subprocess
import sys
import textwrap

import pytest

from hosts import INTERFACE, Hosts, why_not

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))


def output(hosts, host, *command):
    process = hosts.popen(host, command, stdout=subprocess.PIPE, text=True)
    text, _ = process.communicate(timeout=60)
    assert process.returncode == 0, command
    return text


def test_hosts_reach_each_other_and_have_nothing_else():
    with Hosts(["a", "b"]) as hosts:
        listener = hosts.popen("b", [sys.executable, "-c", textwrap.dedent(f"""
            import socket
            with socket.create_server(("{hosts.address("b")}", 7000)) as server:
                print("listening", flush=True)
                server.accept()[0].sendall(b"hello")
            """)], stdout=subprocess.PIPE, text=True)
        assert listener.stdout.readline() == "listening\n"
        heard = output(hosts, "a", sys.executable, "-c", textwrap.dedent(f"""
            import socket
            print(socket.create_connection(("{hosts.address("b")}", 7000)).recv(9).decode())
            """))
        assert heard == "hello\n"
        assert listener.wait(timeout=60) == 0
        links = json.loads(output(hosts, "a", "ip", "-json", "link"))
        assert {link["ifname"] for link in links} == {"lo", INTERFACE}


def test_either_direction_of_a_link_has_its_token_bucket():
    with Hosts(["a"], rate_bit_s=8e6) as hosts:
        for namespace, device in ((hosts._namespace("a"), INTERFACE), (hosts._hub, "port0")):
            shown = subprocess.run(["tc", "-n", namespace, "-json", "qdisc", "show", "dev", device], check=True,
                                   capture_output=True, text=True)
            (bucket,) = json.loads(shown.stdout)
            assert bucket["kind"] == "tbf" and bucket["options"]["rate"] == 1_000_000  # bytes


def test_nothing_is_left_behind():
    with Hosts(["a", "b"], rate_bit_s=1e9) as hosts:
        names = [hosts._hub, hosts._namespace("a"), hosts._namespace("b")]
        there = subprocess.run(["ip", "netns", "list"], check=True, capture_output=True, text=True).stdout
        assert all(name in there for name in names)
    after = subprocess.run(["ip", "netns", "list"], check=True, capture_output=True, text=True).stdout
    assert not any(name in after for name in names)
