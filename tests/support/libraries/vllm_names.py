"""Names of vLLM that tests need; those that the library needs are in `compat/vllm.py`. vLLM is imported where it is
used, which takes ten seconds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest


def inspect_here(patch: pytest.MonkeyPatch | None = None) -> None:
    """Have vLLM look at the classes of models in this process: it starts another one for that. patch: takes it back."""
    from vllm.model_executor.models import registry

    if patch is None:
        registry._run_in_subprocess = lambda function: function()
    else:
        patch.setattr(registry, "_run_in_subprocess", lambda function: function())


def without_finalizer(client: Any) -> None:
    """Give a client that was never made what its end looks at."""
    client._finalizer = None


def can_reach(source: int, num_devices: int) -> bool:
    """Whether this GPU reaches the memory of all others, as vLLM has found out."""
    from vllm.distributed.device_communicators import custom_all_reduce

    is_reached: bool = custom_all_reduce._can_p2p(source, num_devices)
    return is_reached
