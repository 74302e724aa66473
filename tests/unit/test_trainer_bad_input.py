"""Bad input gets the right error with a helpful message before any weight is loaded or any folder is made."""

import importlib.util
import json
import sys

import pytest
import torch
import yaml
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file, save_file

from hybrid_rl.errors import CheckpointError, ConfigError, DataError, ModelError
from hybrid_rl.extras.report.runs import summary
from hybrid_rl.run import choice
from tests.support.tiny import build_model, build_tokenizer, sums
from tests.unit.models.families import build_vision


@pytest.fixture
def refused(make_trainer, tmp_path, monkeypatch, model_folder):
    """Asserts that a Trainer is refused before weights are read and that nothing is left behind."""

    def no_loading(*_: object, **__: object) -> None:
        raise AssertionError("weights were loaded before the check")

    def check(error: type, message: str, /, *, may_load: bool = False, **keys) -> None:
        if not may_load:
            monkeypatch.setattr(choice, "load_model", no_loading)
        keys = {"model": str(model_folder)} | keys
        with pytest.raises(error, match=message):
            make_trainer(**keys)
        assert not (tmp_path / "runs").exists() or may_load and not any((tmp_path / "runs").iterdir())

    return check


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        # Of what the configuration alone refuses one that cannot be loaded and one that cannot be resolved: the others
        # are tests of config/.
        ({"learning_rat": 1.0}, "learning_rate"),
        ({"num_generations": 1}, "num_generations=1"),
        ({"max_completion_length": 64}, "leaves no room"),
        ({"max_prompt_length": 60}, "max_prompt_length=60"),
        ({"reward_funcs": None}, "there is no reward"),
        ({"reward_funcs": lambda: [1.0]}, "no parameter that can be passed by keyword"),
        ({"reward_funcs": lambda *completions: [1.0]}, "no parameter that can be passed by keyword"),
        ({"model": None}, "there is no model"),
        ({"callbacks": [7]}, "callbacks has .* of type int: write a subclass of hybrid_rl.Callback"),
        ({"train_dataset": None}, "there is no training data"),
        ({"train_dataset": lambda: iter(sums(4)), "num_train_epochs": 1.0}, "set max_steps"),
        ({"train_dataset": sums(3), "num_train_epochs": 1.0}, "do not fill one step"),
        ({"eval_dataset": lambda: iter(sums(4))}, "stream"),
        ({"chat_template_kwargs": {"tokenize": False}}, "tokenize"),
        ({"on_host": ["shards"]}, "shards does nothing on a CPU"),
        ({"rollouts_path": "rollouts"}, "mode=full makes its own rollouts"),
        ({"ray.watchdog_seconds": 9.0}, "belongs to controller.backend=ray, not local"),
        (
            {"attention": "flash_attn_3", "device": "cpu"},
            "it needs a CUDA device, and the model is on cpu; it computes in bfloat16, and the model holds float32",
        ),
        ({"attention": "varlen", "device": "cpu", "num_ranks": 2}, "model.attention=varlen cannot run here"),
        ({"attention": "compiled", "device": "cpu", "dtype": "bfloat16"}, "computes in float32, .* holds bfloat16"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_config(refused, keys: dict, message: str) -> None:
    refused(ConfigError, message, **keys)


def test_modules_that_cannot_be_trained_as_they_are(refused) -> None:
    refused(
        ModelError,
        r"the module holds float16, which cannot be trained; convert it with \.to\(torch\.bfloat16\) or \.float\(\)",
        model=build_model(dtype=torch.float16),
    )
    mixed = build_model(dtype=torch.bfloat16)
    mixed.model.norm.float()
    refused(
        ModelError,
        r"parameters are bfloat16 and float32 \(model\.norm\.weight\); convert it to one dtype",
        model=mixed,
    )


def test_tracker_that_is_not_installed(refused, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    refused(ConfigError, "pip install wandb", report_to=["wandb"])


def test_many_ranks_without_ray(refused, monkeypatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "ray" or name.endswith(".ray_backend")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ray", None)
    refused(ConfigError, "num_ranks=2 and controller.backend=ray need Ray, .* pip install", may_load=True, num_ranks=2)


def test_dataset(refused) -> None:
    """The forms that data may not have are tests of data/."""
    refused(DataError, "empty", train_dataset=[])
    refused(DataError, "longer", train_dataset=[{"prompt": "1" * 60}])
    refused(DataError, "list of dicts", train_dataset={"prompt": ["1"]})
    refused(DataError, "no `prompt` column", eval_dataset=[{"question": "1"}])


def test_images_beside_the_prompts(refused) -> None:
    """Also in the evaluation set, and of a model of text, which would answer as blindly."""
    rows = [{**row, "image": "x.png"} for row in sums(8)]
    message = "row 0 has something in the column 'image'. .* drop the column if that is intended, or rename it"
    refused(DataError, message, model=build_vision("qwen2.5-vl"), train_dataset=rows)
    refused(DataError, message, model=build_vision("qwen2.5-vl"), eval_dataset=rows)
    refused(DataError, message, train_dataset=rows)


def test_adapters_that_cannot_be_trained_are_refused(refused) -> None:
    """Before work starts, on several ranks too."""
    refused(ConfigError, "peft_config=dict is no peft config", peft_config={"r": 8})
    refused(ConfigError, r"LoraConfig is a class; pass LoraConfig\(r=16\)", peft_config=LoraConfig)
    refused(ConfigError, "lora_alpha: given by peft_config and as a key", peft_config=LoraConfig(), lora_alpha=4)
    refused(ConfigError, "r: given by peft_config and as a key", peft_config=LoraConfig(), lora={"r": 4})
    refused(ConfigError, "target_modules: query is not the end of any name", r=4, target_modules=["query"], num_ranks=2)
    quantised = build_model()
    quantised.config.quantization_config = {"quant_method": "bitsandbytes"}
    refused(ModelError, r"neither they nor adapters on them \(QLoRA\) can be trained", model=quantised, r=4)
    prompts = get_peft_model(build_model(), PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"))
    refused(ConfigError, "PromptTuningConfig learns tokens in front of the prompt", model=prompts)


def test_a_trainer_says_how_much_of_its_model_is_trained(make_trainer, capsys) -> None:
    """r (in + out): q_proj of two layers, 2 * 2 * (16 + 16), of the 5,472 parameters of the model."""
    trainer = make_trainer(peft_config=LoraConfig(r=2, target_modules=["q_proj"]))
    assert capsys.readouterr().err.count("adapter r=2, 2.3 % trained (128 parameters)") == 1
    assert "5,472 parameters; adapter r=2, 2.3 % trained (128 parameters)" in repr(trainer)
    trainer.step()
    about = json.loads((trainer.run_folder / "environment.json").read_text())["model"]
    assert (about["num_parameters"], about["num_trained_parameters"], about["adapter_rank"]) == (5472, 128, 2)
    assert summary([], {}, {"model": about})["model"].endswith(" (0.00547M), adapter r=2, 2.3 % trained")
    assert yaml.safe_load((trainer.run_folder / "config.yaml").read_text())["lora"]["target_modules"] == ["q_proj"]


def test_a_reward_model_that_is_not_there_is_refused(refused, tmp_path) -> None:
    refused(ModelError, "reward-model", reward_funcs=str(tmp_path / "reward-model"))


@pytest.mark.parametrize("keys", [{"engine": "vllm"}, {"rollout": {"engine": "vllm"}}], ids=str)
def test_without_vllm_its_engine_is_refused(refused, keys: dict, monkeypatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "vllm" else found(name, *rest))
    refused(ConfigError, "needs vllm, which is not installed: make vllm", **keys)


@pytest.mark.parametrize(
    ("model", "keys", "message"),
    [
        ("./no/such/folder", {}, "does not exist"),
        (3, {}, "model is a int"),
        (build_model(), {"tokenizer": None}, "tokenizer="),
        (build_model(), {"tokenizer": "/no/such/folder"}, "model folder .* does not exist"),
        (build_model(vocab_size=20), {}, "45 tokens but the model embeds 20"),
    ],
    ids=["folder", "type", "no tokenizer", "no tokenizer object", "vocabulary"],
)
def test_model(refused, model, keys: dict, message: str) -> None:
    refused(ModelError, message, model=model, **keys)


def test_folder_without_tokenizer_or_config(refused, model_folder) -> None:
    for path in model_folder.glob("tokenizer*"):
        path.unlink()
    refused(ModelError, "has no tokenizer")
    (model_folder / "config.json").unlink()
    refused(ModelError, "cannot load", tokenizer=build_tokenizer())


def test_folder_with_a_missing_tensor(refused, model_folder) -> None:
    path = model_folder / "model.safetensors"
    tensors = load_file(path)
    gone = tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, path, metadata={"format": "pt"})
    refused(ModelError, "1 missing keys, e.g. model.layers.1.mlp.up_proj.weight", may_load=True)
    save_file(tensors | {"model.layers.1.mlp.up_proj.weight": gone[:1]}, path, metadata={"format": "pt"})
    refused(ModelError, "up_proj|its weights have other shapes than config.json says", may_load=True)


def test_folder_with_a_cut_off_file(refused, model_folder) -> None:
    path = model_folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    refused(ModelError, "cannot load model", may_load=True)


def test_module_of_another_dtype_than_the_key(refused) -> None:
    refused(ConfigError, "dtype", model=build_model(), dtype="bfloat16")


def test_checkpoint_to_resume_from(refused, tmp_path) -> None:
    """What may be wrong with one is a test of checkpoints."""
    refused(CheckpointError, "not a checkpoint", resume=str(tmp_path / "checkpoint-1"))


def test_output_dir_that_cannot_be_written(make_trainer, tmp_path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="set output_dir to a writable folder"):
        make_trainer(output_dir=str(tmp_path / "file" / "runs"))


def test_a_prompt_that_no_key_can_make_room_for(make_trainer) -> None:
    """The model has 64 positions: advice to raise max_prompt_length to 70 would end in the next error."""
    with pytest.raises(DataError, match="Shorten them: the model's positions=64 less max_completion_length=5 leaves"):
        make_trainer(train_dataset=[*sums(8), {"prompt": "1" * 70, "answer": "0"}])


def test_overlong_prompts_can_be_dropped_or_cut(make_trainer) -> None:
    rows = [*sums(8), {"prompt": "1234567", "answer": "0"}]
    dropped = make_trainer(train_dataset=rows, max_prompt_length=5, overlong_prompts="drop", num_train_epochs=1.0)
    assert dropped.max_steps == 2
    cut = make_trainer(
        train_dataset=rows[-1:], max_prompt_length=5, overlong_prompts="truncate", prompts_per_step=1, max_steps=1
    )
    batch, _ = cut.step()
    assert batch["prompt_ids"][0].tolist() == build_tokenizer()("34567")["input_ids"]
