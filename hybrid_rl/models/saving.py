"""Writing a model folder from plain or sharded modules, one parameter at a time."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import torch
from huggingface_hub import StateDictSplit, split_torch_state_dict_into_shards
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from hybrid_rl.compat.transformers import custom_object_save, keys_not_saved
from hybrid_rl.files import save_tensors
from hybrid_rl.models.recipe import fp32_tensors
from hybrid_rl.weights.names import Conversion, checkpoint_conversions, own_classes

MAX_SHARD_BYTES = 5 * 10**9


@torch.no_grad()
def save_weights(
    module: PreTrainedModel,
    folder: Path,
    dtype: torch.dtype,
    *,
    is_writer: bool = True,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write weights, config and generation config as `save_pretrained` writes a module of this dtype; makes the folder.

    Every rank of a sharded module calls it, one with is_writer. Parameters are gathered one after the other (those that
    a conversion takes together, together); the writer holds one file of at most max_shard_bytes beside them, others
    nothing. What fails on the writer is raised there, after it has taken part in all gathering: the others never wait.
    """
    with own_classes(module):
        tensors, conversions = _to_save(module, dtype)
        empty = {name: torch.empty(t.shape, dtype=d, device="meta") for name, (t, d) in tensors.items()}
        results = [conversion.run(module, empty.__getitem__) for conversion in conversions]
        stored = {name: tensor for result in results for name, tensor in result.items()}
        split = split_torch_state_dict_into_shards(
            stored, filename_pattern="model{suffix}.safetensors", max_shard_size=max_shard_bytes
        )
        writer = _Writer(folder, split) if is_writer else None
        failure: Exception | None = None
        for conversion in conversions:
            gathered = {name: _whole(*tensors[name], keep=writer is not None) for _, name in conversion.parts}
            try:
                if writer is not None:
                    writer.add(conversion.run(module, gathered.__getitem__))
            except Exception as error:  # a full disk, no permission, a conversion
                failure, writer = error, None
            del gathered  # before the next is gathered
        if failure is not None:
            raise failure
        if is_writer:
            _write_index(module, folder, split)
            _write_configs(module, folder, dtype)


class _Writer:
    """Collects tensors and writes each file once all of its tensors are there."""

    def __init__(self, folder: Path, split: StateDictSplit) -> None:
        self._folder = folder
        self._split = split
        self._pending: dict[str, dict[str, Tensor]] = {}

    def add(self, tensors: dict[str, Tensor]) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        for name, tensor in tensors.items():
            file = self._split.tensor_to_filename[name]
            pending = self._pending.setdefault(file, {})
            pending[name] = tensor.contiguous()
            if len(pending) == len(self._split.filename_to_tensors[file]):
                save_tensors(self._pending.pop(file), self._folder / file, {"format": "pt"})


def _to_save(
    module: PreTrainedModel, dtype: torch.dtype
) -> tuple[dict[str, tuple[Tensor, torch.dtype]], list[Conversion]]:
    """The tensors to save with the dtype of each, a tied one once under the name that loading expects, and how they
    become those of a checkpoint."""
    tied = set(module.get_expanded_tied_weights_keys(all_submodels=True))
    ignored = keys_not_saved(module)
    state = {n: t for n, t in module.state_dict(keep_vars=True).items() if n not in ignored}
    chosen: dict[int, str] = {}
    for name in sorted(state, key=lambda name: name in tied):
        chosen.setdefault(id(state[name]), name)
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    in_fp32 = fp32_tensors(module, dtype)

    def dtype_of(name: str) -> torch.dtype:
        if name not in parameters or not state[name].is_floating_point():
            return state[name].dtype
        return torch.float32 if name in in_fp32 else dtype

    tensors = {name: (state[name], dtype_of(name)) for name in state if chosen[id(state[name])] == name}
    return tensors, checkpoint_conversions(module, list(tensors))


def _whole(tensor: Tensor, dtype: torch.dtype, *, keep: bool) -> Tensor:
    """The full tensor on the CPU; collective if it is sharded. Cast first: less to send."""
    found = tensor.detach().to(dtype)
    if isinstance(found, DTensor):
        found = found.full_tensor()
    return found.cpu() if keep else found


def _write_index(module: PreTrainedModel, folder: Path, split: StateDictSplit) -> None:
    if split.is_sharded:
        metadata = {"total_parameters": module.num_parameters(), **split.metadata}
        index = {"metadata": metadata, "weight_map": split.tensor_to_filename}
        (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _write_configs(module: PreTrainedModel, folder: Path, dtype: torch.dtype) -> None:
    config = copy.deepcopy(module.config)
    config.dtype = str(dtype).removeprefix("torch.")
    config.architectures = [type(module).__name__]
    if module.is_remote_code():
        custom_object_save(module, folder, config=config)  # type: ignore[arg-type]
    config.save_pretrained(folder)
    if module.can_generate():
        module.generation_config.save_pretrained(folder)
