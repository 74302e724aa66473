"""What the collector does with prompts that teach nothing, in whole runs."""

import pytest
import torch

from hybrid_rl import Trainer
from hybrid_rl.errors import NoSignalError
from tests.support.tiny import build_model, build_tokenizer, sums


def long(completion_ids, **_):
    return [float(len(ids) > 4) for ids in completion_ids]


@pytest.fixture
def make(tmp_path):
    """A Trainer of 3 steps x 4 prompts x 3 samples, most of which are equally long: 4 of 12 prompts have signal."""
    made = []

    def make(folder="runs", reward_funcs=long, **keys):
        defaults = {"prompts_per_step": 4, "num_generations": 3, "max_completion_length": 6, "learning_rate": 1e-2}
        defaults |= {"max_steps": 3, "max_refills": 9, "output_dir": str(tmp_path / folder), "run_name": "run"}
        made.append(Trainer(build_model(), reward_funcs, sums(12), tokenizer=build_tokenizer(), **defaults | keys))
        return made[-1]

    yield make
    for trainer in made:
        trainer.close()


@pytest.mark.slow
def test_every_group_that_is_trained_on_has_signal_and_a_resumed_run_goes_on_behind_the_refills(make):
    """Bit for bit: the prompts, the samples and the weights."""
    whole, broken = make("whole", save_steps=1), make("broken", save_steps=1)
    steps = [whole.step() for _ in range(3)]
    for batch, metrics in steps:
        rewards = batch["rewards"].view(4, 3)
        assert (rewards.max(1).values > rewards.min(1).values).all()
        assert metrics["collect/groups_dropped"] > 0 and metrics["collect/num_rollouts"] > 1
    assert steps[-1].metrics["epoch"] > 1.5  # without refills it would be 1
    broken.step()
    broken.close()
    resumed = make("broken", resume="auto", save_steps=1)
    assert resumed.global_step == 1
    for batch, metrics in steps[1:]:
        again = resumed.step()
        assert again.batch["prompt"] == batch["prompt"] and again.batch["completion"] == batch["completion"]
        assert again.metrics["epoch"] == metrics["epoch"]
    for name, weight in resumed.module.state_dict().items():
        assert torch.equal(weight, whole.module.state_dict()[name])


def test_a_step_without_signal_takes_nothing_from_the_data(make):
    """The numbers say why; the next step begins where this one did."""
    trainer = make(reward_funcs=lambda completion_ids, **_: [1.0] * len(completion_ids), max_refills=2)
    before = trainer.train_dataset.state_dict()
    with pytest.raises(
        NoSignalError, match=r"step 1: 0 of 12 prompts .* Of the others, 12 had the reward 1 throughout"
    ):
        trainer.step()
    assert trainer.train_dataset.state_dict() == before and trainer.global_step == 0
