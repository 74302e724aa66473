"""An estimate of the time of a training step by its parts, from shapes and assumed rates. It is no measurement.

Products are counted as 2 operations for each weight that a token passes through; attention as 4 for each pair of
tokens, head and dim. A backward pass costs two forward passes, or one through frozen weights. Rewards are taken to be
ready when the rollout ends, and FSDP's communication to hide behind computation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from transformers import PreTrainedModel

from hybrid_rl.extras.plan.rates import Assumptions, Rates

BACKWARD, BACKWARD_FROZEN = 2, 1  # forward passes that a backward pass costs
OPTIMIZER_TRAFFIC = 28  # bytes per parameter: masters and both moments read and written, gradients read
UPDATE_OVER_PCIE = 4 + 2  # bytes per parameter: gradients to the host, new weights back
PARTS = ("rollout", "scoring", "update", "handoff", "sleep and wake")


@dataclass(frozen=True)
class ModelWork:
    """What a token costs in a model.

    weights: elements that every token is multiplied with, but the head. head: of the projection to the vocabulary.
    experts: elements of all experts; expert_share: of them that one token visits. attention_width: heads x dims.
    """

    weights: int
    head: int
    num_layers: int
    attention_width: int
    experts: int = 0
    expert_share: float = 1.0

    @classmethod
    def of(cls, module: PreTrainedModel) -> ModelWork:
        """Count the weights of a model, which may be on meta. Only text is counted, not towers for images."""
        config = module.config.get_text_config()
        head, embedding = module.get_output_embeddings(), module.get_input_embeddings()
        named = dict(module.named_parameters())
        experts = {name: p for name, p in named.items() if ".experts." in f".{name}." and p.dim() == 3}
        sizes = {name: p.numel() for name, p in named.items() if name not in experts}
        num_head = 0 if head is None else head.weight.numel()  # type: ignore[union-attr, operator]
        total = sum(sizes.values()) - embedding.weight.numel()  # type: ignore[operator, union-attr]
        is_tied = head is None or head.weight is embedding.weight
        num_experts = max((p.shape[0] for p in experts.values()), default=1)
        return cls(
            weights=total - (0 if is_tied else num_head),
            head=num_head,
            num_layers=config.num_hidden_layers,
            attention_width=config.num_attention_heads
            * (getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads),
            experts=sum(p.numel() for p in experts.values()),
            expert_share=min(1.0, getattr(config, "num_experts_per_tok", num_experts) / num_experts),
        )

    def without_head(self) -> ModelWork:
        """Return the work of the same model with a number in place of the vocabulary."""
        return replace(self, head=0)

    @property
    def parameters_per_token(self) -> float:
        """Weights that a token passes through, without the head."""
        return self.weights + self.experts * self.expert_share

    def read_elements(self, num_tokens: int) -> float:
        """Return the weights that a pass of so many tokens reads, if each chooses its experts evenly."""
        visited = 1 - (1 - self.expert_share) ** num_tokens
        return self.weights + self.head + self.experts * visited

    def forward_flops(self, lengths: Lengths) -> float:
        """Return the operations of one forward pass over all samples of a step."""
        pairs = lengths.num_prompts * lengths.prompt**2 / 2 * lengths.prompt_copies
        pairs += lengths.num_samples * (lengths.completion * lengths.prompt + lengths.completion**2 / 2)
        attention = 4 * pairs * self.attention_width * self.num_layers
        head = self.head * lengths.num_samples * lengths.completion
        return 2 * (self.parameters_per_token * lengths.num_tokens + head) + attention


@dataclass(frozen=True)
class Lengths:
    """The samples of a step. prompt, completion: tokens of each. is_shared: a group's prompt is computed once."""

    num_prompts: int
    num_generations: int
    prompt: int
    completion: int
    is_shared: bool = True

    @property
    def num_samples(self) -> int:
        """Completions of a step."""
        return self.num_prompts * self.num_generations

    @property
    def prompt_copies(self) -> int:
        """How often a prompt is computed."""
        return 1 if self.is_shared else self.num_generations

    @property
    def num_tokens(self) -> int:
        """Tokens of one pass over all samples."""
        return self.num_prompts * self.prompt_copies * self.prompt + self.num_samples * self.completion


