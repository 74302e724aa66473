"""What an algorithm is: one record that says what it needs and points to its pure functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from torch import Tensor

from hybrid_rl.algos.advantages import group_relative_advantages
from hybrid_rl.algos.policy_losses import PolicyLoss, clipped_policy_loss


@dataclass(frozen=True)
class Algorithm:
    """One algorithm of the library.

    advantage: f(rewards [N], groups [N], **advantage_options) -> [N].
    policy_loss: f(logprobs, old_logprobs, advantages, mask, rows [T], num_rows, **loss_options) -> PolicyLoss.
    advantage_options, loss_options: the names of the algorithm's config leaves that are passed by keyword, so that the
    functions never see a config.
    needs: further columns ("ref_logprobs", "values", "teacher_logprobs") and collector work ("greedy_baseline",
    "group_filter") that it cannot do without. A KL term asks for "ref_logprobs" by beta > 0.
    """

    name: str
    advantage: Callable[..., Tensor]
    policy_loss: Callable[..., PolicyLoss]
    advantage_options: tuple[str, ...] = ()
    loss_options: tuple[str, ...] = ()
    needs: frozenset[str] = frozenset()


GRPO = Algorithm(
    name="grpo",
    advantage=group_relative_advantages,
    policy_loss=clipped_policy_loss,
    advantage_options=("scale_rewards",),
    loss_options=("epsilon", "epsilon_high", "delta", "importance_sampling_level"),
)

ALGORITHMS: Mapping[str, Algorithm] = MappingProxyType({record.name: record for record in (GRPO,)})
