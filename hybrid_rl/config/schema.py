"""The configuration keys: type, default, allowed range and description of each, in one place.

Frozen dataclasses, nested one level deep. `policy_loss`, `rollout.engine`, `controller.backend` and others are tags
that select the class of their section (choices.py): a key of another choice does not exist and is refused. The sections
of an algorithm (advantage, policy_loss, kl, correction) are the records of hybrid_rl.algos themselves. Leaf names are
unique over the whole tree: a leaf name (`learning_rate`) means the same as its path (`optimizer.learning_rate`)
wherever it is given. A key may be a mapping with fixed names (`entries`): a record, whose fields are its entries. Keys
with the same meaning as in TRL have TRL's name. Batch sizes are global and name their unit.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from hybrid_rl.algos import GRPO, AdvantageEstimator, Clip, Correction, KLTerm, PolicyObjective
from hybrid_rl.algos.correction import NoCorrection
from hybrid_rl.algos.kl import NoKL
from hybrid_rl.algos.options import entries, key
from hybrid_rl.config.agent_keys import AgentConfig
from hybrid_rl.config.algorithm_keys import AlgorithmConfig, EntropyConfig
from hybrid_rl.config.buffer_keys import BufferConfig
from hybrid_rl.config.checkpoint_keys import CheckpointConfig
from hybrid_rl.config.config_text import Shown
from hybrid_rl.config.data_keys import DataConfig
from hybrid_rl.config.engine_keys import ARGS_DOC, HANDOFF_DOC, CopyHandoff, EngineArgs, Handoff, InPlaceArgs, VLLMArgs
from hybrid_rl.config.eval_keys import EvalConfig
from hybrid_rl.config.lasting_keys import LastingKeys
from hybrid_rl.config.logging_keys import LoggingKeys
from hybrid_rl.config.lora_keys import FullTrainingConfig, check_slot
from hybrid_rl.config.memory_keys import MemoryConfig
from hybrid_rl.config.quantised_weights import check_quantised
from hybrid_rl.config.rank_keys import ControllerConfig, FSDPConfig
from hybrid_rl.config.vllm_arguments import check_arguments
from hybrid_rl.errors import ConfigError

ENGINES = (
    "inplace (embedded, any machine), vllm (in the trainer's processes) or hf (the model's own forward, in training "
    "too: for linear attention, convolutions, state spaces and other layers that cannot be packed; slower)"
)


@dataclass(frozen=True)
class ModelConfig:
    """The model to train."""

    path: str | None = key(None, "Hugging Face name or local folder; None if a module is passed to Trainer")
    device: Literal["auto", "cpu", "cuda"] = key(
        "auto",
        "where all models are loaded, on every rank; auto = a GPU if there is one; a module that is passed stays on "
        "its device, except that ranks on Ray copy it to their own devices",
    )
    dtype: Literal["auto", "float32", "bfloat16"] = key(
        "auto",
        "compute dtype; auto = that of a module that is passed, else bfloat16 on GPUs that support it and float32 "
        "elsewhere; bfloat16 keeps fp32 master weights and accumulates gradients in fp32",
    )
    trust_remote_code: bool = key(False, "run Python code from the model folder")
    gradient_checkpointing: bool = key(False, "recompute activations in the backward pass: less memory, more time")
    torch_compile: bool = key(False, "compile the blocks of the trainer's model with torch.compile")
    attention: Literal["auto", "varlen", "flash_attn", "flash_attn_3", "compiled", "sdpa", "unpacked"] = key(
        "auto",
        "kernels of the trainer's attention: PyTorch's varlen kernels or the flash-attn package (CUDA, bfloat16), the "
        "package flash-attn-3 (Hopper; switches all flash attention of the process), the compiled extension (CPU, "
        "float32), or scaled_dot_product_attention (any machine); auto = the first of flash_attn_3, varlen, compiled "
        "and sdpa that runs; unpacked (rollout.engine=vllm) = the model's own forward, samples next to each other, for "
        "layers that cannot be packed, as with rollout.engine=hf",
    )
    exact: bool = key(
        False,
        "logprobs of engine and trainer are equal to the bit, whatever is batched, packed, cached or cut into chunks "
        "together: the first ratio is 1, and the mismatch 0, of samples that the weights of this step have drawn "
        "(rollout.engine=inplace on CPUs)",
    )

    # Exists only with dtype=bfloat16, in BFloat16ModelConfig.
    cast_lm_head_to_fp32 = False


@dataclass(frozen=True)
class BFloat16ModelConfig(ModelConfig):
    """The model to train, with dtype=bfloat16."""

    cast_lm_head_to_fp32: bool = key(
        False,
        "logits are float32 products of hidden states and head, not rounded to bfloat16, in training, scoring and the "
        "embedded engines; the values of the head stay bfloat16 (its masters float32)",
    )


@dataclass(frozen=True)
class CriticConfig:
    """The base of the critic's sections; without a critic there is nothing to set."""


