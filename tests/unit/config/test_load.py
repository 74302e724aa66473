"""From keywords, files and arguments to a config: names, types, choices, precedence and the way back through YAML."""

from __future__ import annotations

import json
import re
import typing
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from hybrid_rl.algos.advantages import Rejection
from hybrid_rl.config import Leaf, TrainerConfig, load_config, resolve, to_dict, to_yaml, visible_leaves
from hybrid_rl.config.algorithm_keys import AlgorithmConfig
from hybrid_rl.config.choices import CHOICES
from hybrid_rl.errors import ConfigError
from hybrid_rl.extras.names import by_end


def loaded(*arguments: str, **keys: Any) -> TrainerConfig:
    return load_config(None, keys, arguments)[0]


def value_at(config: TrainerConfig, path: str) -> Any:
    value: Any = config
    for part in path.split("."):
        value = getattr(value, part)
    return value


# ------------------------------------------------------------------------------------------------------------- names


def example(leaf: Leaf) -> Any:
    """A value that the key takes; another than its default where there is one."""
    kind = next((t for t in typing.get_args(leaf.type) if t is not type(None)), leaf.type)
    if leaf.default is None:
        element = next(iter(typing.get_args(kind)), float)  # of a list
        in_list = typing.get_args(element)[0] if typing.get_origin(element) is Literal else 1.5
        return {int: 3, float: min(1.5, leaf.metadata["maximum"] or 1.5), bool: True, str: "text"}.get(kind, [in_list])
    if typing.get_origin(leaf.type) is Literal:
        return typing.get_args(leaf.type)[-1]
    if isinstance(leaf.default, bool):
        return not leaf.default
    text = 3 if kind is int else "text"  # of a number, or auto
    others: dict[type, Any] = {int: leaf.default, float: 0.75, str: text, list: leaf.default, dict: {"a": 1}}
    return others[type(leaf.default)]


@pytest.mark.parametrize("leaf", [leaf for path, leaf in visible_leaves().items() if path != "algorithm.name"])
def test_a_leaf_name_means_its_path(leaf: Leaf) -> None:
    """As a keyword, as an argument, and nested as in a file."""
    value = example(leaf)
    nested: Any = value
    for part in reversed(leaf.path.split(".")):
        nested = {part: nested}
    expected = load_config({leaf.path: value})
    assert value_at(expected[0], leaf.path) == value and expected[1] == {leaf.path}
    assert load_config({leaf.name: value}) == load_config(nested) == expected
    assert load_config(None, {}, [f"{leaf.name}={json.dumps(value)}"]) == expected
    if leaf.within is not None:
        name = leaf.path.rsplit(".", 1)[-1]
        assert load_config({leaf.key.name: {name: value}}) == expected
        with pytest.raises(ConfigError, match=rf"unknown key '{name}'.* {leaf.name}\b|did you mean '{leaf.path}'"):
            load_config({name: value})


RAY_LEAVES = [leaf for path, leaf in visible_leaves({"controller": "ray"}).items() if path not in visible_leaves()]


@pytest.mark.parametrize("leaf", RAY_LEAVES, ids=lambda leaf: leaf.path)
def test_keys_of_ray_exist_with_more_ranks_or_where_it_is_chosen(leaf: Leaf) -> None:
    name, value = leaf.name, example(leaf)
    for chosen in ({"num_ranks": 2}, {"backend": "ray"}, {"controller": "ray"}):
        for keys in ({name: value}, {leaf.path: value}):
            config = load_config(chosen, keys)[0]
            assert value_at(config, leaf.path) == value and config.controller.backend == "ray"
    for one in ({}, {"num_ranks": 1}, {"num_ranks": 2, "backend": "local"}):
        message = f"key '{name}{'.a' * isinstance(value, dict)}' would do nothing: it belongs to controller.backend=ray"
        if name in by_end():
            message = by_end()[name].advice
        with pytest.raises(ConfigError, match=re.escape(message)):
            load_config(one, {name: value})


