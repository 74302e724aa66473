"""The Trainer's verbs on the tiny model: fit, step, steps, generate, evaluate, save, close."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hybrid_rl import Callback, Trainer
from hybrid_rl.config import load_config
from hybrid_rl.errors import ConfigError, DataError, HybridRLError
from tests.support.inside.workers import module_of
from tests.support.tiny import EOS_ID, build_model, exact, ids_of, spread, sums

# What users of TRL look for, and what this library adds (FIELD: TRL's names where the meaning is the same).
STEP_METRICS = {
    *("reward", "reward_std", "frac_reward_zero_std", "rewards/num_failed", "rewards/spread/mean"),
    *("rewards/spread/std", "num_tokens", "epoch", "loss", "grad_norm", "learning_rate", "skipped_updates"),
    *("completions/mean_length", "completions/min_length", "completions/max_length", "completions/clipped_ratio"),
    *("entropy", "clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean", "clip_ratio/low_min"),
    *("clip_ratio/high_max", "sampling/sampling_logp_difference/mean", "sampling/sampling_logp_difference/max"),
    *("step_time", "timing/rollout", "timing/reward", "timing/logprobs", "timing/update", "timing/handoff"),
    *("perf/tokens_per_second", "memory/actor_bytes", "memory/optimizer_bytes", "memory/kv_cache_bytes"),
    *("mismatch/prob_difference_mean", "mismatch/kl", "handoff/version", "handoff/bytes", "handoff/probe_gap"),
}


def snapshot(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in module_of(trainer).state_dict().items()}


def test_fit_trains_and_writes_one_record_per_step(make_trainer, records) -> None:
    model = build_model()
    before = model.lm_head.weight.clone()
    trainer = make_trainer(model, max_steps=3, handoff={"probe_steps": 1})
    last = trainer.fit()
    lines = records(trainer)
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert {key: value for key, value in lines[-1].items() if key != "step"} == last
    for line in lines[1:]:
        assert line.keys() >= STEP_METRICS
        assert all(isinstance(value, int | float) and math.isfinite(value) for value in line.values())
    assert [line["handoff/version"] for line in lines] == [0, 1, 2, 3]
    assert [line["epoch"] for line in lines[1:]] == pytest.approx([1 / 3, 2 / 3, 1])
    assert not torch.equal(model.lm_head.weight, before)  # a module is trained in place


def test_batch_of_a_step(make_trainer) -> None:
    trainer = make_trainer(max_completion_length=8)
    result = trainer.step()
    batch, metrics = result
    assert result[0] is batch and result[1] is metrics and result[-1] is result.metrics
    with pytest.raises(TypeError, match=r"'reward' is in .metrics\[...\] or in .batch\[...\]"):
        result["reward"]
    assert trainer.global_step == 1
    assert metrics["num_tokens"] == sum(len(row) for name in ("prompt_ids", "completion_ids") for row in batch[name])
    assert batch.num_samples == 8
    assert [len(rows) for rows in batch.group_rows()] == [2, 2, 2, 2]
    answers = {row["prompt"]: row["answer"] for row in sums(12)}
    for index, prompt in enumerate(batch["prompt"]):
        assert batch["prompt_ids"][index].tolist() == ids_of(prompt)
        assert batch["row"][index] == {"answer": answers[prompt]}
        ids = batch["completion_ids"][index].tolist()
        ended = batch["finish_reason"][index] == "stop"
        assert (ids[-1] == EOS_ID) == ended
        assert EOS_ID not in ids[:-1]
        assert ended or len(ids) == 8
        assert batch["completion_mask"][index].all()  # the final EOS stays in the loss
    assert "stop" in batch["finish_reason"]


def test_steps_and_fit_continue_each_other(make_trainer, records) -> None:
    trainer = make_trainer(max_steps=4, eval_dataset=sums(3))
    trainer.step()
    assert [result.metrics["handoff/version"] for result, _ in zip(trainer.steps(), range(1), strict=False)] == [2]
    last = trainer.fit()
    assert last["handoff/version"] == 4 and trainer.fit() == last  # a cell that is run twice
    assert [line["step"] for line in records(trainer)] == [1, 2, 3, 4]
    with pytest.raises(ConfigError, match="nothing to do: step 4, max_steps=4; trainer.fit"):
        trainer.step()


@pytest.mark.parametrize(
    ("keys", "expected"),
    [({}, [0, 3]), ({"eval_steps": 2}, [0, 2, 3]), ({"eval_on_start": False}, [3]), ({"eval_steps": 3}, [0, 3])],
)
def test_evaluation_cadence(make_trainer, records, keys: dict, expected: list[int]) -> None:
    trainer = make_trainer(eval_dataset=sums(3), max_steps=3, **keys)
    trainer.fit()
    assert [line["step"] for line in records(trainer) if "eval/reward" in line] == expected


def test_evaluate_is_greedy_and_leaves_training_alone(make_trainer, records) -> None:
    """Accuracy by hand from greedy completions; an evaluation in between changes no later number."""
    plain, evaluated = (make_trainer(reward_funcs=[exact, spread], eval_dataset=sums(6)) for _ in range(2))
    first, second = ({**evaluated.evaluate(), "timing/evaluate": 0.0} for _ in range(2))
    assert first == second
    texts = evaluated.generate([row["prompt"] for row in sums(6)], temperature=0.0)
    scores = [
        float(found.completion == row["answer"]) + spread([found.completion_ids])[0]
        for found, row in zip(texts, sums(6), strict=True)
    ]
    assert first["eval/reward"] == pytest.approx(sum(scores) / 6)
    right = sum(found.completion == row["answer"] for found, row in zip(texts, sums(6), strict=True))
    assert first["eval/accuracy"] == right / 6  # `spread` shapes the reward, and says nothing of right and wrong
    for trainer in (plain, evaluated):
        trainer.fit()
    assert records(plain, comparable=True) == records(evaluated, comparable=True)


def test_generate(make_trainer) -> None:
    trainer = make_trainer(max_completion_length=6)
    greedy = trainer.generate(["1+2=", "7"], temperature=0.0)
    assert [found.prompt for found in greedy] == ["1+2=", "7"]
    for found in greedy:
        ids = ids_of(found.prompt)
        for token in found.completion_ids:
            logits = module_of(trainer)(input_ids=torch.tensor([ids])).logits[0, -1]
            assert token == logits.argmax()
            ids.append(token)
        assert len(found.completion_ids) == len(found.logprobs) <= 6
    alone = trainer.generate("1+2=", temperature=0.0)[0]
    assert replace(alone, logprobs=greedy[0].logprobs) == greedy[0]
    assert alone.logprobs == pytest.approx(greedy[0].logprobs, abs=1e-5)  # last bits depend on the shapes of products
    sampled = trainer.generate(["1+2="], num_generations=5, seed=3)
    assert len({tuple(found.completion_ids) for found in sampled}) > 1
    assert sampled == trainer.generate(["1+2="], num_generations=5, seed=3)
    assert sampled != trainer.generate(["1+2="], num_generations=5, seed=4)
    assert len(trainer.generate("7", max_completion_length=1, top_k=1)[0].completion_ids) == 1
    assert trainer.generate([]) == []


REFUSED = (
    ({"prompts": [""]}, DataError, "empty"),
    ({"prompts": None}, DataError, r"generate\(None\): give a prompt or a list of them"),
    ({"prompts": ["1" * 90]}, DataError, "90"),
    ({"prompts": [{"role": "user", "content": "1"}]}, DataError, "list"),
    ({"num_generations": 0}, ConfigError, "num_generations=0"),
    ({"num_generations": None}, ConfigError, "num_generations=None: give the number"),
    ({"num_generations": 1.5}, ConfigError, "num_generations=1.5 must be a whole number"),
    ({"stop_strings": 5}, ConfigError, "stop_strings=5 must be a string or a list"),
    ({"stop_strings": ["<eos>"]}, ConfigError, r"contains the special token '<eos>'.*stop_token_ids=\[1\]"),
    ({"stop_strings": [1]}, ConfigError, "must be texts, none of them empty"),
    ({"max_completion_length": 0}, ConfigError, "^max_completion_length=0 must be at least 1$"),
    ({"max_completion_length": "5"}, ConfigError, "^max_completion_length='5' must be a whole"),
    ({"max_completion_length": True}, ConfigError, "max_completion_length=True must be"),
    ({"max_completion_length": 99}, DataError, "a completion of up to 99 exceed"),
    ({"seed": "a"}, ConfigError, "seed='a' must be a whole number"),
    ({"top_p": "all"}, ConfigError, "top_p='all' must be a number"),
    ({"temperature": -1.0}, ValueError, "temperature"),
)


def test_generate_refuses(make_trainer) -> None:
    trainer = make_trainer()
    for arguments, error, message in REFUSED:
        with pytest.raises(error, match=message):
            trainer.generate(**{"prompts": "1", **arguments})
    assert trainer.generate("1+2=", num_generations=np.int64(1))  # and the engine is none the worse


def test_save_is_what_from_pretrained_reads(make_trainer, tmp_path) -> None:
    trainer = make_trainer()
    trainer.step()
    folder = trainer.save()
    assert folder == trainer.run_folder / "checkpoint-1"
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    for name, value in snapshot(trainer).items():
        assert torch.equal(loaded.state_dict()[name], value)
    assert AutoTokenizer.from_pretrained(folder)("1+2=")["input_ids"] == ids_of("1+2=")
    assert trainer.save(tmp_path / "elsewhere") == tmp_path / "elsewhere"
    assert [path.name for path in trainer.run_folder.iterdir() if path.name.startswith(".")] == [".lock"]
    trainer.fit()


def test_close_is_idempotent_and_later_calls_say_so(make_trainer) -> None:
    with make_trainer() as trainer:
        trainer.step()
    trainer.close()
    trainer.close()
    for call in (trainer.fit, trainer.step, trainer.evaluate, trainer.save, lambda: trainer.generate("1")):
        with pytest.raises(HybridRLError, match="closed"):
            call()


def test_run_folder(make_trainer, records) -> None:
    trainer = make_trainer(reward_funcs=[exact, spread], reward_weights=[2.0, 0.5])
    trainer.fit()
    trainer.close()
    names = {path.name for path in trainer.run_folder.iterdir()}
    written = {"config.yaml", "environment.json", "metrics.jsonl", "samples.jsonl", "timeline.jsonl", "memory.json"}
    assert names == written
    reloaded, _ = load_config(trainer.run_folder / "config.yaml")
    assert reloaded == trainer.config
    samples = records(trainer, name="samples.jsonl")
    assert len(samples) == 16
    assert [line["step"] for line in samples] == [1] * 8 + [2] * 8
    for line in samples:
        assert line["reward"] == pytest.approx(2 * line["rewards"]["exact"] + 0.5 * line["rewards"]["spread"])
        assert line["prompt"].endswith("=")
        assert isinstance(line["completion"], str)
    step_2 = [line["reward"] for line in samples if line["step"] == 2]
    assert records(trainer)[-1]["reward"] == pytest.approx(sum(step_2) / 8)


def test_callbacks_see_the_run(make_trainer) -> None:
    seen: list[tuple] = []

    class Spy(Callback):
        def on_fit_start(self, trainer) -> None:
            seen.append(("start", trainer.global_step))

        def on_step_end(self, trainer, step, batch, metrics) -> None:
            seen.append(("step", step, batch.num_samples, "loss" in metrics))

        def on_evaluate(self, trainer, step, metrics) -> None:
            seen.append(("evaluate", step, "eval/reward" in metrics))

        def on_save(self, trainer, step, folder) -> None:
            seen.append(("save", step, folder.name))

        def on_fit_end(self, trainer) -> None:
            seen.append(("end", trainer.global_step))

    make_trainer(callbacks=[Spy()], eval_dataset=sums(2), save_steps=2).fit()
    assert seen == [
        ("start", 0),
        ("evaluate", 0, True),
        ("step", 1, 8, True),
        ("evaluate", 2, True),
        ("save", 2, "checkpoint-2"),
        ("step", 2, 8, True),
        ("end", 2),
    ]


@pytest.mark.parametrize(
    "keys",
    [
        {"beta": 0.05, "kl_estimator": "k2", "use_bias_correction_kl": False, "gradient_checkpointing": True},
        {"importance_sampling_level": "sequence", "loss_type": "grpo", "delta": 2.0, "epsilon_high": 0.28},
        {"old_logprobs": "rollout", "loss_type": "dr_grpo", "scale_rewards": "none", "tokens_per_micro_batch": 20}
        | {"max_num_seqs": 3, "engine_args.block_size": 2},
    ],
    ids=lambda keys: "-".join(keys),
)
def test_variants_train(make_trainer, keys: dict) -> None:
    model = build_model()
    before = model.lm_head.weight.clone()
    lines = [result.metrics for result in make_trainer(model, max_steps=3, **keys).steps()]
    assert all(math.isfinite(line["loss"]) and line["grad_norm"] > 0 and line["skipped_updates"] == 0 for line in lines)
    assert not torch.equal(model.lm_head.weight, before)
    if "beta" in keys:
        assert lines[0]["kl"] == pytest.approx(0, abs=1e-9) and lines[2]["kl"] > 1e-5


def test_truncated_completions_can_be_left_out(make_trainer) -> None:
    """With a limit of 1 token a completion either is the EOS or was cut off: without EOS there is nothing to learn."""
    model = build_model()
    with torch.no_grad():
        model.model.embed_tokens.weight[EOS_ID] = 0
    trainer = make_trainer(model, max_completion_length=1, mask_truncated_completions=True)
    batch, metrics = trainer.step()
    assert metrics["completions/clipped_ratio"] > 0.5
    stopped = sum(reason == "stop" for reason in batch["finish_reason"])
    if not stopped:
        assert metrics["grad_norm"] == 0
    trainer = make_trainer(model, max_completion_length=1)
    assert trainer.step().metrics["grad_norm"] > 0


def test_two_runs_of_one_seed_are_bit_for_bit_the_same(make_trainer, records) -> None:
    runs = []
    for seed in (7, 7, 8):
        trainer = make_trainer(
            build_model(), seed=seed, max_steps=3, eval_dataset=sums(3), num_iterations=2, prompts_per_mini_batch=2
        )
        state = torch.get_rng_state()
        trainer.fit()
        assert torch.equal(torch.get_rng_state(), state)
        runs.append((records(trainer, comparable=True), records(trainer, name="samples.jsonl"), snapshot(trainer)))
        torch.randn(3)  # the global random state is nobody's business
    assert runs[0][:2] == runs[1][:2]
    assert all(torch.equal(value, runs[1][2][name]) for name, value in runs[0][2].items())
    assert runs[0][1] != runs[2][1]


def test_a_giant_reward_ends_the_run_with_its_value(make_trainer) -> None:
    """Advantages of 1e300 do not fit into float32: every update would be skipped. Earlier learning is kept."""

    def giant(completions, trainer_state, **_):
        return [1e300 * index if trainer_state.global_step == 2 else float(index) for index in range(len(completions))]

    model = build_model()
    trainer = make_trainer(model, giant, scale_rewards="none")
    assert trainer.step().metrics["skipped_updates"] == 0
    before = model.lm_head.weight.clone()
    with pytest.raises(DataError, match=r"GRPO.compute gave advantages of .*e\+\d+ .* the reward .*; .*scale_rewards"):
        trainer.step()
    assert torch.equal(model.lm_head.weight, before)


def test_a_giant_reward_is_one_of_its_group_where_rewards_are_normalised(make_trainer) -> None:
    def giant(completions, **_):
        return [1e300 * index for index in range(len(completions))]

    result = make_trainer(build_model(), giant, num_generations=4, max_steps=1).step()
    assert result.metrics["skipped_updates"] == 0 and 0.5 < float(result.batch["advantages"].values.abs().max()) < 2


def test_tokenizer_stop_tokens_beside_the_models(make_trainer) -> None:
    trainer = make_trainer(stop_token_ids=ids_of("0123456789"))
    batch, _ = trainer.step()
    stops = {EOS_ID, *ids_of("0123456789")}
    for ids, reason in zip(batch["completion_ids"], batch["finish_reason"], strict=True):
        assert (reason == "stop") == (int(ids[-1]) in stops)
        assert not stops & set(ids[:-1].tolist())
