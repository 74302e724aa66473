"""What is in memory in each phase of a training step, added up."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from transformers import PreTrainedModel

from hybrid_rl.config import TrainerConfig
from hybrid_rl.config.algorithm import has_reference_model, is_rounded, reference_is_policy, samples_rounded
from hybrid_rl.config.schema import ColocatedRolloutConfig, InPlaceRolloutConfig, VLLMRolloutConfig
from hybrid_rl.memory.cycle import (
    ACTOR,
    CRITIC,
    CRITIC_OPTIMIZER,
    ENGINE_WEIGHTS,
    KV_CACHE,
    OPTIMIZER,
    REFERENCE,
    REWARD_MODELS,
    TEACHER,
    Phase,
)
from hybrid_rl.models.model_loading import DTYPES
from hybrid_rl.planning import adapter_memory, engines
from hybrid_rl.planning.activations import PassMemory
from hybrid_rl.planning.ledger import (
    ACTIVATIONS,
    ARENA,
    ENGINE_GRAPHS,
    ENGINE_WORK,
    GATHERED,
    GRADIENTS,
    HANDOFF,
    PROCESS,
    PhaseMemory,
    Share,
)
from hybrid_rl.planning.passes import Passes, sharding_of
from hybrid_rl.planning.shapes import (
    has_masters,
    host_optimizer_share,
    optimizer_share,
    shard_bytes,
    trained_numel,
    weights_share,
)
from hybrid_rl.planning.sharded import padded_numel, units_of
from hybrid_rl.planning.size_text import size_text
from hybrid_rl.planning.version_memory import versions_share
from hybrid_rl.resharding.handoff.base import PROBE_TOKENS, num_probe_passes
from hybrid_rl.resharding.rank_plan import BUCKET_BYTES
from hybrid_rl.training.optimizer import SLICE_ELEMENTS
from hybrid_rl.training.run_cycle import MemoryPhases, memory_phases
from hybrid_rl.training.sharding.fsdp import ShardOptions

# What cannot be known from shapes. Of a GPU of the Hopper or Ampere generation with torch 2.11; see docs/decisions.md.
CONTEXT_BYTES = 800 * 1000**2  # the CUDA context, kernels that were loaded, workspaces of cuBLAS
NCCL_BYTES = 800 * 1000**2  # buffers of the channels between ranks
GRAPH_BYTES = 1000**3  # vLLM's CUDA graphs
REDUCE_BYTES = 256 * 1000**2  # vLLM's buffers of sums between the ranks of a replica
FULL_NOTE = "micro-batches are as full as tokens_per_micro_batch allows, of completions of full length"
NOTES = {
    "cuda": (
        f"a process on a GPU takes {size_text(CONTEXT_BYTES)} for CUDA, and {size_text(NCCL_BYTES)} for NCCL if there "
        "are several ranks",
        FULL_NOTE,
        "gaps between tensors in the allocator's segments are not counted",
    ),
    "cpu": (FULL_NOTE,),
}


@dataclass(frozen=True)
class StepMemory:
    """The memory of one rank over a step, for a configuration in which nothing is `auto` any more but, with
    kv_cache_bytes=None, the size of the cache. trains, generates: whether it does (`memory_phases`); config: of those
    that only generate, `rollout_config`."""

    passes: Passes
    config: TrainerConfig
    trains: bool = True
    generates: bool = True

    @property
    def optimizer_on_host(self) -> bool:
        """Whether masters and moments of the policy are updated in host memory."""
        return self.config.memory.keeps_on_host("optimizer")

    @property
    def plan(self) -> MemoryPhases:
        """The cycle, the residents of the run, and those that go to host memory."""
        return memory_phases(
            self.config,
            has_reward_models=self.trains and bool(self.passes.shape.models.rewards),
            trains=self.trains,
            generates=self.generates,
        )

    # ---------------------------------------------------------------------------------------------- residents

    def cache(self) -> engines.CacheShape:
        """Return the cache of the engine."""
        config, length, module = self.config, self.passes.shape.engine_length, self.passes.shape.models.policy
        if isinstance(config.rollout, InPlaceRolloutConfig):
            return engines.paged_cache(self.passes.layer_shapes(config), config, length)
        if isinstance(config.rollout, ColocatedRolloutConfig):
            return engines.vllm_cache(module, self.passes.layer_shapes(config), config, length)
        return engines.own_cache(self.passes.cache_size(config), config, length)

    def residents(self, kv_cache_bytes: int) -> dict[str, Share]:
        """Return what the run has, by tag."""
        config = self.config
        key = (sharding_of(config), config.rollout, config.model.dtype, self.optimizer_on_host, config.lora, config.kl)
        weights = self.passes.remember(("residents", *map(repr, key)), self._weights)
        shares = {**weights, KV_CACHE: self.cache().share(kv_cache_bytes)}
        there = self.plan.residents
        return {tag: share for tag, share in shares.items() if tag in there}

    def _weights(self) -> dict[str, Share]:
        models, sharding = self.passes.shape.models, sharding_of(self.config)
        policy, itemsize = self.passes.module("policy", self.config), DTYPES[self.config.model.dtype].itemsize
        shares = {
            ACTOR: weights_share(ACTOR, [policy], sharding),
            OPTIMIZER: host_optimizer_share(OPTIMIZER, policy)
            if self.optimizer_on_host
            else optimizer_share(OPTIMIZER, policy, sharding),
        }
        if isinstance(self.config.rollout, ColocatedRolloutConfig):
            shares[ENGINE_WEIGHTS] = engines.vllm_weights_share(models.policy, self.config, itemsize)
            if adapter_memory.has_slot(self.config):
                num_bytes = adapter_memory.slot_numel(policy, self.config) * itemsize
                words = f"{shares[ENGINE_WEIGHTS].formula} + {num_bytes:,} B of a slot for adapters"
                shares[ENGINE_WEIGHTS] = Share(ENGINE_WEIGHTS, shares[ENGINE_WEIGHTS].num_bytes + num_bytes, words)
        elif is_rounded(self.config.rollout):
            shares[ENGINE_WEIGHTS] = engines.rounded_share(policy, itemsize, is_whole=sharding is not None)
        elif sharding is not None:
            shares[ENGINE_WEIGHTS] = engines.gathered_share(policy, itemsize)
        if has_reference_model(self.config):
            shares[REFERENCE] = weights_share(REFERENCE, [models.policy], sharding)
        if models.teacher is not None:
            shares[TEACHER] = weights_share(TEACHER, [models.teacher], sharding)
        if models.critic is not None:
            critic = self.passes.module("critic", self.config)
            shares[CRITIC] = weights_share(CRITIC, [critic], sharding)
            shares[CRITIC_OPTIMIZER] = optimizer_share(CRITIC_OPTIMIZER, critic, sharding)
        if models.rewards:
            shares[REWARD_MODELS] = weights_share(REWARD_MODELS, models.rewards, sharding)
        return shares

    @property
    def movable(self) -> frozenset[str]:
        """Tags of what sleeps if a phase does not need it."""
        rollout, engine = self.config.rollout, {ENGINE_WEIGHTS, KV_CACHE}
        # vLLM sleeps on GPUs only, and for others that need the room; adopted memory is the trainer's.
        can_sleep = self.config.model.device != "cpu" and self.trains
        if isinstance(rollout, ColocatedRolloutConfig) and (rollout.handoff.adopt_weights or not can_sleep):
            engine = set()
        if is_rounded(rollout):
            engine.discard(ENGINE_WEIGHTS)
        return frozenset(self.plan.offload | engine)

    # -------------------------------------------------------------------------------------------------- phases

    def phases(self, kv_cache_bytes: int) -> tuple[PhaseMemory, ...]:
        """Return all phases that the run takes, in order."""
        residents = self.residents(kv_cache_bytes)
        memories = []
        for phase in self.plan.cycle:
            if phase.is_taken:
                for moment, work, host in self._work(phase):
                    memories.append(self._memory(phase, residents, moment, work, host))
        return tuple(memories)

    def _memory(
        self, phase: Phase, residents: dict[str, Share], moment: str, work: list[Share], host_bytes: int
    ) -> PhaseMemory:
        device: list[Share] = []
        host: list[Share] = []
        waiting = 0
        shards_on_host = self.config.memory.keeps_on_host("shards") and sharding_of(self.config) is not None
        for tag, share in residents.items():
            on_host = tag == OPTIMIZER and self.optimizer_on_host
            if on_host or (shards_on_host and tag not in (KV_CACHE, ENGINE_WEIGHTS)):
                host.append(share)
            elif tag in phase.tags or tag not in self.movable:
                device.append(share)
            if tag in self.plan.offload and not on_host:
                waiting += share.num_bytes
        if shards_on_host and phase.name in ("update", "update_critic"):
            module = self.passes.module("update" if phase.name == "update" else "critic", self.config)
            sharding = sharding_of(self.config)
            assert sharding is not None
            words = (
                f"{trained_numel(module):,} trained x {sharding.master_dtype.itemsize} B / {sharding.dp_shard} shards"
            )
            host.append(Share(GRADIENTS, shard_bytes(module, sharding), words))
        if waiting:
            host.append(Share(ARENA, waiting, f"slots of {', '.join(sorted(self.plan.offload))}"))
        if self.trains and not self.generates:
            host.append(
                versions_share(self.passes.module("policy", self.config), self.config, sharding_of(self.config))
            )
        if host_bytes:
            host.append(Share(ACTIVATIONS, host_bytes, "activations until the backward pass"))
        device += [share for share in work if share.num_bytes]
        standing = self._engine_graphs() if KV_CACHE in residents else []
        return PhaseMemory(phase.name, (*device, *standing, *self._process()), tuple(host), moment)

    def _process(self) -> list[Share]:
        if self.config.model.device != "cuda":
            return []
        several = self.config.num_ranks != 1
        words = "CUDA context and libraries" + (f", {size_text(NCCL_BYTES)} of NCCL" if several else "")
        return [Share(PROCESS, CONTEXT_BYTES + NCCL_BYTES * several, words)]

    def _work(self, phase: Phase) -> Iterator[tuple[str, list[Share], int]]:
        """Yield the peaks of a phase: the name of each, what it has besides the residents, and bytes of activations on
        the host."""
        if phase.name in ("update", "update_critic"):
            yield from self._learning("update" if phase.name == "update" else "critic")
        elif phase.name == "check":
            yield "", [*self._engine_pass(self.passes.longest_prompt(self.config), 1), *self._kept_probe()], 0
        elif phase.name == "generate":
            yield "", self._engine_work(), 0
        elif phase.name == "publish":
            yield from ((moment, shares, 0) for moment, shares in self._publishing())
        elif phase.name == "reward":
            numbers = map(str, range(len(self.passes.shape.models.rewards)))
            counts = [self.passes.score(number, self.config) for number in numbers]
            beside = self._engine_work() if ENGINE_WEIGHTS in phase.tags or KV_CACHE in phase.tags else []
            yield "", [*self._of_pass(max(counts, key=lambda count: count.fullest.total)), *beside], 0
        elif phase.name == "save":
            yield "", [], 0
        else:
            role = phase.name.removeprefix("score_")
            if role == "actor" or (role == "reference" and not reference_is_policy(self.config)):
                role = "policy"
            yield "", self._of_pass(self.passes.score(role, self.config)), 0

    def _row_words(self) -> str:
        samples = self.passes.samples(self.config)
        count = len(samples.prompts)
        return f"counted: a row of {samples.num_tokens:,} tokens, {count} sample{'s' if count > 1 else ''}"

    def _of_pass(self, count: PassMemory) -> list[Share]:
        held = count.fullest
        return [
            Share(ACTIVATIONS, held.others, self._row_words() + ", no gradients"),
            Share(GATHERED, held.gathered, "full weights of blocks, gathered"),
        ]

    def _learning(self, role: str) -> Iterator[tuple[str, list[Share], int]]:
        """Yield the peaks of an update: in the passes, and when all gradients are there."""
        config, passes = self.config, self.passes
        count = passes.update(config) if role == "update" else passes.update_values(config)
        module, sharding = passes.module(role, config), sharding_of(config)
        numel, words = trained_numel(module), self._row_words()
        if config.model.gradient_checkpointing:
            words += ", recomputed block by block"
        accumulators = 4 * numel if sharding is None and has_masters(module) else 0
        earlier = 0 if passes.is_single(config) else accumulators
        moments = {"backward": count.fullest}
        if count.most_others.others > count.fullest.others:
            moments = {"activations": count.most_others} | moments
        for name, held in moments.items():
            text = self._gradient_words(module, held.gradients, bool(earlier))
            shares = [
                Share(GRADIENTS, held.gradients + earlier, text),
                Share(ACTIVATIONS, held.others, words),
                Share(GATHERED, held.gathered, "full weights of embedding, head and blocks, gathered"),
            ]
            yield name, shares, count.host_bytes
        if sharding is not None:
            on_host = sharding.cpu_offload
            num_bytes = 0 if on_host else shard_bytes(module, sharding)
            text = f"{numel:,} trained x {sharding.master_dtype.itemsize} B / {sharding.dp_shard} shards"
        elif accumulators:
            # Gradients of the last slice are freed after they were added.
            last = min(numel, SLICE_ELEMENTS) * 2
            num_bytes, text = accumulators + last, f"{numel:,} trained x 4 B + {size_text(last)} not taken over yet"
        else:
            num_bytes, text = 4 * numel, f"{numel:,} trained x 4 B"
        yield "optimizer step", [Share(GRADIENTS, num_bytes, text)], 0

    def _gradient_words(self, module: PreTrainedModel, num_bytes: int, has_accumulators: bool) -> str:
        """Explain gradients in a pass. num_bytes: without the accumulators of one rank's masters."""
        sharding, numel = sharding_of(self.config), f"{trained_numel(module):,} trained"
        if sharding is None:
            parts = [f"{numel} x 4 B accumulated"] if has_accumulators else []
            return " + ".join([*parts, *([f"{size_text(num_bytes)} of this micro-batch"] if num_bytes else [])])
        if self.passes.is_single(self.config):
            return "of blocks that were reduced to shards, or wait for it"
        size = sharding.reduce_dtype.itemsize
        if not sharding.sync_every_micro_batch:
            return (
                f"{numel} x {size} B, whole until the last micro-batch reduces them, and what of a block is on its way"
            )
        shards = 0 if sharding.cpu_offload else shard_bytes(module, sharding)
        words = f"{numel} x {sharding.master_dtype.itemsize} B / {sharding.dp_shard} shards + " if shards else ""
        return f"{words}{size_text(num_bytes - shards)} of embedding, head and blocks on their way (sums of {size} B)"

    def _engine_work(self) -> list[Share]:
        """Return what the fullest pass of the engine takes besides weights and cache."""
        count, most = self.config.rollout.max_num_seqs, self.config.rollout.engine_args.max_num_batched_tokens
        num_tokens = min(most, count * self.passes.longest_prompt(self.config)) + count
        return self._engine_pass(num_tokens, count)

    def _engine_pass(self, num_tokens: int, num_sequences: int) -> list[Share]:
        """Return what a pass over so many tokens takes."""
        config = self.config
        bytes_beside = engines.bytes_beside(config)
        held = self.passes.generate(config, num_tokens, num_sequences, bytes_beside=bytes_beside).fullest.others
        text = f"counted: a pass of {num_tokens:,} tokens, logits of {num_sequences}"
        if adapter_memory.has_slot(config) and config.model.device == "cpu":
            # There vLLM copies the factors for every token.
            module = self.passes.module("policy", config)
            num_values = adapter_memory.slot_rank(module) * adapter_memory.widest(module)
            each = num_values * DTYPES[config.model.dtype].itemsize
            held, text = held + num_tokens * each, f"{text}, {num_tokens:,} x {each:,} B of adapters"
        return [Share(ENGINE_WORK, held, text)]

    def _engine_graphs(self) -> list[Share]:
        """Return what the engine has on a GPU in every phase, for none of it sleeps: graphs, and vLLM's buffers."""
        config, rollout = self.config, self.config.rollout
        if config.model.device != "cuda":
            return []
        if isinstance(rollout, VLLMRolloutConfig):
            vocabulary = self.passes.shape.models.policy.config.get_text_config().vocab_size
            graphs = 0 if rollout.engine_args.enforce_eager else GRAPH_BYTES
            sums = REDUCE_BYTES if rollout.ranks_per_engine > 1 else 0
            text = f"{rollout.max_num_seqs} x {vocabulary:,} counts x 4 B"
            text += f" + {size_text(graphs)} of CUDA graphs" if graphs else ""
            text += f" + {size_text(sums)} for sums between ranks" if sums else ""
            return [Share(ENGINE_GRAPHS, rollout.max_num_seqs * vocabulary * 4 + graphs + sums, text)]
        if not getattr(rollout.engine_args, "cuda_graphs", False):
            return []
        count = rollout.max_num_seqs
        held = self.passes.generate(config, count, count, bytes_beside=0).fullest.others
        return [Share(ENGINE_GRAPHS, held, f"counted: a pass of {count:,} tokens, in CUDA graphs")]

    def _publishing(self) -> Iterator[tuple[str, list[Share]]]:
        """Yield the peaks of publishing: the handoff, and the trainer's half of its probe."""
        config, handoff = self.config, self._handoff()
        # The trainer's half comes from ranks that train.
        if not config.rollout.handoff.probe_steps or not self.trains:
            yield "", handoff
            return
        held, num_tokens = self.passes.probe(config).fullest, self.passes.longest_prompt(config)
        probe = [Share(ACTIVATIONS, held.others, f"counted: {num_tokens:,} tokens of a probe")]
        sharding = sharding_of(config)
        if sharding is not None and (isinstance(config.rollout, ColocatedRolloutConfig) or is_rounded(config.rollout)):
            # Others have gathered all weights by then. Between two blocks there are the weights and the buffer of one,
            # and the buffer of the one before; before the first, the root's.
            root, *blocks = self._unit_bytes(sharding)
            fullest = root + max(3 * max(blocks), root + max(blocks))
            probe.append(Share(GATHERED, fullest, "full weights of blocks, gathered"))
        if handoff:
            yield "handoff", handoff
        yield "probe" if handoff else "", probe

    def _kept_probe(self) -> list[Share]:
        """Return the trainer's half of the probe, which waits on the host for the engine's."""
        config = self.config
        if config.model.device != "cpu" or not config.rollout.handoff.probe_steps:
            return []
        num_tokens = min(PROBE_TOKENS, config.rollout.max_completion_length)
        num_rows = num_probe_passes(DTYPES[config.model.dtype], is_rounded=samples_rounded(config.rollout)) * num_tokens
        vocabulary = self.passes.shape.models.policy.config.get_text_config().vocab_size
        return [Share(ACTIVATIONS, num_rows * vocabulary * 4, f"{num_rows} x {vocabulary:,} x 4 B of a probe")]

    def _handoff(self) -> list[Share]:
        """Return what publishing takes besides the weights of both sides."""
        config, sharding = self.config, sharding_of(self.config)
        quantised = engines.quantised_shares(self.passes.shape.models.policy, config, sharding)
        shares = [*self._adapters_on_their_way(), *quantised]
        if not self.trains and isinstance(config.rollout, ColocatedRolloutConfig):
            # Files are mapped in host memory, of which nothing is copied but what is on its way to a GPU.
            if config.model.device == "cuda":
                shares.append(Share(HANDOFF, BUCKET_BYTES, f"a bucket of {size_text(BUCKET_BYTES)} from files"))
            return shares
        if is_rounded(config.rollout):
            return [engines.rounding_share(self.passes.shape.models.policy, is_whole=sharding is not None)]
        if sharding is None:
            return shares
        sizes = self._unit_bytes(sharding)
        if not isinstance(config.rollout, ColocatedRolloutConfig):
            # Unit by unit, each through a buffer of its size; the root, with the embedding, comes first.
            fullest = max(sum(sizes[: number + 1]) + size for number, size in enumerate(sizes))
            return [Share(HANDOFF, fullest - sum(sizes), "a unit on its way into the weights that are gathered")]
        is_sent = config.rollout.handoff.transport == "distributed" or config.rollout.quantization != "none"
        if is_sent or sharding.cpu_offload:
            count = 2 if sharding.cpu_offload else 4
            shares.append(Share(HANDOFF, count * BUCKET_BYTES, f"{count} buckets x {size_text(BUCKET_BYTES)}"))
        return shares

    def _adapters_on_their_way(self) -> list[Share]:
        """Return what a handoff takes for adapters that vLLM gets as part of its weights."""
        config = self.config
        if not (config.lora.is_on and isinstance(config.rollout, ColocatedRolloutConfig)):
            return []
        if adapter_memory.has_slot(config):
            return []
        is_whole = sharding_of(config) is None and config.model.dtype == "float32"
        num_bytes, words = adapter_memory.merging_bytes(self.passes.module("policy", config), is_whole=is_whole)
        return [Share(HANDOFF, num_bytes, words)]

    def _unit_bytes(self, sharding: ShardOptions) -> list[int]:
        """Return the full weights of what is gathered as a whole: of the root, then of every block."""
        itemsize = sharding.param_dtype.itemsize
        return [
            sum(padded_numel(p, sharding.dp_shard) for p in parameters) * itemsize
            for _, parameters in units_of(self.passes.module("policy", self.config))
        ]
