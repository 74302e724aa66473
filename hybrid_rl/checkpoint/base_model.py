"""The base model of an adapter: named in every checkpoint, and known again by a hash of its weights.

A run that trains adapters changes nothing of its base model, so checkpoints hold the adapter and name the base. A base
that exists in memory only is written into the run folder, once.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from hybrid_rl.checkpoint.manifest import MANIFEST_FILE, STATE_FILE
from hybrid_rl.checkpoint.reading import BASE, read_state
from hybrid_rl.checkpoint.writing import write_model
from hybrid_rl.errors import CheckpointError, ModelError
from hybrid_rl.models.lora.folder import CONFIG_FILE, read_settings
from hybrid_rl.models.saving import save_weights
from hybrid_rl.process.heartbeat import mark_progress
from hybrid_rl.resharding.copy_tables import MAX_DIMS
from hybrid_rl.resharding.execute import HashedBoxes, hash_pieces, name_seed
from hybrid_rl.weights.boxes import Box, is_first_copy, local_box, local_tensor
from hybrid_rl.weights.loading import lazy_weights
from hybrid_rl.weights.plain import plain
from hybrid_rl.weights.sources import FolderSource, names_of_each

logger = logging.getLogger("hybrid_rl")

# Keys of a model's config that do not change what a pass computes.
NOT_COMPUTING = frozenset({"transformers_version", "dtype", "torch_dtype", "architectures", "name_or_path", "auto_map"})
NOT_COMPUTING |= {"use_cache", "return_dict", "output_attentions", "output_hidden_states", "chunk_size_feed_forward"}
NOT_COMPUTING |= {"problem_type", "id2label", "label2id", "pad_token_id", "bos_token_id", "eos_token_id"}
NOT_COMPUTING |= {"initializer_range"}
FOLDER = "base-{}"  # in the run folder, with the first digits of the hash
Gather = Callable[[Any], list[Any]]
Read = Callable[[str, Tensor], Tensor]


def base_hashes(module: PreTrainedModel, dtype: torch.dtype, *, rank: int, gather: Gather) -> dict[str, str]:
    """Return a hash of a module's weights without its adapters, by dtype that they are rounded to: that of the run, and
    bfloat16, in which runs of different dtypes compare. The same on any number of ranks. Collective."""
    with plain(module, trained=False):
        return _hashes(module, dtype, lambda _, parameter: local_tensor(parameter), rank, gather)


def config_numbers(module: PreTrainedModel) -> dict[str, Any]:
    """Return what a module's config says of its computation, as JSON has it: not how it is stored, run or decoded."""
    config: dict[str, Any] = json.loads(module.config.to_json_string(use_diff=False))
    return {key: value for key, value in _computing(config).items() if value is not None}


def _computing(config: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in config.items() if not key.startswith("_") and key not in NOT_COMPUTING}
    return {key: _computing(value) if isinstance(value, dict) else value for key, value in kept.items()}


def check_base(
    record: Mapping[str, Any], hashes: Mapping[str, str], what: str, numbers: Mapping[str, Any] | None = None
) -> None:
    """Raise CheckpointError if the base model is not the one that an adapter was trained on; warn if its config is
    another. record: of the adapter's checkpoint. what: the adapter, for the error. numbers: of `config_numbers`."""
    theirs = record.get("hashes", {})
    common = [dtype for dtype in hashes if dtype in theirs]
    if common and hashes[common[0]] != theirs[common[0]]:
        raise CheckpointError(
            f"{what} was trained on other weights than those of this base model: their hashes are "
            f"{theirs[common[0]][:12]} and {hashes[common[0]][:12]}. Its base is {record['path']}; load that (if you "
            "did, it has changed since), or start from the merged model of that run (trainer.save(merged=True))"
        )
    then, now = record.get("config", {}), numbers or {}
    # Of keys that both have: another version of transformers may have more.
    changed = [
        f"{key} {then[key]!r} -> {now[key]!r}" for key in sorted(then.keys() & now.keys()) if then[key] != now[key]
    ]
    if changed:
        logger.warning(
            f"{what} was trained on a base model with another config.json: {', '.join(changed)}. The weights are the "
            "same, what it computes may not be"
        )


def keep_base(
    module: PreTrainedModel,
    dtype: torch.dtype,
    known: str | None,
    run: Path,
    write_tokenizer: Callable[[Path], None],
    *,
    rank: int,
    gather: Gather,
) -> dict[str, Any]:
    """Return where the base model of a run is, with its hashes and config. One that is nowhere is written into the run
    folder.

    known: the name or folder that it was loaded from, None for a module that was passed: if that says by itself what it
    was loaded from, the weights there are read and compared. Collective. Raises CheckpointError if it cannot be
    written.
    """
    hashes = base_hashes(module, dtype, rank=rank, gather=gather)
    record = {"hashes": hashes, "config": config_numbers(module)}
    if known is None and _is_at(module.name_or_path or "", module, dtype, hashes, rank, gather):
        known = module.name_or_path
    if known is not None:
        return {"path": str(Path(known).resolve()) if Path(known).is_dir() else known, **record}
    folder = run.resolve() / FOLDER.format(next(iter(hashes.values()))[:12])
    is_there = gather((folder / MANIFEST_FILE).is_file())[0]

    def save(target: Path) -> None:
        with plain(module, trained=False):
            save_weights(module, target, dtype, is_writer=rank == 0)
        if rank == 0:
            write_tokenizer(target)

    if not is_there:
        write_model(folder, save, rank=rank, gather=gather)
    return {"path": str(folder), **record}


