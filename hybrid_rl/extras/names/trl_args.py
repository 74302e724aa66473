"""TRL's GRPOConfig as keys of this library, with the values that it really has: those of TRL where nothing was set."""

from __future__ import annotations

import enum
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hybrid_rl.config.leaves import all_leaves, visible_leaves
from hybrid_rl.errors import ConfigError
from hybrid_rl.extras.names import Kind, records

# Fields of TRL's batch, which together are prompts_per_step and prompts_per_mini_batch.
PER_DEVICE, ACCUMULATION = "per_device_train_batch_size", "gradient_accumulation_steps"
PER_GENERATION, GENERATED, GROUP = "steps_per_generation", "generation_batch_size", "num_generations"
BATCH = (PER_DEVICE, ACCUMULATION, PER_GENERATION, GENERATED)
# Fields that are filled or changed when a GRPOConfig is made, whoever makes it, and that say nothing by themselves.
FILLED = frozenset({*BATCH, "do_eval", "accelerator_config", "pad_to_multiple_of", "vllm_mode", "disable_tqdm"})
CORRECTION = "vllm_importance_sampling_"
MAXIMA = (f"{CORRECTION}cap", f"{CORRECTION}clip_max")


@dataclass
class Translation:
    """Keys that stand for another library's configuration.

    given: what the user set. taken: what the user left alone, where the other library's value is not ours.
    unneeded: fields that the user set and that there is nothing to set for here. steps: numbers of training steps that
    were made of optimizer steps, `updates` of which are in each.
    """

    given: dict[str, Any] = field(default_factory=dict)
    taken: dict[str, Any] = field(default_factory=dict)
    unneeded: list[str] = field(default_factory=list)
    steps: dict[str, Any] = field(default_factory=dict)
    updates: int = 1

    def notice(self, overridden: Iterable[str]) -> str:
        """Return what to tell the user, or an empty text. overridden: paths or names that were given besides."""
        others = {name.rpartition(".")[2] for name in overridden}
        parts = []
        taken = ", ".join(f"{name}={_shown(value)}" for name, value in self.taken.items() if name not in others)
        if taken:
            parts.append(f"TRL's defaults, which differ from those of this library: {taken}")
        batch = self.given.get("prompts_per_step")
        if batch is not None and "prompts_per_step" not in others:
            parts.append(f"your batch size: prompts_per_step={batch}")
        steps = ", ".join(f"{name}={value}" for name, value in self.steps.items() if name not in others)
        if steps:
            parts.append(f"a training step has {self.updates} of TRL's steps, so {steps}")
        if self.unneeded:
            parts.append(f"not needed here: {', '.join(self.unneeded)}")
        return f"args: {'; '.join(parts)}" if parts else ""


def translate(fields: Mapping[str, Any], defaults: Mapping[str, Any], others: Collection[str] = ()) -> Translation:
    """Return the keys for the fields of a GRPOConfig. defaults: the fields of a new one. others: keys that are given
    besides, and so decide.

    A field that has no key here stays under its own name, for an error that says what to do. Raises ConfigError for a
    batch that is no whole number of prompts.
    """
    return _Translator(fields, defaults, {name.rpartition(".")[2] for name in others}).run()