def test_dtypes_and_devices_of_torch_are_taken_by_name() -> None:
    config, _ = load_config(None, {"dtype": torch.bfloat16, "device": torch.device("cpu")})
    assert (config.model.dtype, config.model.device) == ("bfloat16", "cpu")
    with pytest.raises(ConfigError, match="model.dtype='float16' is not a valid choice: float16 is not supported"):
        load_config({"dtype": torch.float16})


@pytest.mark.parametrize("section", ["model", "data", "rollout.engine_args", "algorithm", "controller"])
@pytest.mark.parametrize("value", [3, None, [1]])
def test_a_section_is_no_value(section: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=section.replace(".", r"\.")):
        load_config({section: value})


# ------------------------------------------------------------------------------------------------------------- types


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("learning_rate", "1e-6", 1e-6),  # YAML reads 1e-6 as text
        ("learning_rate", 1, 1.0),
        ("learning_rate", np.float32(0.5), 0.5),
        ("max_steps", 16.0, 16),
        ("max_steps", "1e3", 1000),
        ("max_steps", np.int64(4), 4),
        ("max_steps", None, None),
        ("seed", 2**53 + 1, 2**53 + 1),
        ("shuffle", False, False),
        ("path", Path("some") / "model", "some/model"),
        ("stop_token_ids", (1, 2.0), [1, 2]),
        ("stop_token_ids", 7, [7]),
        ("report_to", "tensorboard", ["tensorboard"]),
        ("reward_weights", [1, "0.5"], [1.0, 0.5]),
        ("chat_template_kwargs", {"enable_thinking": False}, {"enable_thinking": False}),
    ],
)
def test_values_that_are_taken(path: str, value: Any, expected: Any) -> None:
    found = value_at(load_config({path: value})[0], next(p for p in visible_leaves() if p.split(".")[-1] == path))
    assert found == expected and type(found) is type(expected)


def test_of_adapters_a_text_is_a_regular_expression_and_a_list_has_ends_of_names() -> None:
    def lora(*arguments: str) -> Any:
        return loaded("lora.r=8", *arguments).lora

    assert not loaded().lora.is_on and lora().is_on and lora().target_modules == "all-linear"
    assert lora("target_modules=.*q_proj").target_modules == ".*q_proj"
    assert lora("target_modules=[q_proj, v_proj]").target_modules == ["q_proj", "v_proj"]
    assert lora("target_modules=null").target_modules is None
    assert lora("peft={exclude_modules: a|b}").peft.exclude_modules == "a|b"
    with pytest.raises(ConfigError, match=r"write a list as lora.target_modules=\[q_proj,v_proj\]"):
        lora("target_modules=q_proj,v_proj")
    config = loaded("lora.r=8", "target_modules=.*q_proj", "peft.rank_pattern={q_proj: 2}")
    assert load_config(config)[0] == config  # as it is read back from a run folder


# ------------------------------------------------------------------------------------------------------------ choices


@pytest.mark.parametrize("section", [section for section, choice in CHOICES.items() if choice.tag])
@pytest.mark.parametrize("value", ["grop", "", 3, ["grpo"], {"x": 1}])
def test_members_that_do_not_exist(section: str, value: Any) -> None:
    tag = CHOICES[section].tag
    with pytest.raises(ConfigError, match=rf"{section}\.{tag}=.* is unknown; use one of {CHOICES[section].default}"):
        load_config({f"{section}.{tag}": value})


def test_a_dataclass_is_no_section() -> None:
    with pytest.raises(ConfigError, match="algorithm.name=AlgorithmConfig"):
        load_config({"algorithm": AlgorithmConfig()})
    with pytest.raises(ConfigError, match="rollout.engine="):
        load_config({"rollout": TrainerConfig().rollout})


