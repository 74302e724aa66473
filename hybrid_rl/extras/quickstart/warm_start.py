"""Supervised learning on prompt-answer rows: the warm start before GRPO and, for comparison, its continuation."""

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from hybrid_rl.errors import ConfigError, ModelError
from hybrid_rl.extras.quickstart.task import MAX_COMPLETION_TOKENS, Row, Task, demonstrations

WARM_START_STEPS = 700
WARM_START_LR = 3e-3
LOWEST, HIGHEST = 0.30, 0.50  # held-out accuracy of a warm-started model
# Strong, because the training operands are few: without it the model remembers numbers instead of reading digits, and
# neither more supervision nor GRPO teaches it the unseen numbers afterwards.
WEIGHT_DECAY = 1.0
CONTINUED_LR = 1e-3
BATCH_SIZE = 128
STEPS_PER_EVALUATION = 50
IGNORED = -100  # label of positions without loss: cross_entropy's own default


@dataclass(frozen=True)
class SupervisedReport:
    """Held-out greedy accuracy, optimizer steps of the weights that were kept, wall seconds."""

    accuracy: float
    steps: int
    seconds: float


class SupervisedTrainer:
    """Cross-entropy on the answer and `<eos>` with AdamW; batches go through the rows in an order drawn from `seed`.

    `examples` are input ids and labels, as `encode` gives them. `schedule` maps the number of the coming optimizer step
    (from 0) to a factor of `lr`; without it the learning rate is constant.
    """

    def __init__(
        self,
        model: Qwen2ForCausalLM,
        examples: tuple[Tensor, Tensor],
        seed: int,
        lr: float,
        batch_size: int,
        schedule: Callable[[int], float] | None = None,
    ) -> None:
        self._input_ids, self._labels = examples
        num_rows = len(self._input_ids)
        if not 1 <= batch_size <= num_rows:
            raise ConfigError(f"batch_size={batch_size} does not fit {num_rows} rows; use 1 to {num_rows}")
        self.model = model
        self.num_steps = 0
        self._lr = lr
        self._schedule = schedule
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.99), weight_decay=WEIGHT_DECAY)
        self._batches = self._walk(seed, batch_size)

    def step(self) -> float:
        """Take one optimizer step; return its loss, the mean over the batch's answer tokens, in nats."""
        indices = next(self._batches)
        input_ids, labels = self._input_ids[indices], self._labels[indices]
        self.model.train()
        logits = self.model(input_ids=input_ids[:, :-1]).logits
        loss = functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        if self._schedule is not None:
            for group in self._optimizer.param_groups:
                group["lr"] = self._lr * self._schedule(self.num_steps)
        self._optimizer.step()
        self.num_steps += 1
        return loss.item()

    def _walk(self, seed: int, batch_size: int) -> Iterator[Tensor]:
        """Yield row indices, int64 [batch_size], for ever; each pass has a new order and no incomplete batch."""
        generator = torch.Generator().manual_seed(seed)
        while True:
            order = torch.randperm(len(self._input_ids), generator=generator)
            yield from (batch for batch in order.split(batch_size) if len(batch) == batch_size)


def encode(tokenizer: PreTrainedTokenizerFast, rows: Sequence[Row]) -> tuple[Tensor, Tensor]:
    """Return `(input_ids, labels)`, int64 [N, T]: prompt, answer, `<eos>`, padding; `IGNORED` outside the answer.

    Padding on the right needs no attention mask, because a causal model's answer tokens never see it.
    """
    prompts = tokenizer([row["prompt"] for row in rows])["input_ids"]
    answers = tokenizer([row["answer"] for row in rows])["input_ids"]
    width = max(len(prompt) + len(answer) + 1 for prompt, answer in zip(prompts, answers, strict=True))
    input_ids, labels = [], []
    for prompt, answer in zip(prompts, answers, strict=True):
        target = [*answer, tokenizer.eos_token_id]
        num_padding = width - len(prompt) - len(target)
        input_ids.append(prompt + target + [tokenizer.pad_token_id] * num_padding)
        labels.append([IGNORED] * len(prompt) + target + [IGNORED] * num_padding)
    return torch.tensor(input_ids), torch.tensor(labels)


