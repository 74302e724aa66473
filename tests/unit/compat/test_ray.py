from __future__ import annotations

import logging

import pytest
import ray
import ray._private.node
import ray._private.services
import ray._private.worker

from hybrid_rl.compat import ray as private

CALLED = ("canonicalize", "_raylet.", "authentication.")  # the others are replaced for a while
PATCHED = [name for name in private.NAMES if "(" not in name and not any(part in name for part in CALLED)]


def holder(name: str) -> tuple[object, str]:
    """What a dotted name is an attribute of, and its last part."""
    owner, _, last = name.rpartition(".")
    return ray._private.node.Node if owner.endswith("Node") else getattr(ray._private, owner.rpartition(".")[2]), last


def test_every_patch_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the start fails. Inside, none of the names is Ray's own, and a loopback address stays what it is."""
    before = [getattr(*holder(name)) for name in PATCHED]

    def init(address: str, **arguments: object) -> None:
        assert (address, arguments) == (
            "local",
            {"_node_ip_address": "127.0.0.1", "_temp_dir": "folder", "num_cpus": 2},
        )
        assert not [name for name, own in zip(PATCHED, before, strict=True) if getattr(*holder(name)) is own]
        assert ray._private.services.resolve_ip_for_localhost("127.0.0.1") == "127.0.0.1"
        assert logging.getLogger("ray").level == logging.ERROR
        raise KeyError

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(KeyError), private.quiet():
        private.start_cluster("127.0.0.1", "folder", num_cpus=2)
    assert [getattr(*holder(name)) for name in PATCHED] == before


def test_an_address_other_than_auto_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray._private.services, "canonicalize_bootstrap_address", lambda address: "10.0.0.1:6379")
    assert private.found_cluster("ray://a:1") == "ray://a:1" and private.found_cluster("auto") == "10.0.0.1:6379"


def test_each_token_is_new() -> None:
    tokens = {private.own_token()["RAY_AUTH_TOKEN"] for _ in range(3)}
    assert len(tokens) == 3 and {len(token) for token in tokens} == {64}
