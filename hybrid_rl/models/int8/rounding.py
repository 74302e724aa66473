"""Weights as integers of 8 bits with a scale per output channel, and products with them.

A row of a weight, which makes one output channel, becomes round(w / s) with s = max|w| / 127. What it is
multiplied with is rounded too, per token, to integers as wide as exact int32 sums allow: 15 bits and a sign for 516
columns, 12 for 4,864. That moves the logprobs of SmolLM2-135M a twentieth as far as the rounding of its weights does.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hybrid_rl.compat import native

LARGEST = 127
_CHUNK = 1 << 20  # elements of a weight in bfloat16 that are made float32 at once


@dataclass(frozen=True)
class Int8Weight:
    """A weight [..., N, K]. values: int8 [..., N, K]; scales: float32 [..., N]; w is about values * scales."""

    values: Tensor
    scales: Tensor

    @classmethod
    def zeros(cls, shape: tuple[int, ...]) -> Int8Weight:
        """Return a weight of zeros."""
        return cls(torch.zeros(shape, dtype=torch.int8), torch.zeros(shape[:-1], dtype=torch.float32))

    @classmethod
    @torch.no_grad()
    def of(cls, weight: Tensor) -> Int8Weight:
        """Round a weight [..., N, K] of any float dtype. A row that has an infinite number or none gets the scale NaN,
        so that its outputs are NaN too."""
        made = cls(torch.empty(weight.shape, dtype=torch.int8), torch.empty(weight.shape[:-1]))
        rows, values, scales = weight.flatten(0, -2), made.values.flatten(0, -2), made.scales.view(-1)
        compiled = native.operator("int8_round") or round_torch
        step = max(1, _CHUNK // max(1, rows.shape[1]))
        for start in range(0, len(rows), step):
            part = slice(start, start + step)
            compiled(rows[part].float().contiguous(), values[part], scales[part])
        return made

    def __getitem__(self, index: int) -> Int8Weight:
        """Return one of the weights that lie in this one, [N, K] of [E, N, K]."""
        return Int8Weight(self.values[index], self.scales[index])

    def as_float(self) -> Tensor:
        """Return what the integers stand for, float32 [..., N, K]."""
        return self.values * self.scales[..., None]

    @property
    def num_bytes(self) -> int:
        """Bytes of integers and scales."""
        return self.values.nbytes + self.scales.nbytes

    def linear(self, rows: Tensor, bias: Tensor | None = None) -> Tensor:
        """Compute rows @ w.T + bias. rows: [..., K], float32 or bfloat16, which out has too; bias: [N] or None. Returns
        [..., N]. A row's result does not depend on the other rows."""
        flat = rows.reshape(-1, rows.shape[-1]).float().contiguous()
        multiply = native.operator("int8_linear") or linear_torch
        out: Tensor = multiply(flat, self.values, self.scales, None if bias is None else bias.float())
        return out.to(rows.dtype).view(*rows.shape[:-1], len(self.scales))


def round_torch(weight: Tensor, values: Tensor, scales: Tensor) -> None:
    """Round rows, float32 [N, K], by PyTorch into what is given: the oracle of the compiled operator, to the bit."""
    scale = weight.abs().amax(1) / LARGEST
    scales.copy_(scale.masked_fill(~scale.isfinite(), torch.nan))
    divisors = scales.masked_fill(scales == 0, 1.0)  # a row so small that its scale is 0 becomes zeros
    values.copy_((weight / divisors[:, None]).round().nan_to_num(0.0).clamp(-LARGEST, LARGEST))


def linear_torch(rows: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """Compute `Int8Weight.linear` by PyTorch, float32 [M, N]: the oracle of the compiled operator, to the bit. Sums of
    integers are exact in float64."""
    largest = torch.tensor(float(min(32767, (2**31 - 1) // (LARGEST * max(1, rows.shape[1])))))
    top = rows.abs().amax(1, keepdim=True)
    row_scales, inverse = top / largest, largest / top
    is_usable = top.isfinite() & (inverse < 1e38)
    integers = (rows * inverse).round().masked_fill(~is_usable, 0.0)
    row_scales = torch.where(is_usable, row_scales, torch.where(top.isfinite(), 0.0, torch.nan))
    out = (integers.double() @ values.double().t()).float() * (row_scales * scales)
    return out if bias is None else out + bias
