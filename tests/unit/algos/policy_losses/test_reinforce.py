"""REINFORCE by hand, and as supervised learning."""

from __future__ import annotations

import torch

from hybrid_rl.algos import token_weights
from hybrid_rl.algos.policy_losses import Reinforce
from tests.unit.algos.policy_losses.samples import MASK, assert_is, columns, loss_and_gradient, samples


def test_written_out() -> None:
    """-A ln p, gradient -A, whatever the old policy says."""
    given = columns()
    loss, gradient = loss_and_gradient(Reinforce(), given)
    new, advantages = given["logprobs"].tolist(), given["advantages"].tolist()
    expected = [(t, -advantages[t] * new[t], -advantages[t]) for places in samples(given) for t in places]
    assert_is(loss, gradient, expected)
    old = (given["logprobs"].detach() - given["old_logprobs"]).exp()
    torch.testing.assert_close(loss.ratio[MASK], old[MASK], rtol=1e-12, atol=0)


def test_with_advantage_one_it_is_cross_entropy() -> None:
    """Mean over all tokens of -ln softmax(logits)[label], against PyTorch's own."""
    logits = torch.randn(len(MASK), 11, dtype=torch.float64, requires_grad=True)
    labels = torch.arange(len(MASK)) % 11
    given = columns()
    given["logprobs"] = logits.log_softmax(1).gather(1, labels[:, None])[:, 0]
    given["advantages"] = torch.ones(len(MASK), dtype=torch.float64)
    loss, _ = loss_and_gradient(Reinforce(), given)
    weights = token_weights(
        MASK, given["rows"], 6, "dapo", num_tokens=int(MASK.sum()), num_trajectories=6, max_completion_length=9
    ).double()
    ours = (weights * torch.where(MASK, loss.per_token, 0.0)).sum()
    theirs = torch.nn.functional.cross_entropy(logits[MASK], labels[MASK])
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
    (mine,), (reference,) = torch.autograd.grad(ours, logits), torch.autograd.grad(theirs, logits)
    torch.testing.assert_close(mine, reference, rtol=1e-6, atol=1e-9)
