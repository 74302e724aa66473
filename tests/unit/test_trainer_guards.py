"""What users' code may do to a run without harming it, and what is refused instead."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hybrid_rl.errors import CheckpointError, ConfigError, EngineStateError, HybridRLError, ModelError, RewardError
from hybrid_rl.models import CausalLM
from tests.support.inside.trainers import crew_of
from tests.support.tiny import build_model, ids_of, spread, sums


def shares(completion_ids, **_):
    return [float(sum(ids) % 3) for ids in completion_ids]


def test_a_reward_that_changes_its_arguments_changes_nothing_else(make_trainer) -> None:
    def vandal(prompts, completion_ids, numbers, **_):
        rewards = shares(completion_ids)
        for row in (*completion_ids, *numbers):
            row.clear()
        return rewards

    data = [dict(row, numbers=[1, 2]) for row in sums(8)]
    results = [make_trainer(reward_funcs=f, train_dataset=data).step() for f in (vandal, shares)]
    assert torch.equal(*(result.batch["completion_ids"].values for result in results))
    assert results[0].metrics["sampling/sampling_logp_difference/max"] < 1e-4
    assert all(row["numbers"] == [1, 2] for row in data)


def test_a_failing_evaluation_loses_neither_log_nor_checkpoint(make_trainer, records) -> None:
    def fails_later(completion_ids, trainer_state, part, **_):
        if part[0] == "eval" and trainer_state.global_step == 2:
            raise ValueError("no")
        return shares(completion_ids)

    parts = {"train_dataset": "train", "eval_dataset": "eval"}
    data = {name: [dict(row, part=part) for row in sums(8)] for name, part in parts.items()}
    trainer = make_trainer(reward_funcs=fails_later, max_steps=2, save_steps=2, **data)
    with pytest.raises(Exception, match="no"):
        trainer.fit()
    assert [record["step"] for record in records(trainer)] == [0, 1, 2]
    assert (trainer.run_folder / "checkpoint-2" / "model.safetensors").is_file()


def test_log_metric_hides_none_of_our_own_metrics_nor_passes_for_an_evaluation(make_trainer) -> None:
    def logs(completion_ids, log_metric, **_):
        for name, value in (("learning_rate", 9.0), ("mine", 7.0), ("eval/accuracy", 8.0)):
            log_metric(name, value)
        return shares(completion_ids)

    metrics = make_trainer(reward_funcs=logs, eval_dataset=sums(2), learning_rate=1e-3).step().metrics
    assert (metrics["learning_rate"], metrics["log_metric/learning_rate"], metrics["mine"]) == (1e-3, 9.0, 7.0)
    assert metrics["log_metric/eval/accuracy"] == 8.0 and "eval/accuracy" not in metrics


def test_numbers_of_log_metric_that_are_not_finite_are_told_once(make_trainer, records, caplog) -> None:
    def logs(completion_ids, trainer_state, log_metric, **_):
        log_metric("hits", float("nan") if trainer_state.global_step < 3 else 1.0)
        log_metric("good", 1.0)
        return shares(completion_ids)

    trainer = make_trainer(reward_funcs=logs, max_steps=3)
    trainer.fit()
    told = "step 1: the mean of what a reward function gave to log_metric('hits', ...) is nan"
    assert caplog.text.count("log_metric(") == 1 and told in caplog.text
    assert [line.get("hits") for line in records(trainer)[-3:]] == [None, None, 1.0]


def test_an_odd_value_of_log_extra_ends_the_run_before_the_update_and_names_its_function(make_trainer, records) -> None:
    def odd(completion_ids, trainer_state, log_extra, **_):
        log_extra("where", [{("a", 1): 2} if trainer_state.global_step == 2 else "here"] * len(completion_ids))
        return shares(completion_ids)

    trainer = make_trainer(reward_funcs=odd, max_steps=3, save_steps=1)
    with pytest.raises(
        RewardError, match=r"(?s)reward odd: .*log_extra\('where', ...\): value 0 of type dict cannot be"
    ):
        trainer.fit()
    assert [line["step"] for line in records(trainer)] == [0, 1]
    assert {line["extra"]["where"] for line in records(trainer, name="samples.jsonl")} == {"here"}
    assert (trainer.run_folder / "checkpoint-1" / "model.safetensors").is_file()


def test_samples_that_cannot_be_logged_cost_neither_metrics_nor_checkpoint(make_trainer, records, monkeypatch) -> None:
    trainer = make_trainer(max_steps=2, save_steps=1)

    def refuse(*_: object) -> None:
        raise ZeroDivisionError("no samples today")

    monkeypatch.setattr(crew_of(trainer), "log_samples", refuse)
    with pytest.raises(ZeroDivisionError):
        trainer.step()
    assert [line["step"] for line in records(trainer)] == [1]
    assert (trainer.run_folder / "checkpoint-1" / "model.safetensors").is_file()


def test_what_needs_the_workers_is_refused_inside_a_step_or_evaluation(make_trainer) -> None:
    """A reward function that called them would wait for itself for ever."""
    seen = []

    def asks(completion_ids, trainer_state, **_):
        calls = (trainer.step, trainer.fit, trainer.evaluate, trainer.save, lambda: trainer.generate("1+2="))
        for call in calls:
            with pytest.raises(EngineStateError, match="is running; .* before or after it") as refused:
                call()
            seen.append(str(refused.value).partition(" is running")[0])
        return shares(completion_ids)

    trainer = make_trainer(reward_funcs=asks, eval_dataset=sums(2))
    trainer.evaluate()
    assert set(seen) == {"an evaluation or generation"}
    seen.clear()
    trainer.step()
    assert set(seen) == {"a training step"}
    assert trainer.generate("1+2=", temperature=0)[0].completion_ids and trainer.save().is_dir()


def test_prompts_at_the_limit_leave_the_probe_its_room(make_trainer) -> None:
    length = build_model().config.max_position_embeddings - 1
    trainer = make_trainer(train_dataset=[{"prompt": "1" * length}] * 8, max_completion_length=1)
    assert trainer.step().batch["completion_ids"].lengths.max() == 1


def test_functional_dropout_is_off_under_gradient_checkpointing() -> None:
    from transformers import Starcoder2Config, Starcoder2ForCausalLM

    config = Starcoder2Config(
        vocab_size=24, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, residual_dropout=0.5, embedding_dropout=0.5,
        pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    model = CausalLM(Starcoder2ForCausalLM(config))
    model.enable_gradient_checkpointing()
    assert model.verify() < 1e-5


def test_rotary_frequencies_that_depend_on_length_are_refused_beyond_their_limit() -> None:
    model = build_model()
    model.config.rope_parameters = {"rope_type": "longrope", "original_max_position_embeddings": 16, "rope_theta": 1e4}
    CausalLM(model).check_length(16)
    with pytest.raises(ModelError, match="more than 16 tokens are not supported: longrope"):
        CausalLM(model).check_length(17)


def test_a_config_without_a_number_of_positions_has_no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    model = CausalLM(build_model())
    bare = SimpleNamespace()
    bare.get_text_config = lambda: bare
    monkeypatch.setattr(model.module, "config", bare)
    model.check_length(10**6)
    bare.rope_parameters = {"rope_type": "dynamic"}
    model.check_length(10**6)


def test_a_model_that_is_resized_after_the_trainer_was_made_is_refused(make_trainer) -> None:
    model = build_model()
    trainer = make_trainer(model)
    trainer.step()
    model.resize_token_embeddings(200)
    with pytest.raises(HybridRLError, match="changed shape or dtype since the trainer was made|modules .* replaced"):
        trainer.step()


def test_a_cache_that_cannot_hold_one_sequence_is_refused_at_once(make_trainer) -> None:
    with pytest.raises(ConfigError, match="the KV cache holds 16 tokens, but prompt and completion may take 55"):
        make_trainer(kv_cache_memory_bytes=4096, max_completion_length=50)


def test_a_reward_may_run_the_policy_while_it_generates(make_trainer) -> None:
    """The reward's thread sees the model as its user made it, and the numbers that it always gives."""
    model = build_model()
    token_ids = torch.tensor([ids_of("1+1=")])
    gaps = []

    def judge(completion_ids, **_):
        for _ in range(5):
            with torch.no_grad():
                gaps.append(float((model(token_ids).logits - expected).abs().max()))
        return spread(completion_ids)

    trainer = make_trainer(model, judge, prompts_per_step=8, max_completion_length=30, max_steps=1, learning_rate=1e-12)
    with torch.no_grad():
        expected = model(token_ids).logits
    assert trainer.step().metrics["rewards/num_failed"] == 0
    assert len(gaps) >= 5 and max(gaps) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_weights_that_are_loaded_into_the_module_between_steps_are_trained(make_trainer, caplog, dtype) -> None:
    """A learning rate that moves nothing: after the next step the module holds what was loaded, in either dtype."""
    module, other = build_model(dtype=dtype), build_model(7, dtype=dtype)
    trainer = make_trainer(module, learning_rate=1e-12, max_steps=4)
    trainer.step()
    for _ in range(2):
        module.load_state_dict(other.state_dict())
        trainer.step()
    gap = max(float((a - b).detach().abs().max()) for a, b in zip(module.parameters(), other.parameters(), strict=True))
    assert gap < 1e-9
    told = [r.getMessage() for r in caplog.records if "changed by hand" in r.getMessage()]
    assert len(told) == (dtype == torch.bfloat16)


