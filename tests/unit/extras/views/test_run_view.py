"""What a Trainer and its configuration show, and what notebooks complete."""

from __future__ import annotations

import linecache
import re
import signal
from pathlib import Path

import pytest

import hybrid_rl
from hybrid_rl import Callback, TrainerConfig
from hybrid_rl.config import load_config
from hybrid_rl.errors import HybridRLError
from hybrid_rl.process.interrupts import show_shortly
from hybrid_rl.rollout.generations import Generation
from tests.support.libraries.python_names import html_of, traceback_of
from tests.support.tiny import build_model


def test_a_trainer_tells_its_state_and_how_to_go_on(make_trainer) -> None:
    trainer = make_trainer(build_model(), max_steps=3)
    assert "step 0 of 3" in repr(trainer) and "fit() the 3 that are left" in repr(trainer)
    trainer.fit(steps=2)
    text = repr(trainer)
    assert text.startswith("Trainer: grpo, step 2 of 3, engine inplace\n") and str(trainer.run_folder) in text
    assert re.search(r"reward  +[▁█]{2}  ", text) and "spread" in text and "5,472 parameters" in text
    page = html_of(trainer)
    assert "<svg" in page and page.count("learning_rate") >= 1
    trainer.fit()
    assert "fit(steps=20) trains 20 more" in repr(trainer)
    trainer.save()
    trainer.close()
    with pytest.raises(HybridRLError) as found:
        trainer.fit()
    (shown,) = traceback_of(found.value)
    first, place = shown.splitlines()
    assert first == "HybridRLError: this Trainer is closed; make a new one" and place.endswith("trainer.fit()")
    saved = str(trainer.run_folder / "checkpoint-3")
    assert f"it is closed: make a new one; Trainer(..., resume={saved!r}) goes on from there" in repr(trainer)


def test_a_configuration_shows_what_differs() -> None:
    config, _ = load_config({"algorithm": "rloo", "learning_rate": 0.25, "run_name": "<i>"})
    text = repr(config)
    assert "optimizer.learning_rate    0.25" in text and "kl.beta" in text and "'rloo'" in text
    assert "max_completion_length" not in text
    page = html_of(config)
    shown, folded = page.split("<details>", 1)
    assert "peak learning rate" in shown and "longest completion" not in shown and "longest completion" in folded
    assert "&lt;i&gt;" in page and "<i>" not in page
    assert "all keys have their defaults" in html_of(TrainerConfig())


class Interrupting(Callback):
    """Sends a Ctrl-C after a training step."""

    def on_step_end(self, trainer, step, batch, metrics) -> None:
        if step == 1:
            signal.raise_signal(signal.SIGINT)


def test_an_interrupt_shows_the_users_line_alone(make_trainer) -> None:
    trainer = make_trainer(callbacks=[Interrupting()], max_steps=3)
    with pytest.raises(KeyboardInterrupt) as found:
        trainer.fit()
    (shown,) = traceback_of(found.value)  # what IPython prints
    first, place = shown.splitlines()
    assert first == "KeyboardInterrupt: interrupted after training step 1 of 3; step() or fit() goes on"
    assert place.endswith("trainer.fit()")
    trainer.callbacks = []
    trainer.fit()
    assert trainer.global_step == 3
    bare = KeyboardInterrupt()
    show_shortly(bare, "said")
    assert traceback_of(bare) == ["KeyboardInterrupt: said"]


def test_a_script_beside_the_package_is_the_users() -> None:
    """Its folder's name only begins like the package's."""
    package, names = Path(hybrid_rl.__file__).parent, {}
    beside = package.with_name(f"{package.name}_scripts")
    for file, line in ((beside / "train.py", "fit()"), (package / "fit.py", "raise KeyboardInterrupt")):
        code = f"def {file.stem}():\n    {line}\n"
        linecache.cache[str(file)] = (len(code), None, code.splitlines(keepends=True), str(file))
        exec(compile(code, str(file), "exec"), names)
    with pytest.raises(KeyboardInterrupt) as found:
        names["train"]()
    show_shortly(found.value, "said")
    shown = traceback_of(found.value)
    linecache.clearcache()
    assert shown == ["KeyboardInterrupt: said\n---> 2 fit()"]


def test_generations_are_short() -> None:
    generation = Generation("1+1=", "2" * 500, [1] * 500, [0.0] * 500, "stop")
    assert repr(generation).startswith("Generation('1+1=' -> ") and len(repr(generation)) < 260
