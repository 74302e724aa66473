"""Loading of weights into a module: every rank reads only what it keeps."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hybrid_rl.compat.torch import apply_to_tensors
from hybrid_rl.compat.transformers import relevant_keys, remember_conversions
from hybrid_rl.errors import ModelError
from hybrid_rl.process.heartbeat import mark_progress
from hybrid_rl.weights.boxes import local_box, local_tensor
from hybrid_rl.weights.lazy import LazyTensor
from hybrid_rl.weights.names import Match, match, own_classes
from hybrid_rl.weights.sources import WeightSource, names_of_each


@torch.no_grad()
def load_weights(module: PreTrainedModel, source: WeightSource, device: torch.device | str) -> None:
    """Fill a module from a source, in the dtypes that its parameters have.

    Parameters may be on meta (they get memory on `device`; do not call to_empty before: it would forget the buffers)
    or have memory already, into which they are read; plain, or sharded by fully_shard. Of a sharded parameter only this
    rank's box is read, and nothing is communicated. Peak memory besides the module: one local parameter; for a
    conversion that has no lazy form one whole parameter.
    Raises ModelError, before anything is overwritten, if tensors are missing, left over, or of another shape.
    """
    with own_classes(module):
        matching = match(module, source)
        tensors = _checked(module, matching, source, frozenset())
    if any(parameter.is_meta for parameter in module.parameters()):
        materialise(module, torch.device(device))
    state = module.state_dict(keep_vars=True)
    for name, lazy in tensors.items():
        mark_progress()
        target = local_tensor(state[name])
        if target.numel():
            target.copy_(lazy.read(local_box(state[name])))
    source.close()
    if source.uses_checkpoint_names:
        remember_conversions(module, matching.conversions)


def lazy_weights(
    module: PreTrainedModel, source: WeightSource, *, optional: frozenset[str] = frozenset()
) -> dict[str, LazyTensor]:
    """Return the tensors of a source for a module, a tied one once, under its first name that the source has. optional:
    names of parameters that it need not have.

    Raises ModelError if other tensors are missing, left over, or of another shape.
    """
    with own_classes(module):
        return _checked(module, match(module, source), source, optional)


def _checked(
    module: PreTrainedModel, found: Match, source: WeightSource, optional: frozenset[str]
) -> dict[str, LazyTensor]:
    """Return the lazy tensor of every tensor of the module, a tied one once, under its first name in the source."""
    state = module.state_dict(keep_vars=True)
    groups = names_of_each(state)
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    missing = {names[0] for names in groups if not any(name in found.tensors for name in names)}
    relevant, unexpected = relevant_keys(module, missing, found.unexpected)
    # A missing buffer that the class allows for keeps the value that code gave it; a parameter has no such value.
    missing = (relevant | (missing & parameters)) - optional
    mismatched = {
        f"{name} (checkpoint {list(lazy.shape)}, model {list(state[name].shape)})"
        for name, lazy in found.tensors.items()
        if lazy.shape != state[name].shape
    }
    _refuse(source, "missing keys", missing, "these weights would start random")
    _refuse(source, "mismatched keys", mismatched, "these weights would start random")
    _refuse(source, "unexpected keys", unexpected, "these weights would be ignored")
    chosen = {}
    for names in groups:
        stored = [name for name in names if name in found.tensors]
        if stored:
            chosen[stored[0]] = found.tensors[stored[0]]
            _refuse_untied(state, found, stored, source)
    return chosen


def _refuse(source: WeightSource, what: str, names: set[str], consequence: str) -> None:
    if names:
        shown = ", ".join(sorted(names)[:3])
        raise ModelError(
            f"{source.label}: {len(names)} {what}, e.g. {shown}; {consequence}. Is the checkpoint complete, and of "
            f"this architecture?"
        )


def _refuse_untied(state: dict[str, Tensor], found: Match, names: list[str], source: WeightSource) -> None:
    """Raise ModelError if a tied tensor is stored under several names with different values."""
    for other in names[1:]:
        box = local_box(state[other])
        if any(part.start >= part.stop for part in box):
            continue
        if not torch.equal(found.tensors[names[0]].read(box), found.tensors[other].read(box)):
            raise ModelError(
                f"{source.label}: the config ties {names[0]} and {other}, but their stored values differ; set "
                f"tie_word_embeddings to false in config.json, or remove one of them"
            )


def materialise(module: nn.Module, device: torch.device) -> None:
    """Give memory to what is on meta and move the rest, keeping ties (which PyTorch's `to_empty` breaks)."""
    state = module.state_dict(keep_vars=True)
    tied = {name: names[0] for names in names_of_each(state) for name in names[1:]}

    def give_memory(tensor: Tensor) -> Tensor:
        return torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device)

    apply_to_tensors(module, give_memory)
    for name, source in tied.items():
        if isinstance(state[name], nn.Parameter):
            parent, _, leaf = name.rpartition(".")
            setattr(module.get_submodule(parent), leaf, module.get_parameter(source))
