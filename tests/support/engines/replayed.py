"""Samples held against the weights that are said to have made them, token by token; and runs on saved rollouts against
those that saved them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hybrid_rl import Trainer
from hybrid_rl.batch import Batch, BatchRef
from hybrid_rl.logging.run_folder import read_jsonl
from tests.support.kills.killed import without_chance


@torch.no_grad()
def logprobs_of(model: PreTrainedModel, prompt: Tensor, completion: Tensor) -> Tensor:
    """ln p of the tokens of a completion by the model's own forward pass, temperature 1."""
    ids = torch.cat([prompt, completion])
    logits = model(input_ids=ids[None]).logits[0, len(prompt) - 1 : -1].float()
    return logits.log_softmax(-1).gather(1, completion[:, None])[:, 0]


def gaps_by_version(
    model: Any, weights: Mapping[int, Mapping[str, Tensor]], batch: Batch | BatchRef, now: int
) -> tuple[float, float, dict[int, int]]:
    """Compare the logprobs of a batch with those of the weights of each token's version.

    Returns the largest difference, the largest to the weights of the version before, and how many tokens are of each
    age at the version `now`.
    """
    loaded = batch.load() if isinstance(batch, BatchRef) else batch
    gap, other_gap, ages = 0.0, 0.0, dict[int, int]()
    columns: Sequence[Any] = [
        loaded[name] for name in ("prompt_ids", "completion_ids", "rollout_logprobs", "policy_version")
    ]
    for version in sorted({*loaded["policy_version"].values.tolist()}):
        for is_other in (False, True):
            if version - is_other not in weights:
                continue
            model.load_state_dict(weights[version - is_other])
            for prompt, completion, said, made in zip(*columns, strict=True):
                of_version = made == version
                found = (logprobs_of(model, prompt, completion) - said)[of_version].abs()
                largest = float(found.max()) if len(found) else 0.0
                if is_other:
                    other_gap = max(other_gap, largest)
                else:
                    gap = max(gap, largest)
                    ages[now - version] = ages.get(now - version, 0) + int(of_version.sum())
    return gap, other_gap, ages


def assert_learned_alike(recorded: Trainer, replayed: Trainer) -> list[Mapping[str, Any]]:
    """Check that a run on saved rollouts has learned what the recorded one did, to the bit: whatever it logs of a step
    (losses, weights of the correction, ages), and the weights at the end. Returns what the recorded run has logged."""
    theirs, mine = (
        [without_chance(line) for line in read_jsonl(one.run_folder / "metrics.jsonl") if line["step"]]
        for one in (recorded, replayed)
    )
    assert [line["step"] for line in mine] == [line["step"] for line in theirs] and theirs
    for line, known in zip(mine, theirs, strict=True):
        assert {"loss", "grad_norm", "reward", "mismatch/mean_weight", "staleness/mean_age"} <= {*line}
        assert line == {name: known[name] for name in line}
    assert any(line["mismatch/mean_weight"] != 1 for line in theirs)
    weights = recorded.module.state_dict()
    assert all(torch.equal(weight, weights[name]) for name, weight in replayed.module.state_dict().items())
    return theirs
