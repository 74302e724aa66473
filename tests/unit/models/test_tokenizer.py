"""Tokenizers as their own files say, the error for those that are not, and the tokens that end a turn."""

import json
import logging
from types import SimpleNamespace

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from hybrid_rl.errors import ModelError
from hybrid_rl.models import check_tokenizer, load_tokenizer, stop_token_ids
from hybrid_rl.models.tokenizer import PROBES, check_rules, end_of_turn, lacks_bos
from tests.unit.models.families import EOS, VOCABULARY, build

LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
MERGES = [("1", "0"), ("\u0120", "t")]  # of a digit with the next one, and of a space with a letter
SPECIALS = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|user|>"]
MISTRAL = "{% for m in messages %}[INST]{{ m.content }}[/INST]{% endfor %}"


@pytest.fixture
def module():
    return build("qwen2")


def byte_level(*, splits_digits=False, eos="</s>", template=None):
    """A tokenizer of bytes with two merges: its ids are places in LETTERS, then the merges, then SPECIALS."""
    vocabulary = {piece: place for place, piece in enumerate([*LETTERS, *(a + b for a, b in MERGES)])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=MERGES))
    parts = [pre_tokenizers.Split(Regex(r"\p{N}"), "isolated")] if splits_digits else []
    backend.pre_tokenizer = pre_tokenizers.Sequence([*parts, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token=eos)
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIALS})
    tokenizer.chat_template = template
    return tokenizer


def published(folder, tokenizer, *, model_type="llama", **settings):
    """Write a model's folder as it is published: tokenizer.json, and a tokenizer_config.json that says `settings`."""
    tokenizer.save_pretrained(folder)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type, "transformers_version": "5.0.0"}))
    return str(folder)


def ids_by_hand(text):
    """One id per byte; the merges of two characters by their places."""
    symbols = "".join(text).replace(" ", "\u0120").replace("\n", "\u010a")
    merged = {a + b: len(LETTERS) + place for place, (a, b) in enumerate(MERGES)}
    ids = []
    while symbols:
        size = 2 if symbols[:2] in merged else 1
        ids.append(merged[symbols[:2]] if size == 2 else LETTERS.index(symbols[0]))
        symbols = symbols[size:]
    return ids


@pytest.mark.parametrize(
    ("model_type", "name", "has_other_rules"),  # transformers would build the class with rules of its own
    [
        ("llama", "LlamaTokenizerFast", True),
        ("llama", "LlamaTokenizer", True),
        ("qwen3", "LlamaTokenizer", True),
        ("gemma3_text", "GemmaTokenizerFast", True),
        ("llama", "GPT2TokenizerFast", False),
        ("qwen2", "Qwen2TokenizerFast", True),
        ("mistral", "LlamaTokenizer", False),
        ("mixtral", "LlamaTokenizerFast", False),
        ("llama", "PreTrainedTokenizerFast", False),
        ("llama", "ATokenizerOfNobody", False),
        ("mistral", None, False),
        ("llama", None, False),
    ],
)
def test_a_tokenizer_json_is_read_as_it_stands(tmp_path, caplog, model_type, name, has_other_rules):
    """Whatever class tokenizer_config.json names, and whatever that of the model's type would do: ids and text are
    those of the file."""
    caplog.set_level(logging.INFO, "hybrid_rl")
    loaded = load_tokenizer(published(tmp_path, byte_level(), model_type=model_type, tokenizer_class=name))
    text = "What is 10 plus 3?\n  three"
    assert loaded(text)["input_ids"] == ids_by_hand(text)
    assert loaded.decode(loaded(text)["input_ids"]) == text
    assert [loaded.convert_tokens_to_ids(token) for token in SPECIALS] == [258, 259, 260, 261, 262]
    assert loaded.eos_token == "</s>" and loaded.bos_token == "<s>"
    assert ("it is read as it stands" in caplog.text) == has_other_rules


