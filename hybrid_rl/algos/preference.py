"""Direct preference optimisation: a pure function, for your own losses. This library has no trainer for pairs."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid


def dpo_loss(
    chosen_logprobs: Tensor,
    rejected_logprobs: Tensor,
    ref_chosen_logprobs: Tensor,
    ref_rejected_logprobs: Tensor,
    *,
    beta: float,
) -> Tensor:
    """Compute -ln sigmoid(beta * margin), margin = ln (pi / ref)(chosen) - ln (pi / ref)(rejected), [N] with gradient.

    DPO, arXiv:2305.18290, eq. 7. All arguments: float [N], ln p of whole completions (sums over their tokens). A larger
    beta keeps the policy closer to the reference: the same loss is reached with a smaller margin.
    """
    columns = (chosen_logprobs, rejected_logprobs, ref_chosen_logprobs, ref_rejected_logprobs)
    shapes = [tuple(column.shape) for column in columns]
    if chosen_logprobs.dim() != 1 or len(set(shapes)) > 1:
        raise ValueError(f"all four columns must be [N], one number per completion, not {shapes}")
    if not beta > 0:
        raise ValueError(f"beta={beta} must be above 0")
    margin = (chosen_logprobs - ref_chosen_logprobs.detach()) - (rejected_logprobs - ref_rejected_logprobs.detach())
    return -logsigmoid(beta * margin)
