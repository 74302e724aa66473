"""This library's side of a comparison of training steps; started by peers.py."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from benchmarks.side import Driver, Job, StepClock, peak_rss_bytes
from benchmarks.workload import REWARDS, load, rows
from hybrid_rl import Trainer

HANDOFF = ("handoff/bytes", "handoff/probe_gap", "timing/handoff", "timing/verify")


def main() -> None:
    """Train, one step per command."""
    imports_rss_bytes = peak_rss_bytes()
    driver = Driver()
    job = Job.of(driver.receive())
    work = job.work
    torch.set_num_threads(job.threads)
    model, tokenizer = load(job.folder, job.dtype)
    keys: dict[str, Any] = {"learning_rate": job.learning_rate, "seed": job.seed, "beta": job.beta, **job.keys}
    if job.lora is not None:
        from peft import LoraConfig

        keys["peft_config"] = LoraConfig(**job.lora)
    if job.tokens_per_micro_batch is not None:
        keys["tokens_per_micro_batch"] = job.tokens_per_micro_batch
    trainer = Trainer(
        model,
        REWARDS[work.reward],
        rows(work, work.prompts_per_step * job.num_steps, job.seed + 1),
        tokenizer=tokenizer,
        shuffle=False,
        max_steps=job.num_steps,
        prompts_per_step=work.prompts_per_step,
        num_generations=work.num_generations,
        max_completion_length=work.max_completion_length,
        loss_type="dapo",
        temperature=1.0,
        output_dir=job.output,
        **keys,
    )
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    driver.send(versions=versions, imports_rss_bytes=imports_rss_bytes)
    with trainer:
        while True:
            driver.serve(model)
            driver.send(**_step(trainer), peak_rss_bytes=peak_rss_bytes())


def _step(trainer: Trainer) -> dict[str, Any]:
    clock = StepClock()
    batch, metrics = trainer.step()
    seconds = clock.stop()
    lengths = batch["completion_ids"].lengths
    return {
        **seconds,
        "generation_seconds": metrics["timing/rollout"],
        "update_seconds": metrics["timing/update"] + metrics["timing/logprobs"],
        "num_tokens": int(lengths.sum()),
        "longest_tokens": int(lengths.max()),
        "reward": metrics["reward"],
        "handoff": {name: metrics[name] for name in HANDOFF if name in metrics},
    }


if __name__ == "__main__":
    main()
