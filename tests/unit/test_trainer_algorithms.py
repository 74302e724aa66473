"""The Trainer with what algorithms bring: critics, teachers, demonstrations, moving KL weights and references."""

import json
import math
from typing import Any

import pytest
import torch

from hybrid_rl.algos import row_mean
from hybrid_rl.algos.advantages.grpo import reward_decoupled_advantages
from hybrid_rl.errors import ConfigError, DataError, NoSignalError
from tests.support.inside.workers import reference_of
from tests.support.tiny import build_model, build_tokenizer, spread, sums

pytestmark = pytest.mark.slow


def test_only_the_critic_learns_in_its_warmup(make_trainer) -> None:
    model = build_model()
    before = {key: p.clone() for key, p in model.named_parameters()}
    trainer = make_trainer(model, algorithm="ppo", critic_warmup_steps=1, max_steps=3)
    first = trainer.step().metrics
    assert all(torch.equal(p, before[key]) for key, p in model.named_parameters())
    assert "critic/value_loss" in first and "loss" not in first and "grad_norm" not in first
    second = trainer.step().metrics
    assert second["critic/value_mean"] != 0 and second["grad_norm"] > 0
    assert any(not torch.equal(p, before[key]) for key, p in model.named_parameters())


def test_kl_in_the_reward_reaches_the_advantages(make_trainer) -> None:
    """RLOO of the rewards less beta times the KL estimates, by hand from the batch's columns."""
    trainer = make_trainer(kl="reward", beta=0.5, advantage="rloo", max_steps=2)
    trainer.step()
    batch = trainer.step().batch
    rows = batch["completion_ids"].row_index()
    gap = (batch["old_logprobs"].values - batch["ref_logprobs"].values).double()
    assert float(gap.abs().max()) > 1e-3
    totals = batch["rewards"] - 0.5 * torch.zeros(batch.num_samples).double().index_add(0, rows, gap)
    other = totals.view(-1, 2).flip(1).reshape(-1)  # groups of two: the baseline is the other one
    expected = (totals - other)[rows]
    torch.testing.assert_close(batch["advantages"].values.double(), expected, rtol=0, atol=1e-6)


def test_adaptive_kl_moves_beta_by_the_written_out_rule(make_trainer) -> None:
    keys = {"beta": 0.5, "kl_target": 0.01, "kl_horizon": 20, "learning_rate": 3e-2, "max_steps": 4}
    trainer = make_trainer(**keys)
    beta = 0.5
    for _ in range(4):
        result = trainer.step()
        assert result.metrics["kl_beta"] == pytest.approx(beta, rel=1e-12)
        tokens = int(result.batch["completion_length"].sum())
        of_completion = result.metrics["kl"] * tokens / result.batch.num_samples
        error = min(max(of_completion / 0.01 - 1, -0.2), 0.2)
        beta *= 1 + error * result.batch.num_samples / 20
    assert beta != 0.5


def test_the_policy_becomes_the_reference(make_trainer) -> None:
    trainer = make_trainer(beta=0.1, reference_reset_steps=2, max_steps=5, learning_rate=3e-2)
    kls = [trainer.step().metrics["kl"] for _ in range(5)]
    assert kls[0] < 1e-6 < kls[1]  # before step 1, and after its update
    assert kls[2] < 1e-6 < kls[3] and kls[4] < 1e-6  # after steps 2 and 4 it is the policy


def test_the_reference_moves_towards_the_policy(make_trainer) -> None:
    """(1 - alpha) * reference + alpha * policy after every second step; moments of the optimizer stay."""
    model = build_model()
    old = {name: p.detach().clone() for name, p in model.named_parameters()}
    keys = {"beta": 0.1, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.3, "learning_rate": 3e-2}
    trainer = make_trainer(model, max_steps=4, **keys)
    reference = reference_of(trainer).module
    for step in range(1, 5):
        trainer.step()
        if step % 2 == 0:
            old = {name: 0.7 * old[name] + 0.3 * p.detach() for name, p in model.named_parameters()}
        for name, mine in reference.named_parameters():
            torch.testing.assert_close(mine, old[name], rtol=1e-6, atol=1e-7)
        assert any(not torch.equal(mine, dict(model.named_parameters())[n]) for n, mine in reference.named_parameters())