@dataclass(frozen=True)
class Generation:
    """How a step generates. ranks_per_engine: that share one copy of the weights; max_num_seqs: decoded together;
    kv_cache_tokens: of an engine, None = enough; kv_bytes: of a token; element_bytes: of a weight; extra_samples:
    completions besides those that are trained on; is_shared: a group's prompt is computed once."""

    ranks_per_engine: int
    max_num_seqs: int
    kv_cache_tokens: int | None
    kv_bytes: int
    element_bytes: int
    extra_samples: int = 0
    is_shared: bool = True


@dataclass(frozen=True)
class StepWork:
    """The work of a training step.

    scored: models that score all samples, by name. trained: models that learn, by name, with their parameters on a
    rank; frozen: those of them of which only adapters learn. passes: over the samples. forward_passes: in an update, 2
    with checkpointing. optimizer_steps: of each model. host_optimizers: of `trained`, those that are updated in host
    memory. handoff_bytes: that a rank takes from itself ("local"), GPUs of its host ("host"), other hosts ("remote")
    and host memory ("pcie"); None = not known. moved_bytes: of a rank to the host and back.
    """

    num_ranks: int
    ranks_per_host: int
    lengths: Lengths
    policy: ModelWork
    generation: Generation | None
    scored: Mapping[str, ModelWork] = field(default_factory=dict)
    trained: Mapping[str, tuple[ModelWork, int]] = field(default_factory=dict)
    frozen: frozenset[str] = frozenset()
    passes: int = 1
    forward_passes: int = 1
    optimizer_steps: int = 1
    host_optimizers: frozenset[str] = frozenset()
    handoff_bytes: Mapping[str, int] | None = field(default_factory=dict)
    moved_bytes: int = 0


@dataclass(frozen=True)
class StepTime:
    """Estimated seconds of a step by part (PARTS), None for one that is not known, and what the estimate takes for
    granted."""

    seconds: Mapping[str, float | None]
    assumptions: tuple[str, ...]

    @property
    def total(self) -> float:
        """Seconds of a step, without the parts that are not known."""
        return sum(seconds or 0.0 for seconds in self.seconds.values())

    def share(self, part: str) -> float:
        """Return the share of a part, 0 to 1; 0 if it is not known."""
        return (self.seconds[part] or 0.0) / self.total if self.total else 0.0


def step_time(work: StepWork, rates: Rates, assumed: Assumptions | None = None) -> StepTime:
    """Estimate the time of a step on GPUs of these rates."""
    assumed = assumed or Assumptions()
    trained_flops = work.num_ranks * rates.flops * assumed.training_share
    scoring = sum(model.forward_flops(work.lengths) for model in work.scored.values())
    learning = sum(
        model.forward_flops(work.lengths)
        * (work.forward_passes + (BACKWARD_FROZEN if name in work.frozen else BACKWARD))
        for name, (model, _) in work.trained.items()
    )
    seconds: dict[str, float | None] = {
        "rollout": _rollout_seconds(work, rates, assumed) if work.generation else 0.0,
        "scoring": scoring / trained_flops,
        "update": learning * work.passes / trained_flops + _optimizer_seconds(work, rates, assumed),
        "handoff": None if work.handoff_bytes is None else _handoff_seconds(work.handoff_bytes, rates, assumed),
        "sleep and wake": work.moved_bytes / (rates.host_bandwidth * assumed.link_share),
    }
    return StepTime(seconds, _named(work, rates, assumed))


