"""vLLM's private names. Tried with vLLM 0.25.1 and 0.32.0; vLLM itself is imported when a function is called."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

# Each private name that this file uses, and why there is no public way.
NAMES = {
    "vllm.distributed.parallel_state._WORLD": "vLLM's own call that drops its world group ends torch.distributed",
    "vllm.distributed.parallel_state._NODE_COUNT": "is counted again only when it is None",
    "vllm.cumem_allocator.error_code": "is cleared only by calls that raise it, and fails every allocation until then",
    "vllm.v1.engine.core_client.InprocClient._finalizer": "would end torch.distributed when the client is collected",
}


def drop_world() -> None:
    """Destroy vLLM's group of all ranks, and let the next engine make another one; torch.distributed stays."""
    from vllm.distributed import parallel_state

    world = parallel_state._WORLD
    parallel_state._WORLD = parallel_state._NODE_COUNT = None
    if world is not None:
        world.destroy()


def has_finalizer(client: Any) -> bool:
    """Return whether something happens when this client of an engine is collected, as since vLLM 0.32."""
    return hasattr(client, "_finalizer")


def detach_finalizer(client: Any) -> None:
    """Let nothing happen when this client of an engine is collected."""
    client._finalizer.detach()


def clear_allocator_error() -> None:
    """Clear the error of an allocation or a free that failed: vLLM's allocator for CUDA keeps it, and answers every
    later allocation with it. Does nothing where that allocator has not been loaded."""
    extension = sys.modules.get("vllm.cumem_allocator")
    if extension is not None:
        ctypes.c_int.in_dll(ctypes.CDLL(extension.__file__), "error_code").value = 0
