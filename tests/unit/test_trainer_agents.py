"""Trainers of agents: what is trained on is what the engine made; records, replays and resumed runs hold all of it."""

import asyncio
import random

import pytest
import torch

from hybrid_rl import Trainer
from hybrid_rl.agents.client import TrajectoryEndedError
from hybrid_rl.errors import AgentError
from hybrid_rl.logging.run_folder import read_jsonl
from tests.support.tiny import build_model, build_tokenizer, ids_of, sums

MOST = 44  # tokens after the prompt

CALL = {"type": "function", "function": {"name": "look", "arguments": {"at": "it"}}}
MESSAGES = (
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "name": "look", "content": "abc"},
    {"role": "assistant", "content": "done"},
)


@pytest.fixture
def train(tmp_path):
    made = []

    def make(rollout_func, functions=None, **keys):
        settings = {"prompts_per_step": 3, "num_generations": 4, "max_completion_length": MOST, "learning_rate": 1e-3}
        settings |= {"max_steps": 2, "output_dir": str(tmp_path / "runs"), "max_reward_failure_share": 1.0, **keys}
        settings |= {"tokenizer": build_tokenizer(), "rollout_func": rollout_func}
        rows = sums(max(12, settings["prompts_per_step"]))
        trainer = Trainer(build_model(max_position_embeddings=64), functions, rows, **settings)
        made.append(trainer)
        return trainer

    yield make
    for trainer in made:
        trainer.close()


def wild(delays: int):
    """A rollout whose trajectories differ in everything: turns, budgets, answers of tools, forks, sub-agents, rewards
    and exceptions. All of it follows from the row and from tokens; `delays` seeds how long tools take."""
    sleeps = random.Random(delays)

    async def one(row, generation, client):
        trajectory = client.trajectory(row)
        noise = random.Random(f"{row['prompt']}/{generation}")
        ids = ids_of(row["prompt"])
        try:
            for _ in range(noise.randint(1, 6)):
                turn = await client.generate(ids, trajectory, max_tokens=noise.choice((1, 3, 6, 30)))
                await asyncio.sleep(sleeps.random() ** 6 * 0.02)
                noise.seed(f"{noise.random()}/{turn.token_ids}")
                ids = [*ids, *turn.token_ids, *(noise.randrange(45) for _ in range(noise.randint(0, 7)))]
                if noise.random() < 0.4:
                    trajectory.add_reward(noise.random(), turn)
                if noise.random() < 0.2:  # what was said first is forgotten
                    ids = ids[noise.randint(1, 4) :]
                if noise.random() < 0.2:
                    prompts = [[noise.randrange(45) for _ in range(noise.randint(1, 5))] for _ in range(2)]
                    await asyncio.gather(*(client.generate(p, trajectory, max_tokens=4) for p in prompts))
                if noise.random() < 0.08:
                    trajectory.end("error", "Traceback\nValueError: on purpose")
                    break
        except TrajectoryEndedError:
            pass
        trajectory.add_reward(noise.random())
        return trajectory

    async def rollout(rows, client, num_generations):
        return await asyncio.gather(*(one(row, n % num_generations, client) for n, row in enumerate(rows)))

    return rollout


@pytest.mark.slow
@pytest.mark.parametrize("num_prompts", [5, pytest.param(125, marks=pytest.mark.sweep)])
def test_of_wild_trajectories_every_token_has_the_logprob_that_the_trainer_computes(train, num_prompts):
    """Whatever agents do: the engine's logprobs are the trainer's over what is stored, and delays change nothing."""
    batches, ends = [], set()
    for delays, limits in ((1, {}), (2, {"max_num_seqs": 5})):
        keys = {"prompts_per_step": num_prompts, "num_generations": 8, "old_logprobs": "recompute", "max_steps": 1}
        trainer = train(wild(delays), **keys, **limits)
        step = trainer.step()
        batch = step.batch
        mask = batch["completion_mask"].values
        made, own = batch["rollout_logprobs"].values, batch["old_logprobs"].values
        torch.testing.assert_close(made[mask], own[mask], rtol=0, atol=1e-5)
        assert made[~mask].eq(0).all() and 0.3 < mask.double().mean() < 0.95
        assert step.metrics["agents/forks"] + step.metrics["agents/sub_agents"] > num_prompts / 3
        ends |= set(batch["finish_reason"])
        batches.append(batch)
        trainer.close()
    first, second = batches
    assert first.num_samples > num_prompts * 8
    assert ends >= {"stop", "length", "error"}
    for name in ("prompt_ids", "completion_ids", "completion_mask", "token_rewards"):
        assert torch.equal(first[name].values, second[name].values), name
        assert torch.equal(first[name].offsets, second[name].offsets), name
    torch.testing.assert_close(first["rollout_logprobs"].values, second["rollout_logprobs"].values, rtol=0, atol=1e-5)
    torch.testing.assert_close(first["rewards"], second["rewards"], rtol=0, atol=0, equal_nan=True)


