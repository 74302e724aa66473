"""The origin of tokens: whether columns agree on which of them the policy made."""

from __future__ import annotations

import torch

from hybrid_rl.batch.batch import Batch
from hybrid_rl.batch.trajectories import sample_keys
from hybrid_rl.errors import DataError


def check_origins(batch: Batch) -> None:
    """Raise DataError unless every token that the policy made has a version, and every other one version -1 and logprob
    0: a token of the environment with a version would count as stale, one of the policy without it as fresh. For
    batches of a rollout; nobody's policy made demonstrations."""
    mask, versions, logprobs = (
        batch[name].values for name in ("completion_mask", "policy_version", "rollout_logprobs")
    )
    agrees = torch.where(mask, versions >= 0, (versions == -1) & (logprobs == 0))
    if bool(agrees.all()):
        return
    token = int((~agrees).nonzero()[0, 0])
    sample = int(batch["completion_ids"].row_index()[token])
    place = token - int(batch["completion_ids"].offsets[sample])
    maker = "policy" if mask[token] else "environment"
    wanted = (
        "version 0 or later (Sample.add_policy)" if mask[token] else "version -1 and logprob 0 (Sample.add_environment)"
    )
    raise DataError(
        f"token {place} of the completion of trajectory {sample_keys(batch)[sample]} is the {maker}'s by its mask, but "
        f"has version {int(versions[token])} and logprob {float(logprobs[token]):g}; give tokens of the {maker} "
        f"{wanted}"
    )
