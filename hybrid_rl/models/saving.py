"""Model folders, written from plain or sharded modules one parameter at a time."""

from __future__ import annotations

import contextlib
import copy
import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from huggingface_hub import StateDictSplit, split_torch_state_dict_into_shards
from torch import Tensor
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import CONFIG_NAME, GENERATION_CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME

from hybrid_rl.compat.transformers import save_own_code
from hybrid_rl.errors import ModelError
from hybrid_rl.models.recipe import fp32_tensors
from hybrid_rl.models.tokenizer import check_read_back, save_tokenizer
from hybrid_rl.process.files import Sink, save_tensors
from hybrid_rl.weights.boxes import full_tensor, local_box, local_tensor
from hybrid_rl.weights.low_rank import LowRank
from hybrid_rl.weights.names import Conversion, checkpoint_conversions, own_classes, saved_names

MAX_SHARD_BYTES = 5 * 10**9


@torch.no_grad()
def save_weights(
    module: PreTrainedModel,
    folder: Path,
    dtype: torch.dtype,
    *,
    is_writer: bool = True,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    changes: Mapping[str, LowRank] = MappingProxyType({}),
    sink: Sink | None = None,
) -> None:
    """Write weights, config and generation config as `save_pretrained` writes a module of this dtype; makes the folder.
    changes: of tensors, by their names in the module; added in float32 to what is written, and rounded once. sink:
    takes the tensors of each file instead of having them written.

    Every rank of a sharded module calls it, one with is_writer. Parameters are gathered one after the other (those that
    a conversion takes together, together); the writer holds one file of at most max_shard_bytes besides them, others
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
        pending: dict[str, dict[str, Tensor]] = {}  # by file, until all tensors of the file are there
        failure: Exception | None = None
        for conversion in conversions:
            writes = is_writer and failure is None
            gathered = {name: whole(*tensors[name], keep=writes, own=sink is not None) for _, name in conversion.parts}
            try:
                if writes:
                    for name in gathered.keys() & changes.keys():
                        base = gathered[name]
                        gathered[name] = changes[name].merged(base, local_box(base)).to(base.dtype)
                    _write_complete(folder, split, pending, conversion.run(module, gathered.__getitem__), sink)
            except Exception as error:  # a full disk, no permission, a conversion
                failure = error
                pending.clear()
            del gathered  # before the next is gathered
        if failure is not None:
            raise failure
        if is_writer:
            _write_index(module, folder, split)
            # The values are written as they are, as they were loaded: transformers' `save_pretrained` validates
            # strictly, and refuses generation configs that many published models have (temperature without do_sample).
            _write_config(module, folder, dtype)
            _write_generation_config(module, folder)


def _write_complete(
    folder: Path,
    split: StateDictSplit,
    pending: dict[str, dict[str, Tensor]],
    tensors: dict[str, Tensor],
    sink: Sink | None,
) -> None:
    """Add tensors to the files that they belong to, and write each file once all of its tensors are there."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, tensor in tensors.items():
        file = split.tensor_to_filename[name]
        pending.setdefault(file, {})[name] = tensor.contiguous()
        if len(pending[file]) == len(split.filename_to_tensors[file]):
            (sink or save_tensors)(pending.pop(file), folder / file, {"format": "pt"})


def _to_save(
    module: PreTrainedModel, dtype: torch.dtype
) -> tuple[dict[str, tuple[Tensor, torch.dtype]], list[Conversion]]:
    """Return the tensors to save with the dtype of each, a tied one once under the name that loading expects, and the
    conversions to those of a checkpoint."""
    state = module.state_dict(keep_vars=True)
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    in_fp32 = fp32_tensors(module, dtype)

    def dtype_of(name: str) -> torch.dtype:
        if name not in parameters or not state[name].is_floating_point():
            return state[name].dtype
        return torch.float32 if name in in_fp32 else dtype

    tensors = {name: (state[name], dtype_of(name)) for name, *_ in saved_names(module)}
    return tensors, checkpoint_conversions(module, list(tensors))


def whole(tensor: Tensor, dtype: torch.dtype, *, keep: bool, own: bool = False) -> Tensor:
    """Return the full tensor, on the CPU if it is kept; collective if it is sharded. Cast first: less to send. own: if
    it is kept, it is never the memory of the tensor itself, which training goes on to change."""
    full = full_tensor(tensor.detach().to(dtype))
    full = full.cpu() if keep else full
    is_same = own and keep and full.untyped_storage().data_ptr() == local_tensor(tensor).untyped_storage().data_ptr()
    return full.clone() if is_same else full


def _write_index(module: PreTrainedModel, folder: Path, split: StateDictSplit) -> None:
    if split.is_sharded:
        metadata = {"total_parameters": module.num_parameters(), **split.metadata}
        index = {"metadata": metadata, "weight_map": split.tensor_to_filename}
        (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _write_config(module: PreTrainedModel, folder: Path, dtype: torch.dtype) -> None:
    """Write the config, and the code of a model that brings its own."""
    config: Any = stored_config(module)
    config.dtype = str(dtype).removeprefix("torch.")
    config.architectures = [type(module).__name__]
    vars(config).pop("transformers_weights", None)  # the name of another file
    save_own_code((module, config), config, folder)
    config.to_json_file(folder / CONFIG_NAME)


def _write_generation_config(module: PreTrainedModel, folder: Path) -> None:
    if module.can_generate():
        module.generation_config.to_json_file(folder / GENERATION_CONFIG_NAME, keys_to_pop=["compile_config"])


def check_saved(module: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, dtype: torch.dtype) -> None:
    """Write all of a model's folder but the weights into a temporary one, and read it again: what could not be saved at
    the end of a run is refused before it. Raises ModelError."""
    with tempfile.TemporaryDirectory(prefix="hrl-trial-") as place:
        folder, config = Path(place), type(stored_config(module))
        with _refused("config", "module.config"):
            _write_config(module, folder, dtype)
            config.from_pretrained(folder)
        with _refused("generation config", "module.generation_config, or generation_config.json"):
            _write_generation_config(module, folder)
            if module.can_generate():
                GenerationConfig.from_pretrained(folder)
        with _refused("tokenizer", "what was set on it"):
            save_tokenizer(tokenizer, folder)
            check_read_back(tokenizer, folder)


@contextlib.contextmanager
def _refused(what: str, where: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # of json, transformers and its validation, and of the model's own code
        raise ModelError(
            f"the {what} of this model cannot be written into a checkpoint and read again, so nothing that is trained "
            f"could be saved: {type(error).__name__}: {error}; correct {where}"
        ) from error


def stored_config(module: PreTrainedModel) -> PreTrainedConfig:
    """Return a copy of a module's config that says of tied embeddings what is so: of a checkpoint whose config ties two
    tensors that differ transformers makes an untied module, and leaves the config as it was."""
    config = copy.deepcopy(module.config)
    state = module.state_dict(keep_vars=True)
    ties = module.get_expanded_tied_weights_keys(all_submodels=True).items()
    if any(state[name] is not state[source] for name, source in ties if {name, source} <= state.keys()):
        for part in (config, config.get_text_config()):
            if getattr(part, "tie_word_embeddings", False):
                part.tie_word_embeddings = False
    return config
