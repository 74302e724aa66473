"""TRL's GRPOConfig as `args=`: what the user brought is what runs, or the user is told."""

import dataclasses
import enum
import json
from pathlib import Path
from typing import Any

import pytest

from hybrid_rl.config import load_config, to_yaml
from hybrid_rl.errors import ConfigError

# The init fields of trl 1.16.0's GRPOConfig on transformers 5, with their defaults.
RECORD = Path(__file__).parents[3] / "reference" / "trl_grpo_config.json"


class SchedulerType(str, enum.Enum):  # noqa: UP042 - as transformers writes it
    """An enum of transformers, whose members are also texts."""

    LINEAR = "linear"
    COSINE = "cosine"


class Strategy(str, enum.Enum):  # noqa: UP042
    """Another one."""

    NO = "no"
    STEPS = "steps"
    EPOCH = "epoch"


def _fill(self: Any) -> None:
    """What TRL and transformers fill in when a GRPOConfig is made."""
    if self.bf16 is None and not self.use_cpu:
        raise ValueError("Your setup doesn't support bf16/gpu.")
    self.bf16 = not self.fp16 if self.bf16 is None else self.bf16
    self.output_dir = self.output_dir or "trainer_output"
    self.lr_scheduler_type = SchedulerType(self.lr_scheduler_type)
    self.save_strategy, self.eval_strategy = Strategy(self.save_strategy), Strategy(self.eval_strategy)
    self.do_eval = self.do_eval or self.eval_strategy != "no"
    self.disable_tqdm = bool(self.disable_tqdm)
    self.accelerator_config = object()
    self.report_to = [] if self.report_to == "none" else self.report_to
    self.steps_per_generation = self.steps_per_generation or self.gradient_accumulation_steps
    batch = self.per_device_train_batch_size * self.steps_per_generation
    self.generation_batch_size = self.generation_batch_size or batch


GRPOConfig: Any = dataclasses.make_dataclass(
    "GRPOConfig",
    [
        (name, Any, dataclasses.field(default_factory=lambda value=value: value))
        for name, value in json.loads(RECORD.read_text()).items()
    ],
    namespace={"__post_init__": _fill},
)


def load(keywords: dict[str, Any] | None = None, **fields: Any) -> Any:
    args = GRPOConfig("out", **{"use_cpu": True, "bf16": False, **fields})
    return load_config(None, {"args": args, **(keywords or {})})


def told(caplog: pytest.LogCaptureFixture) -> str:
    return "\n".join(record.getMessage() for record in caplog.records)


def test_fields_that_equal_the_defaults_of_trl_count(caplog: pytest.LogCaptureFixture) -> None:
    config, given = load(num_train_epochs=3, lr_scheduler_type="linear", save_steps=500, save_strategy="steps")
    assert (config.num_train_epochs, config.optimizer.lr_scheduler_type, config.save_steps) == (3.0, "linear", 500)
    assert config.data.prompts_per_step == 1  # 8 completions on the device, 8 of each prompt
    assert config.eval.eval_steps is None and config.max_steps is None and config.log_level == "normal"
    assert given == {"output_dir", "model.device"}
    assert told(caplog) == (
        "args: TRL's defaults, which differ from those of this library: prompts_per_step=1, save_steps=500, "
        "shuffle=true, num_train_epochs=3, lr_scheduler_type=linear, gradient_checkpointing=true, eval_on_start=false"
    )


@pytest.mark.parametrize(
    ("fields", "given", "device", "dtype"),
    [
        ({"bf16": False}, {"model.dtype"}, "auto", "float32"),
        ({"use_cpu": True}, {"model.device"}, "cpu", "auto"),
        ({"use_cpu": True, "bf16": False}, {"model.device"}, "cpu", "auto"),
    ],
)
def test_what_needs_no_gpu_can_be_made_without_one(
    fields: dict[str, Any], given: set[str], device: str, dtype: str
) -> None:
    """Where there is none, a GRPOConfig needs arguments to be made; its defaults are those of TRL all the same."""
    config, found = load_config(None, {"args": GRPOConfig("out", **fields)})
    assert found - {"output_dir"} == given and (config.model.device, config.model.dtype) == (device, dtype)


def test_keywords_win_and_are_not_mentioned(caplog: pytest.LogCaptureFixture) -> None:
    config, _ = load({"max_steps": 2, "data.prompts_per_step": 4, "save_steps": None}, num_generations=4)
    assert (config.max_steps, config.data.prompts_per_step, config.save_steps) == (2, 4, None)
    assert "prompts_per_step" not in told(caplog) and "save_steps" not in told(caplog)


