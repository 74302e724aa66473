"""Completion of KEY=VALUE, as shells ask for it."""

from __future__ import annotations

import pytest

from hybrid_rl.cli import main
from hybrid_rl.cli.key_values import complete_setting, complete_word, values_of


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("train learning_r", ["learning_rate=", "learning_rate=1e-06"]),
        ("train algorithm = gs", ["gspo"]),
        ("train beta = 0.0 kl = l", ["loss"]),
        ("doctor device =", ["auto", "cpu", "cuda"]),
        ("plan grpo kl =", ["none", "loss", "reward"]),
        ("keys policy_l", ["policy_loss"]),
        ("repo", ["report"]),
    ],
)
def test_bash_completes(
    words: str, expected: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """bash splits at "=" and gives all words with the number of the one to complete."""
    monkeypatch.setenv("COMP_WORDS", f"hybrid-rl {words}")
    monkeypatch.setenv("COMP_CWORD", str(len(words.split())))
    monkeypatch.setenv("_HYBRID_RL_COMPLETE", "complete_bash")
    main([])
    assert capsys.readouterr().out.split() == expected


def test_shells_that_do_not_split_get_key_and_value() -> None:
    assert complete_setting("algorithm=gs") == ["algorithm=gspo"]
    assert complete_setting("optimizer.lr_scheduler_type=co") == [
        f"optimizer.lr_scheduler_type={value}" for value in ("constant", "constant_with_warmup", "cosine")
    ]
    found = complete_setting("num_")
    assert {"num_ranks=", "num_generations=", "num_train_epochs="} <= set(found) and "name=" not in complete_setting("")


def test_words_are_sections_and_names() -> None:
    assert complete_word("optimizer") == ["optimizer"]


def test_values_of_numbers_are_their_default() -> None:
    assert values_of("learning_rate") == ["1e-06"] and values_of("max_steps") == ["null"] and values_of("nothing") == []
    assert values_of("shuffle") == ["true", "false"]
