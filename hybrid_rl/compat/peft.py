"""peft's names outside its public interface. Tried with peft 0.21.2."""

from __future__ import annotations

from typing import Any

# Each name that is private, or in a module that peft does not document, and why there is no public way.
NAMES = {
    "peft.tuners.lora.layer.ParamWrapper": "the wrapper of a parameter instead of a layer",
    "peft.tuners.lora.layer.ParamWrapper._did_swap_in_out_features": "whether fused experts are [experts, out, in]",
    "peft.utils.other.ModulesToSaveWrapper": "the wrapper of a module that is trained whole",
}


def is_swapped(wrapper: Any) -> bool:
    """Return whether the experts that a ParamWrapper adapts are stored as [experts, out, in]."""
    return bool(wrapper._did_swap_in_out_features)