@dataclass(frozen=True)
class ValueHeadConfig(CriticConfig):
    """A model of the policy's architecture with one number per token, for estimators that need values."""

    critic_path: str | None = key(None, "a saved critic, or a model for its backbone; None = the policy's weights")
    critic_learning_rate: float = key(1e-5, "peak learning rate of the critic", minimum=0)
    cliprange_value: float | None = key(
        0.2, "values are clipped to this distance from the old ones; None = never", above=0
    )
    critic_warmup_steps: int = key(0, "number of first training steps in which only the critic learns", minimum=0)


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW, its schedule, and the mini-batches and micro-batches. An optimizer step is one update of the weights."""

    learning_rate: float = key(
        1e-6,
        "peak learning rate",
        minimum=0,
        remedy="set it above 0 (0 is for mode=rollout, or for training only a critic)",
    )
    weight_decay: float = key(0.0, "decoupled weight decay", minimum=0)
    adam_beta1: float = key(0.9, "decay of the first moment", minimum=0, below=1)
    adam_beta2: float = key(0.999, "decay of the second moment", minimum=0, below=1)
    adam_epsilon: float = key(1e-8, "added to the root of the second moment", above=0)
    max_grad_norm: float | None = key(1.0, "gradients are scaled down to this norm; None = never", above=0)
    lr_scheduler_type: Literal["constant", "constant_with_warmup", "linear", "cosine"] = key(
        "constant", "schedule of the learning rate over the run's optimizer steps"
    )
    warmup_steps: int = key(0, "optimizer steps of the rise from 0 to the peak", minimum=0)
    prompts_per_mini_batch: int | None = key(
        None, "prompts (whole groups) of one optimizer step, over all ranks; None = all of the training step", minimum=1
    )
    tokens_per_micro_batch: int | None = key(
        None,
        "hard cap on the tokens of one forward pass on one rank; None = 4096 on a CPU, 16384 elsewhere, or the longest "
        "sample if that is longer",
        minimum=1,
    )


@dataclass(frozen=True)
class RolloutConfig:
    """The generation of completions for training. Each engine has a subclass that describes the engine to the library.

    placement: embedded = it decodes from the actor's own modules; colocated = in the trainer's process, with its own
        weights; separate = in its own process.
    is_packed: whether models can run packed rows, in training too (`TrainerConfig.is_packed`).
    library: what must be installed, and how, as (module, command).
    """

    placement: ClassVar[Literal["embedded", "colocated", "separate"]] = "embedded"
    is_packed: ClassVar[bool] = True
    library: ClassVar[tuple[str, str] | None] = None

    # Exist only with engines that can hold weights on a grid, or keys and values.
    quantization, quantization_aware, kv_cache_dtype = "none", False, "auto"

    engine: str = key("inplace", ENGINES)
    max_completion_length: int = key(512, "longest completion in tokens, including the final EOS", minimum=1)
    temperature: float = key(
        1.0, "divides the logits, in the rollout and in training on its samples", minimum=0.01, maximum=100
    )
    partial: bool = key(
        False,
        "end a step when enough groups are whole, and hold the others for the next one: long completions no longer "
        "decide how long a step takes; their first tokens come from older weights",
    )
    async_level: int | Literal["auto"] = key(
        "auto",
        "batches that are generated ahead of the one that a step trains on: its tokens are so many updates old, and "
        "rewards, judges and tools have as many generations and updates to finish in; 0 = a step trains on what its "
        "own weights have made; auto = 1 with rollout_ranks, else 0",
        minimum=0,
    )
    stop_token_ids: list[int] = key([], "token ids that end a completion, in addition to the model's EOS ids")
    stop_strings: list[str] = key([], "texts that end a completion, also in evaluation; they are kept at its end")
    handoff: Handoff = entries(Handoff, HANDOFF_DOC)
    max_num_seqs: int = key(256, "sequences decoded together by one engine", minimum=1)
    kv_cache_memory_bytes: int | None = key(
        None,
        "size of the KV cache of a rank; None = room for max_num_seqs full sequences, at most 40 % of free memory; "
        "sequences that do not fit wait",
        minimum=1,
    )
    engine_args: EngineArgs = entries(EngineArgs, ARGS_DOC)

    @property
    def ranks_per_engine(self) -> int:
        """Consecutive ranks that run one engine together."""
        return 1

    def check(self, config: TrainerConfig, num_ranks: int) -> None:
        """Raise ConfigError if this engine cannot run this configuration. num_ranks: those that generate."""
        return


@dataclass(frozen=True)
class InPlaceRolloutConfig(RolloutConfig):
    """rollout.engine=inplace."""

    engine: Literal["inplace"] = key("inplace", ENGINES)
    speculation: Literal["off", "auto", "on"] = key(
        "off",
        "draft tokens from other completions of the prompt, compute them together, and keep those that are drawn: the "
        "same samples in fewer passes, but for rounding; auto = where it saves time; on = always; CPUs only",
    )
    quantization: Literal["none", "int8"] = key(
        "none",
        "int8 = decode from weights of 8 bits, with a scale per output channel, rounded from the trainer's masters at "
        "every handoff; on CPUs, without adapters",
    )
    kv_cache_dtype: Literal["auto", "int8"] = key(
        "auto",
        "how the KV cache holds keys and values: auto = in the model's dtype; int8 = in 8 bits, with a float32 scale "
        "per token and head, for about a quarter of the memory of float32; on CPUs",
    )
    engine_args: InPlaceArgs = entries(InPlaceArgs, ARGS_DOC)

    def check(self, config: TrainerConfig, num_ranks: int) -> None:
        """Raise ConfigError if drafts would decide where completions are broken off, or something cannot be rounded."""
        if self.quantization == "int8":
            self._check_int8(config)
        if self.kv_cache_dtype == "int8" and config.model.device == "cuda":
            raise ConfigError("rollout.kv_cache_dtype=int8 is for CPUs, but model.device=cuda; leave it out")
        if self.kv_cache_dtype == "int8" and config.model.exact:
            raise ConfigError(
                "rollout.kv_cache_dtype=int8 rounds keys and values, which the trainer does not do, but "
                "model.exact=true wants equal logprobs; leave one of them out"
            )
        if self.speculation != "off" and self.partial:
            raise ConfigError(
                f"speculation={self.speculation} with partial=true: how far completions are when a step breaks them "
                "off would depend on drafts, and no run could be repeated; set one of them only"
            )

    def _check_int8(self, config: TrainerConfig) -> None:
        name = "rollout.quantization=int8"
        if config.model.device == "cuda":
            raise ConfigError(f"{name} multiplies on CPUs only, but model.device=cuda; leave it out")
        if config.lora.is_on:
            raise ConfigError(
                f"{name} rounds the weights that are trained, but lora.r={config.lora.r} trains adapters beside them; "
                "leave one of them out"
            )
        if config.model.torch_compile:
            raise ConfigError(
                f"{name} with model.torch_compile=true: the probe of a handoff rounds the trainer's layers one by one, "
                "which compiled blocks do not allow; leave one of them out"
            )
        if config.model.dtype == "bfloat16":
            if getattr(config.controller, "rollout_ranks", 0):
                raise ConfigError(
                    f"{name} with dtype=bfloat16 and rollout_ranks: ranks that only generate get weights in bfloat16, "
                    "which would be rounded twice; use dtype=float32, or no rollout_ranks"
                )
            if "optimizer" in (config.memory.offload or ()):
                raise ConfigError(
                    f"{name} with dtype=bfloat16 rounds the optimizer's masters at every handoff, but memory.offload "
                    "names optimizer; take it out"
                )


@dataclass(frozen=True)
class HFRolloutConfig(RolloutConfig):
    """rollout.engine=hf, which decodes through the model's own forward, with the caches of transformers. A running
    sequence counts at its full length in the cache."""

    is_packed: ClassVar[bool] = False

    engine: Literal["hf"] = key("hf", ENGINES)


@dataclass(frozen=True)
class ColocatedRolloutConfig(RolloutConfig):
    """Keys of all engines in the trainer's process that have their own weights."""

    placement: ClassVar[Literal["embedded", "colocated", "separate"]] = "colocated"

    handoff: CopyHandoff = entries(CopyHandoff, HANDOFF_DOC)

    def check(self, config: TrainerConfig, num_ranks: int) -> None:
        """Raise ConfigError if the transport of the weights does not fit the ranks."""
        handoff = self.handoff
        if handoff.transport in ("ipc", "distributed") and num_ranks == 1:
            raise ConfigError(
                f"handoff.transport={handoff.transport} carries weights between ranks, but num_ranks=1; leave it out"
            )
        if handoff.adopt_weights and (num_ranks > 1 or handoff.transport != "auto"):
            raise ConfigError(
                f"handoff.adopt_weights=true shares one rank's memory, but num_ranks={num_ranks} and "
                f"transport={handoff.transport}; leave it out, or use num_ranks=1 without a transport"
            )
        if (handoff.transport == "disk") != (handoff.weights_path is not None):
            raise ConfigError(
                f"handoff.transport={handoff.transport} with weights_path={handoff.weights_path}: transport=disk and "
                "the folder go together; set both or neither"
            )


