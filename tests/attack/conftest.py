"""Fixtures of the attacks: `rpc` (the services, as a stranger has them) and `victim` (a server with an honest job)."""

from __future__ import annotations

import contextlib

import pytest

import victim as victims


def pytest_configure(config) -> None:
    config.addinivalue_line("markers", "ci: runs in continuous integration too, where the whole would take too long")


@pytest.fixture(scope="session")
def rpc(tmp_path_factory):
    return victims.load_stubs(tmp_path_factory.mktemp("stubs"))


@pytest.fixture
def victim(tmp_path):
    """victim(flags, **limits): a server that serves; it ends with the test."""
    with contextlib.ExitStack() as stack:
        yield lambda *flags, **limits: stack.enter_context(victims.Victim(tmp_path, flags, **limits))
