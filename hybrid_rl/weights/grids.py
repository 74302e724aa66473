"""Grids of quantised linear weights, in the layouts that vLLM loads: few bits for each weight, and a scale for many.

Pure functions: a weight [out, in] becomes tensors by suffix, named as in a checkpoint of that layout, and back.
Whatever its dtype, it is computed with in float32 and rounded once. A rank that holds some rows of a weight quantises
them alone, once it knows the largest values (`maxima`) of blocks that other ranks have rows of.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from hybrid_rl.errors import ConfigError

FP8_MAX, FP4_MAX = 448.0, 6.0  # of float8_e4m3fn, and of e2m1
SMALLEST_FP8_SCALE = 1.0 / (FP8_MAX * 512.0)
SMALLEST_BLOCK_MAXIMUM, SMALLEST_FP4_MAXIMUM = 1e-4, 1e-8
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_JOINED = {"q_proj", "k_proj", "v_proj"}, {"gate_proj", "up_proj"}
_FP4_LIMITS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # between them; a tie goes to the value whose number is even

Parts = dict[str, Tensor]  # by suffix


@dataclass(frozen=True)
class Part:
    """One of the tensors that replace a weight [out, in].

    per_element: how many neighbours of a row one element of it stands for, so that it is cut where the weight is; None:
    it describes the whole weight.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    per_element: int | None = None


