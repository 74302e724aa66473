"""The recipes for real models: their settings load, one step of each runs on random weights of the same kind cut to two
layers, and their pages say what the planner says."""

import json
import re
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import yaml
from transformers import AutoConfig, AutoModelForCausalLM

from hybrid_rl.cli.train import train_own
from hybrid_rl.config import load_config
from recipes.real import plans, without_duplicates
from tests.support.tiny import VOCABULARY, build_tokenizer

pytestmark = pytest.mark.slow  # the file as a whole
pytest.importorskip("math_verify")

ONE_PROCESS = {
    "num_ranks": 1,
    "device": "cpu",
    "reward_processes": 0,
    "max_steps": 1,
    "prompts_per_step": 2,
    "prompts_per_mini_batch": 1,
    "max_completion_length": 4,
    "max_prompt_length": 300,
    "eval_steps": None,
    "save_steps": None,
}


def settings(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((plans.FOLDER / f"{name}.yaml").read_text())
    return found


def cut_model(name: str, folder: Path) -> Path:
    """A model of the same class, with two layers, few heads and experts, and a vocabulary of characters."""
    config = AutoConfig.from_pretrained(plans.ROOT / plans.MODELS / name)
    small = {
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "head_dim": 8,
    }
    small |= {"num_key_value_heads": 2, "vocab_size": len(VOCABULARY), "pad_token_id": 0, "eos_token_id": 1}
    small |= {"bos_token_id": None, "layer_types": None, "max_window_layers": 2}
    small |= {"num_experts": 8, "moe_intermediate_size": 16} if hasattr(config, "num_experts") else {}
    plain = {key: value for key, value in config.to_dict().items() if key not in small} | small
    plain = {key: value for key, value in plain.items() if value is not None}
    model = AutoModelForCausalLM.from_config(type(config)(**plain))
    model.save_pretrained(folder / "model")
    build_tokenizer(chat=True).save_pretrained(folder / "model")
    return folder / "model"


def published(folder: Path) -> dict[str, str]:
    """Data in the form of the published files, at the paths that the recipes name."""
    data = folder / "data"
    (data / "gsm8k").mkdir(parents=True)
    for split in ("train", "test"):
        (data / "gsm8k" / f"{split}.jsonl").write_text('{"question": "1+1", "answer": "It is.\\n#### 2"}\n' * 4)
    problem = {"problem": "1+1", "level": "Level 1", "type": "Algebra", "solution": "$\\boxed{2}$"}
    for place in range(4):
        (data / "MATH" / "train" / "algebra").mkdir(parents=True, exist_ok=True)
        (data / "MATH" / "train" / "algebra" / f"{place}.json").write_text(json.dumps(problem))
    (data / "math500.jsonl").write_text(json.dumps({**problem, "answer": "2", "subject": "Algebra"}) + "\n")
    verl = {"data_source": "math_dapo", "prompt": [{"role": "user", "content": "1+1"}], "ability": "MATH"}
    verl |= {"reward_model": {"ground_truth": "2", "style": "rule"}, "extra_info": {"index": "0"}}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([verl] * 4), data / "dapo-math-17k.parquet")
    found = (path for path in data.rglob("*") if path.is_file() or path.name == "train")
    return {str(path.relative_to(folder)): str(path) for path in found}


@pytest.mark.parametrize("recipe", plans.RECIPES, ids=lambda recipe: recipe.name)
def test_one_step_of_each(recipe: plans.Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    given, files = settings(recipe.name), published(tmp_path)
    assert given["data"]["train_path"] in files and given["data"]["eval_path"] in files
    assert load_config(given)[0].model.path == given["model"]["path"]
    of_gpus = ("rollout", "tokens_per_micro_batch", "overlong_buffer", "critic_warmup_steps", "num_train_epochs")
    for key in (*of_gpus, *ONE_PROCESS):
        given.pop(key, None)
        given["data"].pop(key, None)
    given["model"] = {"path": str(cut_model(recipe.model, tmp_path))}
    given["num_generations"] = min(given["num_generations"], 2)
    given["max_refills"] = 0  # random weights solve nothing
    config, _ = load_config(given, ONE_PROCESS | {"output_dir": str(tmp_path)})
    train_own(config, ["math_reward"])
    last = [json.loads(line) for line in (tmp_path / given["run_name"] / "metrics.jsonl").read_text().splitlines()][-1]
    assert last["step"] == 1 and last["rewards/math_reward/mean"] >= 0.0 and "eval/rewards/math_reward/mean" in last


def test_the_fastest_page_is_fresh() -> None:
    """If it is not, `python recipes/real/plans.py` writes all of them again."""
    recipe = plans.RECIPES[0]
    assert (plans.FOLDER / f"{recipe.name}.md").read_text() == plans.page(recipe, recipe.plan())


@pytest.mark.sweep
@pytest.mark.parametrize("recipe", plans.RECIPES[1:], ids=lambda recipe: recipe.name)
def test_every_page_is_fresh(recipe: plans.Recipe) -> None:
    assert (plans.FOLDER / f"{recipe.name}.md").read_text() == plans.page(recipe, recipe.plan())


def test_every_recipe_has_a_page_that_fits() -> None:
    for recipe in plans.RECIPES:
        text = (plans.FOLDER / f"{recipe.name}.md").read_text()
        assert recipe.command in text and "\nfits: " in text
    assert {path.stem for path in plans.FOLDER.glob("*.yaml")} == {recipe.name for recipe in plans.RECIPES}


def test_duplicates_go_and_the_first_stays(tmp_path: Path) -> None:
    def row(text: str, number: int) -> dict[str, Any]:
        return {"prompt": [{"role": "user", "content": text}], "extra_info": {"index": number}}

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row("b", 0), row("a", 1), row("b", 2)]), tmp_path / "all")
    assert without_duplicates.main([str(tmp_path / "all"), str(tmp_path / "few")]) == (3, 2)
    assert pyarrow.parquet.read_table(tmp_path / "few").to_pylist() == [row("b", 0), row("a", 1)]


def test_the_table_has_the_numbers_of_the_pages() -> None:
    readme = (plans.FOLDER / "README.md").read_text()
    for recipe in plans.RECIPES:
        text = (plans.FOLDER / f"{recipe.name}.md").read_text()
        peak = re.search(r"^fits: peak (\S+ GB) of", text, re.MULTILINE)
        step = re.search(r"^step +(~\S+ s)$", text, re.MULTILINE)
        assert peak is not None and step is not None
        assert f"[{recipe.name}]({recipe.name}.md) | {recipe.num_gpus} | {peak[1]} | {step[1]} |" in readme
