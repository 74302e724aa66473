"""What a run refuses before anything is loaded."""

from __future__ import annotations

import datetime
import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from hybrid_rl.config import load_config
from hybrid_rl.errors import ConfigError, ModelError
from hybrid_rl.run.checks import check_rewards
from tests.support.tiny import CHAT_TEMPLATE, build_model, build_tokenizer, spread, sums
from tests.unit.models.test_tokenizer import byte_level, ids_by_hand, published


def test_a_published_generation_config_is_no_reason_to_lose_a_run(make_trainer, model_folder: Path) -> None:
    path = model_folder / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"temperature": 0.9, "top_p": 0.6}))  # as vicuna-7b-v1.5
    trainer = make_trainer(str(model_folder), max_steps=1, save_steps=1)
    trainer.fit()
    saved = AutoModelForCausalLM.from_pretrained(trainer.run_folder / "checkpoint-1")
    assert (saved.generation_config.temperature, saved.generation_config.top_p) == (0.9, 0.6)


def test_a_module_that_was_dequantised_trains_once_its_config_says_so(make_trainer) -> None:
    """As transformers loads a GGUF file whose types no kernel multiplies: weights in float32, marked as quantised."""
    module = build_model()
    module.config.quantization_config = GgufConfig("model.gguf", dequantize=True)
    module.is_quantized = True
    with pytest.raises(ModelError, match="weights are plain numbers.*clear that first: ") as refusal:
        make_trainer(module)
    exec(str(refusal.value).partition("clear that first: ")[2], {"module": module})
    trainer = make_trainer(module, max_steps=1)
    trainer.fit()
    saved = trainer.save()
    assert "quantization_config" not in json.loads((saved / "config.json").read_text())
    assert AutoModelForCausalLM.from_pretrained(saved).dtype == module.dtype


def test_a_setting_that_no_checkpoint_can_hold_is_refused(make_trainer) -> None:
    """YAML reads 2024-07-26 as a date; a checkpoint has the configuration as JSON."""
    tokenizer = build_tokenizer()
    tokenizer.chat_template = "{{ date_string }}" + CHAT_TEMPLATE
    given = {"tokenizer": tokenizer, "chat_template_kwargs": {"date_string": datetime.date(2024, 7, 26)}}
    with pytest.raises(ConfigError, match=r"chat_template_kwargs\.date_string=.*not JSON.*only in quotes"):
        make_trainer(build_model(), train_dataset=sums(8, chat=True), **given)


def test_the_tokenizer_of_a_reward_model_is_held_to_its_file(tmp_path: Path) -> None:
    """As the policy's own: a class that loses spaces is refused, by name the file is read as it stands."""
    path, config = published(tmp_path, byte_level(), tokenizer_class="LlamaTokenizerFast"), load_config()[0]
    theirs = AutoTokenizer.from_pretrained(path)
    with pytest.raises(ModelError, match=r"makes 'Whatis2plus3\?' of .* Pass reward_processing_classes='"):
        check_rewards([spread, build_model()], config, None, has_eval=False, processing_classes=[None, theirs])
    for given in (path, tmp_path):
        setup = check_rewards(build_model(), config, None, has_eval=False, processing_classes=given)
        assert setup.functions[0].tokenizer("What is 10?")["input_ids"] == ids_by_hand("What is 10?")