@pytest.mark.slow
def test_a_resumed_run_repeats_the_trajectories_of_one_that_went_on(train):
    """And a replay of saved rollouts trains on the same samples."""
    whole = train(wild(1), save_steps=1, save_rollouts=True, run_name="whole")
    whole.fit()
    resumed = train(wild(2), resume=str(whole.run_folder / "checkpoint-1"), run_name="resumed")
    metrics = resumed.fit()
    records = [
        [line for line in read_jsonl(trainer.run_folder / "samples.jsonl") if line["step"] == 2]
        for trainer in (whole, resumed)
    ]
    assert records[0] == records[1] and len(records[0]) > 12
    last = read_jsonl(whole.run_folder / "metrics.jsonl")[-1]
    for name in ("loss", "grad_norm", "reward", "agents/turns_mean", "completions/mean_length"):
        assert metrics[name] == pytest.approx(last[name], rel=1e-5, abs=1e-7), name
    replayed = train(wild(3), mode="train", rollouts_path=str(whole.run_folder / "rollouts"), run_name="replayed").fit()
    for name in ("loss", "grad_norm", "reward"):
        assert replayed[name] == pytest.approx(last[name], rel=1e-5, abs=1e-7), name


def test_records_tell_who_made_which_tokens_and_what_each_turn_got(train, capfd):
    async def rollout(rows, client):
        made = []
        for row in rows:
            trajectory = client.trajectory(row)
            first = await client.generate(ids_of(row["prompt"]), trajectory, max_tokens=2)
            await client.generate([*first.prompt_ids, *first.token_ids, *ids_of("abc")], trajectory, max_tokens=3)
            trajectory.add_reward(0.5, first)
            trajectory.add_reward(len(made))
            trajectory.messages = list(MESSAGES)
            trajectory.extra["seen"] = {"the", "sky"}
            made.append(trajectory)
        return made

    trainer = train(rollout, max_steps=1, log_completions=1)
    trainer.fit()
    lines = read_jsonl(trainer.run_folder / "samples.jsonl")
    line = lines[3]
    assert [(span["origin"], span["num_tokens"]) for span in line["tokens"]][:2] == [("policy", 2), ("environment", 3)]
    assert line["tokens"][0]["reward"] == 0.5 and line["tokens"][1] == {
        "origin": "environment",
        "num_tokens": 3,
        "text": "abc",
    }
    assert line["tokens"][2]["reward"] is None
    assert [message["role"] for message in line["messages"]] == ["assistant", "tool", "assistant"]
    assert (line["reward"], line["rewards"], line["finish_reason"]) == (3.5, {"agent": 3.5}, "stop")
    assert "error" not in line and "seen" in line["extra"]
    shown = capfd.readouterr().err
    for words in ('assistant   look(at="it")', "tool        abc", "assistant   done"):
        assert words in shown


def test_generate_gives_the_last_sample_of_each_trajectory(train, caplog):
    async def rollout(rows, client):
        made = []
        for row in rows:
            trajectory = client.trajectory(row)
            if row["prompt"] == "9":
                raise KeyError("answer")
            if row is rows[-1]:
                trajectory.end("error", "Traceback\nValueError: the lamp is broken")
            for text in ("1+1=", "2+2="):
                await client.generate(ids_of(text), trajectory, max_tokens=2)
            made.append(trajectory)
        return made

    trainer = train(rollout)
    found = trainer.generate(["3+4=", {"prompt": "7"}], num_generations=2)
    assert [generation.prompt for generation in found] == ["3+4=", "3+4=", "7", "7"]
    assert all(0 < len(generation.completion_ids) <= 2 for generation in found)
    assert found[-1].finish_reason == "error" and "generate: the agent: 1 sample ended" in caplog.text
    with pytest.raises(AgentError, match=r"every trajectory failed; rows may lack columns[\s\S]*KeyError: 'answer'"):
        trainer.generate(["9"])
    assert "the lamp is broken" in found[-1].error and found[0].error is None is found[0].messages
