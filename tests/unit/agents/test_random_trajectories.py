"""Trajectories through the Trainer's own tools and environments, which differ in everything: what is stored is what the
engine made, whenever tools answer."""

import pytest

from tests.support.agents.random_tools import SETTINGS, TOOLS, Line, caller, gap_between, gaps, is_varied, rows

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("num_prompts", [5, pytest.param(125, marks=pytest.mark.sweep)])
def test_every_token_has_the_trainers_logprob_and_delays_change_nothing(make_trainer, num_prompts):
    batches = []
    for limits in ({}, {"max_num_seqs": 5}):
        model, tokenizer = caller()
        keys = {**SETTINGS, "prompts_per_step": num_prompts, "tokenizer": tokenizer, **limits}
        trainer = make_trainer(model, None, rows(num_prompts), tools=TOOLS, environment_factory=Line, **keys)
        step = trainer.step()
        trainer.close()
        batches.append(step.batch)
        assert is_varied(step.metrics, set(step.batch["finish_reason"]), 8 * num_prompts), step.metrics
        assert gaps(step.batch) < 1e-5
    assert gap_between(*batches) < 1e-5
    assert batches[0].num_samples > 8 * num_prompts
