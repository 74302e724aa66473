"""The configuration keys of evaluation, of the best checkpoint, and of stopping early."""

from __future__ import annotations

from dataclasses import dataclass

from hybrid_rl.algos.options import entries, key


@dataclass(frozen=True)
class EarlyStopping:
    """When a run ends before its last step because it gets no better."""

    patience: int | None = key(
        None, "stop after this many evaluations in a row that were not better than the best; None = never", minimum=1
    )
    threshold: float = key(0.0, "by how much an evaluation must be better to count", minimum=0)


@dataclass(frozen=True)
class EvalConfig:
    """Evaluation on held-out prompts."""

    eval_steps: int | None = key(
        None, "also evaluate every n training steps; None = only before the first and after the last", minimum=1
    )
    eval_on_start: bool = key(True, "evaluate before the first step")
    eval_temperature: float = key(0.0, "0 = greedy", minimum=0)
    eval_repetition_penalty: float = key(
        1.0,
        "repetition penalty: tokens already in the prompt or completion become less likely, in evaluation only; "
        "1 = off",
        above=0,
    )
    success_reward: float | None = key(
        None,
        "smallest value of the first reward function (or of success_functions) at which a sample counts as right in "
        "eval/accuracy, pass@k and maj@k; None = 1 as long as a run has seen only 0 and 1, else there is no accuracy",
    )
    success_functions: list[str] = key(
        [],
        "names of the reward functions that say what is right, of each sample the first that gives it a value (others "
        "return None: sets with answers of their own kind); [] = the first reward function",
    )
    metric_for_best_model: str | None = key(
        None,
        "metric by which the best step is remembered in best.json, such as eval/accuracy or eval/gsm8k/pass@8; with "
        "save_steps its checkpoint is kept too; None = none",
    )
    greater_is_better: bool | None = key(
        None, "whether a larger metric_for_best_model is better; None = yes, unless its name ends in loss or length"
    )
    load_best_model_at_end: bool = key(
        False, "take the weights of the best checkpoint at the end of fit(); needs save_steps"
    )
    early_stopping: EarlyStopping = entries(EarlyStopping, "the end of a run whose metric_for_best_model has its best")

    # Keys of sampled evaluation exist only in SampledEvalConfig.
    eval_top_p = 1.0
    eval_top_k = 0
    eval_min_p = 0.0
    num_generations_eval = 1


@dataclass(frozen=True)
class SampledEvalConfig(EvalConfig):
    """Evaluation with eval_temperature above 0."""

    eval_top_p: float = key(1.0, "nucleus sampling, in evaluation only", above=0, maximum=1)
    eval_top_k: int = key(0, "sample among the k most likely tokens, in evaluation only; 0 = all", minimum=0)
    eval_min_p: float = key(
        0.0, "lowest probability relative to the most likely token, in evaluation only", minimum=0, maximum=1
    )
    num_generations_eval: int = key(
        1, "completions per evaluation prompt; above 1, eval/pass@n is logged in addition to the accuracy", minimum=1
    )
