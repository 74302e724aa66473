"""The tokenizer of a run, given as an object or by name."""

from pathlib import Path

from hybrid_rl.config import load_config
from hybrid_rl.run.choice import choose_model
from tests.support.tiny import build_model, build_tokenizer


def test_a_tokenizer_may_be_named_by_its_folder(tmp_path: Path) -> None:
    build_tokenizer().save_pretrained(tmp_path)
    model, config = build_model(), load_config()[0]
    for folder in (tmp_path, str(tmp_path)):
        chosen = choose_model(model, folder, config)
        assert chosen.tokenizer.encode("3+4=") == build_tokenizer().encode("3+4=")
