"""The passes of a run, each counted once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedModel

from hybrid_rl.config import TrainerConfig, ValueHeadConfig
from hybrid_rl.config.algorithm import samples_rounded
from hybrid_rl.config.lora_keys import LoraKeys
from hybrid_rl.config.schema import ColocatedRolloutConfig
from hybrid_rl.controller import RankMesh
from hybrid_rl.engines.inplace.kv_cache import LayerShape
from hybrid_rl.models.packed.cache import CacheSize
from hybrid_rl.planning.activations import Counted, PassMemory
from hybrid_rl.planning.fullest_rows import Samples
from hybrid_rl.planning.models import RunModels, adapted
from hybrid_rl.planning.shapes import has_masters
from hybrid_rl.training.batch_plan import TOKENS_PER_MICRO_BATCH
from hybrid_rl.training.sharding.build import shard_options
from hybrid_rl.training.sharding.fsdp import ShardOptions
from hybrid_rl.training.spec import LossSpec


@dataclass(frozen=True)
class RunShape:
    """What decides the memory of a run besides its configuration, which is resolved and names a number of ranks and a
    kind of device. max_length: tokens of the longest sample; engine_length: of the longest sequence of the engine."""

    models: RunModels
    max_length: int
    engine_length: int


@dataclass
class Passes:
    """Counts passes of the models of a run under several configurations, and remembers the results."""

    shape: RunShape
    _known: dict[Any, Any] = field(default_factory=dict)

    def update(self, config: TrainerConfig) -> PassMemory:
        """Count the policy's forward and backward pass: of a micro-batch after the first, if there are several."""
        samples, is_first = self.samples(config), self._is_first("update", config)
        is_exact = LossSpec.of(config).is_exact_kl
        reference = self._counted("policy", config).model().without_adapters() if is_exact else None
        return self._once(
            "update", config, samples, is_first, lambda it: it.update(samples, reference, is_first=is_first)
        )

    def update_values(self, config: TrainerConfig) -> PassMemory:
        """Count the critic's forward and backward pass."""
        assert isinstance(config.critic, ValueHeadConfig)
        samples, clip = self.samples(config), config.critic.cliprange_value
        is_first = self._is_first("critic", config)
        return self._once(
            "critic", config, samples, is_first, lambda it: it.update_values(samples, clip, is_first=is_first)
        )

    def score(self, role: str, config: TrainerConfig) -> PassMemory:
        """Count a forward pass for scores. role: policy, reference, teacher, critic, or the number of a reward
        model."""
        samples = self.samples(config)
        return self._once(role, config, samples, "score", lambda it: it.score(samples))

    def generate(self, config: TrainerConfig, num_tokens: int, num_sequences: int, *, bytes_beside: int) -> PassMemory:
        """Count a pass of an engine over so many tokens with logits of so many sequences; as in Counted."""
        return self._once(
            "engine",
            config,
            num_tokens,
            (num_sequences, bytes_beside),
            lambda it: it.generate(num_tokens, num_sequences, bytes_beside=bytes_beside),
        )

    def probe(self, config: TrainerConfig) -> PassMemory:
        """Count the trainer's half of the probe of a handoff, on the longest prompt."""
        num_tokens = self.longest_prompt(config)
        rounds = samples_rounded(config.rollout)
        return self._once(
            "policy", config, num_tokens, ("probe", rounds), lambda it: it.probe(num_tokens, is_rounded=rounds)
        )

    def longest_prompt(self, config: TrainerConfig) -> int:
        """Return the tokens of the longest prompt."""
        return max(1, self.shape.max_length - config.rollout.max_completion_length)

    def layer_shapes(self, config: TrainerConfig) -> dict[int, LayerShape]:
        """Return what each layer of the policy caches of a token."""
        dtype = config.rollout.kv_cache_dtype
        shapes: dict[int, LayerShape] = self._once("policy", config, "layers", dtype, lambda it: it.layer_shapes(dtype))
        return shapes

    def cache_size(self, config: TrainerConfig) -> CacheSize:
        """Return what the policy's own cache holds of a sequence."""
        size: CacheSize = self._once("policy", config, "cache", None, lambda it: it.cache_size())
        return size

    def module(self, role: str, config: TrainerConfig) -> PreTrainedModel:
        """Return the model of a role, with its adapters; "update" and "reference" are the policy, and so is "engine",
        without adapters if it has weights of its own."""
        models = self.shape.models
        if role.isdigit():
            return models.rewards[int(role)]
        module = {"teacher": models.teacher, "critic": models.critic}.get(role, models.policy)
        assert module is not None
        is_critic, lora = role == "critic", config.lora
        if role == "teacher" or not isinstance(lora, LoraKeys) or (is_critic and not lora.lora_critic):
            return module
        if role == "engine" and isinstance(config.rollout, ColocatedRolloutConfig):
            return module
        key = ("adapted", is_critic, repr(lora))
        made: PreTrainedModel = self.remember(key, lambda: adapted(module, config, is_critic=is_critic))
        return made

    def samples(self, config: TrainerConfig) -> Samples:
        """Return the samples of the fullest micro-batch of a rank."""
        completion = min(config.rollout.max_completion_length, self.shape.max_length - 1)
        return Samples.fullest(
            tokens_per_micro_batch(config, self.shape.max_length),
            prompt=self.shape.max_length - completion,
            completion=completion,
            num_generations=config.algorithm.num_generations,
            num_samples=samples_per_mini_batch(config),
            is_packed=config.is_packed,
        )

    def is_single(self, config: TrainerConfig) -> bool:
        """Whether one micro-batch takes all samples of a mini-batch of this rank."""
        return len(self.samples(config).prompts) == samples_per_mini_batch(config)

    def _is_first(self, role: str, config: TrainerConfig) -> bool:
        """Whether the fullest micro-batch finds no gradients of earlier ones where autograd puts its own: it is the
        only one, or the optimizer of one rank has taken them over into its masters' accumulators."""
        return self.is_single(config) or (sharding_of(config) is None and has_masters(self.module(role, config)))

    def _counted(self, role: str, config: TrainerConfig) -> Counted:
        trains = role in ("update", "critic")
        return Counted(
            self.module(role, config),
            config,
            config.model.device,
            is_packed=config.is_packed or role.isdigit(),
            checkpoints=trains and config.model.gradient_checkpointing,
            offloads=trains and config.memory.keeps_on_host("activations") and config.model.device == "cuda",
            sharding=None if role == "engine" else sharding_of(config),  # engines run full weights, which lie there
            is_base=role == "reference",
        )

    def remember(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return what `make` gave for this key the first time."""
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]

    def _once(self, role: str, config: TrainerConfig, what: Any, how: Any, count: Any) -> Any:
        counted = self._counted(role, config)
        model = config.model
        how = (
            how,
            counted.checkpoints,
            counted.offloads,
            counted.sharding,
            repr(config.lora),
            config.rollout.placement,
        )
        key = (role, what, how, model.attention, model.device)
        return self.remember(key, lambda: count(counted))


def tokens_per_micro_batch(config: TrainerConfig, max_length: int) -> int:
    """Return the cap on a micro-batch: as given, else what suits the device, and at least a sample."""
    cap = config.optimizer.tokens_per_micro_batch
    return max(TOKENS_PER_MICRO_BATCH[config.model.device], max_length) if cap is None else cap


def samples_per_mini_batch(config: TrainerConfig) -> int:
    """Return the samples of one optimizer step on one rank, of the rank that has most."""
    assert config.num_ranks != "auto"
    prompts = config.optimizer.prompts_per_mini_batch or config.data.prompts_per_step
    return -(-prompts * config.algorithm.num_generations // config.num_ranks)


def sharding_of(config: TrainerConfig) -> ShardOptions | None:
    """Return how models are sharded over the ranks, None for one rank."""
    assert config.num_ranks != "auto"
    if config.num_ranks == 1:
        return None
    replicas = config.fsdp.dp_replicate
    return shard_options(config, RankMesh(replicas, config.num_ranks // replicas), config.model.device)
