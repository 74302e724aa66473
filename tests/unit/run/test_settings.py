"""What is set between steps acts in the next one, is written down, and outlives a resume."""

import copy
import logging

import numpy
import pytest
import torch

from hybrid_rl import Callback, Trainer
from hybrid_rl.config import load_config
from hybrid_rl.errors import ConfigError, EngineStateError, HybridRLError
from hybrid_rl.run.attributes import Setting
from hybrid_rl.run.missing import LIVE
from tests.support.inside.training import adam_states, clipped_at, options_of
from tests.support.inside.workers import actor_of, optimizer_of
from tests.support.tiny import spread, sums


def weights_of(module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten().clone() for parameter in module.parameters()]).double()


def logprobs_of(module, batch, temperature: float) -> torch.Tensor:
    """ln p of the completion tokens by transformers' own forward pass, float64 [M]."""
    found = []
    for prompt, completion in zip(batch["prompt_ids"], batch["completion_ids"], strict=True):
        ids = torch.cat([prompt, completion])[None].long()
        with torch.no_grad():
            logits = module(input_ids=ids).logits[0, len(prompt) - 1 : -1].double()
        found.append((logits / temperature).log_softmax(1).gather(1, completion[:, None].long())[:, 0])
    return torch.cat(found)


# ------------------------------------------------------------------------------------------------------ what it does


def test_the_next_update_has_the_new_learning_rate(make_trainer, records) -> None:
    trainer = make_trainer(max_steps=3, adam_beta1=0.9, adam_beta2=0.99)
    trainer.step()
    trainer.learning_rate = 1e-4
    assert trainer.learning_rate == trainer.config.optimizer.learning_rate == 1e-4
    before = weights_of(trainer.module)
    assert trainer.step().metrics["learning_rate"] == 1e-4
    optimizer = optimizer_of(trainer)
    states = adam_states(optimizer)
    moments = [torch.cat([state[name].flatten() for state in states]).double() for name in ("exp_avg", "exp_avg_sq")]
    mean, square = moments[0] / (1 - 0.9**2), moments[1] / (1 - 0.99**2)
    expected = -1e-4 * mean / (square.sqrt() + 1e-8)
    assert expected.abs().max() > 5e-5
    torch.testing.assert_close(
        weights_of(trainer.module) - before, expected, rtol=0, atol=2e-7
    )  # weights of 1 are rounded
    lines = records(trainer)
    assert ["set/learning_rate" in line for line in lines] == [False, True] and lines[1]["set/learning_rate"] == 1e-4


def test_a_schedule_goes_on_from_where_it_is_and_stretches_with_the_run(make_trainer, capsys) -> None:
    """A linear one of 4 steps that becomes one of 8 after step 3: 1 - 3/8 = 0.625 of the peak is next."""
    trainer = make_trainer(max_steps=4, lr_scheduler_type="linear", learning_rate=1e-2)
    rates = [trainer.step().metrics["learning_rate"] for _ in range(2)]
    trainer.learning_rate = 1e-3
    rates.append(trainer.step().metrics["learning_rate"])
    trainer.max_steps = 8
    rates.append(trainer.step().metrics["learning_rate"])
    assert rates == pytest.approx([1e-2, 0.75e-2, 0.5e-3, 0.625e-3])
    assert "max_steps 4 -> 8; the linear schedule" in capsys.readouterr().err


def test_samples_are_drawn_and_trained_at_the_new_temperature(make_trainer) -> None:
    trainer = make_trainer(max_steps=3)
    trainer.step()
    trainer.temperature = 0.25
    before = copy.deepcopy(trainer.module)
    batch = trainer.step().batch
    assert batch["temperature"].tolist() == [0.25] * 8
    expected = logprobs_of(before, batch, 0.25)
    torch.testing.assert_close(batch["rollout_logprobs"].values.double(), expected, rtol=0, atol=1e-5)
    assert (expected - logprobs_of(before, batch, 1.0)).abs().max() > 0.1


