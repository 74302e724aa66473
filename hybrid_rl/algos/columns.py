"""Checks of shapes and dtypes, and ratios of probabilities that neither overflow nor make NaN of a gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor

# ln of the largest ratio that is told apart from a larger one. e^20 = 5e8, verl's bound: a token that is so much more
# likely under one policy was sampled from the other by an error, and e^89 is not a float32.
MAX_LOG_RATIO = 20.0

BOOLEAN = frozenset({"mask", "which", "forking", "selected"})


def check_columns(**columns: Tensor) -> None:
    """Raise ValueError unless all columns are [T], one number per token: unlike shapes would broadcast. Those that say
    which tokens are meant (`mask` ...) must be bool, `rows` int64 and, on a CPU, not negative: they would count from
    the end."""
    shapes = {name: tuple(column.shape) for name, column in columns.items()}
    if len(set(shapes.values())) != 1 or any(len(shape) != 1 for shape in shapes.values()):
        raise ValueError(f"{', '.join(shapes)} must all be [T], one number per token, not {shapes}")
    for name in BOOLEAN & columns.keys():
        if columns[name].dtype != torch.bool:
            raise ValueError(f"{name} must be bool, not {columns[name].dtype}; give {name}.bool()")
    rows = columns.get("rows")
    if rows is not None:
        if rows.dtype != torch.int64:
            raise ValueError(f"rows must be int64, the sample of each token, not {rows.dtype}; give rows.long()")
        # On a GPU looking would wait for the device.
        if rows.device.type == "cpu" and len(rows) and int(rows.min()) < 0:
            raise ValueError(f"rows must be numbers of samples, from 0, but one is {int(rows.min())}")


def check_ascending(rows: Tensor, num_rows: int) -> None:
    """Raise ValueError unless `rows`, int64 [T], ascend within 0..num_rows-1: samples follow one another."""
    if len(rows) and (bool((rows.diff() < 0).any()) or int(rows[0]) < 0 or int(rows[-1]) >= num_rows):
        raise ValueError(
            f"rows must ascend within 0..{num_rows - 1}, one sample after another, not {rows[:8].tolist()}..; "
            "sort the tokens by sample"
        )


def check_rewards(**rewards: Tensor) -> None:
    """Raise ValueError unless all are [N], one number per sample, and finite, or NaN if a sample has none."""
    shapes = {name: tuple(values.shape) for name, values in rewards.items()}
    if len(set(shapes.values())) != 1 or any(len(shape) != 1 for shape in shapes.values()):
        raise ValueError(f"{', '.join(shapes)} must be [N], one number per sample, not {shapes}")
    for name, values in rewards.items():
        if bool(values.isinf().any()):
            sample = int(values.isinf().nonzero()[0, 0])
            raise ValueError(
                f"{name} has {float(values[sample])} at sample {sample}, which cannot be compared with other samples; "
                "give a finite number, or NaN for a sample that could not be scored"
            )


def at_least_float32(values: Tensor) -> Tensor:
    """Convert float16 and bfloat16 to float32: sums in them stop growing, at 256 in bfloat16, and ratios lose the
    digits that a clip looks at. Other dtypes as they are."""
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values


def masked_log_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Compute ln of policy / old policy, [T] with gradient through logprobs, in at least float32; 0 where masked:
    there an overflow of exp, or -inf less -inf, would reach the gradient as 0 * inf."""
    gap = at_least_float32(logprobs) - old_logprobs.detach()
    return torch.where(mask, gap, torch.zeros_like(gap))


def bounded(log_ratio: Tensor) -> Tensor:
    """Bound the logarithm of a ratio by MAX_LOG_RATIO, with the gradient of the whole: what is made of it (exp, k3)
    ends there in its value and in its slope, and is finite in float32. A clip then makes 0 of the slope, not NaN of
    0 * inf. NaN stays NaN. log_ratio: float, any shape."""
    from hybrid_rl.algos.bounding import Bounded  # here, so that algorithms can be listed without importing torch

    apply: Any = Bounded.apply
    result: Tensor = apply(log_ratio, MAX_LOG_RATIO)
    return result


def ratio_of(log_ratio: Tensor) -> Tensor:
    """Compute exp of the logarithm of a ratio, at most e^20 (`bounded`)."""
    return bounded(log_ratio).exp()