@dataclass(frozen=True)
class VLLMRolloutConfig(ColocatedRolloutConfig):
    """rollout.engine=vllm."""

    library: ClassVar[tuple[str, str] | None] = (
        "vllm",
        "make vllm (CPU), or pip install vllm (CUDA; docs/vllm.md, Installing)",
    )

    engine: Literal["vllm"] = key("vllm", ENGINES)
    engine_args: VLLMArgs = entries(VLLMArgs, ARGS_DOC)
    quantization: Literal["none", "fp8", "fp8_block", "int4", "nvfp4"] = key(
        "none",
        "hold the engine's linear layers in 8 or 4 bits, made from the trainer's weights at every handoff: fp8 (one "
        "scale per weight), fp8_block (one per 128 x 128), int4 (one per 32 of a row) or nvfp4 (one per 16); on CPUs "
        "they are computed with in the engine's dtype, for tests",
    )
    quantization_aware: bool = key(
        False,
        "train with the quantised weights too: forward passes compute with them, and gradients go to the masters as if "
        "they were not quantised (straight-through); the reference model is not quantised",
    )
    tensor_parallel_size: int = key(1, "ranks that share one copy of the weights, called a replica", minimum=1)

    @property
    def ranks_per_engine(self) -> int:
        """Ranks of a tensor-parallel replica."""
        return self.tensor_parallel_size

    def check(self, config: TrainerConfig, num_ranks: int) -> None:
        """Raise ConfigError if ranks cannot be divided into replicas, the transport of the weights does not fit them,
        or an argument of vLLM is not the user's to give."""
        if num_ranks % self.ranks_per_engine:
            ranks = "rollout_ranks" if getattr(config.controller, "rollout_ranks", 0) else "num_ranks"
            raise ConfigError(
                f"rollout.tensor_parallel_size={self.ranks_per_engine} does not divide {ranks}={num_ranks}; use "
                f"{', '.join(str(n) for n in range(1, num_ranks + 1) if num_ranks % n == 0)}"
            )
        check_arguments(self, config.model.device)
        check_quantised(config)
        if self.handoff.lora == "adapter":
            check_slot(config.lora)
            if self.handoff.transport == "disk":
                raise ConfigError(
                    "handoff.transport=disk writes all weights at every handoff, and handoff.lora=adapter hands over "
                    "adapters only; leave transport out"
                )
        elif self.handoff.adopt_weights and config.lora.is_on:
            raise ConfigError(
                "handoff.adopt_weights=true shares the trainer's memory with the engine, which gets base and adapters "
                "as one tensor (lora.r): the base would be lost; leave adopt_weights out, or set handoff.lora=adapter"
            )
        super().check(config, num_ranks)


