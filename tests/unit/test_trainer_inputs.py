"""What a Trainer takes: models, configs, datasets and rewards in every form that is promised."""

import asyncio
import json
import logging
import math
import time
from pathlib import Path

import datasets
import pytest
import yaml

from hybrid_rl.errors import RewardError
from tests.support.tiny import build_tokenizer, exact, ids_of, spread, sums

pytestmark = pytest.mark.slow  # the file as a whole

KEYS = {"prompts_per_step": 4, "num_generations": 2, "max_completion_length": 5, "max_steps": 1}


def test_model_by_folder_is_the_model_as_a_module(make_trainer, model_folder, records) -> None:
    by_path = [make_trainer(str(model_folder)), make_trainer(model_folder), make_trainer(None, path=str(model_folder))]
    for trainer in (*by_path, make_trainer()):
        trainer.fit()
    expected, *others = (records(other, comparable=True) for other in (trainer, *by_path))
    assert all(other == expected for other in others)


def test_config_as_yaml_mapping_or_keywords(make_trainer, tmp_path) -> None:
    nested = {
        "max_steps": 1,
        "output_dir": str(tmp_path / "runs"),
        "data": {"prompts_per_step": 4},
        "algorithm": {"name": "grpo", "num_generations": 2},
        "rollout": {"max_completion_length": 5},
        "optimizer": {"learning_rate": 1e-2},
    }
    (tmp_path / "grpo.yaml").write_text(yaml.safe_dump(nested))
    trainers = [
        make_trainer(config=tmp_path / "grpo.yaml"),
        make_trainer(config=nested),
        make_trainer(config=nested | {"data": {"prompts_per_step": 2}}, prompts_per_step=4),
        make_trainer(max_steps=1),
    ]
    configs = [trainer.config for trainer in trainers]
    assert all(config == configs[0] for config in configs)


def as_jsonl(folder: Path):
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sums(12)))
    return folder / "data.jsonl"


def as_parquet(folder: Path):
    datasets.Dataset.from_list(sums(12)).to_parquet(folder / "data.parquet")
    return str(folder / "data.parquet")


def test_datasets(make_trainer, tmp_path, records) -> None:
    rows = sums(12)
    forms = [rows, as_jsonl(tmp_path), as_parquet(tmp_path), datasets.Dataset.from_list(rows), tuple(rows)]
    trainers = [make_trainer(reward_funcs=exact, train_dataset=form, max_steps=1) for form in forms]
    for trainer in trainers:
        trainer.fit()
    expected, *others = (records(trainer, comparable=True) for trainer in trainers)
    assert all(other == expected for other in others)


def test_dataset_by_config_key(make_trainer, tmp_path) -> None:
    path = str(as_jsonl(tmp_path))
    trainer = make_trainer(train_dataset=None, train_path=path, eval_path=path)
    assert trainer.evaluate()["eval/rewards/num_failed"] == 0
    trainer.fit()


@pytest.mark.parametrize("how", ["IterableDataset", "function"])
def test_streams_with_max_steps(make_trainer, how: str) -> None:
    """A stream keeps its order and goes on into the next pass: 3 steps of 4 prompts from 10."""
    rows = sums(10)
    stream = (lambda: iter(rows)) if how == "function" else datasets.Dataset.from_list(rows).to_iterable_dataset()
    trainer = make_trainer(train_dataset=stream, max_steps=3)
    prompts = [batch["prompt"][::2] for batch, _ in trainer.steps()]
    assert sum(prompts, []) == [row["prompt"] for row in (rows + rows)[:12]]


def test_epochs_decide_the_number_of_steps(make_trainer) -> None:
    """2.5 epochs of 6 prompts are 15; 3 steps of 4 fit, the last 3 prompts do not fill a step."""
    trainer = make_trainer(train_dataset=sums(6), num_train_epochs=2.5)
    seen = [prompt for batch, _ in trainer.steps() for prompt in batch["prompt"][::2]]
    assert trainer.global_step == 3
    prompts = sorted(row["prompt"] for row in sums(6))
    assert sorted(seen[:6]) == sorted(seen[6:12]) == prompts
    assert seen[:6] != seen[6:12]  # shuffled again


def test_chat_prompts(make_trainer, records) -> None:
    seen = []

    def reward(prompts, completions, **_):
        seen.extend(zip(prompts, completions, strict=True))
        return [float(len(messages[0]["content"])) for messages in completions]

    trainer = make_trainer(
        tokenizer=build_tokenizer(chat=True), reward_funcs=reward, train_dataset=sums(12, chat=True), max_steps=1
    )
    batch, _ = trainer.step()
    for index, prompt in enumerate(batch["prompt"]):
        assert batch["prompt_ids"][index].tolist() == ids_of(f"[u{prompt[0]['content']}]/")
    prompt, completion = seen[0]
    assert prompt[0]["role"] == "user"
    assert [message["role"] for message in completion] == ["assistant"]
    assert records(trainer, name="samples.jsonl")[0]["prompt"] == batch["prompt"][0]
    assert trainer.generate([[{"role": "user", "content": "1+2="}]], temperature=0.0)[0].completion is not None