def test_a_function_of_the_same_name_takes_the_place_of_the_old_one(make_trainer, records) -> None:
    """Running a cell again defines another function of that name."""

    def score(completions, **_):
        return [0.5] * len(completions)

    trainer = make_trainer(reward_funcs=score, eval_dataset=sums(2), max_steps=4)
    assert trainer.step().metrics["rewards/score/mean"] == 0.5

    def score(completions, answer, **_):
        return [100.0] * len(completions)

    trainer.reward_funcs = score
    assert trainer.reward_funcs == (score,)
    assert trainer.step().metrics["rewards/score/mean"] == 100
    assert trainer.evaluate()["eval/rewards/score/mean"] == 100
    trainer.set(reward_funcs=[spread, score], reward_weights=[0, 0.1])
    metrics = trainer.step().metrics
    assert metrics["reward"] == pytest.approx(10) and "rewards/spread/mean" in metrics
    assert list(records(trainer, name="samples.jsonl")[-1]["rewards"]) == ["spread", "score"]
    trainer.reward_weights = [0, 0.2]
    assert trainer.step().metrics["reward"] == pytest.approx(20)


def test_other_settings_act_in_the_next_step(make_trainer) -> None:
    trainer = make_trainer(max_steps=6, beta=0.1, max_completion_length=8, num_iterations=2)
    assert trainer.step().metrics["kl_beta"] == 0.1
    trainer.set(beta=0.3, num_generations=3, max_completion_length=4, epsilon=0.05, entropy_coef=0.01, max_grad_norm=2)
    batch, metrics = trainer.step()
    assert metrics["kl_beta"] == 0.3 and metrics["set/beta"] == 0.3
    assert batch.num_samples == 12 and metrics["completions/max_length"] <= 4
    actor = actor_of(trainer)
    assert (options_of(actor).policy_loss.epsilon, options_of(actor).max_completion_length) == (0.05, 4)
    assert actor.entropy_weight.applied == 0.01 and clipped_at(actor.optimizer) == 2


# --------------------------------------------------------------------------------------------------- what is refused


REFUSED = (
    ({"learning_rate": -1}, "must be at least 0"),
    ({"learning_rate": 0}, "trains nothing"),
    ({"learning_rate": "fast"}, "must be of type float"),
    ({"temperature": 0}, "must be at least 0.01"),
    ({"num_generations": 1}, "compares the completions of a group; use at least 2"),
    ({"max_completion_length": 6}, "is above 5, for which engine and memory were planned"),
    ({"beta": 0.1}, "beta=0.1 would change kl.kl_in none -> loss too"),
    ({"critic_learning_rate": 0.1}, "there is no critic"),
    ({"reward_weights": [1, 2]}, "2 reward weights for 1 reward function"),
    ({"reward_funcs": "nope/nope"}, "has the reward model 'nope', which is loaded when a Trainer is made"),
    ({"reward_funcs": lambda solution: [0.0]}, "requires the parameter 'solution', but the dataset has no such"),
    ({"reward_funcs": []}, "there is no reward"),
    ({"reward_funcs": [torch.nn.Linear(1, 1)]}, "the reward model 'Linear', which is loaded when"),
    ({"callbacks": [3]}, "write a subclass of hybrid_rl.Callback"),
    ({"lr": 0.1}, "a Trainer has no such attribute; set learning_rate"),
    ({"temprature": 0.1}, "did you mean trainer.temperature?"),
    ({"callbacks": [Callback()], "learning_rate": -1}, "must be at least 0"),
    ({"max_steps": 77, "learning_rate": "fast"}, "must be of type float"),
    ({"callbacks": [Callback()], "max_steps": 0}, "max_steps=0 must be a whole number"),
    ({"eval_temperature": 0, "num_generations_eval": 2, "max_steps": 77}, "num_generations_eval"),
    ({"policy": 3}, "trainer.policy is what the Trainer works with, and cannot be replaced"),
    ({"num_ranks": 2}, "it is fixed when a Trainer is made. Make another one"),
    ({"temperature": 0.5, "seed": 3}, "trainer.seed would do nothing: it is fixed"),
)