@pytest.mark.parametrize(
    "keys",
    [
        {"advantage": "rejection"},
        {"advantage": {"estimator": "rejection"}},
        {"advantage.estimator": "rejection"},
        {"estimator": "rejection"},
    ],
)
def test_a_tag_chooses_the_class(keys: dict[str, Any]) -> None:
    config = load_config({**keys, "num_best": 2, "num_generations": 3})[0]
    assert config.advantage == Rejection(num_best=2) and config.algorithm.num_generations == 3
    assert load_config(to_dict(config))[0] == config


@pytest.mark.parametrize("name", ["num_best", "advantage.num_best"])
def test_a_key_of_another_member_would_do_nothing(name: str) -> None:
    message = f"key '{name}' would do nothing: it belongs to advantage.estimator=rejection, not grpo"
    with pytest.raises(ConfigError, match=message):
        load_config({name: 7})


def test_the_last_layer_chooses() -> None:
    for base, keyword, argument, expected in (
        ("rloo", "grpo", [], "grpo"),
        ("grpo", "rloo", [], "rloo"),
        ("rloo", "rloo", ["advantage=grpo"], "grpo"),
    ):
        config, _ = load_config({"advantage": base}, {"advantage.estimator": keyword}, argument)
        assert config.advantage.estimator == expected  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("base", "keys", "arguments", "backend"),
    [
        ({}, {}, [], "local"),
        ({}, {"num_ranks": 1}, [], "local"),
        ({}, {"num_ranks": 2}, [], "ray"),
        ({}, {"num_ranks": np.int64(8)}, [], "ray"),
        ({"num_ranks": "4"}, {}, [], "ray"),
        ({}, {}, ["num_ranks=2"], "ray"),
        ({"num_ranks": 4}, {"num_ranks": 1}, [], "local"),
        ({"num_ranks": 1}, {}, ["num_ranks=4"], "ray"),
        ({"controller": "ray"}, {}, [], "ray"),
        ({"controller": {"backend": "ray"}}, {"num_ranks": 1}, [], "ray"),
        ({"backend": "local"}, {"num_ranks": 2}, [], "ray"),  # a file may have written the default down
    ],
)
def test_the_number_of_ranks_chooses_the_backend_unless_somebody_does(
    base: dict[str, Any], keys: dict[str, Any], arguments: list[str], backend: str
) -> None:
    assert load_config(base, keys, arguments)[0].controller.backend == backend


# ------------------------------------------------------------------------------------------------- layers and sources