def base_of(folder: Path) -> str:
    """Return name or folder of the base model of an adapter folder. A base in the run folder is also found if that was
    moved. Raises ModelError if the adapter does not say, or the base is not there."""
    named = read_settings(folder).base_model_name_or_path
    if not named:
        raise ModelError(
            f"{folder / CONFIG_FILE} does not name the model that the adapter belongs to (base_model_name_or_path); "
            "write its name or folder there"
        )
    beside = folder.resolve().parent / Path(named).name
    if not Path(named).is_dir() and Path(named).is_absolute():
        if not beside.is_dir():
            raise ModelError(
                f"the adapter {str(folder)!r} belongs to the model {named}, which is not there, nor is {beside}; put "
                f"it there, or write where it is into base_model_name_or_path of {CONFIG_FILE}"
            )
        return str(beside)
    return str(named)


def base_record(folder: Path) -> dict[str, Any] | None:
    """Return what the checkpoint of an adapter says of its base model; None for an adapter from elsewhere."""
    return read_state(folder).get(BASE) if (folder / STATE_FILE).is_file() else None


def _is_at(
    name: str, module: PreTrainedModel, dtype: torch.dtype, hashes: Mapping[str, str], rank: int, gather: Gather
) -> bool:
    """Return whether a folder, or a model on the hub, has the weights of a module without its adapters. Collective."""
    if not name or not all(gather(Path(name).is_dir() or name.count("/") == 1)):
        return False
    weights: dict[str, Any] = {}
    with plain(module, trained=False):
        with contextlib.suppress(ModelError):  # another model is there by now, or none
            weights = dict(lazy_weights(module, FolderSource(name)))
        if not all(gather(bool(weights))):
            return False
        names = {id(t): name for name, t in module.state_dict(keep_vars=True).items() if name in weights}

        def read(_: str, parameter: Tensor) -> Tensor:
            lazy = weights[names[id(parameter)]]
            # As it is loaded: rounded to the run's dtype.
            return lazy.read(local_box(parameter)).to(dtype)  # type: ignore[no-any-return]

        return _hashes(module, dtype, read, rank, gather) == hashes


def _hashes(module: PreTrainedModel, dtype: torch.dtype, read: Read, rank: int, gather: Gather) -> dict[str, str]:
    """Hash all parameters. read: returns this rank's part of one by its name."""
    dtypes = list(dict.fromkeys((dtype, torch.bfloat16)))
    mine = {name: _sums(name, read(name, p), p, dtypes) for name, p in _parameters(module) if is_first_copy(p, rank)}
    totals: dict[str, list[int]] = {}
    for part in gather(mine):
        for name, sums in part.items():
            before = totals.get(name, [0] * len(dtypes))
            totals[name] = [(total + other) % 2**64 for total, other in zip(before, sums, strict=True)]
    hashes = {}
    for place, kind in enumerate(dtypes):
        text = json.dumps(sorted((name, sums[place]) for name, sums in totals.items()))
        hashes[str(kind).removeprefix("torch.")] = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    return hashes


def _parameters(module: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    state = {name: p for name, p in module.named_parameters(remove_duplicate=False) if p.is_floating_point()}
    for names in names_of_each(state):
        yield names[0], state[names[0]]


def _sums(name: str, part: Tensor, whole: Tensor, dtypes: list[torch.dtype]) -> list[int]:
    """Return the content hash of this rank's part of a parameter, in each of the dtypes."""
    mark_progress()
    flat, box = part.contiguous().reshape(-1), local_box(whole)
    sums = torch.zeros(len(dtypes), dtype=torch.int64, device=flat.device)
    if flat.numel():
        rows, ones = np.arange(len(dtypes)), np.ones((len(dtypes), MAX_DIMS), dtype=np.int64)
        shape, zeros = ones.copy(), np.zeros_like(rows)
        shape[:, 0] = flat.numel()
        first = zeros + _first_element(box, whole)
        boxes = HashedBoxes(zeros, zeros, ones, shape, rows, rows, first, ones)
        seeds = torch.full((len(dtypes),), name_seed(name), dtype=torch.int64)
        hash_pieces(boxes, [flat], dtypes, hashes=sums, seeds=seeds)
    return [int(total) % 2**64 for total in sums.tolist()]


def _first_element(box: Box, whole: Tensor) -> int:
    """Return the number of a part's first element in the global tensor. Shards are whole rows, one after another."""
    assert all((part.start, part.stop) == (0, extent) for part, extent in zip(box[1:], whole.shape[1:], strict=True))
    return int(box[0].start * math.prod(whole.shape[1:])) if box else 0
