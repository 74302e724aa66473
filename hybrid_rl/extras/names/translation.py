"""Settings of verl, and those of adapters in TRL, key and value, as settings here."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from hybrid_rl.config.unknown import theirs
from hybrid_rl.extras.names import corrections
from hybrid_rl.extras.names.records import Answer, read_table, said


def translate(path: str, value: Any, asked: Mapping[str, Any]) -> Answer | None:
    """Return what becomes of a setting of verl, or of an adapter in TRL; None if that is not clear from its value.

    asked: all settings, by path, because some count only with others.
    """
    habit = theirs(path)
    if path.startswith("~"):
        return Answer(note="with ~ Hydra deletes a key; here only the keys that are set exist")
    if path.removeprefix("lora.") == "lora_alpha" and asked.keys() & _RANKS:
        return Answer({"lora_alpha": value})
    if habit is not None and path in _SHORT:
        return _SHORT[path](value, asked)
    if habit is None or habit.library != "verl":
        return None
    if habit.name in _RULES:
        # The last word alone may be meant as in another library.
        is_verls = path.split(".")[-2:] == habit.name.split(".")[-2:]
        return _RULES[habit.name](value, asked) if is_verls else None
    key, _, more = habit.here.partition(" ")
    if value is None:
        return Answer(note="None asks for nothing")
    is_carried = key in read_table("verl")["carried"] and isinstance(value, str | int | float)
    return Answer({key: value}, habit.note or more.strip("()")) if is_carried or habit.kind == "same" else None


def pasted(settings: Mapping[str, Any]) -> str:
    """Return settings as arguments of a command, quoted for a shell."""
    return " ".join(shlex.quote(said(key, value)) for key, value in settings.items())


def _asked(asked: Mapping[str, Any], name: str, default: Any = None) -> Any:
    """Return the value of the key whose path ends in a name; the default if it is not given."""
    return next((value for path, value in asked.items() if f".{path}".endswith(f".{name}")), default)


_ESTIMATORS = MappingProxyType(
    {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3", "abs": "abs", "full": "exact"}
)
_ADVANTAGES = MappingProxyType(
    {name: name for name in ("grpo", "gae", "rloo", "remax", "opo", "gpg", "optimal_token_baseline")}
    | {name: name for name in ("reinforce_plus_plus", "reinforce_plus_plus_baseline")}
    | {"grpo_vectorized": "grpo", "rloo_vectorized": "rloo", "grpo_passk": "pass_at_k"}
)
_LOSSES = MappingProxyType({"token-mean": "dapo", "seq-mean-token-mean": "grpo", "seq-mean-token-sum": "sequence_sum"})
_BOTH = "verl would put KL into the loss and into the reward; choose kl=loss or kl=reward, and beta"
_CLAMPED = "verl stops it at 10, so tokens with ln(reference / policy) above 2.61 have no gradient there"
_VERLS_BETA = 0.001
_VERLS_ALPHA = 16
_TRACKERS = ("tensorboard", "wandb", "trackio", "mlflow")


def _kl(other: str, where: str, coefficient: str, **more: Any) -> Callable[[Any, Mapping[str, Any]], Answer | None]:
    def rule(value: Any, asked: Mapping[str, Any]) -> Answer | None:
        if not value:
            return Answer(note=f"{value} asks for nothing")
        if _asked(asked, other):
            return Answer(note=_BOTH)
        settings = {"kl": where, "beta": _asked(asked, coefficient, _VERLS_BETA), **more}
        return Answer(settings, f"verl's {coefficient} counts")

    return rule


def _with(switch: str, here: str, rule: Callable[[Any], Answer | None]) -> Callable[[Any, Mapping[str, Any]], Any]:
    """A key that counts in verl only if a switch is on, which is off unless it is given."""

    def counts(value: Any, asked: Mapping[str, Any]) -> Answer | None:
        if _asked(asked, "use_kl_loss") and _asked(asked, "use_kl_in_reward"):
            return Answer(note=_BOTH)
        return rule(value) if _asked(asked, switch) else Answer(note=f"it counts only with {switch}=True (here {here})")

    return counts


def _choice(key: str, words: Mapping[str, str]) -> Callable[..., Answer | None]:
    return lambda value, _asked=None: Answer({key: words[value]}) if value in words else None


def _estimator_in_loss(value: Any) -> Answer | None:
    """With a plus verl has the gradient of k2, whatever the value is."""
    base = _ESTIMATORS.get(str(value).removesuffix("+"))
    if base is None:
        return None
    if str(value).endswith("+"):
        return Answer({"kl_estimator": "k2"}, f"{value} has the gradient of k2")
    if base == "k1":
        return Answer(note="in the loss the gradient of k1 is zero in expectation; set kl_estimator=k2 or k3")
    return Answer({"kl_estimator": base}, _CLAMPED if base == "k3" else "")


def _positive(key: str) -> Callable[[Any, Mapping[str, Any]], Answer | None]:
    """A number of which -1, 0 and None ask for nothing."""

    def rule(value: Any, _: Mapping[str, Any]) -> Answer | None:
        is_on = isinstance(value, int | float) and value > 0
        return Answer({key: value}) if is_on else Answer(note=f"{value} asks for nothing")

    return rule


def _offload(word: str) -> Callable[[Any, Mapping[str, Any]], Answer | None]:
    def rule(value: Any, asked: Mapping[str, Any]) -> Answer | None:
        if not value:
            return Answer(note=f"{value} asks for nothing")
        asking = [name for path, name in _RESIDENTS.items() if _asked(asked, path)]
        return Answer({"memory.offload": asking}, f"the {word} while a phase does not need it")

    return rule


_RESIDENTS = MappingProxyType(
    {
        "actor_rollout_ref.actor.fsdp_config.param_offload": "actor",
        "actor_rollout_ref.actor.fsdp_config.optimizer_offload": "optimizer",
        "actor_rollout_ref.ref.fsdp_config.param_offload": "reference",
        "critic.model.fsdp_config.param_offload": "critic",
        "critic.model.fsdp_config.optimizer_offload": "critic_optimizer",
    }
)


def _loggers(value: Any, asked: Mapping[str, Any]) -> Answer | None:
    names = [value] if isinstance(value, str) else list(value or [])
    unknown = [name for name in names if name not in (*_TRACKERS, "console", "file")]
    if unknown:
        return None
    kept = [name for name in names if name in _TRACKERS]
    project = "wandb" in kept and _asked(asked, "trainer.project_name")
    wanted = {name: {"project": project} if name == "wandb" else {} for name in kept} if project else kept
    return Answer({"report_to": wanted} if kept else {}, "the console and metrics.jsonl are always there")


def _project(_: Any, asked: Mapping[str, Any]) -> Answer | None:
    if "wandb" not in (loggers := _asked(asked, "trainer.logger") or []):
        return Answer(note="only trackers have projects: report_to={wandb: {project: P}}")
    return _loggers(loggers, asked)


def _ranks(value: Any, asked: Mapping[str, Any]) -> Answer | None:
    nodes, gpus = _asked(asked, "trainer.nnodes", 1), _asked(asked, "trainer.n_gpus_per_node", 8)
    if not isinstance(nodes, int) or not isinstance(gpus, int):
        return None
    return Answer({"num_ranks": nodes * gpus}, "over all nodes" + "; see also controller.address" * (nodes > 1))


def _truncation(value: Any, asked: Mapping[str, Any]) -> Answer | None:
    if _asked(asked, "filter_overlong_prompts"):
        return Answer(note="with filter_overlong_prompts no prompt is too long")
    return _choice("overlong_prompts", {"error": "error", "left": "truncate"})(value)


def _reward(value: Any, asked: Mapping[str, Any]) -> Answer | None:
    file, name = (_asked(asked, f"custom_reward_function.{key}") for key in ("path", "name"))
    if not file:
        return Answer(note="without a path it names nothing; pass reward=FILE.py:FUNCTION, in Python reward_funcs=")
    return Answer({"reward": f"{file}:{name or 'compute_score'}"}, "on a command line; in Python pass reward_funcs=")


def _switch(settings: Mapping[str, Any]) -> Callable[[Any, Mapping[str, Any]], Answer | None]:
    return lambda value, _: Answer(settings) if value else Answer(note=f"{value} asks for nothing")


def _clip_ratio(value: Any, asked: Mapping[str, Any]) -> Answer | None:
    if _asked(asked, "clip_ratio_low") is not None:
        return Answer(note="clip_ratio_low and clip_ratio_high count")
    return Answer({"epsilon": value})


def _resume(value: Any, _: Mapping[str, Any]) -> Answer | None:
    if value == "auto":
        return Answer({"resume": "auto"}, "with run_name")
    return Answer(note="without resume a run starts anew" if value == "disable" else "resume_from_path counts")


def _tensor_parallel(value: Any, asked: Mapping[str, Any]) -> Answer | None:
    return (
        Answer(note="1 asks for nothing")
        if value == 1
        else Answer({"tensor_parallel_size": value}, "with rollout.engine=vllm")
    )


def _adapter_rank(value: Any, asked: Mapping[str, Any]) -> Answer | None:
    if not value:
        return Answer(note=f"{value} asks for nothing")
    return Answer({"lora.r": value, "lora_alpha": _asked(asked, f"{_MODEL}.lora_alpha", _VERLS_ALPHA)})


def _of_adapter(key: str) -> Callable[[Any, Mapping[str, Any]], Answer | None]:
    """A key that counts in verl only if there are adapters."""

    def rule(value: Any, asked: Mapping[str, Any]) -> Answer | None:
        if value is None or not _asked(asked, f"{_MODEL}.lora_rank"):
            return Answer(note="it counts only with lora_rank above 0 (here lora.r)")
        return Answer({key: value})

    return rule


def _rank(name: str, rank: int, alpha: int) -> Callable[[Any, Mapping[str, Any]], Answer]:
    """Rank and alpha of adapters. name: of the rank there; rank, alpha: the defaults there."""

    def rule(value: Any, asked: Mapping[str, Any]) -> Answer:
        if not value:
            return Answer(note=f"{value} asks for nothing")
        asked_alpha = asked.get("lora_alpha", asked.get("lora.lora_alpha"))
        note = "" if asked_alpha is not None else f"without lora_alpha it is {alpha} there"
        return Answer(
            {"lora.r": asked.get(name, rank), "lora_alpha": alpha if asked_alpha is None else asked_alpha}, note
        )

    return rule


def _names(key: str) -> Callable[[Any, Mapping[str, Any]], Answer]:
    """Ends of names of layers, one or several."""

    def rule(value: Any, _: Mapping[str, Any]) -> Answer:
        if value is None:
            return Answer(note="None asks for nothing")
        return Answer({key: [value] if isinstance(value, str) and value != "all-linear" else value})

    return rule


# Keys of adapters on TRL's command line, and lora_rank of verl and OpenRLHF, which share its default of alpha.
_RANKS = frozenset({"use_peft", "lora_r", "lora_rank"})
_SHORT: Mapping[str, Callable[[Any, Mapping[str, Any]], Answer]] = MappingProxyType(
    {
        "use_peft": _rank("lora_r", 16, 32),
        "lora_r": _rank("lora_r", 16, 32),
        "lora_rank": _rank("lora_rank", 0, _VERLS_ALPHA),
        "lora_target_modules": _names("target_modules"),
        "lora_target_parameters": _names("peft.target_parameters"),
        "lora_modules_to_save": _names("peft.modules_to_save"),
    }
)
_ACTOR, _ROLLOUT, _MODEL = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "model"))
_LOSS_SWITCH, _REWARD_SWITCH = ("use_kl_loss", "kl=loss and beta"), ("use_kl_in_reward", "kl=reward and beta")
_RULES: Mapping[str, Callable[[Any, Mapping[str, Any]], Answer | None]] = MappingProxyType(
    {
        f"{_ACTOR}.use_kl_loss": _kl("use_kl_in_reward", "loss", "kl_loss_coef", use_bias_correction_kl=False),
        "algorithm.use_kl_in_reward": _kl("use_kl_loss", "reward", "kl_coef"),
        f"{_ACTOR}.kl_loss_coef": _with(*_LOSS_SWITCH, lambda value: Answer({"beta": value})),
        "algorithm.kl_ctrl.kl_coef": _with(*_REWARD_SWITCH, lambda value: Answer({"beta": value})),
        f"{_ACTOR}.kl_loss_type": _with(*_LOSS_SWITCH, _estimator_in_loss),
        "algorithm.kl_penalty": _with(*_REWARD_SWITCH, _choice("kl_estimator", _ESTIMATORS)),
        "algorithm.adv_estimator": _choice("advantage", _ADVANTAGES),
        f"{_ACTOR}.loss_agg_mode": _choice("loss_type", _LOSSES),
        f"{_ACTOR}.clip_ratio": _clip_ratio,
        f"{_ACTOR}.clip_ratio_low": lambda value, _: Answer({"epsilon": value}),
        f"{_ACTOR}.optim.lr_warmup_steps": _positive("warmup_steps"),
        f"{_ACTOR}.optim.lr_warmup_steps_ratio": lambda value, _: None if value else Answer(note="0 asks for nothing"),
        f"{_ROLLOUT}.name": lambda value, _: Answer({"rollout.engine": value}) if value in ("vllm", "hf") else None,
        f"{_ROLLOUT}.tensor_model_parallel_size": _tensor_parallel,
        f"{_ROLLOUT}.val_kwargs.do_sample": lambda value, _: None if value else Answer({"eval_temperature": 0}),
        f"{_MODEL}.enable_activation_offload": _switch({"on_host": ["activations"]}),
        f"{_MODEL}.lora_rank": _adapter_rank,
        **{f"{_MODEL}.{key}": _of_adapter(key) for key in ("lora_alpha", "target_modules")},
        f"{_MODEL}.exclude_modules": _of_adapter("peft.exclude_modules"),
        "critic.model.lora_rank": _switch({"lora_critic": True}),
        **{
            f"critic.model.{key}": lambda _, __: Answer(note="the critic's adapter has that of the policy's")
            for key in ("lora_alpha", "target_modules")
        },
        "data.filter_overlong_prompts": _switch({"overlong_prompts": "drop"}),
        "data.truncation": _truncation,
        "trainer.critic_warmup": _positive("critic_warmup_steps"),
        "trainer.save_freq": _positive("save_steps"),
        "trainer.test_freq": _positive("eval_steps"),
        "trainer.log_val_generations": _positive("log_completions"),
        "trainer.logger": _loggers,
        "trainer.project_name": _project,
        "trainer.nnodes": _ranks,
        "trainer.n_gpus_per_node": _ranks,
        "trainer.resume_mode": _resume,
        **corrections.RULES,
        "custom_reward_function.path": _reward,
        "custom_reward_function.name": _reward,
        **{path: _offload(one.replace("_", "'s ")) for path, one in _RESIDENTS.items()},
    }
)
