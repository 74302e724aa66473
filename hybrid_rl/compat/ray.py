"""Ray's private names. Tried with Ray 2.60.0.

The patches keep two promises that Ray has no argument for: a cluster that is started for one driver listens on the
loopback interface only, and it is small. All are taken back as soon as `ray.init` returns.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import secrets
import signal
import threading
from collections.abc import Iterator
from typing import Any

import ray._private.node
import ray._private.services
import ray._private.utils
import ray._private.worker
import ray._raylet
import ray.exceptions

TRIED = "2.60.0"
_raylet: Any = ray._raylet
_tokens: Any = None  # early versions have none
with contextlib.suppress(ImportError):
    _tokens = importlib.import_module("ray._private.authentication.authentication_token_setup")
AuthenticationError: type[Exception] = getattr(ray.exceptions, "AuthenticationError", PermissionError)
# Each private name that this file uses, and why there is no public way.
NAMES = {
    "ray._private.services.resolve_ip_for_localhost": (
        "turns 127.0.0.1 into the machine's own address, on which the cluster would then listen. Any other loopback "
        "address (127.0.0.2) is taken as it is, but gcs_server and raylet then listen on every interface; "
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0 counts only if nobody imported ray before"
    ),
    "ray.init(_node_ip_address)": "the only argument for the address on which a cluster listens",
    "ray.init(_temp_dir)": "the variable RAY_TMPDIR would move the files of all that a rank starts, too",
    "ray._private.node.Node.start_monitor": "the autoscaler, 80 MB, listens on 0.0.0.0; no argument leaves it out",
    "ray._private.node.Node.start_log_monitor": "80 MB; runs whatever log_to_driver says",
    "ray._private.node.Node.start_api_server": "100 MB; runs whatever include_dashboard says",
    "ray._private.worker.listen_error_messages": "prints on the console, whatever log_to_driver says",
    "ray._private.utils.set_kill_on_parent_death_linux": (
        "runs last in a process of a cluster, before its program, and so where it can be told to ignore signals; no "
        "argument says so"
    ),
    "ray._private.utils.set_sigterm_handler": (
        "ray.init takes the driver's SIGTERM and ends it with status 15; no argument says that it is the program's"
    ),
    "ray._private.services.canonicalize_bootstrap_address": (
        "which address 'auto' is: ray.init tries for minutes to reach a cluster that is gone"
    ),
    "ray._raylet.AuthenticationTokenLoader.reset_cache": "a process keeps the first token that it has read",
    "ray._raylet.Config.initialize": "a process keeps the RAY_AUTH_MODE that it has read, or that ray.init has set",
    "ray._raylet.GcsClient": "whether a cluster takes our token: ray.init tries for 20 seconds, and prints each time",
    "ray._private.authentication.authentication_token_setup.maybe_enable_token_auth_if_token_available": (
        "sends the token if there is one, as `ray start --head` wants it; ray.init does so for 'auto' only"
    ),
}


def found_cluster(address: str) -> str:
    """Return the "host:port" that ray.init would take for "auto"; other addresses as they are."""
    cluster_address = ray._private.services.canonicalize_bootstrap_address(address) if address == "auto" else None
    return cluster_address or address


def log_in(address: str) -> None:
    """Have this process send Ray's token to the cluster at "host:port", if there is a token and RAY_AUTH_MODE does not
    say otherwise, as `ray start --head` does. A cluster without authentication ignores it.

    Raises AuthenticationError if the cluster does not take it, or wants one and there is none.
    """
    if _tokens is not None:
        _forget_token()
        _tokens.maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
        _raylet.GcsClient(address=address)


def own_token() -> dict[str, str]:
    """Return the variable with which a cluster that is started here gets a token of its own: it must be set until the
    cluster has started. Ray would write one into the home folder, for all clusters of the user, later ones included."""
    _forget_token()
    return {"RAY_AUTH_TOKEN": secrets.token_hex(32)}


def _forget_token() -> None:
    """Have the environment count again: an earlier cluster of this process had its token and mode."""
    if _tokens is not None:
        _raylet.Config.initialize("")
        _raylet.AuthenticationTokenLoader.instance().reset_cache()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Connect inside the block without messages on the console, then and later, since our errors tell how a rank ended,
    and without changing what a SIGTERM does: Ray's libraries put a handler before the program's, which prints where
    the program was and aborts it unless it has ended three seconds later."""
    is_main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM) if is_main else None
    logger = logging.getLogger("ray")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with _replaced(
            (ray._private.worker, "listen_error_messages", _nothing),
            (ray._private.utils, "set_sigterm_handler", _nothing),
        ):
            yield
    finally:
        logger.setLevel(before)
        if handler is not None:
            signal.signal(signal.SIGTERM, handler)


def start_cluster(address: str, folder: str, **arguments: Any) -> None:
    """Start a small cluster in this process and connect to it: no autoscaler, no dashboard, no logs on the console. Its
    processes, ranks included, ignore SIGUSR1 and SIGUSR2, with which schedulers tell a job that its time is over: they
    may come to all processes, and are meant for the driver.

    address: of the loopback interface, which the cluster then listens on, and on no other. folder: for Ray's files;
    Ray opens it to every user. arguments: of ray.init.
    """
    node = ray._private.node.Node
    die_with_parent = ray._private.utils.set_kill_on_parent_death_linux

    def set_up() -> None:
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.SIG_IGN)
        die_with_parent()

    with _replaced(
        (node, "start_monitor", _nothing),
        (node, "start_log_monitor", _nothing),
        (node, "start_api_server", _nothing),
        (ray._private.services, "resolve_ip_for_localhost", lambda host: host),
        (ray._private.utils, "set_kill_on_parent_death_linux", set_up),
    ):
        ray.init(address="local", _node_ip_address=address, _temp_dir=folder, **arguments)


@contextlib.contextmanager
def _replaced(*changes: tuple[Any, str, Any]) -> Iterator[None]:
    """(owner, name, value): these attributes have other values inside the block, if the owner has them at all."""
    known = [(owner, name, getattr(owner, name), value) for owner, name, value in changes if hasattr(owner, name)]
    for owner, name, _, value in known:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, before, _ in known:
            setattr(owner, name, before)


def _nothing(*_: Any, **__: Any) -> None:
    """Do nothing, whatever the arguments."""
