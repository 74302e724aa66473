"""The charts of a page: which metrics stand together, and the lines and ranges that they are read by."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from typing import Any

from hybrid_rl.extras.report.run_files import is_number

PROBE_TOLERANCES = {"float32": 1e-3}  # what probe_tolerance=None means; in bfloat16 it is the model's own noise


@dataclass(frozen=True)
class Guide:
    """A value to compare a curve with. kind: "limit" for a line that should not be crossed, "line" for one that only
    tells a setting, "healthy" for a range (from `low` to `high`), drawn as a band. says: what it is, and whose."""

    kind: str
    says: str
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Chart:
    """A picture of some metrics. metrics: names, or patterns with *, in order. log: whether values have a log axis.
    about: a sentence that tells how to read it."""

    title: str
    metrics: tuple[str, ...]
    about: str = ""
    log: bool = False
    unit: str = ""
    guides: tuple[Guide, ...] = ()


@dataclass(frozen=True)
class Section:
    """Charts under one heading."""

    title: str
    charts: tuple[Chart, ...]


PROBABILITY_GAP = (
    Guide("healthy", "below 0.005: good (verl)", high=0.005),
    Guide("limit", "above 0.01: a precision problem (verl)", high=0.01),
)
KL_GAP = (
    Guide("healthy", "up to 1e-3: usual for dense models (slime)", high=1e-3),
    Guide("limit", "1e-1: the most that is usual for mixtures of experts (slime)", high=0.1),
)
ONE = (Guide("line", "1: engine and trainer agree", high=1.0),)

SECTIONS = (
    Section(
        "Reward and evaluation",
        (
            Chart("reward of sampled completions", ("reward",), "The mean over the training batch, sampled."),
            Chart(
                "evaluation",
                ("eval/accuracy", "eval/*/accuracy", "eval/reward", "eval/*/reward"),
                "On prompts that are not trained on; greedy unless the configuration says otherwise. Bands are 95 % "
                "confidence intervals.",
            ),
            Chart(
                "evaluation, several samples of a prompt",
                ("eval/pass@*", "eval/*/pass@*", "eval/maj@*", "eval/*/maj@*"),
                "pass@k: at least one of k is right; maj@k: the most frequent answer is.",
            ),
            Chart("share of solved prompts, sampled", ("pass@*",), "pass@n: at least one of n samples is right."),
            Chart("mean of each reward function", ("rewards/*/mean",)),
            Chart(
                "spread of rewards",
                ("reward_std", "frac_reward_zero_std"),
                "frac_reward_zero_std is the share of groups whose rewards are all equal: they teach nothing. At 1 "
                "there is no gradient.",
            ),
            Chart("share of groups kept", ("collect/groups_kept_share",), "Dynamic sampling draws prompts again."),
        ),
    ),
    Section(
        "Lengths",
        (
            Chart(
                "completion length",
                ("completions/mean_length", "completions/min_length", "completions/max_length"),
                unit="tokens",
            ),
            Chart(
                "cut off by a limit",
                ("completions/clipped_ratio",),
                "The share of completions that did not end by themselves. If it rises, raise max_completion_length.",
            ),
            Chart("length of evaluation", ("eval/completions/mean_length",), unit="tokens"),
            Chart("turns and tool calls", ("agents/turns_mean", "agents/tool_calls_mean", "tools/failure_frequency")),
        ),
    ),
    Section(
        "Optimization",
        (
            Chart("entropy", ("entropy",), "In nats, the mean over tokens. Near 0 nothing is explored any more."),
            Chart("KL to the reference", ("kl",), "The mean of a token."),
            Chart(
                "ratio of new to old policy",
                ("ratio/mean", "ratio/min", "ratio/max"),
                "1 if one optimizer step uses a batch.",
            ),
            Chart("share of clipped tokens", ("clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean")),
            Chart("gradient norm", ("grad_norm",), "Before it is cut to max_grad_norm."),
            Chart("learning rate", ("learning_rate",)),
            Chart("loss", ("loss",), "Of a policy gradient: it tells nothing of progress."),
            Chart("updates skipped", ("skipped_updates",), "Updates whose gradient was not finite."),
            Chart("critic: explained variance", ("critic/explained_variance",), "1 is perfect, 0 is a constant guess."),
            Chart("critic: value loss", ("critic/value_loss",)),
            Chart("advantages that are zero", ("advantages/zero_share",), "The share of tokens that teach nothing."),
        ),
    ),
    Section(
        "Engine and trainer",
        (
            Chart(
                "difference of probabilities",
                ("mismatch/prob_difference_mean",),
                "How far the probability of a sampled token is from what the trainer computes, on average.",
                log=True,
                guides=PROBABILITY_GAP,
            ),
            Chart(
                "difference of logprobs",
                ("sampling/sampling_logp_difference/mean", "sampling/sampling_logp_difference/max"),
                "Around 1e-7 is rounding of float32.",
                log=True,
            ),
            Chart("KL of engine and trainer", ("mismatch/kl",), "Estimated by k3.", log=True, guides=KL_GAP),
            Chart(
                "gap of the probe prompt",
                ("handoff/probe_gap",),
                "After a handoff a prompt is computed by both; over the tolerance the run stops.",
                log=True,
            ),
            Chart(
                "effective sample size",
                ("mismatch/ess_tokens", "mismatch/ess_samples"),
                "1 if engine and trainer agree.",
                guides=ONE,
            ),
            Chart(
                "importance ratio, quantiles",
                ("mismatch/ratio_p01", "mismatch/ratio_p50", "mismatch/ratio_p99"),
                "Of trainer to engine, over tokens.",
                guides=ONE,
            ),
            Chart("weights of the correction", ("mismatch/mean_weight", "mismatch/truncated_tokens")),
        ),
    ),
    Section(
        "Staleness",
        (
            Chart("mean age of tokens", ("staleness/mean_age",), "Policy versions between a token and its learner."),
            Chart("share of tokens by age", ("staleness/share_age_*",)),
            Chart(
                "importance ratio by age, quantiles",
                ("staleness/ratio_*",),
                "Probability at the start of the step, divided by that of the engine when it made the token.",
                log=True,
                guides=ONE,
            ),
            Chart("share of tokens held", ("buffer/held_share",), "Of the tokens of held and delivered groups."),
        ),
    ),
    Section(
        "Throughput",
        (
            Chart("tokens per second", ("perf/tokens_per_second", "perf/rollout_tokens_per_second")),
            Chart(
                "GFLOP/s of the policy",
                ("perf/rollout_gflops", "perf/update_gflops"),
                "Floating-point operations of all ranks by the seconds of the part.",
                unit="GFLOP/s",
            ),
            Chart("share of the GPUs' peak (MFU)", ("perf/rollout_mfu", "perf/update_mfu"), "In dense bfloat16."),
            Chart("seconds of a step", ("timing/step",), unit="seconds"),
            Chart(
                "engine: share of empty slots",
                ("engine/idle_share",),
                "Slots that decoded nothing while the longest completions ended.",
            ),
            Chart(
                "seconds won by holding",
                ("timing/won",),
                "What the samples would have taken synchronously, less what the rollout took; an estimate.",
                unit="seconds",
            ),
            Chart("engine: steps of a rollout", ("engine/steps",), "One token of every sequence that runs."),
            Chart("samples per second", ("perf/samples_per_second",)),
            Chart("bytes of a handoff", ("handoff/bytes", "handoff/minimum_bytes"), unit="bytes"),
        ),
    ),
)


def guides_of(config: Mapping[str, Any]) -> dict[str, list[Guide]]:
    """Return the guides that a run's own configuration gives, by metric."""
    guides: dict[str, list[Guide]] = {}

    def add(metric: str, name: str, value: Any, kind: str, says: str) -> None:
        if is_number(value):
            guides.setdefault(metric, []).append(Guide(kind, f"{says} ({name}={value:g})", high=float(value)))

    tolerance = config.get("rollout.handoff.probe_tolerance")
    if tolerance is None:
        tolerance = PROBE_TOLERANCES.get(str(config.get("model.dtype")))
    add("handoff/probe_gap", "probe_tolerance", tolerance, "limit", "the run stops")
    length = config.get("rollout.max_completion_length")
    add("completions/mean_length", "max_completion_length", length, "line", "limit")
    add("grad_norm", "max_grad_norm", config.get("optimizer.max_grad_norm"), "line", "cut to")
    low, high = config.get("policy_loss.epsilon"), config.get("policy_loss.epsilon_high")
    high = low if high is None else high
    if is_number(low) and is_number(high):
        guides["ratio/mean"] = [Guide("healthy", f"not clipped ({1 - low:g} to {1 + high:g})", 1 - low, 1 + high)]
    return guides


def layout(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the sections with the charts for which a run has metrics, patterns replaced by names. runs: as shown."""
    names = sorted({name for run in runs for name in run["curves"]["metrics"]})
    from_config: dict[str, list[Guide]] = {}
    for run in runs:
        for metric, guides in guides_of(run["config"]).items():
            known = from_config.setdefault(metric, [])
            known += [guide for guide in guides if guide not in known]
    sections = []
    for section in SECTIONS:
        charts = []
        for chart in section.charts:
            metrics = matching(chart.metrics, names)
            if metrics:
                guides = [*chart.guides, *(guide for metric in metrics for guide in from_config.get(metric, ()))]
                charts.append(asdict(chart) | {"metrics": metrics, "guides": [asdict(guide) for guide in guides]})
        if charts:
            sections.append({"title": section.title, "charts": charts})
    return sections


def matching(patterns: Iterable[str], names: Sequence[str]) -> list[str]:
    """Return the names that patterns fit, each once, in the order of the patterns."""
    return list(dict.fromkeys(name for pattern in patterns for name in names if fnmatchcase(name, pattern)))