def test_a_module_that_is_converted_between_steps_is_refused_before_it_generates_or_is_saved(make_trainer) -> None:
    module = build_model()
    trainer = make_trainer(module)
    trainer.step()
    module.to(torch.bfloat16)
    for call in (trainer.step, lambda: trainer.generate("1+2="), trainer.save):
        with pytest.raises(ModelError, match=r"parameters changed shape or dtype .*\.to\(dtype\).*make a new Trainer"):
            call()


def test_a_block_of_autocast_is_refused_where_it_would_compute(make_trainer) -> None:
    trainer = make_trainer(eval_dataset=sums(2))
    with torch.autocast("cpu", torch.bfloat16):
        for call in (make_trainer, trainer.step, trainer.evaluate, lambda: trainer.generate("1+2=")):
            with pytest.raises(ModelError, match=r"torch.autocast\('cpu'\) is active.* dtype=bfloat16 computes"):
                call()
    assert trainer.step().metrics["grad_norm"] > 0


def test_inference_mode_is_refused_where_there_are_gradients(make_trainer) -> None:
    trainer = make_trainer(eval_dataset=sums(2))
    with torch.inference_mode():
        for call in (make_trainer, trainer.step):
            with pytest.raises(ModelError, match=r"torch.inference_mode\(\) is active|made or loaded inside torch.inf"):
                call()
        assert trainer.generate("1+2=", temperature=0) and trainer.evaluate()
        made = build_model()
    with pytest.raises(ModelError, match=r"made or loaded inside torch.inference_mode\(\).*\(model.embed_tokens"):
        make_trainer(made)
    assert trainer.step().metrics["grad_norm"] > 0


