"""Keys of other libraries: each is answered, by keys that exist, and all that are wrong in one error."""

import dataclasses
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from hybrid_rl import Trainer
from hybrid_rl.config import TrainerConfig, load_config
from hybrid_rl.config.choices import CHOICES
from hybrid_rl.config.leaves import all_leaves, leaf_names, visible_leaves
from hybrid_rl.errors import ConfigError
from hybrid_rl.extras import names as habits
from hybrid_rl.extras.names import Habit, by_end, habit_of, names, records
from hybrid_rl.extras.names.records import read_table

ELSEWHERE = Path(__file__).parent / "elsewhere"
TABLES = sorted(Path(habits.__file__).parent.glob("*.yaml"))
KEYS = leaf_names()
SECTIONS = {item.name for item in dataclasses.fields(TrainerConfig)} | set(CHOICES)
MEMBERS = {member for choice in CHOICES.values() for member in choice.members}
PATHS = {name for leaf in all_leaves() for name in (leaf.path, leaf.name, leaf.key.path)}
ARGUMENTS = set(inspect.signature(Trainer).parameters)
# Words with an underscore or a dot in them that are no keys.
FILES = {"metrics.jsonl", "samples.jsonl", "num_tokens", "trainer.plan", "requires_grad", "torch.backends.cuda.matmul"}
FILES |= {"space_id", "experiment_name"}
FILES |= {
    "allow_tf",
    "fsdp_size",
    "chat_template",
    "torch.backends.cuda.matmul.allow_tf32",
    "low_var_kl",
    "rollout.vllm",
    "rollout.engine_args.model_impl",
}


def names_of(file: str) -> list[str]:
    return [line for line in (ELSEWHERE / file).read_text().splitlines() if not line.startswith("#")]


@pytest.mark.parametrize("file", ["trl.txt", "transformers.txt"])
def test_every_field_of_grpo_config_is_answered(file: str) -> None:
    known = {habit.name: habit for habit in records()}
    for name in names_of(file):
        assert known[name].library in ("TRL", "transformers"), name
        assert (known[name].kind == "same") == (name in KEYS), f"{name}: is it a key here?"


def test_every_common_key_of_verl_is_answered() -> None:
    unanswered = [name for name in names_of("verl.txt") if habit_of(name) is None and name not in PATHS]
    assert not unanswered


def repeated(node: yaml.Node, path: str = "") -> list[str]:
    """Return what a YAML file says twice in a mapping or a list of texts, of which a reader would take the last."""
    if isinstance(node, yaml.MappingNode):
        texts = [key.value for key, _ in node.value if key.tag.endswith(":str")]
        inner = [twice for key, value in node.value for twice in repeated(value, f"{path}{key.value}/")]
    elif isinstance(node, yaml.SequenceNode):
        texts, inner = [item.value for item in node.value], []
    else:
        return []
    return [path + text for text in sorted(set(texts)) if texts.count(text) > 1] + inner


@pytest.mark.parametrize("file", TABLES, ids=lambda file: file.stem)
def test_tables_say_nothing_twice(file: Path) -> None:
    assert repeated(yaml.compose(file.read_text(), yaml.SafeLoader)) == []


def test_what_is_said_twice_is_noticed() -> None:
    text = "other name: {a: b, c: d, a: e}\nsame: [x, y, x]\n"
    assert repeated(yaml.compose(text, yaml.SafeLoader)) == ["other name/a", "same/x"]


def test_tables_have_known_parts() -> None:
    parts = {"library", "same", "other name", "not needed", "missing"}
    others = {file: set(read_table(file)) - parts for file in habits.FILES}
    assert others == {"trl": set(), "transformers": set(), "verl": {"carried"}, "others": set()}
    assert {file.stem for file in TABLES} == {*habits.FILES, "values", "trainer"}
    texts = [text for habit in records() for text in (habit.library, habit.name, habit.here, habit.note)]
    texts += [*read_table("verl")["carried"], *read_table("values")["off anyway"], *read_table("values")["plain words"]]
    assert [text for text in texts if not isinstance(text, str)] == []
    answers = read_table("values")["values"]
    assert {type(value) for known in answers.values() for value in known} == {str, bool}
    assert {type(advice) for known in answers.values() for advice in known.values()} == {str}