@torch.no_grad()
def greedy_accuracy(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: Sequence[Row], max_new_tokens: int
) -> float:
    """Return the share of rows whose greedy completion is exactly the answer and then `<eos>`, in `max_new_tokens`."""
    inputs = tokenizer([row["prompt"] for row in rows], padding=True, return_tensors="pt")
    was_training = model.training
    model.eval()
    generated = model.generate(  # type: ignore[misc]  # its self is annotated with a protocol that no model matches
        **inputs,
        max_new_tokens=max_new_tokens,
        do_sample=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model.train(was_training)
    completions = generated[:, inputs["input_ids"].shape[1] :].tolist()
    answers = tokenizer([row["answer"] for row in rows])["input_ids"]
    num_correct = 0
    for completion, answer in zip(completions, answers, strict=True):
        target = [*answer, tokenizer.eos_token_id]
        num_correct += completion[: len(target)] == target
    return num_correct / len(rows)


def warm_start(
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    task: Task,
    seed: int,
    on_progress: Callable[[int, float], None] | None = None,
) -> SupervisedReport:
    """Train `model` in place on the careless worker's demonstrations until held-out accuracy lies between `LOWEST` and
    `HIGHEST`. on_progress: gets steps done and last loss (in nats per token) after every evaluation.

    The number of steps is fixed in advance, and the accuracy lands inside by design of the task: the model learns the
    arithmetic, and with it the worker's slips. If it ends outside, the last evaluated weights inside are used; without
    any, ModelError is raised. The held-out set decides nothing else: the bounds are a condition on the *start*, which
    they keep low, so they cannot flatter the accuracy that GRPO reaches later.
    """
    started = time.perf_counter()
    trainer = SupervisedTrainer(
        model, encode(tokenizer, demonstrations(task.train)), seed, WARM_START_LR, BATCH_SIZE, _warm_start_schedule
    )
    inside: tuple[float, int, dict[str, Tensor]] | None = None
    accuracy = 0.0
    while trainer.num_steps < WARM_START_STEPS:
        loss = trainer.step()
        if trainer.num_steps % STEPS_PER_EVALUATION:
            continue
        accuracy = greedy_accuracy(model, tokenizer, task.heldout, MAX_COMPLETION_TOKENS)
        if LOWEST <= accuracy <= HIGHEST:
            inside = (accuracy, trainer.num_steps, copy.deepcopy(model.state_dict()))
        if on_progress is not None:
            on_progress(trainer.num_steps, loss)
    if inside is None:
        raise ModelError(
            f"the warm start ended at held-out accuracy {accuracy:.3f} and was never between {LOWEST} and {HIGHEST}; "
            "use another seed"
        )
    accuracy, steps, state = inside
    model.load_state_dict(state)
    return SupervisedReport(accuracy, steps, time.perf_counter() - started)


def continue_supervised(
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    task: Task,
    seconds: float,
    seed: int = 0,
    from_answers: bool = False,
) -> SupervisedReport:
    """Train the warm-started `model` in place for `seconds` more of wall time, not counting evaluations.

    By default it continues on the demonstrations of the warm start. `from_answers` teaches the right answers instead:
    the result of supervision if somebody wrote a solution to every problem, which GRPO never sees.
    """
    elapsed = 0.0

    def schedule(step: int) -> float:
        # The rate falls over the second half of the time, as in a well-run supervised training.
        return _ramp(step) * min(1.0, 2 * max(0.0, 1 - elapsed / seconds))

    rows = task.train if from_answers else demonstrations(task.train)
    trainer = SupervisedTrainer(model, encode(tokenizer, rows), seed, CONTINUED_LR, BATCH_SIZE, schedule)
    while elapsed < seconds:
        started = time.perf_counter()
        trainer.step()
        elapsed += time.perf_counter() - started
    accuracy = greedy_accuracy(model, tokenizer, task.heldout, MAX_COMPLETION_TOKENS)
    return SupervisedReport(accuracy, trainer.num_steps, elapsed)


def train_on_answers(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, task: Task, seed: int, num_steps: int
) -> None:
    """Train the warm-started `model` in place on right answers for so many steps, to be the teacher of distillation."""

    def schedule(step: int) -> float:
        return _ramp(step) * min(1.0, 2 * (num_steps - step) / num_steps)

    trainer = SupervisedTrainer(model, encode(tokenizer, task.train), seed, CONTINUED_LR, BATCH_SIZE, schedule)
    for _ in range(num_steps):
        trainer.step()


def _ramp(step: int) -> float:
    """Rise from 0 to 1 over the first 50 steps, in which AdamW's second moments are still unreliable."""
    return min(1.0, (step + 1) / 50)


def _warm_start_schedule(step: int) -> float:
    """Rise over 50 steps, stay, then fall linearly towards 0 over the last two fifths: GRPO needs a calm start."""
    return _ramp(step) * min(1.0, (WARM_START_STEPS - step) / (0.4 * WARM_START_STEPS))