def test_what_cannot_be_set_changes_nothing(make_trainer) -> None:
    trainer = make_trainer(max_steps=1, eval_dataset=sums(2))
    before = trainer.config
    for changes, message in REFUSED:
        with pytest.raises(ConfigError, match=message.replace("?", r"\?").replace("(", r"\(")):
            trainer.set(**changes)
        if len(changes) == 1:
            ((name, value),) = changes.items()  # of one that no Trainer has, Python's own error tells
            with pytest.raises(ConfigError if hasattr(Trainer, name) else AttributeError):
                setattr(trainer, name, value)
        assert trainer.config == before and trainer.reward_funcs == (spread,)
        assert trainer.callbacks == () and trainer.max_steps == 1
    for steps in (0, -1, 2.5, True, "3"):
        with pytest.raises(ConfigError, match="must be a whole number"):
            trainer.fit(steps=steps)
        with pytest.raises(ConfigError, match="must be a whole number"):
            trainer.max_steps = steps
    assert not any(name.startswith("set/") for name in trainer.step().metrics)


def test_evaluation_is_greedy_again(make_trainer) -> None:
    trainer = make_trainer(eval_dataset=sums(2), max_steps=1)
    greedy = trainer.evaluate()["eval/reward"]
    trainer.set(eval_temperature=0.5, num_generations_eval=2)
    assert trainer.num_generations_eval == 2 and trainer.evaluations[""].num_samples == 1
    trainer.evaluate()
    assert trainer.evaluations[""].num_samples == 2
    trainer.eval_temperature = 0.0
    assert trainer.evaluate()["eval/reward"] == greedy and trainer.evaluations[""].num_samples == 1
    with pytest.raises(AttributeError, match="it exists with eval_temperature above 0"):
        _ = trainer.num_generations_eval


def test_lists_are_handed_out_as_tuples_and_a_closed_trainer_is_left_alone(make_trainer) -> None:
    trainer = make_trainer(reward_weights=[0.5])
    assert (trainer.reward_weights, trainer.reward_funcs) == ((0.5,), (spread,))
    trainer.max_steps = numpy.int64(5)
    assert trainer.max_steps == 5 and type(trainer.max_steps) is int
    trainer.close()
    for name, value in (("max_steps", 7), ("callbacks", [Callback()])):
        with pytest.raises(HybridRLError, match="closed"):
            setattr(trainer, name, value)
    assert trainer.max_steps == 5 and trainer.callbacks == ()


def test_nothing_is_set_inside_a_step(make_trainer) -> None:
    seen = []

    def reward(completion_ids, **_):
        with pytest.raises(EngineStateError, match="a training step is running; set learning_rate before or after it"):
            trainer.learning_rate = 1e-3
        return spread(completion_ids)

    class Sets(Callback):
        def on_step_end(self, trainer, step, batch, metrics):
            seen.append(metrics["learning_rate"])
            trainer.learning_rate = 1e-2 / (step + 1)

    trainer = make_trainer(reward_funcs=reward, callbacks=[Sets()], max_steps=3)
    trainer.fit()
    assert seen == [1e-2, 1e-2 / 2, 1e-2 / 3]


def test_every_setting_is_described_typed_and_a_key(make_trainer) -> None:
    trainer = make_trainer()
    assert set(LIVE) <= set(dir(trainer))
    assigned = {name for name, attribute in vars(Trainer).items() if isinstance(attribute, Setting)}
    assert assigned == set(LIVE) and assigned <= set(Trainer.__annotations__)
    assert trainer.temperature == 1.0 and trainer.num_generations == 2 and trainer.callbacks == ()
    with pytest.raises(AttributeError, match="this run has no such setting"):
        _ = trainer.critic_learning_rate
    assert not hasattr(trainer, "seed")


# ---------------------------------------------------------------------------------------------------------- resuming


