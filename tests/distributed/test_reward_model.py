"""A reward model sharded over two ranks: the scores of the whole one, and ranks with unequal numbers of samples."""

from datetime import timedelta

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from hybrid_rl.config import load_config, resolve
from hybrid_rl.controller import RankContext, RankMesh
from hybrid_rl.controller.ranks import object_gather
from hybrid_rl.rewards import RewardModelEntry
from hybrid_rl.training.sharding.fsdp import ShardedCausalLM
from hybrid_rl.workers.reward_model import RewardModel
from tests.distributed.ranks import run_ranks
from tests.support.tiny import VOCABULARY, build_tokenizer
from tests.unit.workers.test_reward_model import classifier, sample_batch

pytestmark = pytest.mark.slow  # processes are started

KEYS = {"max_completion_length": 8, "num_generations": 2, "tokens_per_micro_batch": 20, "dtype": "float32"}


def settings(**keys):
    loaded, given = load_config(KEYS | keys)
    return resolve(loaded, given)


def sharded_scores(rank, num_ranks, path):
    context = RankContext(
        rank=rank,
        mesh=RankMesh(dp_shard=num_ranks),
        device=torch.device("cpu"),
        gather=object_gather(num_ranks, timedelta(seconds=60)),
    )
    model = RewardModel(RewardModelEntry("rm", path), settings(), context)
    assert isinstance(model.model, ShardedCausalLM)
    local = sum(p.to_local().numel() for p in model.model.module.parameters())
    module = classifier("llama", vocab_size=len(VOCABULARY))  # a live one, equal on both ranks
    live = RewardModel(RewardModelEntry("rm", module, build_tokenizer()), settings(), context)
    batch = sample_batch()
    torch.testing.assert_close(live.scores(batch), model.scores(batch))
    assert sum(p.to_local().numel() for p in live.model.module.parameters()) == local
    # All samples are the first rank's: the other runs as many forwards without any.
    mine = batch if rank == 0 else batch.select([])
    return model.scores(mine), model.scores(batch.select([rank, rank + 1])), local


def test_two_ranks(tmp_path):
    module = classifier("llama", vocab_size=len(VOCABULARY))
    module.save_pretrained(tmp_path)
    build_tokenizer().save_pretrained(tmp_path)
    whole = RewardModel(RewardModelEntry("rm", module, build_tokenizer()), settings(), RankContext())
    expected = whole.scores(sample_batch())
    (first, first_part, first_size), (second, second_part, second_size) = run_ranks(sharded_scores, 2, str(tmp_path))
    torch.testing.assert_close(first, expected, rtol=1e-5, atol=1e-6)
    assert second.shape == (0,)
    torch.testing.assert_close(first_part, expected[:2], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(second_part, expected[1:3], rtol=1e-5, atol=1e-6)
    num_parameters = sum(p.numel() for p in AutoModelForSequenceClassification.from_pretrained(tmp_path).parameters())
    assert first_size + second_size == num_parameters