def test_later_layers_win(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("seed: 1\noptimizer:\n  learning_rate: 1e-3\n  weight_decay: 0.5\nrollout.temperature: 0.5\n")
    config, given = load_config(file, {"learning_rate": 2e-3, "seed": 2}, ["seed=3"])
    assert (config.seed, config.optimizer.learning_rate, config.optimizer.weight_decay) == (3, 2e-3, 0.5)
    assert config.rollout.temperature == 0.5
    assert given == {"seed", "optimizer.learning_rate", "optimizer.weight_decay", "rollout.temperature"}


@pytest.mark.parametrize("make", [dict, OmegaConf.create], ids=["mapping", "omegaconf"])
def test_mappings(make: Any) -> None:
    assert load_config(make({"seed": 5, "rollout": {"engine_args": {"block_size": 8}}}))[0] == loaded(
        **{"seed": 5, "rollout.engine_args.block_size": 8}
    )


def test_nothing_given_is_the_default(tmp_path: Path) -> None:
    (tmp_path / "empty.yaml").write_text("# nothing\n")
    for nothing in (None, {}, tmp_path / "empty.yaml"):
        assert load_config(nothing) == (TrainerConfig(), frozenset())


@pytest.mark.parametrize(
    ("arguments", "path", "expected"),
    [
        (["max_steps=7"], "max_steps", 7),
        (["learning_rate=3e-4"], "optimizer.learning_rate", 3e-4),
        (["report_to=[tensorboard, wandb]"], "report_to", ["tensorboard", "wandb"]),
        (["stop_token_ids=[1,2]"], "rollout.stop_token_ids", [1, 2]),
        (["chat_template_kwargs={a.b: 1, c: [x]}"], "data.chat_template_kwargs", {"a.b": 1, "c": ["x"]}),
        (["max_steps=7", "max_steps="], "max_steps", None),
        (["model.path=a=b/c.d"], "model.path", "a=b/c.d"),
        (["shuffle=false"], "data.shuffle", False),
    ],
)
def test_arguments_are_yaml(arguments: list[str], path: str, expected: Any) -> None:
    assert value_at(loaded(*arguments), path) == expected


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("max_steps", "not of the form key=value"),
        ("=3", "not of the form key=value"),
        ("report_to=[a", "not YAML"),
        ("run_name=a: b", "not YAML"),
        ("run_name=${oc.env:NOT_SET_ANYWHERE}", "not YAML"),
    ],
)
def test_bad_arguments(argument: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        loaded(argument)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a\n- b\n", "must be a mapping"),
        ("seed: [1\n", "cannot parse"),
        ("seed: 1\nseed: 2\n", "cannot"),
        ("seed: ${nowhere}\n", "cannot read"),
        ("just words", "unknown key 'just words'"),
    ],
)
def test_bad_files(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_config(tmp_path / "config.yaml")


def test_no_file(tmp_path: Path) -> None:
    for path in (tmp_path / "missing.yaml", tmp_path):
        with pytest.raises(ConfigError, match="does not exist"):
            load_config(str(path))


def test_a_number_is_no_config() -> None:
    with pytest.raises(ConfigError, match="must be a mapping of keys, a YAML file of one, or a TrainerConfig, not 3"):
        load_config(3)  # type: ignore[arg-type]


# -------------------------------------------------------------------------------------------------------- round trip


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"beta": 0.1, "kl_estimator": "k2", "use_bias_correction_kl": False, "delta": 4.0, "epsilon_high": 0.28},
        {"prompts_per_step": 12, "prompts_per_mini_batch": 4, "num_iterations": 2, "learning_rate": 1e-7},
        {"max_steps": 3, "stop_token_ids": [1, 2], "report_to": ["wandb"], "reward_weights": [0.1, 2]},
        {"chat_template_kwargs": {"enable_thinking": False, "depth": {"a": [1, "x", None]}, "odd": "1e5"}},
        {"model.path": "ümlaut 中文: # 'quoted' \"x\"", "output_dir": "~"},
        {"num_ranks": 4, "dp_replicate": 2, "ray.cpus_per_rank": 1, "ray.env_vars": {"A": "1"}},
        {"backend": "ray", "beta": 0.1, "reference_ranks": 2},
        {"mode": "train", "rollouts_path": "runs/a/rollouts"},
    ],
)
def test_the_resolved_config_comes_back_from_its_file(tmp_path: Path, keys: dict[str, Any]) -> None:
    """Resolving what was read back, with every key counted as given, changes nothing."""
    config = resolve(*load_config(keys))
    file = tmp_path / "config.yaml"
    file.write_text("# a comment\n" + to_yaml(config), encoding="utf-8")
    again, given = load_config(file)
    assert again == config and resolve(again, given) == config
    assert given == set(visible_leaves({"controller": config.controller.backend, "kl": config.kl.kl_in}))  # type: ignore[attr-defined]
    assert load_config(config)[0] == config


def test_texts_that_look_like_something_else_stay_texts(tmp_path: Path) -> None:
    numbers = ["1e5", "007", "-1e-3", ".5e3", "1.5", "0x1f", "1_000", "12:30:00", "2026-01-01"]
    for name in [*numbers, "", " x", "a: b", "null", "true", "no", "~"]:
        (tmp_path / "config.yaml").write_text(to_yaml(loaded(system_prompt=name)))
        assert load_config(tmp_path / "config.yaml")[0].data.system_prompt == name