def test_an_ordinary_script_needs_no_change(caplog: pytest.LogCaptureFixture) -> None:
    """Its batch is computed, and nothing is blamed that TRL has filled in."""
    config, given = load(
        per_device_train_batch_size=16,
        gradient_accumulation_steps=2,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="no",
        logging_steps=1,
        optim="adamw_torch",
        log_completions=True,
        num_completions_to_print=3,
    )
    assert (config.data.prompts_per_step, config.eval.eval_steps, config.save_steps) == (4, 2, None)
    assert config.log_completions == 3
    assert given == {"data.prompts_per_step", "eval.eval_steps", "output_dir", "log_completions", "model.device"}
    assert "your batch size: prompts_per_step=4; not needed here: logging_steps" in told(caplog)


def test_steps_of_trl_are_optimizer_steps(caplog: pytest.LogCaptureFixture) -> None:
    """8 per device and 4 batches per generation are 32 completions, 4 prompts, for 4 / 2 optimizer steps."""
    config, _ = load(steps_per_generation=4, gradient_accumulation_steps=2, max_steps=10, warmup_steps=0.25)
    assert (config.data.prompts_per_step, config.optimizer.prompts_per_mini_batch) == (4, 2)
    assert (config.max_steps, config.save_steps, config.optimizer.warmup_steps) == (5, 250, 3)
    assert "a training step has 2 of TRL's steps, so max_steps=5" in told(caplog)


def test_enums_are_words() -> None:
    config, _ = load(lr_scheduler_type="cosine")
    assert "lr_scheduler_type: cosine\n" in to_yaml(config)
    keyword, _ = load_config(None, {"lr_scheduler_type": SchedulerType.COSINE})
    assert "lr_scheduler_type: cosine\n" in to_yaml(keyword)


def test_fields_that_mean_something_only_together() -> None:
    config, _ = load(use_vllm=True)
    # TRL corrects by default: it leaves out sequences whose ratio is above 3.
    assert config.rollout.engine == "vllm" and type(config.correction).__name__ == "MaskedImportanceSampling"
    assert (config.correction.correction_level, config.correction.correction_high) == ("sequence", 3.0)
    assert config.correction.correction_low == 0.0
    config, _ = load(use_vllm=True, vllm_importance_sampling_mode="token_truncate")
    assert (config.correction.correction_level, config.correction.correction_high) == ("token", 3.0)
    config, _ = load(sync_ref_model=True, beta=0.04)
    assert (config.kl.beta, config.kl.ref_model_sync_steps) == (0.04, 512)
    assert load(entropy_coef=0.01)[1] == {"output_dir", "model.device", "algorithm.entropy_coef"}


def test_an_option_of_one_loss_is_an_entry_here() -> None:
    loss = load({"policy_loss": "vespo"}, vespo_k_pos=3.0)[0].policy_loss
    assert (loss.vespo_k_pos, loss.vespo_lambda_pos) == (3.0, 3.0)
    with pytest.raises(ConfigError, match="vespo_k_pos' would do nothing: it belongs to policy_loss.objective=vespo"):
        load(vespo_k_pos=3.0)


@pytest.mark.parametrize(
    ("fields", "keys"),
    [
        ({"save_strategy": "epoch", "eval_strategy": "epoch", "eval_steps": 3}, ["eval_strategy", "save_strategy"]),
        ({"top_p": 0.9, "push_to_hub": True, "deepspeed": "ds.json"}, ["top_p", "push_to_hub", "deepspeed"]),
        ({"use_vllm": True, "vllm_mode": "server", "top_k": 9}, ["vllm_mode", "top_k"]),
    ],
)
def test_only_what_cannot_be_had_is_an_error(fields: dict[str, Any], keys: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load(**fields)
    found = [line.split()[0] for line in str(caught.value).splitlines()[1:] if line[2] != " "]
    assert sorted(found) == sorted(keys)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"per_device_train_batch_size": 6}, "6 completions per step .* num_generations=8 .* set prompts_per_step"),
        ({"num_generations": 24, "steps_per_generation": 3, "gradient_accumulation_steps": 2}, "1 prompts per step"),
        ({"warmup_steps": 0.1}, "optimizer.warmup_steps=0.1 is a share of the run; give a whole number of steps"),
    ],
)
def test_numbers_that_do_not_fit(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        load(**fields)