def test_records_are_whole() -> None:
    assert len({(habit.library, habit.name) for habit in records()}) == len(records())
    for habit in records():
        assert bool(habit.here) == (habit.kind in ("same", "other name")), habit
        assert habit.here or habit.note, habit
        assert not habit.note.endswith("."), habit
        if habit.kind == "same":
            assert habit.here in KEYS, habit
    both = set(by_end()) & {leaf.name for leaf in visible_leaves().values()}
    assert not both, both
    assert {switch for switch in read_table("values")["off anyway"] if habit_of(switch) is None} == set()


@pytest.mark.parametrize("library", sorted({habit.library for habit in records()}))
def test_what_is_to_be_set_exists(library: str) -> None:
    known = KEYS | SECTIONS | MEMBERS | PATHS | ARGUMENTS | FILES | {f"{s}.{c.tag}" for s, c in CHOICES.items()}
    for habit in (habit for habit in records() if habit.library == library):
        words = set(re.findall(r"[a-z]+(?:[_.][a-z_0-9]+)+", habit.advice))
        words |= set(re.findall(r"(?<=set )[a-z_0-9.]+", habit.advice))
        assert words <= known, habit
        for section, value in re.findall(r"([a-z_.]+)=([a-z_]+)", habit.advice):
            tag = section.partition(".")[0]
            if tag in CHOICES and CHOICES[tag].tag:
                assert value in CHOICES[tag].members, habit


def refusal(keys: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(keys)
    return str(caught.value)


@pytest.mark.parametrize("prefix", ["", "elsewhere."])
@pytest.mark.parametrize("library", ["TRL", "transformers", "verl", "others"])
def test_the_error_gives_the_advice(library: str, prefix: str) -> None:
    """For full names, wherever the section lies, and for names that are alone as the last word of one."""
    for habit in records():
        if habit.library != library or habit.kind == "same" or habit.name.endswith("*"):
            continue
        found = habit_of(prefix + habit.name)
        assert found is not None and (found == habit or found.name == habit.name), habit
    one = next(habit for habit in records() if habit.library == library and habit.kind == "other name")
    assert refusal({prefix + one.name: 1}) == f"unknown key {prefix + one.name!r}: {one.advice}"


def test_all_that_is_wrong_is_one_table() -> None:
    text = refusal(
        {"lr": 1, "logging_steps": 2, "bogus": 3, "max_steps": 1.5, "gamma": 0.9, "learning_rat": 1, "num_ranks": 0}
        | {"actor_rollout_ref": {"rollout": {"n": 5, "tensor_model_parallel_size": 2}, "actor": {"optim": {"lr": 1}}}}
    )
    table, _, line = text.partition("\nWhat is clear, in one line:\n")
    rows = re.split(r"\n  (?=\S)", re.sub(r"\n {20,}", " ", table))
    assert line == "  learning_rate=1 num_generations=5 tensor_parallel_size=2"  # of verl's; and nothing that is wrong
    assert rows[0] == "10 keys cannot be used as they are:"
    assert {row.split()[0]: " ".join(row.split()[1:]) for row in rows[1:]} == {
        "lr": "set learning_rate=1",
        "logging_steps": "leave it out: every training step is logged",
        "bogus": "no such key (`hybrid-rl keys` lists all)",
        "gamma": "would do nothing: it belongs to advantage.estimator=reinforce_plus_plus or gae or vapo or vtrace, "
        "not grpo",
        "learning_rat": "no such key; did you mean 'learning_rate'? (`hybrid-rl keys` lists all)",
        "actor_rollout_ref.rollout.n": "set num_generations=5",
        "actor_rollout_ref.rollout.tensor_model_parallel_size": "set tensor_parallel_size=2: with rollout.engine=vllm",
        "actor_rollout_ref.actor.optim.lr": "set learning_rate=1",
        "max_steps": "1.5 must be of type int",
        "num_ranks": "0 must be at least 1",
    }
    assert max(map(len, text.splitlines())) < 100


def test_an_unknown_member_hides_no_unknown_key() -> None:
    text = refusal({"algorithm": "grop", "lr": 1, "cliprange_value": 0.1})
    assert "algorithm.name='grop' is unknown" in text and "set learning_rate" in text
    assert "cliprange_value" not in text  # it may be a key of the algorithm that was meant


def test_the_records_are_of_use_to_the_documentation() -> None:
    """A table has a row per record."""
    counts = {library: sum(h.library == library for h in records()) for library in ("TRL", "transformers", "verl")}
    assert counts["TRL"] >= 79 and counts["transformers"] >= 112 and counts["verl"] > 150
    assert Habit("verl", "actor_rollout_ref.rollout.n", "other name", "num_generations") in records()
    assert "megatron.*" in names()
