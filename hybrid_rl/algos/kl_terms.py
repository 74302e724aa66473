"""The KL penalty against the reference as records: none, in the loss, in the reward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from hybrid_rl.algos.interface import KLTerm, register
from hybrid_rl.errors import ConfigError
from hybrid_rl.options import key

_WHERE = "where a KL penalty against the reference stands: none, loss or reward"


@register
@dataclass(frozen=True)
class NoKL(KLTerm):
    """No reference model."""

    kl_in: Literal["none"] = key("none", _WHERE)
    beta: float = key(
        0.0,
        "weight of the KL penalty; above 0 sets kl_in=loss",
        minimum=0,
        maximum=0,
        remedy="kl=none has no penalty to weigh; leave kl out, or choose kl=loss or kl=reward",
    )


@dataclass(frozen=True)
class _Weighted(KLTerm):
    """Base of both penalties."""

    beta: float = key(0.04, "weight of the KL penalty; with kl_target what it starts from", above=0)
    kl_target: float | None = key(
        None, "adaptive weight: beta follows the measured KL per completion to this; None = fixed", above=0
    )
    kl_horizon: int = key(10000, "adaptive weight: samples over which beta moves by one unit of error", minimum=1)
    reference_reset_steps: int | None = key(
        None, "every n training steps the policy becomes the new reference; None = never (ProRL)", minimum=1
    )

    ref_model_sync_steps: int | None = key(
        None, "every n training steps the reference moves towards the policy; None = never (TRL: 512)", minimum=1
    )
    ref_model_mixup_alpha: float = key(
        0.6, "the share of the policy in the reference that ref_model_sync_steps makes", above=0, maximum=1
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reference_reset_steps is not None and self.ref_model_sync_steps is not None:
            raise ConfigError(
                f"reference_reset_steps={self.reference_reset_steps} and ref_model_sync_steps="
                f"{self.ref_model_sync_steps} both move the reference, the first with a new start of the optimizer; "
                "leave one of them out"
            )

    @property
    def inert_options(self) -> Mapping[str, str]:
        """kl_horizon without a target, ref_model_mixup_alpha without steps."""
        found = {} if self.kl_target is not None else {"kl_horizon": "beta is fixed; set kl_target"}
        if self.ref_model_sync_steps is None:
            found["ref_model_mixup_alpha"] = "the reference does not move; set ref_model_sync_steps"
        return found

    @property
    def moves_reference(self) -> str:
        """The key, with its value, by which the reference does not stay as it was before training; empty if it does."""
        for name in ("reference_reset_steps", "ref_model_sync_steps"):
            if getattr(self, name) is not None:
                return f"{name}={getattr(self, name)}"
        return ""


@register
@dataclass(frozen=True)
class KLInLoss(_Weighted):
    """beta * KL(policy || reference) beside the policy loss (GRPO, arXiv:2402.03300, eq. 3 and 4: k3, beta = 0.04)."""

    kl_in: Literal["loss"] = key("loss", _WHERE)
    kl_estimator: Literal["k2", "k3", "abs", "exact"] = key(
        "k3", "KL estimate in the loss; k1 is not offered: its gradient is zero in expectation"
    )
    use_bias_correction_kl: bool = key(
        True, "weight the KL term by the importance ratio: right for samples of an older policy (DeepSeek-V3.2)"
    )
    in_loss = True


@register
@dataclass(frozen=True)
class KLInReward(_Weighted):
    """-beta * KL at every token, as part of its reward (PPO for language models, arXiv:1909.08593, eq. 2)."""

    kl_in: Literal["reward"] = key("reward", _WHERE)
    kl_estimator: Literal["k1", "k2", "k3", "abs"] = key(
        "k1", "KL estimate in the reward; only k1 has the gradient of KL(policy || reference)"
    )
    in_reward = True