class Grid(ABC):
    """A layout.

    multiple: of elements that a row must have. block: rows and columns that share a scale over the rows of several
    ranks; None: no scale does. whole_scale: the suffix of the scale of a whole weight, which weights that an engine
    joins into one share; None: there is none.
    """

    multiple: ClassVar[int] = 1
    block: ClassVar[tuple[int, int] | None] = None
    whole_scale: ClassVar[str | None] = None

    @abstractmethod
    def parts(self, shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Part]:
        """Describe the tensors that replace a weight of this shape. dtype: that the engine computes in."""

    @abstractmethod
    def quantise(self, rows: Tensor, maxima: Tensor, dtype: torch.dtype, first_row: int = 0) -> Parts:
        """Return the parts of some rows [n, in] of a weight, from the row `first_row` on; what describes the whole
        weight is returned whole. maxima: of the whole weight. dtype: that the engine computes in."""

    @abstractmethod
    def dequantise(self, parts: Mapping[str, Tensor]) -> Tensor:
        """Return the weight [out, in] that parts stand for, float32."""

    def num_blocks(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Return the shape of the `maxima` of a whole weight."""
        if self.block is None:
            return (1, 1) if self.whole_scale else (0, 0)
        return -(-shape[0] // self.block[0]), -(-shape[1] // self.block[1])

    def maxima(self, rows: Tensor, first_row: int = 0) -> Tensor:
        """Return the largest absolute values of blocks, float32 [blocks of rows, blocks of columns]: of those that have
        one of these rows. Of no rows: zeros."""
        if self.whole_scale:
            largest = rows.abs().amax() if rows.numel() else rows.new_zeros(())
            return largest.float().reshape(1, 1)
        if self.block is None or not rows.numel():
            return rows.new_zeros(self.num_blocks((0, rows.shape[1])), dtype=torch.float32)
        return _blocks(rows, self.block, first_row).abs().amax(dim=(1, 3)).float()


class FP8(Grid):
    """float8_e4m3fn with one scale: amax / 448, as vLLM's `QuantFP8.forward_native` makes it for a tensor."""

    whole_scale = "weight_scale"

    def parts(self, shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Part]:
        return {"weight": Part(torch.float8_e4m3fn, shape, 1), "weight_scale": Part(torch.float32, (1,))}

    def quantise(self, rows: Tensor, maxima: Tensor, dtype: torch.dtype, first_row: int = 0) -> Parts:
        scale = (maxima.reshape(1) / maxima.new_tensor(FP8_MAX)).clamp(min=SMALLEST_FP8_SCALE)
        values = (rows.float() * scale.reciprocal()).clamp(-FP8_MAX, FP8_MAX)
        return {"weight": values.to(torch.float8_e4m3fn), "weight_scale": scale}

    def dequantise(self, parts: Mapping[str, Tensor]) -> Tensor:
        return parts["weight"].float() * parts["weight_scale"]


class BlockFP8(Grid):
    """float8_e4m3fn with a scale for each block of 128 x 128, as in DeepSeek-V3 and as vLLM's `per_block_cast_to_fp8`
    makes them; blocks at the edges are smaller."""

    block = (128, 128)

    def parts(self, shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Part]:
        scales = Part(torch.float32, self.num_blocks(shape))
        return {"weight": Part(torch.float8_e4m3fn, shape, 1), "weight_scale_inv": scales}

    def quantise(self, rows: Tensor, maxima: Tensor, dtype: torch.dtype, first_row: int = 0) -> Parts:
        scale = maxima.clamp(min=SMALLEST_BLOCK_MAXIMUM) / maxima.new_tensor(FP8_MAX)
        values = (rows.float() * self._spread(1.0 / scale, rows, first_row)).to(torch.float8_e4m3fn)
        return {"weight": values, "weight_scale_inv": scale}

    def dequantise(self, parts: Mapping[str, Tensor]) -> Tensor:
        weight = parts["weight"].float()
        return weight * self._spread(parts["weight_scale_inv"], weight)

    def _spread(self, scales: Tensor, rows: Tensor, first_row: int = 0) -> Tensor:
        """Return the scale of each element of some rows of a weight."""
        number = torch.arange(first_row, first_row + rows.shape[0], device=scales.device) // self.block[0]
        return scales[number].repeat_interleave(self.block[1], dim=1)[:, : rows.shape[1]]


class Int4(Grid):
    """Four bits as w / scale + 8, of groups of 32 of a row, with the smallest scale in which -8 to 7 hold a group, as
    in vLLM's `quantize_weights` (uint4b8). Packed as compressed-tensors does: eight to an int32, the first one lowest.
    The scale is rounded to the engine's dtype first, and the weights are divided by what is left of it."""

    multiple = 32

    def parts(self, shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Part]:
        out, into = shape
        return {
            "weight_packed": Part(torch.int32, (out, into // 8), 8),
            "weight_scale": Part(dtype, (out, into // self.multiple), self.multiple),
            "weight_shape": Part(torch.int64, (2,)),
        }

    def quantise(self, rows: Tensor, maxima: Tensor, dtype: torch.dtype, first_row: int = 0) -> Parts:
        groups = rows.float().unflatten(1, (-1, self.multiple))
        scale = torch.maximum(groups.amax(-1) / groups.new_tensor(7.0), groups.amin(-1) / groups.new_tensor(-8.0))
        scale = scale.to(dtype)
        scale = scale.masked_fill(scale == 0, 1.0)
        codes = (groups / scale.float()[..., None]).round().clamp(-8, 7).to(torch.int32) + 8
        shifts = 4 * torch.arange(8, device=rows.device, dtype=torch.int32)
        packed = (codes.flatten(1).unflatten(1, (-1, 8)) << shifts).sum(-1, dtype=torch.int32)
        return {"weight_packed": packed, "weight_scale": scale}

    def dequantise(self, parts: Mapping[str, Tensor]) -> Tensor:
        packed = parts["weight_packed"]
        shifts = 4 * torch.arange(8, device=packed.device, dtype=torch.int32)
        codes = (((packed[..., None] >> shifts) & 15) - 8).flatten(1).unflatten(1, (-1, self.multiple))
        return (codes.float() * parts["weight_scale"].float()[..., None]).flatten(1)


class NVFP4(Grid):
    """e2m1 (FP4_VALUES and a sign) of blocks of 16 of a row: an e4m3 scale for each, and a float32 one for all, as in
    vLLM's `ref_nvfp4_quant`. Packed as compressed-tensors does: two to a byte, the first one lowest; the scale of all
    is kept as what is divided by."""

    multiple, whole_scale = 16, "weight_global_scale"

    def parts(self, shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Part]:
        out, into = shape
        return {
            "weight_packed": Part(torch.uint8, (out, into // 2), 2),
            "weight_scale": Part(torch.float8_e4m3fn, (out, into // self.multiple), self.multiple),
            "weight_global_scale": Part(torch.float32, (1,)),
        }

    def quantise(self, rows: Tensor, maxima: Tensor, dtype: torch.dtype, first_row: int = 0) -> Parts:
        largest = maxima.reshape(1).clamp(min=SMALLEST_FP4_MAXIMUM)
        whole = largest.new_tensor(FP8_MAX * FP4_MAX) / largest
        blocks = rows.float().unflatten(1, (-1, self.multiple))
        scale = (whole * (blocks.abs().amax(-1) * (1 / FP4_MAX))).clamp(max=FP8_MAX).to(torch.float8_e4m3fn)
        wide = scale.float() * (1.0 / whole)
        factor = torch.where(wide == 0, 0.0, 1.0 / wide)
        values = (blocks * factor[..., None]).clamp(-FP4_MAX, FP4_MAX).flatten(1)
        codes = torch.bucketize(values.abs(), values.new_tensor(_FP4_LIMITS)).to(torch.uint8)
        # The three ties that the value above wins: between 0.5 and 1, 1.5 and 2, 3 and 4.
        codes += torch.isin(values.abs(), values.new_tensor(_FP4_LIMITS[1::2])).to(torch.uint8)
        codes |= (values < 0).to(torch.uint8) << 3
        return {
            "weight_packed": codes[:, ::2] | codes[:, 1::2] << 4,
            "weight_scale": scale,
            "weight_global_scale": whole,
        }

    def dequantise(self, parts: Mapping[str, Tensor]) -> Tensor:
        packed = parts["weight_packed"]
        codes = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(1).int()
        sizes = torch.tensor(FP4_VALUES, device=packed.device)[codes & 7]
        values = torch.where(codes > 7, -sizes, sizes).unflatten(1, (-1, self.multiple))
        scale = parts["weight_scale"].float() * (1.0 / parts["weight_global_scale"])
        return (values * scale[..., None]).flatten(1)


GRIDS: Mapping[str, Grid] = {"fp8": FP8(), "fp8_block": BlockFP8(), "int4": Int4(), "nvfp4": NVFP4()}


def grid_weights(module: PreTrainedModel, name: str) -> list[str]:
    """Return the names of the weights of a model that are put on a grid: those of its linear layers, but not the head.
    name: of the grid, in GRIDS.

    Raises ConfigError for a model that has other matrices than these and embeddings, or rows that the grid does not
    divide.
    """
    head, multiple = module.get_output_embeddings(), GRIDS[name].multiple
    tables = {id(each.weight) for each in module.modules() if isinstance(each, nn.Embedding) or each is head}
    linear = {id(each.weight) for each in module.modules() if isinstance(each, nn.Linear)} - tables
    names = []
    for weight_name, weight in module.named_parameters():
        if weight.dim() < 2 or id(weight) in tables:
            continue
        if id(weight) not in linear:
            raise ConfigError(
                f"rollout.quantization={name} is for models whose matrices are linear layers and embeddings, and "
                f"{weight_name} {list(weight.shape)} is neither (mixtures of experts are not supported); leave it out"
            )
        if weight.shape[1] % multiple:
            raise ConfigError(
                f"rollout.quantization={name} takes {multiple} weights of a row together, and {weight_name} "
                f"{list(weight.shape)} has {weight.shape[1]} in a row; use fp8 or fp8_block, or leave it out"
            )
        names.append(weight_name)
    return names


def joined_names(names: Iterable[str]) -> list[frozenset[str]]:
    """Return the weights that vLLM's models have as one, by their usual names: queries, keys and values of a layer, and
    gate and up projection."""
    groups: dict[tuple[str, int], set[str]] = {}
    for name in names:
        stem, _, layer = name.removesuffix(".weight").rpartition(".")
        for number, joined in enumerate(_JOINED):
            if layer in joined:
                groups.setdefault((stem, number), set()).add(name)
    return [frozenset(group) for group in groups.values() if len(group) > 1]


def _blocks(rows: Tensor, block: tuple[int, int], first_row: int) -> Tensor:
    """View rows as [blocks of rows, rows, blocks of columns, columns], with zeros for what a block has besides."""
    above = first_row % block[0]
    below, right = -(above + rows.shape[0]) % block[0], -rows.shape[1] % block[1]
    return F.pad(rows, (0, right, above, below)).unflatten(1, (-1, block[1])).unflatten(0, (-1, block[0]))