def test_to_dict_is_a_copy() -> None:
    config = loaded(chat_template_kwargs={"a": [1]})
    to_dict(config)["data"]["chat_template_kwargs"]["a"].append(2)
    assert config.data.chat_template_kwargs == {"a": [1]}


def test_a_key_of_a_mapping_is_set_by_its_path() -> None:
    config, given = load_config(None, {}, ["data.chat_template_kwargs.enable_thinking=false", "run_name=7"])
    assert config.data.chat_template_kwargs == {"enable_thinking": False}
    assert config.run_name == "7"  # YAML reads a number
    assert given == {"data.chat_template_kwargs", "run_name"}


def test_the_users_folder_stands_for_a_tilde_in_paths_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without, `output_dir=~/runs` would make a folder named ~."""
    monkeypatch.setenv("HOME", "/people/ann")
    tmp_path.joinpath("own.yaml").write_text("model: {path: ~/models/tiny}")
    keys = {"train_path": {"easy": "~/easy.jsonl", "hard": {"path": "~ann/hard.jsonl"}}, "run_name": "~x"}
    config = load_config(tmp_path / "own.yaml", keys, ("output_dir=~/runs",))[0]
    assert (config.model.path, config.output_dir) == ("/people/ann/models/tiny", "/people/ann/runs")
    assert config.data.train_path == {"easy": "/people/ann/easy.jsonl", "hard": {"path": "~ann/hard.jsonl"}}
    assert config.run_name == "~x"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load_config("~/own.yaml")[0].model.path == f"{tmp_path}/models/tiny"


def test_a_key_given_by_leaf_and_by_path_in_one_place_is_refused() -> None:
    with pytest.raises(ConfigError, match="optimizer.learning_rate is given twice"):
        load_config(None, {"learning_rate": 1e-3, "optimizer": {"learning_rate": 1e-4}})


def test_the_saved_config_of_one_rank_takes_another_number_of_ranks(tmp_path: Path) -> None:
    saved = tmp_path / "config.yaml"
    saved.write_text(to_yaml(load_config()[0]))
    assert load_config(saved, {"num_ranks": 2})[0].controller.backend == "ray"
    assert load_config(saved, arguments=["num_ranks=2"])[0].controller.backend == "ray"
    assert load_config(saved, {"num_ranks": 1})[0].controller.backend == "local"
    # Whoever asks for it gets it, and is told so when the values are checked together.
    assert load_config(saved, {"num_ranks": 2, "backend": "local"})[0].controller.backend == "local"


ITSELF: dict[str, object] = {}
ITSELF["a"] = ITSELF


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("on: 2", "the key True is of type bool; keys are text"),
        ("rollout:\n  1: 2", "the key rollout.1 is of type int"),
        ("null: 2", "cannot read config: Incompatible key type 'NoneType': keys are text$"),
        ({1: 2}, "the key 1 is of type int"),
        ({"rollout": {None: 2}}, "the key rollout.None is of type NoneType"),
        ({"rollout": ITSELF}, "rollout.a contains itself"),
    ],
)
def test_keys_are_text_in_a_tree(given, message: str, tmp_path) -> None:
    """Both as a file or mapping, and as keywords."""
    if isinstance(given, str):
        (tmp_path / "a.yaml").write_text(given)
        given = tmp_path / "a.yaml"
    else:
        with pytest.raises(ConfigError, match=message):
            load_config(None, given)
    with pytest.raises(ConfigError, match=message):
        load_config(given)


def test_trackers_that_are_not_installed_are_named_in_the_same_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=r"(?s)^2 keys .*learnin_rate .*report_to .*mlflow is not installed; pip install\s+mlflow"
    ):
        loaded(learnin_rate=1.0, report_to=["mlflow", "none"])
    assert loaded(report_to=["mlflow"]).report_to == ["mlflow"]  # nothing else is wrong: asked at the start