@pytest.mark.parametrize("wrap", [nn.utils.parametrizations.weight_norm, nn.utils.weight_norm, nn.utils.spectral_norm])
@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated")
def test_weights_that_are_computed_from_others_are_refused(make_trainer, wrap) -> None:
    """They train, but the folder that a checkpoint writes has no such weight for its class."""
    module = build_model()
    wrap(module.model.layers[1].mlp.up_proj)
    with pytest.raises(ModelError, match="model.layers.1.mlp.up_proj of the module computes its weight from other par"):
        make_trainer(module)


def test_a_checkpoint_cannot_be_the_root_of_the_file_system(make_trainer) -> None:
    with pytest.raises(
        CheckpointError, match="a checkpoint cannot be / itself: give the name of a new folder inside it"
    ):
        make_trainer().save("/")


@pytest.mark.parametrize("save_steps", [None, 1])
def test_an_engine_without_finite_logits_names_the_step_and_what_to_do(make_trainer, save_steps) -> None:
    """Weights that broke between two steps: no update says so."""
    trainer = make_trainer(max_steps=3, save_steps=save_steps, eval_dataset=sums(2))
    trainer.step()
    with torch.no_grad():
        next(trainer.module.parameters())[:] = float("nan")
    newest = trainer.run_folder / "checkpoint-1"
    advice = (
        f"the newest is {newest}$" if save_steps else f"and with save_steps: {trainer.run_folder} has no checkpoint$"
    )
    told = f"the model's logits are not finite in . of . rows: .*. What to do: .* lower learning_rate.*{advice}"
    for call, doing in ((trainer.step, "training step 2"), (trainer.evaluate, "evaluation after step 1")):
        with pytest.raises(ModelError, match=f"^{doing}: {told}"):
            call()