def test_a_token_before_each_text_is_that_of_the_file(tmp_path):
    """tokenizer_config.json may ask for another, as for the models of DeepSeek; transformers goes by the file."""
    path = published(tmp_path, byte_level(), tokenizer_class="LlamaTokenizerFast", add_bos_token=True)
    loaded = load_tokenizer(path)
    assert loaded("10")["input_ids"] == [256] and lacks_bos(loaded)
    loaded.add_bos_token = True
    assert loaded("10")["input_ids"] == [258, 256] and not lacks_bos(loaded)
    assert not lacks_bos(byte_level())


def test_a_class_that_keeps_the_rules_is_kept(tmp_path):
    """It is what a saved model names, and what readers of other versions look for."""
    path = published(tmp_path, byte_level(), model_type="gpt2", tokenizer_class="GPT2TokenizerFast")
    assert type(load_tokenizer(path)).__name__ == "GPT2Tokenizer"


def test_a_mistral_folder_keeps_its_own_file_and_template(tmp_path):
    """Its tekken.json is read by another library, to a tokenizer without a chat template."""
    (tmp_path / "tekken.json").write_text("{}")
    path = published(tmp_path, byte_level(template=MISTRAL), model_type="mistral", tokenizer_class="LlamaTokenizer")
    loaded = load_tokenizer(path)
    assert loaded.apply_chat_template([{"role": "user", "content": "10"}], tokenize=False) == "[INST]10[/INST]"
    assert loaded("10")["input_ids"] == [256]


def test_a_library_that_the_file_does_not_need_may_be_missing(tmp_path, monkeypatch):
    def missing(*args, **kwargs):
        raise ModuleNotFoundError("No module named 'tiktoken'")

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", missing)
    path = published(tmp_path, byte_level(), model_type="mistral", tokenizer_class="LlamaTokenizer")
    assert load_tokenizer(path)("10")["input_ids"] == [256]
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match="No module named 'tiktoken'"):
        load_tokenizer(path)


def test_a_tokenizer_of_the_users_own_that_loses_spaces_is_refused(tmp_path):
    """AutoTokenizer before the Trainer: the class cannot be passed over, but it can be named."""
    path = published(tmp_path, byte_level(), tokenizer_class="LlamaTokenizerFast")
    theirs = AutoTokenizer.from_pretrained(path)
    words = r"\(LlamaTokenizer\) makes 'Whatis2plus3\?' of 'What is 2 plus 3\?', which .* keeps: .* Pass tokenizer='"
    with pytest.raises(ModelError, match=words):
        check_rules(theirs)
    check_rules(load_tokenizer(path))
    check_rules(byte_level())  # made by hand


def test_a_tokenizer_made_from_another_is_not_held_to_its_file(tmp_path, caplog):
    """It keeps the name of the folder, but has a vocabulary of its own, here of one letter per token and no spaces."""
    path = published(tmp_path, byte_level())
    made = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"What": 0, "?": 1}, unk_token="?")))
    made.name_or_path = path
    check_rules(made)
    assert not caplog.text
    rules = load_tokenizer(path)
    rules = PreTrainedTokenizerFast(tokenizer_object=rules.backend_tokenizer)
    rules.name_or_path, rules.backend_tokenizer.decoder = path, decoders.Fuse()
    check_rules(rules)  # changed on purpose: no class has read the file by rules of its own
    assert "makes other tokens than" in caplog.text


def test_other_tokens_of_the_same_text_are_a_warning(tmp_path, caplog):
    """Digits one by one, in the place of the file's 10: no text is lost, but the model has learned other tokens."""
    path = published(tmp_path, byte_level(), model_type="qwen2", tokenizer_class="Qwen2Tokenizer")
    theirs = AutoTokenizer.from_pretrained(path)
    assert theirs("10")["input_ids"] == ids_by_hand("1") + ids_by_hand("0")
    check_rules(theirs)
    assert "the tokenizer (Qwen2Tokenizer) makes other tokens than" in caplog.text
    caplog.clear()
    check_rules(load_tokenizer(path))
    assert not caplog.text


