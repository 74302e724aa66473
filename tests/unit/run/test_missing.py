"""What people who know TRL look for is answered with what it is called here."""

import re

import pytest

import hybrid_rl
from hybrid_rl.errors import ConfigError
from hybrid_rl.extras.names.records import read_table
from hybrid_rl.run.callbacks import Callback
from hybrid_rl.run.settings import checked_callbacks


@pytest.fixture
def trainer(make_trainer):
    return make_trainer(max_steps=1)


def test_attributes_of_others(trainer) -> None:
    expected = {
        "create_model_card": "upload the folder that trainer.save() returns",
        "learning_rat": "did you mean trainer.learning_rate?",
        "prompts_per_step": "trainer.config",
        "max_new_tokens": "here it is called max_completion_length",
    }
    for name, advice in expected.items():
        with pytest.raises(AttributeError, match=re.escape(advice)):
            getattr(trainer, name)
    with pytest.raises(AttributeError, match="attribute 'qwertz'$"):
        _ = trainer.qwertz
    elsewhere = read_table("trainer")["attributes"]
    assert not [name for name in elsewhere.keys() - {"model", "model_wrapped"} if hasattr(trainer, name)]
    named = {word for advice in elsewhere.values() for word in re.findall(r"trainer\.(\w+)", advice)}
    assert named and all(hasattr(trainer, name) for name in named)


def test_arguments_of_others(trainer) -> None:
    for name, advice in {"max_new_tokens": "max_completion_length", "n": "num_generations", "seeed": "seed"}.items():
        with pytest.raises(TypeError, match=rf"generate\(\) has no argument {name}.*{advice}"):
            trainer.generate(["1+1="], **{name: 5})
    with pytest.raises(TypeError, match="pass resume= to Trainer"):
        trainer.train(resume_from_checkpoint=True)
    assert len(trainer.generate("1+1=", num_generations=2)) == 2


def test_attributes_of_a_batch(trainer) -> None:
    batch = trainer.step().batch
    for name, advice in {"rewards": "batch['rewards']", "completions": "samples()", "selekt": "'select'"}.items():
        with pytest.raises(AttributeError, match=re.escape(advice)):
            getattr(batch, name)


@pytest.mark.parametrize("name", ["GRPOTrainer", "GRPOConfig", "TrainerCallback"])
def test_imports_of_others(name: str) -> None:
    with pytest.raises(ImportError, match=f"hybrid_rl has no {name}: .*(Trainer|Callback)"):
        exec(f"from hybrid_rl import {name}")
    assert not hasattr(hybrid_rl, "qwertz")


def test_callbacks_of_others() -> None:
    class TrainerCallback:
        pass

    class Mine(TrainerCallback):
        pass

    advice = re.escape("from hybrid_rl import Callback") + ".*trainer.stop"
    with pytest.raises(ConfigError, match=advice):
        checked_callbacks([Mine()])
    with pytest.raises(ConfigError, match=r"pass an instance: Callback\(\)"):
        checked_callbacks([Callback])


def test_hooks_that_are_named_exist() -> None:
    with pytest.raises(ConfigError) as error:
        checked_callbacks([type("TrainerCallback", (), {})()])
    assert all(hasattr(Callback, name) for name in re.findall(r"is (on_\w+)", str(error.value)))
