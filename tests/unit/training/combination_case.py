"""One training step of any algorithm on a tiny batch: columns, advantages and updates go through the actor's own code;
the model is a table of logits by the token before, so that a gradient can be written out token by token."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hybrid_rl.batch import Batch, Jagged
from hybrid_rl.config import TrainerConfig, load_config, resolve
from hybrid_rl.config.algorithm import needs_reference
from hybrid_rl.controller import RankContext
from hybrid_rl.models import CausalLM, PackedRow
from hybrid_rl.models.attention.backends import Backend
from hybrid_rl.training import actor as actor_module
from hybrid_rl.training.actor import Actor
from hybrid_rl.training.estimate import AdvantageSpec, with_advantages
from tests.support.inside.training import learned_numbers

V, TEMPERATURE, VERSION = 7, 0.8, 3
GROUP = 5  # pass_at_k compares subsets of 4
LENGTHS = (3, 1, 5, 2, 4, 2, 6, 1, 3, 5)
UNSCORED, NO_TOKENS = 8, 7  # a sample without a reward, and one without a token that the policy made
NUM_EXPERTS, TOP_EXPERTS = 4, 2
# What a configuration needs beside the sections under test; Adam moves every logit by about the learning rate.
BASE = {"prompts_per_step": 2, "num_generations": GROUP, "learning_rate": 0.15, "max_grad_norm": None}
BASE |= {"temperature": TEMPERATURE, "max_completion_length": 8, "seed": 5}


def random_table(seed: int, spread: float = 1.0) -> Tensor:
    """Logits of the next token, float64 [V, V]."""
    return spread * torch.randn(V, V, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


class TableModel(CausalLM):
    """A language model whose next token depends on the last one alone."""

    def __init__(self, table: Tensor) -> None:
        self.module: Any = nn.Module()
        self.module.config = SimpleNamespace(get_text_config=SimpleNamespace)
        self.module.table = nn.Parameter(table.clone())
        self.attention = Backend("sdpa")

    dtype = property(lambda self: self.module.table.dtype)
    idle_token = 0
    device = property(lambda self: self.module.table.device)

    def row_distribution(self, row: PackedRow, temperature: float) -> Tensor:
        before = row.token_ids[row.sources]
        return (self.module.table / temperature).log_softmax(1)[before].float()

    def row_logprobs(self, row: PackedRow, temperature: float) -> tuple[Tensor, Tensor]:
        log_probs = self.row_distribution(row, temperature)
        entropy = -(log_probs.exp() * log_probs).sum(1)
        return log_probs.gather(1, row.labels[:, None])[:, 0], entropy


class TableRouters:
    """Routers as a mixture of experts has them: their scores are some of the logits."""

    num_layers = 1

    def __init__(self, model: TableModel) -> None:
        self._model = model

    @contextmanager
    def reading(self, row: PackedRow, expert_ids: Tensor | None = None) -> Iterator[SimpleNamespace]:
        scores = router_scores(self._model.module.table.detach())[row.token_ids[row.sources]]
        ids = scores.topk(TOP_EXPERTS, dim=1).indices[:, None] if expert_ids is None else expert_ids
        yield SimpleNamespace(expert_ids=ids, logprobs=scores[:, None].gather(2, ids).float())


def router_scores(table: Tensor) -> Tensor:
    """ln of the share of each expert by the token before, [V, NUM_EXPERTS]."""
    return table[:, :NUM_EXPERTS].log_softmax(1)


START, REFERENCE, TEACHER = random_table(1), random_table(2, 0.5), random_table(3, 0.5)


def column_of(table: Tensor, batch: Batch) -> Tensor:
    """ln p of all completion tokens under a table, float32 [M]."""
    row = PackedRow.of(batch["prompt_ids"], batch["completion_ids"], torch.device("cpu"))
    return TableModel(table).row_logprobs(row, TEMPERATURE)[0].detach()


def tiny_batch(config: TrainerConfig, *, dense: bool, engine_noise: float) -> Batch:
    """Ten samples of two prompts with tokens of the environment among them, as a rollout and the other roles leave
    them. dense: whether there are rewards of single tokens; engine_noise: how far the engine is from the trainer, in
    nats. Demonstrations have rewards of 1 and no engine."""
    generator = torch.Generator().manual_seed(7)
    shown = "demonstrations" in config.advantage.needs
    rows = [torch.randint(V, (length,), generator=generator) for length in LENGTHS]
    completions = Jagged.from_rows(rows, torch.int64)
    num_tokens, of_sample = len(completions.values), completions.row_index()
    made = torch.rand(num_tokens, generator=generator) < 0.85
    made[of_sample == NO_TOKENS] = False

    def noise(scale: float) -> Tensor:
        return scale * torch.randn(num_tokens, generator=generator)

    prompts = Jagged.from_rows([[1, 2]] * GROUP + [[4, 0, 3]] * GROUP, torch.int64)
    base = Batch({"prompt_ids": prompts, "completion_ids": completions})
    token_rewards = torch.where(made & (torch.rand(num_tokens, generator=generator) < 0.3), noise(0.2).abs(), 0.0)
    rewards = torch.tensor([1.0, 0.25, 0.5, 0.0, 0.75, 0.4, 1.5, 0.1, torch.nan, 0.6], dtype=torch.float64)
    if dense:
        rewards = rewards.index_add(0, of_sample, token_rewards.double())
    # Of two functions, the second of which says nothing of some samples.
    second = torch.tensor([0.1, 0.3, torch.nan, 0.2, 0.2, -0.5, torch.nan, 0.4, 0.1, 0.0], dtype=torch.float64)
    of_functions = torch.stack([rewards - second.nan_to_num(), second], 1)
    engine = torch.minimum(column_of(START, base) + noise(engine_noise), torch.tensor(-1e-3))
    values = {
        "completion_mask": made,
        "rollout_logprobs": torch.where(made & ~torch.tensor(shown), engine, 0.0),
        "policy_version": torch.where(made & ~torch.tensor(shown), VERSION - torch.arange(num_tokens) % 3, -1),
    }
    roles = {"teacher_logprobs": column_of(TEACHER, base), "values": noise(0.5)}
    values |= {name: column for name, column in roles.items() if name in config.advantage.needs}
    if needs_reference(config):
        values["ref_logprobs"] = column_of(REFERENCE, base)
    if dense:
        values["token_rewards"] = token_rewards
    return Batch(
        {
            "prompt_ids": prompts,
            "completion_ids": completions,
            "temperature": torch.full((10,), TEMPERATURE, dtype=torch.float64),
            "group": torch.arange(10) if shown else torch.arange(10) // GROUP,
            "trajectory": torch.arange(10),
            "finish_reason": ["length" if place in (2, 5) else "stop" for place in range(10)],
            "rewards": torch.ones(10, dtype=torch.float64) if shown else rewards,
            "function_rewards": of_functions.tolist(),
            "baseline_rewards": torch.tensor([0.3] * GROUP + [0.5] * GROUP, dtype=torch.float64),
            **{name: completions.with_values(column) for name, column in values.items()},
        }
    )


@dataclass
class Trained:
    """What a training step did: the batch with all columns, and of each optimizer step the table and the learned number
    before it, and its gradient."""

    config: TrainerConfig
    batch: Batch
    tables: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)
    learned: list[float] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    beta: float = 0.0


def resolved(keys: dict[str, Any]) -> TrainerConfig:
    """Raises ConfigError if the sections do not go together."""
    base = {name: value for name, value in BASE.items() if name != "num_generations" or keys.get("advantage") != "sft"}
    loaded, given = load_config(base | keys)
    return resolve(loaded, given, has_eval=False)


def train(
    config: TrainerConfig,
    monkeypatch: pytest.MonkeyPatch,
    *,
    dense: bool,
    cut: int = 2,
    engine_noise: float = 0.3,
    change: Callable[[Batch], Batch] = lambda batch: batch,
) -> Trained:
    """All optimizer steps of a training step, its samples cut into so many micro-batches; see `tiny_batch`. change: of
    the batch, before anything is computed, before the advantages and before the update."""
    monkeypatch.setattr(actor_module, "Routers", TableRouters)
    model, context = TableModel(START), RankContext()
    actor = Actor(model, config, context, num_optimizer_steps=8, reference=TableModel(REFERENCE))
    batch = change(tiny_batch(config, dense=dense, engine_noise=engine_noise))
    plan = [[list(range(start, batch.num_samples, cut)) for start in range(cut)]]
    batch = change(batch.with_columns(**actor.columns(batch, plan)))
    batch = change(with_advantages(batch, AdvantageSpec.of(config), context, actor.kl_weight.beta))
    found = Trained(config, batch)
    prepared_column = actor_module.prepared_column

    def remembering(*arguments: Any, **options: Any) -> Jagged | None:
        column = prepared_column(*arguments, **options)
        found.batch = batch if column is None else batch.with_columns(prepared=column)
        return column

    step = actor.optimizer.step

    def recording() -> tuple[float, bool]:
        found.tables.append(model.module.table.detach().clone())
        (gradient,) = actor.optimizer.gradients()
        found.gradients.append(gradient.clone())
        numbers = learned_numbers(actor).parameters
        found.learned.append(0.0 if numbers is None else float(numbers.detach()[0]))
        return step()

    monkeypatch.setattr(actor_module, "prepared_column", remembering)
    monkeypatch.setattr(actor.optimizer, "step", recording)
    found.metrics = dict(actor.update(batch, plan, VERSION).result())
    monkeypatch.setattr(actor_module, "prepared_column", prepared_column)
    found.beta = actor.kl_weight.beta
    return found