def test_one_key_moves_the_reference(make_trainer) -> None:
    with pytest.raises(ConfigError, match="reference_reset_steps=2 and ref_model_sync_steps=2 both move the reference"):
        make_trainer(beta=0.1, reference_reset_steps=2, ref_model_sync_steps=2)


def test_whole_distributions_and_single_tokens_measure_the_same_kl(make_trainer) -> None:
    """The exact KL of the states that were visited against the mean of k3 over what was sampled there: the same in
    expectation, 40 samples of 5 tokens."""
    found = {}
    for estimator in ("exact", "k3"):
        trainer = make_trainer(
            beta=1e-9, kl_estimator=estimator, use_bias_correction_kl=False, num_generations=10, max_steps=3, seed=3
        )
        trainer.step()
        trainer.step()
        found[estimator] = trainer.step().metrics["kl"]
        trainer.close()
    assert found["exact"] > 1e-4
    assert found["exact"] == pytest.approx(found["k3"], rel=0.5)


def test_dapo_trains_on_groups_with_signal_alone(make_trainer) -> None:
    def half_solved(prompts: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        """Odd prompts are solved always, the others are told apart."""
        told = spread(completion_ids)
        return [1.0 if prompt[0] in "13579" else value for prompt, value in zip(prompts, told, strict=True)]

    trainer = make_trainer(reward_funcs=half_solved, algorithm="dapo", num_generations=4, max_steps=2)
    result = trainer.step()
    assert all(prompt[0] not in "13579" for prompt in result.batch["prompt"])
    assert len(result.batch.group_rows()) == 4 and result.metrics["frac_reward_zero_std"] == 0
    assert result.metrics["collect/num_rollouts"] > 1


def test_data_without_signal_ends_the_run_and_keeps_what_was_learned(make_trainer) -> None:
    def solved_later(completion_ids: list[list[int]], trainer_state: Any, **_: Any) -> list[float]:
        return spread(completion_ids) if trainer_state.global_step < 3 else [1.0] * len(completion_ids)

    trainer = make_trainer(reward_funcs=solved_later, max_refills=2, max_steps=6, save_steps=100)
    with pytest.raises(NoSignalError, match="max_refills=2"):
        trainer.fit()
    assert trainer.global_step == 2
    assert json.loads((trainer.run_folder / "checkpoint-2" / "trainer_state.json").read_text())["global_step"] == 2


def test_sft_learns_the_demonstrations(make_trainer) -> None:
    """The loss is the mean negative log-likelihood of completions and their end, by the model's own forward."""
    rows = [{"prompt": f"{n}+{n}=", "completion": f"{2 * n}"} for n in range(1, 5)]
    model, tokenizer = build_model(), build_tokenizer()
    total, count = 0.0, 0
    for row in rows:
        prompt, completion = tokenizer(row["prompt"]).input_ids, [*tokenizer(row["completion"]).input_ids]
        ids = torch.tensor([[*prompt, *completion, tokenizer.eos_token_id]])
        with torch.no_grad():
            logprobs = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        total, count = total - float(logprobs[len(prompt) - 1 :].sum()), count + len(completion) + 1
    trainer = make_trainer(model, None, rows, algorithm="sft", num_generations=1, max_steps=30, learning_rate=1e-2)
    losses = [trainer.step().metrics["loss"] for _ in range(30)]
    assert losses[0] == pytest.approx(total / count, rel=1e-5)
    assert losses[-1] < 0.3 * losses[0]
    assert trainer.generate("3+3=", temperature=0)[0].completion == "6"


def test_sft_wants_completions(make_trainer) -> None:
    with pytest.raises(DataError, match="completion"):
        make_trainer(build_model(), None, sums(4), algorithm="sft", num_generations=1)


def test_distillation_falls_to_the_teacher(make_trainer, tmp_path) -> None:
    """Minus the reverse KL at every token, no reward; on the policy's own samples it falls."""
    teacher = build_model(seed=1)
    teacher.save_pretrained(tmp_path / "teacher")
    build_tokenizer().save_pretrained(tmp_path / "teacher")
    trainer = make_trainer(
        build_model(),
        None,
        algorithm="distillation",
        teacher_path=str(tmp_path / "teacher"),
        num_generations=8,
        max_steps=25,
        learning_rate=1e-2,
    )
    first = trainer.step().batch
    gap = first["teacher_logprobs"].values - first["old_logprobs"].values
    torch.testing.assert_close(first["advantages"].values, gap, rtol=0, atol=1e-5)

    def distance(batch: Any) -> float:
        rows = batch["completion_ids"].row_index()
        gap = batch["old_logprobs"].values - batch["teacher_logprobs"].values
        return float(row_mean(gap, torch.ones_like(gap, dtype=torch.bool), rows, batch.num_samples).mean())

    last = first
    while trainer.global_step < trainer.max_steps:
        last = trainer.step().batch
    assert distance(last) < 0.7 * distance(first)


def test_distillation_wants_a_teacher(make_trainer, tmp_path) -> None:
    with pytest.raises(ConfigError, match="teacher_path"):
        make_trainer(build_model(), None, algorithm="distillation")


def test_the_overlong_penalty_is_one_more_reward(make_trainer) -> None:
    trainer = make_trainer(overlong_buffer=2, reward_weights=[2.0], max_steps=1)
    result = trainer.step()
    lengths = result.batch["completion_length"].tolist()
    for values, length, reward in zip(
        result.batch["function_rewards"], lengths, result.batch["rewards"].tolist(), strict=True
    ):
        assert values[1] == pytest.approx(min(0.0, (3 - length) / 2))  # from 3 of 5 tokens on
        assert reward == pytest.approx(2 * values[0] + values[1])
    assert not math.isnan(result.metrics["rewards/overlong_penalty/mean"])


def test_a_new_critic_begins_at_the_mean_return(make_trainer) -> None:
    """Its learning rate is 0, so that nothing but the beginning moves it; and it begins once."""
    trainer = make_trainer(algorithm="ppo", critic_learning_rate=0.0, max_steps=3)
    first, second, third = (trainer.step().batch for _ in range(3))
    assert not first["values"].values.any()
    mean = float(first["returns"].values.double().mean())
    for batch in (second, third):
        assert batch["values"].values.tolist() == pytest.approx([mean] * len(batch["values"].values), rel=1e-6)


def test_functions_are_normalised_one_by_one_with_their_weights(make_trainer) -> None:
    """The penalty that a key adds is one of them, and weighs 1."""

    def letters(completions: list[str], **_: Any) -> list[float]:
        return [float(len(set(text))) for text in completions]

    keys = {"reward_weights": [1.0, -0.5], "overlong_buffer": 3, "max_steps": 1}
    trainer = make_trainer(reward_funcs=[spread, letters], multi_objective_aggregation="normalize_then_sum", **keys)
    batch = trainer.step().batch
    mine = batch["advantages"].values
    values = torch.tensor(batch["function_rewards"], dtype=torch.float64)
    assert values.shape[1] == 3 and all(len(set(column.tolist())) > 1 for column in values.T[:2])
    weights = torch.tensor([1.0, -0.5, 1.0])
    expected = reward_decoupled_advantages(batch["rewards"], values, weights, batch["group"])
    torch.testing.assert_close(mine, expected[batch["completion_ids"].row_index()].float())
    assert bool(mine.any())