def test_a_resumed_run_goes_on_with_what_was_set(make_trainer, capsys, caplog) -> None:
    def other(completions, **_):
        return [float(place) for place, _ in enumerate(completions)]

    keys = {"run_name": "run", "save_steps": 1, "max_steps": 6, "resume": "auto"}
    first = make_trainer(**keys)
    first.step()
    first.learning_rate = 1e-3
    first.set(learning_rate=1e-4, temperature=0.5, reward_funcs=other)
    first.step()
    text = (first.run_folder / "config.yaml").read_text()
    assert "# after step 1: optimizer.learning_rate 0.001 -> 0.0001\n" in text
    assert load_config(first.run_folder / "config.yaml")[0].rollout.temperature == 0.5
    first.close()
    capsys.readouterr()
    with caplog.at_level(logging.WARNING, logger="hybrid_rl"):
        second = make_trainer(**keys)
    said = capsys.readouterr().err
    assert "as set in the resumed run: optimizer.learning_rate 0.01 -> 0.0001 (after step 1), rollout.temp" in said
    assert "changed:" not in said
    assert "after step 1 the reward functions were set to other, but this run has spread" in caplog.text
    batch, metrics = second.step()
    assert metrics["learning_rate"] == metrics["set/learning_rate"] == 1e-4 and batch["temperature"][0] == 0.5
    second.close()
    third = make_trainer(**keys | {"learning_rate": 5e-3})  # asked for: that one counts
    said = capsys.readouterr().err
    assert "changed: optimizer.learning_rate 0.0001 -> 0.005\n" in said and "rollout.temperature 1.0 -> 0.5" in said
    assert third.step().metrics["learning_rate"] == 5e-3 and third.temperature == 0.5
    third.close()
    assert make_trainer(**keys | {"learning_rate": 5e-3}).step().metrics["learning_rate"] == 5e-3


# ------------------------------------------------------------------------------------------- more steps, fewer steps


def test_more_steps_after_the_end(make_trainer, records) -> None:
    trainer = make_trainer(max_steps=2, save_steps=2)
    trainer.train()
    trainer.fit(steps=3)
    assert trainer.global_step == trainer.max_steps == 5
    trainer.max_steps = 9
    trainer.fit(steps=1)
    assert (trainer.global_step, trainer.max_steps) == (6, 9)
    assert [line["step"] for line in records(trainer)] == [0, 1, 2, 3, 4, 5, 6]


def test_a_callback_stops_a_run(make_trainer) -> None:
    class Stops(Callback):
        def on_step_end(self, trainer, step, batch, metrics):
            if step == 2:
                trainer.stop()

    trainer = make_trainer(max_steps=9, save_steps=5, callbacks=[Stops()])
    trainer.fit()
    assert trainer.global_step == 2 and (trainer.run_folder / "checkpoint-2").exists()
    trainer.callbacks = ()
    trainer.fit(steps=2)
    assert trainer.global_step == 4


def test_stop_iteration_in_a_callback(make_trainer) -> None:
    class Stops(Callback):
        def on_step_end(self, trainer, step, batch, metrics):
            raise StopIteration

    trainer = make_trainer(callbacks=[Stops()])
    for call in (trainer.fit, lambda: list(trainer.steps())):
        with pytest.raises(HybridRLError, match=r"on_step_end of Stops raised StopIteration; .* call trainer.stop\(\)"):
            call()


def test_the_length_of_a_run_is_written_down_like_other_changes(make_trainer, capsys) -> None:
    trainer = make_trainer(max_steps=1)
    trainer.fit()
    trainer.fit(steps=1)
    trainer.max_steps = 3
    assert trainer.max_steps == trainer.config.max_steps == 3
    said, text = capsys.readouterr().err, (trainer.run_folder / "config.yaml").read_text()
    for change in ("after step 1: max_steps 1 -> 2", "after step 2: max_steps 2 -> 3"):
        assert f"set {change}" in said and f"# {change}" in text
    assert "\nmax_steps: 3" in text
    again = make_trainer(max_steps=2, resume=str(trainer.save()))  # as it is given
    assert (again.max_steps, again.config.max_steps) == (2, 2)


def test_a_resumed_run_with_other_reward_functions_is_told(make_trainer, caplog) -> None:
    def other(completions, **_):
        return [float(len(text)) for text in completions]

    trainer = make_trainer(max_steps=2, reward_funcs=[spread, other])
    trainer.step()
    folder = str(trainer.save())
    make_trainer(folder, max_steps=2, reward_funcs=[spread, other], resume=folder)
    assert "reward functions" not in caplog.text
    make_trainer(folder, max_steps=2, reward_funcs=other, resume=folder)
    assert "the resumed run had the reward functions spread, other, and this one has other" in caplog.text
