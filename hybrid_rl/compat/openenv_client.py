"""openenv's names outside its public interface. Tried with openenv 0.10.0."""

from __future__ import annotations

from typing import Any

# Each name that is private, or in a module that openenv does not document, and why there is no public way.
NAMES = {
    "openenv.core.env_client.EnvClient._ws": "whether a client has lost its session and connected to another one",
}


def connection_of(client: Any) -> Any:
    """Return the connection of a client, which is its session on the server; None if it tells of none. A client whose
    connection was lost connects again by itself, to a session in which nothing has begun, and goes on without an
    error."""
    return getattr(getattr(client, "async_client", client), "_ws", None)
