"""The network interface at which ranks meet."""

from __future__ import annotations

import os
import socket
from collections import namedtuple

import psutil
import pytest

from hybrid_rl.controller.ranks import interface_of, use_interface

Address = namedtuple("Address", ("family", "address"))
INTERFACES = {
    "lo": [Address(socket.AF_INET, "127.0.0.1"), Address(socket.AF_INET6, "::1")],
    "eth1": [Address(psutil.AF_LINK, "02:fc:00:00:00:01"), Address(socket.AF_INET, "10.0.0.1")],
    "eth10": [Address(socket.AF_INET, "10.0.0.10"), Address(socket.AF_INET6, "fd00::2")],
}


@pytest.fixture(autouse=True)
def interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: INTERFACES)
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("address", "name"),
    [
        ("10.0.0.1", "eth1"),
        ("10.0.0.10", "eth10"),
        ("fd00:0::2", "eth10"),
        ("127.0.0.1", "lo"),
        ("127.0.0.3", "lo"),  # a second node of a test on one machine
        ("::1", "lo"),
        ("10.0.0.2", ""),  # of a router in front of it
        ("of.nobody.invalid", ""),
    ],
)
def test_the_interface_that_has_an_address(address: str, name: str) -> None:
    assert interface_of(address) == name


def test_ranks_listen_there_unless_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL would take every interface whose name begins so."""
    use_interface("10.0.0.1")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth1" and os.environ["NCCL_SOCKET_IFNAME"] == "=eth1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "mine")
    use_interface("10.0.0.10")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "mine" and os.environ["NCCL_SOCKET_IFNAME"] == "=eth1"