@dataclass(frozen=True)
class RewardConfig:
    """The scoring of completions."""

    reward_weights: list[float] | None = key(
        None, "one weight per reward function, then perhaps one per reward of environments or agents; None = 1 each"
    )
    reward_processes: int = key(0, "score in this many worker processes; 0 = in a thread of this process", minimum=0)
    reward_timeout_seconds: float | None = key(None, "limit of one call of a reward function", above=0)
    score_by: Literal["sample", "group"] = key(
        "sample", "when a reward function is called: as samples finish, or once per complete group"
    )
    overlong_buffer: int | None = key(
        None,
        "DAPO's overlong penalty as an additional reward: from 0 to -1 over this many last tokens before "
        "max_completion_length; None = no penalty",
        minimum=1,
    )
    max_reward_failure_share: float = key(
        0.1, "largest share of a step's samples that may fail to be scored before the run stops", minimum=0, maximum=1
    )


@dataclass(frozen=True, repr=False)
class TrainerConfig(LoggingKeys, LastingKeys, Shown):
    """The whole configuration of a run."""

    num_ranks: int | Literal["auto"] = key(
        1,
        "processes that train and generate together, one per GPU, or on CPUs; more than 1 run on Ray; auto = all GPUs "
        "of this machine, or of the cluster at controller.address, less reference_ranks and rollout_ranks; 1 if there "
        "is none",
        minimum=1,
    )
    mode: Literal["full", "rollout", "train"] = key(
        "full", "for debugging: rollout only makes and saves rollouts, train only trains, on saved ones"
    )
    save_rollouts: bool = key(False, "write the samples of every step to rollouts/ in the run folder")
    rollouts_path: str | None = key(
        None, "mode=train: folder of saved rollouts, one for each step; their temperature is used"
    )
    seed: int = key(
        42, "makes the data order, the rollouts and the mini-batch order reproducible", minimum=0, maximum=2**62
    )
    max_steps: int | None = key(None, "training steps; None = determined by num_train_epochs", minimum=1)
    num_train_epochs: float = key(1.0, "passes over the training data", above=0, maximum=1e9)
    output_dir: str = key("runs", "folder for run folders")
    run_name: str | None = key(None, "name of the run folder; None = algorithm and time")
    save_steps: int | None = key(
        None, "write a checkpoint every n training steps, at the end and at Ctrl-C; None = never", minimum=1
    )
    resume: str | None = key(None, "a checkpoint folder, or auto = the newest of the run named run_name")
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    advantage: AdvantageEstimator = field(default_factory=GRPO)
    policy_loss: PolicyObjective = field(default_factory=Clip)
    kl: KLTerm = field(default_factory=NoKL)
    correction: Correction = field(default_factory=NoCorrection)
    entropy: EntropyConfig = field(default_factory=EntropyConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    lora: FullTrainingConfig = field(default_factory=FullTrainingConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    rollout: RolloutConfig = field(default_factory=InPlaceRolloutConfig)
    buffer: BufferConfig = field(default_factory=BufferConfig)
    agents: AgentConfig = field(default_factory=AgentConfig)
    rewards: RewardConfig = field(default_factory=RewardConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    fsdp: FSDPConfig = field(default_factory=FSDPConfig)
    checkpoints: CheckpointConfig = field(default_factory=CheckpointConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    controller: ControllerConfig = field(default_factory=ControllerConfig)

    @property
    def is_packed(self) -> bool:
        """Whether models run packed rows in training; which engine generates is another matter."""
        return self.rollout.is_packed and self.model.attention != "unpacked"
