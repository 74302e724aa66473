"""transformers' names outside its public interface: each one fails here first, by name, when it moves."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import torch
from transformers import PreTrainedModel, Qwen2Config
from transformers.utils.hub import cached_files

from hybrid_rl.compat import transformers as compat
from tests.architecture.source import read_modules
from tests.unit.models.families import build

ROOT = Path(__file__).parents[3]
HOME = "hybrid_rl/compat/transformers.py"
PUBLIC_MODULES = {"transformers", "transformers.utils"}


def test_a_missing_file_of_the_hub_can_be_told_from_a_failure() -> None:
    assert "_raise_exceptions_for_missing_entries" in inspect.signature(cached_files).parameters


def test_a_loaded_model_tells_its_conversions(tmp_path: Path) -> None:
    made = build("qwen2")
    made.save_pretrained(tmp_path)
    assert compat.loaded_conversions(made) is None
    assert compat.loaded_conversions(type(made).from_pretrained(tmp_path)) == []


def test_no_other_file_imports_from_modules_that_are_not_documented() -> None:
    """Nor does one use a private name: see `private_names` in tests/architecture/rules.py."""
    found = [
        f"{module.path}:{item.line}: from {item.target}"
        for module in read_modules(ROOT, ("hybrid_rl",))
        for item in module.imports
        if item.target.split(".")[0] == "transformers" and item.target not in PUBLIC_MODULES
    ]
    assert not [line for line in found if not line.startswith(HOME)]


def test_a_view_shares_what_a_config_says() -> None:
    config = Qwen2Config(hidden_size=8, attn_implementation="sdpa")
    answers: dict[int, str] = {}
    view = compat.config_view(config, lambda asked: answers.get(id(asked)))
    assert compat.viewed_config(view) is config and compat.viewed_config(config) is config
    assert isinstance(view, Qwen2Config) and view == config and config == view and repr(view) == repr(config)
    view.hidden_size = 16
    assert config.hidden_size == 16 and compat.attention_name(view) == "sdpa"
    answers[id(view)] = "mine"
    assert (compat.attention_name(view), compat.attention_name(config)) == ("mine", "sdpa")


def test_what_is_kept_in_float32() -> None:
    class Kept(PreTrainedModel):
        config_class = Qwen2Config
        _keep_in_fp32_modules = ["a"]
        _keep_in_fp32_modules_strict = ["b.c"]
        _keys_to_ignore_on_save = ["d"]

    model = Kept(Qwen2Config())
    assert compat.fp32_name_parts(model) == ["a", "b.c"] and compat.keys_not_saved(model) == {"d"}
    strict = compat.fp32_pattern(model, torch.bfloat16)
    assert strict is not None and strict.search("x.b.c.weight") and not strict.search("x.d.weight")
    assert compat.fp32_pattern(build("qwen2"), torch.bfloat16) is None


UNCHANGED = """
import sys
import torch
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

def classes():
    found = {}
    for module in list(sys.modules.values()):
        if module.__name__.split(".")[0] == "transformers":
            for thing in list(vars(module).values()):
                if isinstance(thing, type) and thing.__module__.startswith("transformers"):
                    found[thing] = dict(vars(thing))
    return found

sizes = dict(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
model = Qwen2ForCausalLM(Qwen2Config(**sizes, num_key_value_heads=1))
before, functions = classes(), dict(AttentionInterface._global_mapping)
assert {PreTrainedConfig, PreTrainedModel, Qwen2Config, AttentionInterface} < before.keys()
import hybrid_rl.run.trainer, hybrid_rl.workers.hybrid
from hybrid_rl.models import CausalLM
CausalLM(model).packed_logprobs(torch.arange(5), [2, 3], torch.tensor([1, 4]), 1.0)[0].sum().backward()
for kind, members in classes().items():
    old = before.get(kind, members)
    assert {n for n in members if members[n] is not old.get(n)} | (old.keys() - members.keys()) == set(), kind
assert AttentionInterface._global_mapping.items() >= functions.items()
print("unchanged")
"""


def test_importing_and_running_changes_no_class_of_transformers() -> None:
    """Only names of our own are registered beside transformers' attention functions."""
    done = subprocess.run([sys.executable, "-c", UNCHANGED], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1:] == ["unchanged"], done.stderr