def _rollout_seconds(work: StepWork, rates: Rates, assumed: Assumptions) -> float:
    """Return seconds until one engine has completed its part of the samples, all of full length, in waves."""
    assert work.generation is not None
    generation, lengths, policy = work.generation, work.lengths, work.policy
    num_engines = max(1, work.num_ranks // generation.ranks_per_engine)
    samples = -(-(lengths.num_samples + generation.extra_samples) // num_engines)
    slots = min(generation.max_num_seqs, samples)
    if generation.kv_cache_tokens is not None:
        slots = max(1, min(slots, generation.kv_cache_tokens // (lengths.prompt + lengths.completion)))
    flops = generation.ranks_per_engine * rates.flops * assumed.prefill_share
    bandwidth = generation.ranks_per_engine * rates.memory_bandwidth * assumed.decode_share

    def decoding(num_seqs: int) -> float:
        context = num_seqs * (lengths.prompt + lengths.completion / 2) * generation.kv_bytes
        read = policy.read_elements(num_seqs) * generation.element_bytes + context
        products = 2 * num_seqs * (policy.parameters_per_token + policy.head)
        return lengths.completion * (max(read / bandwidth, products / flops) + assumed.pass_seconds)

    waves, rest = divmod(samples, slots)
    prompts = -(-samples // lengths.num_generations) if generation.is_shared else samples
    prefill = 2 * policy.parameters_per_token * prompts * lengths.prompt
    prefill += 4 * prompts * lengths.prompt**2 / 2 * policy.attention_width * policy.num_layers
    return prefill / flops + waves * decoding(slots) + (decoding(rest) if rest else 0.0)


def _optimizer_seconds(work: StepWork, rates: Rates, assumed: Assumptions) -> float:
    """Return seconds of all optimizer steps, which move bytes and compute little."""
    seconds = 0.0
    per_rank = assumed.host_memory_bandwidth / min(work.ranks_per_host, work.num_ranks)
    for name, (_, num_parameters) in work.trained.items():
        if name in work.host_optimizers:
            seconds += num_parameters * OPTIMIZER_TRAFFIC / per_rank
            seconds += num_parameters * UPDATE_OVER_PCIE / (rates.host_bandwidth * assumed.link_share)
        else:
            seconds += num_parameters * OPTIMIZER_TRAFFIC / (rates.memory_bandwidth * assumed.decode_share)
    return seconds * work.optimizer_steps


def _handoff_seconds(num_bytes: Mapping[str, int], rates: Rates, assumed: Assumptions) -> float:
    """Return seconds of a handoff, one link after the other."""
    links = {"host": rates.peer_bandwidth, "remote": assumed.network_bandwidth, "pcie": rates.host_bandwidth}
    seconds = num_bytes.get("local", 0) / (rates.memory_bandwidth * assumed.decode_share)
    return seconds + sum(num_bytes.get(name, 0) / (rate * assumed.link_share) for name, rate in links.items())


def _named(work: StepWork, rates: Rates, assumed: Assumptions) -> tuple[str, ...]:
    """Describe the assumptions, for the reader of an estimate."""
    lengths = work.lengths
    return (
        f"{rates.name}: {rates.flops / 1e12:.0f} TFLOP/s in bfloat16, {rates.memory_bandwidth / 1e12:.2f} TB/s of its "
        f"memory, {rates.host_bandwidth / 1e9:.0f} GB/s to the host, {rates.peer_bandwidth / 1e9:.0f} GB/s to GPUs of "
        f"its host, {assumed.network_bandwidth / 1e9:.0f} GB/s to other hosts, each way",
        f"expected: {assumed.training_share:.0%} of peak FLOP/s in training and scoring (MFU), "
        f"{assumed.prefill_share:.0%} for prompts, {assumed.decode_share:.0%} of memory bandwidth, "
        f"{assumed.link_share:.0%} of links; {1e3 * assumed.pass_seconds:g} ms of every decode pass for all else",
        f"every prompt has {lengths.prompt:,} tokens and every completion {lengths.completion:,}, the most they may "
        "have; shorter ones shift the shares",
        "rewards are ready when the rollout ends, communication of FSDP hides behind computation, no refills",
    )
