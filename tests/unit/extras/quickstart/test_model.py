from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from hybrid_rl.extras.quickstart.model import build_model, build_tokenizer


def test_one_token_per_character_nothing_added_and_padding_on_the_left() -> None:
    tokenizer = build_tokenizer()
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, len(tokenizer)) == (0, 1, 15)
    # "0" to "9" are 2 to 11, then "+", "-", "=".
    assert tokenizer("37+48=")["input_ids"] == [5, 9, 12, 6, 10, 14]
    assert tokenizer("-9")["input_ids"] == [13, 11]
    assert tokenizer.decode(tokenizer("17-52=-35")["input_ids"]) == "17-52=-35"
    assert tokenizer.decode([13, 5, 7, 1, 0, 0], skip_special_tokens=True) == "-35"
    batch = tokenizer(["1+2=", "12+34="], padding=True)
    assert set(batch) == {"input_ids", "attention_mask"}
    assert batch["input_ids"][0] == [0, 0, 3, 12, 4, 14]
    assert batch["attention_mask"][0] == [0, 0, 1, 1, 1, 1]


def test_a_foreign_character_is_refused() -> None:
    for text in ("1 + 2", "x", "3*4"):
        with pytest.raises(Exception, match="Missing \\[UNK\\]"):
            build_tokenizer()(text)


def test_saves_and_loads(tmp_path: Path) -> None:
    build_tokenizer().save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded("37+48=")["input_ids"] == [5, 9, 12, 6, 10, 14]
    assert (loaded.pad_token_id, loaded.eos_token_id, loaded.padding_side) == (0, 1, "left")
    assert loaded.decode([5, 9, 1], skip_special_tokens=True) == "37"


def test_number_of_parameters() -> None:
    model = build_model(build_tokenizer(), seed=0)
    # A layer: queries 128*128+128, keys and values 2*(128*64+64), output 128*128, gated MLP 3*128*256, two norms.
    layer = 16_512 + 16_512 + 16_384 + 98_304 + 256
    assert sum(parameter.numel() for parameter in model.parameters()) == 2 * 15 * 128 + 3 * layer + 128
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_a_seed_gives_one_model_and_leaves_the_random_state_alone() -> None:
    tokenizer = build_tokenizer()
    before = torch.random.get_rng_state()
    first, again, other = (build_model(tokenizer, seed).lm_head.weight for seed in (5, 5, 6))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
