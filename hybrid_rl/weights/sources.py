"""Sources of weights: tensors by name, of which any box can be read by itself."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_INDEX_NAME, WEIGHTS_NAME

from hybrid_rl.compat.transformers import cached_file_or_none, str_to_torch_dtype
from hybrid_rl.errors import ModelError
from hybrid_rl.weights.boxes import Box


class WeightSource(ABC):
    """Named tensors. Names are those of a checkpoint, or, without uses_checkpoint_names, the module's own.

    label: its name in errors. num_bytes_read: what `read` has returned so far.
    """

    uses_checkpoint_names = False
    label = "the module"
    num_bytes_read = 0

    @abstractmethod
    def names(self) -> Sequence[str]:
        """Return the names of all tensors."""

    @abstractmethod
    def spec(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        """Return shape and dtype of a tensor."""

    @abstractmethod
    def _read(self, name: str, box: Box) -> Tensor: ...

    def read(self, name: str, box: Box) -> Tensor:
        """Return a box of a tensor, on the CPU, in its own dtype, only to be read: it may be the source's memory."""
        values = self._read(name, box)
        self.num_bytes_read += values.numel() * values.element_size()
        return values

    def close(self) -> None:  # noqa: B027
        """Release files, if any are open; the next `read` opens them again."""


class FolderSource(WeightSource):
    """The safetensors files of a model folder, or of a hub name. Files are opened when they are first needed, so that
    it can be sent to other processes, each of which opens its own."""

    uses_checkpoint_names = True

    def __init__(self, path: str) -> None:
        self.path = path
        self.label = f"model {path!r}"
        self._files: dict[str, Any] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.path,)

    def names(self) -> list[str]:
        return list(self._opened())

    def spec(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        piece = self._opened()[name].get_slice(name)
        return tuple(piece.get_shape()), str_to_torch_dtype[piece.get_dtype()]

    def _read(self, name: str, box: Box) -> Tensor:
        try:
            values: Tensor = self._opened()[name].get_slice(name)[box or ...]
        except Exception as error:  # SafetensorError and I/O errors
            raise ModelError(f"cannot load {self.label}: {name}: {error}") from error
        return values

    def close(self) -> None:
        self._files = None

    def _opened(self) -> dict[str, Any]:
        """Return the open file of every tensor."""
        if self._files is None:
            try:
                self._files = self._open()
            except ModelError:
                raise
            except Exception as error:  # transformers, hub and safetensors raise OSError, SafetensorError and others
                raise ModelError(f"cannot load {self.label}: {type(error).__name__}: {error}") from error
        return self._files

    def _open(self) -> dict[str, Any]:
        single, index = self._find(SAFE_WEIGHTS_NAME), self._find(SAFE_WEIGHTS_INDEX_NAME)
        if single is not None:
            paths = {SAFE_WEIGHTS_NAME: single}
        elif index is not None:
            weight_map = json.loads(Path(index).read_text())["weight_map"]
            shard_paths = {name: self._find(name) for name in sorted(set(weight_map.values()))}
            missing = [name for name, path in shard_paths.items() if path is None]
            if missing:
                raise ModelError(f"cannot load {self.label}: {len(missing)} files are missing, e.g. {missing[0]}")
            paths = {name: path for name, path in shard_paths.items() if path is not None}
        else:
            pickled = self._find(WEIGHTS_NAME) or self._find(WEIGHTS_INDEX_NAME)
            raise ModelError(
                f"cannot load {self.label}: it has no {SAFE_WEIGHTS_NAME}"
                + (
                    f", only {Path(pickled).name}, of which no part can be read alone; convert it once: "
                    f"AutoModelForCausalLM.from_pretrained(path).save_pretrained(new_path)"
                    if pickled
                    else f" and no {SAFE_WEIGHTS_INDEX_NAME}"
                )
            )
        opened = {file: safe_open(path, framework="pt") for file, path in paths.items()}
        return {name: handle for handle in opened.values() for name in handle.keys()}  # noqa: SIM118

    def _find(self, file: str) -> str | None:
        if Path(self.path).is_dir():
            path = Path(self.path) / file
            return str(path) if path.is_file() else None
        return cached_file_or_none(self.path, file)


class StateSource(WeightSource):
    """Tensors of this process by module name, read where they are."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def names(self) -> list[str]:
        return list(self._tensors)

    def spec(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        return tuple(self._tensors[name].shape), self._tensors[name].dtype

    def _read(self, name: str, box: Box) -> Tensor:
        return self._tensors[name].detach()[box]


class ObjectSource(WeightSource):
    """Tensors by module name, each an object of a store that several processes share.

    stored: name -> (handle, shape, dtype). `get` turns a handle into the tensor's bytes, a uint8 array; it is set by
    the process that reads, because it does not travel.
    """

    def __init__(self, stored: Mapping[str, tuple[Any, tuple[int, ...], torch.dtype]]) -> None:
        self._stored = stored
        self.get: Callable[[Any], np.ndarray] | None = None

    @classmethod
    def of(cls, module: nn.Module, put: Callable[[np.ndarray], Any]) -> ObjectSource:
        """Store a live module's tensors, each as a uint8 array. put: returns an array's handle, such as ray.put."""
        return cls.of_tensors(named_state(module), put)

    @classmethod
    def of_tensors(cls, tensors: Mapping[str, Tensor], put: Callable[[np.ndarray], Any]) -> ObjectSource:
        """Store tensors by name in the same way."""
        stored = {}
        for name, tensor in tensors.items():
            data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            # Tensor.numpy() would mark the memory of the module for good as one that cannot be freed.
            stored[name] = put(np.from_dlpack(data)), tuple(tensor.shape), tensor.dtype
        return cls(stored)

    def __reduce__(self) -> tuple[Any, ...]:
        return ObjectSource, (self._stored,)

    def names(self) -> list[str]:
        return list(self._stored)

    def spec(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        return self._stored[name][1:]

    def _read(self, name: str, box: Box) -> Tensor:
        handle, shape, dtype = self._stored[name]
        if self.get is None:
            raise ModelError("weights are in a store: set `get` of the ObjectSource to what fetches an object")
        # numpy has no bfloat16: the box is taken from integers of the same size.
        integers = self.get(handle).view(f"u{dtype.itemsize}").reshape(shape)
        return torch.from_numpy(np.array(integers[box])).view(dtype)


def named_state(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers by module name, a tied tensor once."""
    state = module.state_dict(keep_vars=True)
    return {names[0]: state[names[0]] for names in names_of_each(state)}


def named_weights(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers by name, a tied tensor once. Buffers are handed over like parameters."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def names_of_each(state: Mapping[str, Tensor]) -> list[list[str]]:
    """Return the names of each tensor, in order; a tied one has several."""
    names: dict[int, list[str]] = {}
    for name, tensor in state.items():
        names.setdefault(id(tensor), []).append(name)
    return list(names.values())
