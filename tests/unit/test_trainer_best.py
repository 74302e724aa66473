"""The best step of a run, its checkpoint and its weights at the end, and stopping early; also after a kill."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from hybrid_rl.controller.failures import note_of_ranks
from hybrid_rl.workers.groups import PolicyGroup
from tests.support.inside.trainers import best_of
from tests.support.tiny import build_model, spread, sums

SCRIPT = {0: 0.5, 1: 0.2, 2: 0.6, 3: 0.55, 4: 0.61, 5: 0.3, 6: 0.3, 7: 0.3, 8: 0.9}


def scripted(completions, trainer_state, **_):
    """The value of an evaluation after each step, which nothing is learned from."""
    return [SCRIPT[trainer_state.global_step]] * len(completions)


@pytest.fixture
def make(make_trainer):
    """Runs of up to 8 steps, evaluated after each."""

    def made(**keys):
        base = {"reward_funcs": [spread, scripted], "reward_weights": [1.0, 0.0], "eval_dataset": sums(2)}
        base |= {"max_steps": 8, "eval_steps": 1, "metric_for_best_model": "rewards/scripted/mean"}
        return make_trainer(**(base | keys))

    return made


def best_file(trainer):
    return json.loads((trainer.run_folder / "best.json").read_text())


def weights(trainer):
    return {name: tensor.clone() for name, tensor in trainer.module.state_dict().items()}


def test_the_best_step_is_recorded_and_kept(make):
    """Steps 1, 2, 4 and 8 are each the best so far; of checkpoints only they and the last are written."""
    trainer = make(save_steps=100)
    trainer.fit()
    assert best_file(trainer) == {
        "metric": "eval/rewards/scripted/mean",
        "value": pytest.approx(0.9),
        "step": 8,
        "checkpoint": "checkpoint-8",
        "before_training": 0.5,
        "evaluations_since_better": 0,
    }
    assert sorted(path.name for path in trainer.run_folder.glob("checkpoint-*")) == [
        f"checkpoint-{step}" for step in (1, 2, 4, 8)
    ]
    bare = make(max_steps=2)  # without save_steps it is recorded, and nothing is saved
    bare.fit()
    assert best_file(bare)["checkpoint"] is None and not list(bare.run_folder.glob("checkpoint-*"))


def test_its_weights_are_taken_at_the_end(make, capsys):
    """Of step 4, from which a run of 4 steps ends with the same ones; what follows generates with them."""
    until_4 = make(max_steps=4)
    until_4.fit()
    trainer = make(max_steps=7, save_steps=100, load_best_model_at_end=True)
    trainer.fit()
    mine, theirs = weights(trainer), weights(until_4)
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert "the best step by eval/rewards/scripted/mean is 4 (0.61): its weights are loaded" in capsys.readouterr().err
    prompts = [row["prompt"] for row in sums(3)]
    assert trainer.generate(prompts) == until_4.generate(prompts)
    trainer.fit()  # again: nothing to do, and nothing to load
    later = make(
        max_steps=7, load_best_model_at_end=True, save_steps=100, resume=str(trainer.run_folder / "checkpoint-7")
    )
    later.fit()
    assert all(torch.equal(one, theirs[name]) for name, one in weights(later).items())


def test_stopping_early(make, capsys):
    """After two evaluations that are not better than 0.6 by 0.02; 0.61 does not count, though 4 is still the best."""
    trainer = make(**{"early_stopping.patience": 2, "early_stopping.threshold": 0.02})
    trainer.fit()
    assert trainer.global_step == 4 and best_file(trainer)["step"] == 4
    assert "stopped early: eval/rewards/scripted/mean was not better in the last 2" in capsys.readouterr().err
    assert trainer.max_steps == 8  # so that a schedule of the learning rate keeps its length
    trainer.fit()
    assert trainer.global_step == 4 and not list(trainer.steps())
    trainer.fit(steps=1)  # asked for by number, it goes on
    assert trainer.global_step == 5


@pytest.mark.parametrize(("save_steps", "start"), [(1, 7), (4, 4)])
def test_fit_of_a_number_of_steps_after_an_early_stop_survives_a_restart(make, monkeypatch, caplog, save_steps, start):
    """Stopped after step 6, the second evaluation: a restart from step 7 finds that in the checkpoint, and one from
    step 4 makes the evaluation again."""
    monkeypatch.setattr("hybrid_rl.run.restarts.FIRST_DELAY_SECONDS", 0.0)
    keys = {"eval_steps": 3, "early_stopping.patience": 1, "early_stopping.threshold": 9.0, "max_restarts": 1}
    trainer = make(save_steps=save_steps, async_save=False, **keys)
    trainer.fit()
    assert trainer.global_step == 6
    if start < 6:
        shutil.rmtree(trainer.run_folder / "checkpoint-6")
    update, failures = PolicyGroup.update, [RuntimeError("the engine is dead")]

    def dies(self, batch, step):
        if step == 8 and failures:
            raise note_of_ranks(failures.pop())
        return update(self, batch, step)

    monkeypatch.setattr(PolicyGroup, "update", dies)
    trainer.fit(steps=2)
    assert trainer.global_step == 8 and f"checkpoint-{start}" in caplog.text and not failures


def test_a_killed_run_keeps_its_best_and_its_patience(make):
    """Killed after step 6, resumed from checkpoint-5: one bad evaluation is behind it, and it stops at 7."""
    keys = {"save_steps": 5, "early_stopping.patience": 3, "run_name": "killed", "model": build_model()}
    run = make(**keys)
    for _ in range(6):
        run.step()
    run.close()
    resumed = make(**(keys | {"resume": "auto", "model": build_model()}))
    assert (resumed.global_step, best_of(resumed).step, best_of(resumed).value, best_of(resumed).num_worse) == (
        *(5, 4, pytest.approx(0.61), 1),
    )
    resumed.fit()
    assert resumed.global_step == 7
    assert best_file(resumed)["step"] == 4 and best_file(resumed)["before_training"] is None
    resumed.close()
    over = make(**(keys | {"resume": "auto", "model": build_model()}))
    over.fit()
    assert over.global_step == 7  # it had stopped, and does not begin again
    over.close()
    longer = make(**(keys | {"resume": "auto", "early_stopping.patience": 4, "model": build_model()}))
    longer.fit()
    assert longer.global_step == 8 and best_file(longer)["step"] == 8


def test_the_best_of_the_run_before_is_found_in_its_folder(make):
    """Resumed under another name after step 5, whose best is 4: that checkpoint is the other run's."""
    run = make(save_steps=100, max_steps=5)
    run.fit()
    last = str(run.run_folder / "checkpoint-5")
    other = make(save_steps=100, max_steps=7, resume=last, run_name="other", load_best_model_at_end=True)
    other.fit()
    assert best_file(other)["checkpoint"] == f"../{run.run_folder.name}/checkpoint-4"
    saved = load_file(run.run_folder / "checkpoint-4" / "model.safetensors")
    mine = weights(other)
    assert all(torch.equal(mine[name], tensor) for name, tensor in saved.items())
