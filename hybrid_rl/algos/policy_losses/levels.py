"""The ratio of a token, or of a whole completion (GSPO)."""

from __future__ import annotations

from torch import Tensor

from hybrid_rl.algos.masked import row_mean


def at_level(log_ratio: Tensor, mask: Tensor, rows: Tensor, num_rows: int, level: str) -> Tensor:
    """ln of the ratio that each token is weighed by, [T].

    - "token": its own
    - "sequence": the mean over its completion, with the gradient of all of its tokens: that of the geometric mean of
      the ratios (GSPO, arXiv:2507.18071, eq. 7)
    - "sequence_token": the same value with a gradient through the token's own logprob alone, sg[s] * p / sg[p]
      (GSPO-token, eq. 14)

    log_ratio: float [T], 0 where masked; mask: bool [T]; rows: int64 [T], in 0..num_rows-1, every sample whole.
    """
    if level == "token":
        return log_ratio
    if level == "sequence":
        return row_mean(log_ratio, mask, rows, num_rows)[rows]
    if level == "sequence_token":
        mean = row_mean(log_ratio.detach(), mask, rows, num_rows)[rows]
        return mean + (log_ratio - log_ratio.detach())
    raise ValueError(f"importance_sampling_level={level!r} is unknown; use token, sequence or sequence_token")
