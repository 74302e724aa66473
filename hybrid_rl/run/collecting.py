"""Where the batch of a training step comes from: new rollouts, saved ones, or the data set's own completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from hybrid_rl.algos import Needs
from hybrid_rl.controller import WorkerGroup
from hybrid_rl.data import PromptRow, PromptSampler
from hybrid_rl.engines import SamplingParams
from hybrid_rl.errors import ConfigError
from hybrid_rl.rewards import TrainerState
from hybrid_rl.rollout.collector import Collected, Collector, replay
from hybrid_rl.run.prepare import Run, check_stop_strings

WHOLE = frozenset({"num_generations", "max_tokens", "top_k", "seed"})
COUNTS = ("num_generations", "max_completion_length")


def collector_of(run: Run, policy: WorkerGroup) -> Collector:
    """The collector of a run."""
    rewards = run.config.rewards
    return Collector(
        policy,
        run.reward_names,
        max_failure_share=rewards.max_reward_failure_share,
        reward_weights=run.rewards.weights(rewards.reward_weights),
        success_reward=run.config.eval.success_reward,
        tells_success=run.rewards.num_added < len(run.reward_names),
    )


def collect_step(
    run: Run, collector: Collector, sampler: PromptSampler, version: int, state: TrainerState
) -> Collected:
    """The batch of the training step that `state` names, for a learner at this policy version."""
    config, num_prompts = run.config, run.config.data.prompts_per_step
    if config.rollouts_path is not None:
        sampler.take(num_prompts)  # so that position and epoch are those of the recorded run
        return replay(
            Path(config.rollouts_path),
            state.global_step,
            num_prompts,
            config.algorithm.num_generations,
            run.reward_names,
            version,
            greedy_baseline=Needs.BASELINE_REWARDS in config.advantage.needs,
            success_reward=config.eval.success_reward,
        )
    if Needs.DEMONSTRATIONS in config.advantage.needs:
        return collector.demonstrate(sampler, num_prompts, run.train_params, version, state)
    return collector.collect(
        sampler,
        num_prompts,
        config.algorithm.num_generations,
        run.train_params,
        version,
        state,
        max_refills=config.algorithm.max_refills,
        greedy_baseline=Needs.BASELINE_REWARDS in config.advantage.needs,
    )


def evaluation_metrics(run: Run, collector: Collector, version: int, state: TrainerState) -> dict[str, float]:
    """Metrics of one sample, or num_generations_eval, for each prompt of the evaluation data; their names begin with
    `eval/`."""
    data = run.data.eval
    assert data is not None
    rows, purpose = [data[index] for index in range(len(data))], f"evaluation/{state.global_step}"
    each = run.config.eval.num_generations_eval
    collected = collector.rollout(rows, each, run.eval_params, version, state, purpose=purpose)
    metrics = {f"eval/{name}": value for name, value in collected.metrics.items() if "std" not in name.split("/")[-1]}
    accuracy = metrics.pop("eval/pass@1", None)
    return metrics if accuracy is None else metrics | {"eval/accuracy": accuracy}


def check_numbers(num_generations: int, given: Mapping[str, Any]) -> None:
    """Raise ConfigError for arguments of `generate` that are no numbers, or no whole ones. given: fields of
    SamplingParams, which knows their ranges; None for what training does."""
    if num_generations is None:
        raise ConfigError("num_generations=None: give how many completions each prompt is to get")
    for name, value in {"num_generations": num_generations, **given}.items():
        kind = Integral if name in WHOLE else Real
        shown = "max_completion_length" if name == "max_tokens" else name
        if value is not None and (isinstance(value, bool) or not isinstance(value, kind)):
            raise ConfigError(f"{shown}={value!r} must be a {'whole ' if kind is Integral else ''}number")
        if shown in COUNTS and value is not None and value < 1:
            raise ConfigError(f"{shown}={value!r} must be at least 1")


def generation_of(
    run: Run, prompts: Sequence[Any], given: Mapping[str, Any], stop_strings: Sequence[str] | str | None
) -> tuple[list[PromptRow], SamplingParams]:
    """The rows of prompts without a data set, and how their tokens are chosen. given: fields of SamplingParams, None
    for what training does."""
    chosen = {**given, "stop_strings": check_stop_strings(stop_strings, run.choice.tokenizer)}
    params = replace(run.train_params, **{name: value for name, value in chosen.items() if value is not None})
    encoded = run.data.encoder.encode(prompts)
    return [PromptRow(i, p, tuple(ids), {}) for i, (p, ids) in enumerate(zip(prompts, encoded, strict=True))], params
