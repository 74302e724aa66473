"""TRL's side of a comparison of training steps; started by peers.py in TRL's own environment."""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.side import Driver, Job, StepClock, measured, peak_rss_bytes
from benchmarks.workload import REWARDS, Work, continuous_batching, load, rows


class TimedTrainer(GRPOTrainer):
    """GRPOTrainer that books its seconds: `generation`, and `prepare` for all that comes before the forward pass."""

    seconds: dict[str, float]

    def _generate_single_turn(self, *arguments: Any) -> Any:
        return measured(self.seconds, "generation", super()._generate_single_turn, *arguments)

    def _save_checkpoint(self, *arguments: Any) -> None:
        measured(self.seconds, "save", super()._save_checkpoint, *arguments)

    def _prepare_inputs(self, *arguments: Any) -> Any:
        return measured(self.seconds, "prepare", super()._prepare_inputs, *arguments)


class Scorer:
    """The reward function, noting what it is given."""

    __name__ = "reward"

    def __init__(self, score: Callable[..., list[float]]) -> None:
        self._score = score
        self.lengths: list[int] = []
        self.rewards: list[float] = []

    def __call__(self, completion_ids: list[list[int]], **columns: Any) -> list[float]:
        rewards = self._score(completion_ids=completion_ids, **columns)
        self.lengths += [len(ids) for ids in completion_ids]
        self.rewards += rewards
        return rewards

    def take(self) -> dict[str, float]:
        """What was seen since the last call."""
        summary = {"num_tokens": sum(self.lengths), "longest_tokens": max(self.lengths), "reward": fmean(self.rewards)}
        self.lengths, self.rewards = [], []
        return summary


class Turns(TrainerCallback):
    """Holds every step until the driver asks for it. A step is answered only when the trainer has come back for the
    next one, so that its logging does not run into the other side's turn; the clock leaves that logging out."""

    def __init__(self, driver: Driver, model: torch.nn.Module, scorer: Scorer, seconds: dict[str, float]) -> None:
        self._driver, self._model, self._scorer, self._seconds = driver, model, scorer, seconds
        self._clock = StepClock()
        self._answer: dict[str, float] | None = None

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.between_steps()
        self._seconds.clear()
        self._clock = StepClock()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        seconds = self._clock.stop()
        self._answer = {
            **seconds,
            "generation_seconds": self._seconds["generation"],
            "update_seconds": seconds["wall_seconds"] - self._seconds["prepare"],
            **self._scorer.take(),
        }

    def between_steps(self) -> None:
        """Answer the last step and wait for the next."""
        if self._answer is not None:
            saved = {"save_seconds": self._seconds.get("save", 0.0)}
            self._driver.send(**self._answer, **saved, peak_rss_bytes=peak_rss_bytes())
            self._answer = None
        self._driver.serve(self._model)


def main() -> None:
    """Train, one step per command."""
    imports_rss_bytes = peak_rss_bytes()
    driver = Driver()
    job = Job.of(driver.receive())
    work = job.work
    torch.set_num_threads(job.threads)
    model, tokenizer = load(job.folder, job.dtype)
    seconds: dict[str, float] = {}
    scorer = Scorer(REWARDS[work.reward])
    turns = Turns(driver, model, scorer, seconds)
    trainer = TimedTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=scorer,
        args=_settings(job, work),
        train_dataset=Dataset.from_list(rows(work, work.prompts_per_step * job.num_steps, job.seed + 1)),
        callbacks=[turns],
        peft_config=_adapters(job),
    )
    trainer.seconds = seconds
    versions = {"trl": trl.__version__, "torch": torch.__version__, "transformers": transformers.__version__}
    driver.send(versions=versions, imports_rss_bytes=imports_rss_bytes)
    trainer.train()
    turns.between_steps()
    raise RuntimeError(f"asked for more than the {job.num_steps} steps of the job")


def _adapters(job: Job) -> Any:
    if job.lora is None:
        return None
    from peft import LoraConfig

    return LoraConfig(**job.lora)


def _settings(job: Job, work: Work) -> GRPOConfig:
    micro_batch = job.micro_batch or work.num_samples
    is_continuous = job.generation == "continuous"
    return GRPOConfig(
        output_dir=job.output,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=work.num_samples // micro_batch,
        num_generations=work.num_generations,
        max_completion_length=work.max_completion_length,
        max_steps=job.num_steps,
        learning_rate=job.learning_rate,
        lr_scheduler_type="constant",
        beta=job.beta,
        temperature=1.0,
        loss_type="dapo",
        shuffle_dataset=False,
        use_transformers_continuous_batching=is_continuous,
        transformers_continuous_batching_config=continuous_batching(work) if is_continuous else None,
        logging_steps=1,
        save_strategy="no" if job.save_steps is None else "steps",
        save_steps=job.save_steps or 500,
        save_total_limit=1,
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        seed=job.seed,
    )


if __name__ == "__main__":
    main()