class _Translator:
    def __init__(self, fields: Mapping[str, Any], defaults: Mapping[str, Any], others: Collection[str]) -> None:
        self._others = others
        self._fields = {name: plain(value) for name, value in fields.items()}
        self._changed = {name for name in fields if differ(self._fields[name], plain(defaults[name]))}
        self._ours = {leaf.name: leaf.default for leaf in visible_leaves().values()}
        self._entries = {leaf.path.rpartition(".")[2]: leaf.name for leaf in all_leaves() if leaf.within}
        self._done = set(FILLED)
        self._found = Translation()

    def run(self) -> Translation:
        self._batch()
        self._lengths()
        self._intervals()
        self._switches()
        self._best()
        same, not_needed = _names("same"), _names("not needed")
        for name, value in self._fields.items():
            if name in self._done:
                continue
            if name in same and name not in self._changed:
                if value is not None and value != self._ours.get(name, value):
                    self._found.taken[name] = value
            elif name in not_needed and name in self._changed:
                self._found.unneeded.append(name)
            elif name in self._changed:
                self._found.given[self._entries.get(name, name)] = value
        return self._found

    def _put(self, key: str, value: Any, *sources: str) -> None:
        """Note a key, as given if any of the fields that it comes from was changed."""
        self._done.update(sources)
        if self._changed & set(sources):
            self._found.given[key] = value
        elif value != self._ours.get(key.rpartition(".")[2]):
            self._found.taken[key] = value

    def _batch(self) -> None:
        if "prompts_per_step" in self._others or not {PER_DEVICE, GROUP} <= self._fields.keys():
            return
        accumulated = self._fields.get(ACCUMULATION) or 1
        parts = self._fields.get(PER_GENERATION) or accumulated
        size, group = self._fields.get(GENERATED) or self._fields[PER_DEVICE] * parts, self._fields[GROUP]
        if size % group:
            raise ConfigError(
                f"args: {size} completions per step (generation_batch_size) are no whole number of prompts with "
                f"num_generations={group} completions each; set prompts_per_step"
            )
        prompts = size // group
        self._put("prompts_per_step", prompts, *BATCH)
        if parts != accumulated and "prompts_per_mini_batch" not in self._others:
            if prompts * accumulated % parts:
                raise ConfigError(
                    f"args: {prompts} prompts per step make no {parts}/{accumulated} equal optimizer steps "
                    "(steps_per_generation, gradient_accumulation_steps); set prompts_per_mini_batch"
                )
            self._put("prompts_per_mini_batch", prompts * accumulated // parts, *BATCH)

    @property
    def _updates(self) -> int:
        """Optimizer steps of a training step, in which TRL counts."""
        accumulated = self._fields.get(ACCUMULATION) or 1
        parts = self._fields.get(PER_GENERATION) or accumulated
        return max(1, (self._fields.get("num_iterations") or 1) * parts // accumulated)

    def _steps(self, name: str) -> Any:
        """Return a number of training steps for one of optimizer steps, or for a share of max_steps if that is set."""
        value, last = self._fields[name], self._fields.get("max_steps") or 0
        if isinstance(value, int | float) and 0 < value < 1 and last > 0:
            value = math.ceil(value * last)
        if not isinstance(value, int | float) or value < 1:
            return value
        steps = max(1, math.ceil(value / self._updates))
        if name in self._changed and steps != value:
            self._found.steps[name], self._found.updates = steps, self._updates
        return steps

    def _lengths(self) -> None:
        """max_steps, where -1 means none; then epochs count. The warm-up, which may be a share of the run."""
        if "max_steps" in self._fields:
            limit = self._fields["max_steps"]
            if limit is not None and limit > 0:
                self._put("max_steps", self._steps("max_steps"), "max_steps")
                self._done.add("num_train_epochs")
            self._done.add("max_steps")
        share, last = self._fields.get("warmup_steps"), self._fields.get("max_steps") or 0
        if isinstance(share, float) and 0 < share < 1 and last > 0:
            self._put("warmup_steps", math.ceil(share * last), "warmup_steps")

    def _intervals(self) -> None:
        for strategy, name in (("save_strategy", "save_steps"), ("eval_strategy", "eval_steps")):
            if strategy not in self._fields or name not in self._fields:
                continue
            kind = self._fields[strategy]
            if kind == "steps":
                self._put(name, self._steps(name), strategy, name)
            elif kind == "no":
                self._done |= {strategy, name}
            else:
                self._done.add(name)  # an error says that strategies of this kind are numbers of steps

    def _switches(self) -> None:
        """Fields that mean something only together."""
        fields = self._fields
        if not fields.get("sync_ref_model"):
            self._done |= {"ref_model_sync_steps", "ref_model_mixup_alpha"}
        else:
            self._put("ref_model_sync_steps", fields["ref_model_sync_steps"], "sync_ref_model")
        adaptive = ("entropy_target", "entropy_coef_min", "entropy_coef_max", "entropy_coef_delta")
        if not fields.get("use_adaptive_entropy"):
            self._done.update(adaptive)
        else:
            for name in adaptive:
                self._put(name, fields[name], "use_adaptive_entropy", name)
        if fields.get("shuffle_dataset") is not None:
            self._put("shuffle", fields["shuffle_dataset"], "shuffle_dataset")
        if fields.get("log_completions"):
            batch = self._fields.get(GENERATED) or self._fields[PER_DEVICE]
            number = fields.get("num_completions_to_print") or batch
            self._put("log_completions", number, "log_completions", "num_completions_to_print")
        if "use_cpu" in self._changed and fields["use_cpu"]:
            self._put("device", "cpu", "use_cpu", "bf16")  # where auto is float32
        if "bf16" in self._changed and "bf16" not in self._done:
            self._put("dtype", "bfloat16" if fields["bf16"] else "float32", "bf16")
        if fields.get("disable_tqdm") and "disable_tqdm" in self._changed:
            self._put("log_level", "quiet", "disable_tqdm", "log_level")
        if fields.get("log_level") == "passive":
            self._done.add("log_level")
        if str(fields.get("optim")).startswith("adamw_torch"):
            self._done.add("optim")  # the same arithmetic, fused or not
        if fields.get("data_seed") == fields.get("seed"):
            self._done.add("data_seed")
        if fields.get("use_vllm"):
            self._vllm()

    def _vllm(self) -> None:
        fields = self._fields
        if fields.get("vllm_mode") == "server":
            self._done.discard("vllm_mode")  # refused, with the reason
            self._changed.add("vllm_mode")
        self._put("rollout.engine", "vllm", "use_vllm")
        if "vllm_tensor_parallel_size" in self._changed:
            self._put("tensor_parallel_size", fields["vllm_tensor_parallel_size"], "vllm_tensor_parallel_size")
        names = [name for name in fields if name.startswith(CORRECTION)]
        if not fields.get(f"{CORRECTION}correction"):
            self._done.update(names)
            return
        level, _, kind = str(fields[f"{CORRECTION}mode"]).partition("_")
        highest = next(fields[name] for name in MAXIMA if fields.get(name) is not None)
        lowest = fields.get(f"{CORRECTION}clip_min") or 0.0
        self._put("correction", "mis" if kind == "mask" else "tis", *names)
        self._put("correction_level", level, *names)
        self._put("correction_high", highest, *names)
        self._put("correction_low", lowest, *names)

    def _best(self) -> None:
        """The metric of the best checkpoint, which TRL names "loss" if the user named none."""
        if self._fields.get("metric_for_best_model") in (None, "loss"):
            self._done |= {"metric_for_best_model", "greater_is_better"}


def _names(kind: Kind) -> set[str]:
    return {habit.name for habit in records() if habit.kind == kind and habit.library in ("TRL", "transformers")}


def plain(value: Any) -> Any:
    """Return a value without the enums of transformers."""
    if isinstance(value, enum.Enum):
        return value.value
    return [plain(item) for item in value] if isinstance(value, list) else value


def differ(one: Any, other: Any) -> bool:
    """Return whether two values are not equal; of those that cannot be compared, whether they are not the same."""
    try:
        return bool(one != other)
    except (TypeError, ValueError):  # arrays, say
        return one is not other


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)
