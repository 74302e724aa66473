"""TRL's side of a comparison of rollouts of agents; started by peers.py in TRL's own environment.

GRPOTrainer's own loop of tools, timed around `_generate`, in which a step makes its completions. Its model is random
and calls no tools: every answer is taken for a call of the one tool there is, and is cut to the length that the plan
has for it; the longest of a turn is what `generate` has to make for all.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch  # noqa: E402
import trl  # noqa: E402
from datasets import Dataset  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402
from trl.trainer import grpo_trainer  # noqa: E402

from benchmarks.side import Driver, Job, StepClock  # noqa: E402
from benchmarks.workload import EOS_ID, VOCABULARY, load, rows, spread  # noqa: E402

# What a prompt, an answer and a tool return are here: their own characters, and the end of an answer.
TEMPLATE = """\
{%- for message in messages %}{{ message['content'] }}
{%- for call in message.get('tool_calls') or [] %}{{ call['function']['name'] }}{{ call['function']['arguments'] }}
{%- endfor %}{% if message['role'] == 'assistant' %}<eos>{% endif %}{%- endfor %}"""
CALL = {"type": "function", "function": {"name": "look", "arguments": {}}}


def called(*_: Any, **__: Any) -> dict[str, Any]:
    """Every answer calls the tool."""
    return {"role": "assistant", "content": "", "tool_calls": [CALL]}


class PlannedTrainer(GRPOTrainer):
    """GRPOTrainer that follows the driver's plan; answers when it has come back for the next one, so that the rest of a
    training step does not run into the other side's turn."""

    driver: Driver
    plan: dict[str, Any]
    returns: Iterator[tuple[float, str]]
    turn = 0
    _answer: dict[str, float] | None = None

    def _generate(self, prompts: list[Any]) -> Any:
        if self._answer is not None:
            self.driver.send(**self._answer)
        self.plan = self.driver.receive()
        delays, results = self.plan["delays"], self.plan["told"]
        # In the order in which TRL calls them: all of a turn, then all of the next.
        self.returns = (
            (row[turn], "".join(VOCABULARY[token] for token in words[turn]))
            for turn in range(len(delays[0]))
            for row, words in zip(delays, results, strict=True)
        )
        self.turn = 0
        clock = StepClock()
        made = super()._generate(prompts)
        self._answer = {**clock.stop(), "num_turns": self.turn}
        return made

    def _generate_single_turn(self, *arguments: Any, **keywords: Any) -> Any:
        lengths = [row[self.turn] for row in self.plan["answers"]]
        self.turn += 1
        self.generation_config.max_new_tokens = max(lengths)
        completion_ids, logprobs = super()._generate_single_turn(*arguments, **keywords)
        return [ids[:length] for ids, length in zip(completion_ids, lengths, strict=True)], logprobs

    def look(self) -> str:
        """Look something up.

        Returns:
            What was found.
        """
        seconds, text = next(self.returns)
        time.sleep(seconds)
        return text


def main() -> None:
    """Train, one step per plan."""
    driver = Driver()
    job = Job.of(driver.receive())
    work = job.work
    torch.set_num_threads(job.threads)
    grpo_trainer.parse_response = called
    model, tokenizer = load(job.folder)
    tokenizer.chat_template, tokenizer.response_schema = TEMPLATE, {}
    texts = [row["prompt"] for row in rows(work, work.prompts_per_step * job.num_steps, job.seed)]
    trainers: list[PlannedTrainer] = []

    def look() -> str:
        """Look something up.

        Returns:
            What was found.
        """
        return trainers[0].look()

    trainer = PlannedTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=spread,
        tools=[look],
        args=GRPOConfig(
            output_dir=job.output,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            per_device_train_batch_size=job.micro_batch or work.num_samples,
            gradient_accumulation_steps=work.num_samples // (job.micro_batch or work.num_samples),
            num_generations=work.num_generations,
            max_completion_length=model.config.max_position_embeddings,
            max_tool_calling_iterations=job.num_turns - 1,
            max_steps=job.num_steps,
            learning_rate=job.learning_rate,
            generation_kwargs={"suppress_tokens": [EOS_ID]},
            shuffle_dataset=False,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=False,
            seed=job.seed,
        ),
        train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": text}]} for text in texts]),
    )
    trainer.driver = driver
    trainers.append(trainer)
    driver.send(versions={"trl": trl.__version__})
    trainer.train()


if __name__ == "__main__":
    main()
