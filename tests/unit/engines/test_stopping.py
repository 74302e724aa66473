"""Stop strings: the token that completes one, found by the cheap tests, is the one that the whole text names."""

import random

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from hybrid_rl.config import load_config
from hybrid_rl.config.validate import resolve
from hybrid_rl.engines.stop_strings import StopStrings
from hybrid_rl.errors import ConfigError
from hybrid_rl.run.prepare import check_stop_strings, sampling_params
from tests.support.tiny import build_tokenizer, ids_of

TEXT = "The answer is 42.</answer>\n\nHuman: größer? Ελληνικά, 数学です。 🙂🙃 stop! 　End\n\n"


def byte_level():
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        [TEXT] * 4, trainers.BpeTrainer(vocab_size=300, special_tokens=["<pad>", "<eos>"], initial_alphabet=alphabet)
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")


def byte_fallback():
    """As Llama 2 has it: spaces become marks, the first is stripped, characters that are unknown become bytes."""
    pieces = ["<pad>", "<eos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁stop", "stop", "▁En", "d"]
    backend = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, [], byte_fallback=True))
    strip = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(strip)
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def word_piece():
    pieces = ["<pad>", "<eos>", "<unk>", "the", "stop", "##ped", "##s", "s", "now", ".", "##top"]
    backend = Tokenizer(models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="<unk>"))
    backend.decoder = decoders.WordPiece()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def decoder(tokenizer):
    return lambda ids: tokenizer.decode(list(ids), skip_special_tokens=True)


def first_by_definition(decode, strings, ids):
    """Number of tokens after which the decoded completion contains one of the strings; None = never."""
    return next((n for n in range(1, len(ids) + 1) if any(s in decode(ids[:n]) for s in strings)), None)


def first_found(decode, strings, ids):
    stops = StopStrings(decode, strings)
    return next((n for n in range(1, len(ids) + 1) if stops.is_completed(ids[:n])), None)


def stop_strings_of(text, draw):
    """One to three pieces of 1 to 9 characters of a text, so that they occur."""
    starts = [draw.randrange(len(text)) for _ in range(draw.randint(1, 3))]
    return tuple(text[start : start + draw.randint(1, 9)] for start in starts)


@pytest.mark.parametrize("build", [byte_level, byte_fallback, word_piece, build_tokenizer])
def test_random_tokens_stop_where_the_whole_text_says(build):
    """Any order of any tokens: characters in parts, bytes that are no character, special tokens in between."""
    tokenizer, draw = build(), random.Random(0)
    decode = decoder(tokenizer)
    num_stopped = 0
    for trial in range(400):
        size = draw.choice([3, 8, len(tokenizer)])
        some = draw.sample(range(len(tokenizer)), min(size, len(tokenizer)))
        ids = draw.choices(some, k=draw.randint(1, 40))
        strings = tuple(s for s in stop_strings_of(decode(ids) or "x", draw) if "\ufffd" not in s) or ("stop",)
        expected = first_by_definition(decode, strings, ids)
        num_stopped += expected is not None
        assert first_found(decode, strings, ids) == expected, (trial, strings, ids)
    assert num_stopped > 50


def test_a_natural_text_stops_in_the_middle_of_a_token_and_of_a_character():
    tokenizer = byte_level()
    decode, ids = decoder(tokenizer), tokenizer(TEXT)["input_ids"]
    assert decode(ids) == TEXT
    draw = random.Random(1)
    for _ in range(150):
        strings = stop_strings_of(TEXT, draw)
        assert first_found(decode, strings, ids) == first_by_definition(decode, strings, ids), strings
    raw = byte_level_ids(tokenizer, "ab🙂cd")
    assert len(raw) == 8
    assert first_found(decode, ("🙂",), raw) == 6
    assert first_found(decode, ("b🙂c",), raw) == 7


def byte_level_ids(tokenizer, text):
    """One token per byte."""
    alphabet = {byte: tokenizer.convert_tokens_to_ids(char) for byte, char in bytes_to_chars().items()}
    return [alphabet[byte] for byte in text.encode()]


def bytes_to_chars():
    """GPT-2's printable stand-ins for bytes, from its definition."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}


def test_special_tokens_inside_of_a_stop_string_add_nothing():
    decode = decoder(build_tokenizer())
    s, t, o, p = ids_of("stop")
    pad = 0
    ids = [*ids_of("abc"), s, *[pad] * 50, t, pad, o, *[pad] * 9, p]
    assert first_found(decode, ("stop",), ids) == len(ids)
    assert first_found(decode, ("c",), ids) == 3


def test_a_space_at_the_start_of_the_window_is_not_lost():
    tokenizer = byte_fallback()
    decode = decoder(tokenizer)
    d, stop = tokenizer.convert_tokens_to_ids(["d", "▁stop"])
    assert decode([stop, stop]) == "stop stop"
    assert first_found(decode, (" stop",), [stop, stop]) == 2
    assert first_found(decode, (" stop",), [d] * 30 + [stop]) == 31


def test_a_window_that_begins_inside_of_a_run_of_bytes_is_not_trusted():
    """Byte fallback gives up on a whole run of bytes where one of them is no character."""
    tokenizer = byte_fallback()
    ids = [tokenizer.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in "🙂🙂🙂🙃".encode()]
    assert first_found(decoder(tokenizer), ("🙃",), ids) == 16


def test_a_decoder_that_joins_neighbours():
    def decode(ids):
        return "".join(map(chr, ids)).replace("aa", "b")

    assert first_found(decode, ("b",), [ord("x"), ord("a"), ord("a")]) == 3


def test_few_tokens_are_decoded_and_most_not_at_all():
    """5000 tokens: text is asked for only where the last token could complete the string, and then for few tokens."""
    asked = []
    decode = decoder(build_tokenizer())

    def counting(ids):
        asked.append(len(ids))
        return decode(ids)

    draw = random.Random(2)
    ids = [draw.choice(ids_of("abcdefghij klmnoqru")) for _ in range(5000)] + ids_of("the stop")
    stops = StopStrings(counting, ("stop",))
    assert [n for n in range(1, len(ids) + 1) if stops.is_completed(ids[:n])] == [len(ids)]
    learnt = [length for length in asked if length <= 2]
    assert len(learnt) == 2 * len(set(ids))
    # "p" occurs once: one window of 4 bytes and the margin, and the whole text to be sure.
    assert sorted(length for length in asked if length > 2) == [6, len(ids)]


def test_training_and_evaluation_stop_at_the_same_strings():
    training, evaluation = sampling_params(load_config({"stop_strings": ["</answer>", "\n\n"]})[0], (1,))
    assert training.stop_strings == evaluation.stop_strings == ("</answer>", "\n\n")
    with pytest.raises(ConfigError, match=r"stop_strings=\['a', ''\] has an empty text"):
        resolve(load_config({"stop_strings": ["a", ""]})[0])
    with pytest.raises(ConfigError, match=r"'stop': set stop_strings"):
        load_config({"stop": ["a"]})


def test_special_tokens_in_stop_strings_are_refused_with_their_id():
    check_stop_strings(["stop", "\n"], build_tokenizer())
    with pytest.raises(ConfigError, match=r"'x<eos>' contains the special token '<eos>'.*set stop_token_ids=\[1\]"):
        check_stop_strings(["x<eos>"], build_tokenizer())