def test_without_a_file_to_compare_with_spaces_must_stay(tmp_path):
    """A vocabulary and merges of bytes, read by a class that puts its own rules around them."""
    (tmp_path / "vocab.json").write_text(json.dumps({piece: place for place, piece in enumerate(LETTERS)}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    kept = load_tokenizer(str(tmp_path))
    assert kept.decode(kept(PROBES[0])["input_ids"]) == PROBES[0]
    kept.backend_tokenizer.decoder = decoders.Fuse()
    with pytest.raises(ModelError, match=r"\(GPT2Tokenizer\) loses spaces: it gives 'What is 2 plus 3\?' back as"):
        check_rules(kept)


@pytest.mark.parametrize(
    ("template", "token"),
    [
        ("{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>\n{% endfor %}", "<|im_end|>"),
        ("{% for m in messages %}[{{ m.content | trim }}]{{ '</s>' if m.role != 'user' }}{% endfor %}", "</s>"),
        ("{% for m in messages %}{{ '<|user|>' if m.role == 'user' }}{{ m.content }}{% endfor %}", "<|user|>"),
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", None),
        ("{{ raise_exception('only questions') if messages | length > 1 }}", None),
    ],
    ids=["closed", "closed after the answer", "the next turn begins", "text only", "refuses"],
)
def test_the_token_that_ends_a_turn(template, token):
    tokenizer = byte_level(template=template)
    expected = None if token is None else tokenizer.convert_tokens_to_ids(token)
    assert end_of_turn(tokenizer, {}) == expected


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("notes.txt", r"no tokenizer \(no tokenizer\*\.json\)"),
        ("tekken.json", "tekken.json is Mistral's own form, which has no chat template"),
        ("tokenizer.json", "cannot load the tokenizer"),
    ],
)
def test_a_folder_without_a_usable_tokenizer_is_refused(tmp_path, file, message):
    build("qwen2").save_pretrained(tmp_path)
    (tmp_path / file).write_text("{")
    with pytest.raises(ModelError, match=message):
        load_tokenizer(str(tmp_path))


class FakeTokenizer:
    def __init__(self, size=VOCABULARY, eos_token_id=EOS):
        self.size, self.eos_token_id = size, eos_token_id

    def __len__(self):
        return self.size

    def __call__(self, text):
        return text

    def decode(self, ids):
        return ids


@pytest.mark.parametrize(
    ("tokenizer", "message"),
    [
        (None, "also pass tokenizer="),
        ("gpt2", "tokenizer=str is not a tokenizer"),
        (FakeTokenizer(VOCABULARY + 1), "98 tokens but the model embeds 97"),
    ],
)
def test_a_tokenizer_that_cannot_go_with_the_model_is_refused(module, tokenizer, message):
    check_tokenizer(FakeTokenizer(), module)
    with pytest.raises(ModelError, match=message):
        check_tokenizer(tokenizer, module)


@pytest.mark.parametrize(
    ("tokenizer_eos", "model_eos", "extra", "expected"),
    [
        (5, None, [], (5,)),
        (None, [9, 2], [], (2, 9)),
        (5, [5, 7], [3, 5], (3, 5, 7)),
        (None, None, [0], (0,)),
    ],
)
def test_stop_tokens_are_those_of_all_sources_once(module, tokenizer_eos, model_eos, extra, expected):
    module.generation_config = SimpleNamespace(eos_token_id=model_eos)
    assert stop_token_ids(module, FakeTokenizer(eos_token_id=tokenizer_eos), extra) == expected


@pytest.mark.parametrize(
    ("tokenizer_eos", "model_eos", "extra", "message"),
    [
        (None, None, [], "set stop_token_ids"),
        (5, None, [97], r"\[97\] are outside"),
        (5, None, [-1], r"\[-1\] are outside"),
        # A generation_config.json that was edited by hand has it as text.
        (EOS, "96", [], "eos_token_id must be a token's number, not '96'; correct generation_"),
        (EOS, [5, "96"], [], "eos_token_id must be a token's number, not '96'; correct generation_"),
    ],
)
def test_unusable_stop_tokens_are_refused(module, tokenizer_eos, model_eos, extra, message):
    module.generation_config = None if model_eos is None else SimpleNamespace(eos_token_id=model_eos)
    with pytest.raises(ModelError, match=message):
        stop_token_ids(module, FakeTokenizer(eos_token_id=tokenizer_eos), extra)