async def later(completions, **_):
    await asyncio.sleep(0.001)
    return [0.5 * len(text) for text in completions]


def only_long(completions, **_):
    return [1.0 if len(text) > 2 else None for text in completions]


def test_reward_functions_with_weights(make_trainer, records) -> None:
    trainer = make_trainer(reward_funcs=[spread, later, only_long], reward_weights=[1.0, 0.25, 2.0], max_steps=1)
    trainer.fit()
    for line in records(trainer, name="samples.jsonl"):
        rewards = line["rewards"]
        assert rewards["later"] == 0.5 * len(line["completion"])
        assert rewards["only_long"] == (1.0 if len(line["completion"]) > 2 else None)
        assert line["reward"] == pytest.approx(
            rewards["spread"] + 0.25 * rewards["later"] + 2 * (rewards["only_long"] or 0)
        )
    metrics = records(trainer)[-1]
    assert metrics["rewards/num_failed"] == 0
    assert metrics["rewards/only_long/mean"] == 1.0  # over the samples to which it applies


def test_log_extra_and_log_metric(make_trainer, records) -> None:
    def reward(completions, log_extra, log_metric, trainer_state, **_):
        log_extra("length", [len(text) for text in completions])
        log_metric("custom/step", trainer_state.global_step)
        log_metric("custom/length", trainer_state.max_steps)
        return [float(len(text)) for text in completions]

    trainer = make_trainer(reward_funcs=reward)
    trainer.fit()
    for line in records(trainer, name="samples.jsonl"):
        assert line["extra"] == {"length": len(line["completion"])}
    assert [(line["custom/step"], line["custom/length"]) for line in records(trainer)[1:]] == [(1, 2), (2, 2)]


def test_reward_processes_give_what_the_thread_gives(make_trainer, records) -> None:
    trainers = [make_trainer(reward_funcs=[spread, exact], reward_processes=n, max_steps=1) for n in (0, 2)]
    for trainer in trainers:
        trainer.fit()
    first, second = (records(trainer, name="samples.jsonl") for trainer in trainers)
    assert first == second


def fails(reason: str):
    """A reward that spoils the samples of one prompt (of 4 in a step: 2 samples of 8)."""

    def reward(prompts, completions, **_):
        spoilt = [prompt == "3+9=" for prompt in prompts]
        if any(spoilt) and reason == "raises":
            raise ValueError("the user's own words")
        if any(spoilt) and reason == "hangs":
            time.sleep(60)
        return [math.nan if is_bad else float(len(text)) for is_bad, text in zip(spoilt, completions, strict=True)]

    return reward


ONE_STEP = {"train_dataset": sums(4), "max_steps": 1, "shuffle": False, "max_reward_failure_share": 1.0}


@pytest.mark.parametrize("reason", ["raises", "nan"])
def test_failed_rewards_are_masked_counted_and_shown(make_trainer, records, caplog, reason: str) -> None:
    with caplog.at_level(logging.WARNING, logger="hybrid_rl"):
        trainer = make_trainer(reward_funcs=fails(reason), **ONE_STEP)
        trainer.fit()
    assert records(trainer)[-1]["rewards/num_failed"] == 2
    assert [line["reward"] is None for line in records(trainer, name="samples.jsonl")] == [False] * 6 + [True] * 2
    told = ('raise ValueError("the user\'s own words")', __name__.rpartition(".")[2]) if reason == "raises" else ()
    assert all(words in caplog.text for words in told or ("returned nan",))


@pytest.mark.parametrize("processes", [0, 1])
def test_hanging_rewards_are_cut_off(make_trainer, records, caplog, processes: int) -> None:
    """A process can be killed; a thread is left behind, its samples masked."""
    with caplog.at_level(logging.WARNING, logger="hybrid_rl"):
        trainer = make_trainer(
            reward_funcs=fails("hangs"), reward_processes=processes, reward_timeout_seconds=1.0, **ONE_STEP
        )
        trainer.fit()
    assert records(trainer)[-1]["rewards/num_failed"] >= 2
    assert "reward_timeout_seconds" in caplog.text


def test_a_run_goes_on_after_its_rewards_are_repaired(make_trainer, records) -> None:
    """The step that failed is taken back whole: weights and the data position."""
    broken = {"now": True}

    def reward(completion_ids, **_):
        if broken["now"]:
            raise RuntimeError("no connection")
        return spread(completion_ids)

    trainer, straight = make_trainer(reward_funcs=reward, max_reward_failure_share=0.1), make_trainer()
    with pytest.raises(RewardError, match=r"step 1: 8 of 8 samples .* max_reward_failure_share=0.1") as caught:
        trainer.fit()
    assert trainer.global_step == 0 and "no connection" in str(caught.value)
    broken["now"] = False
    for one in (trainer, straight):
        one.fit()
    mine, expected = (
        [{k.replace("reward/", "spread/"): v for k, v in line.items()} for line in records(one, comparable=True)]
        for one in (trainer, straight)
    )
    assert mine == expected
