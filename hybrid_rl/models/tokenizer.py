"""A tokenizer: loaded as its own `tokenizer.json` says, and the tokens that end a turn and a completion."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from hybrid_rl.compat.transformers import cached_file_or_none
from hybrid_rl.errors import ModelError
from hybrid_rl.models.model_loading import loading, model_folder, vocabulary_size

logger = logging.getLogger("hybrid_rl")

RULES, SETTINGS = "tokenizer.json", "tokenizer_config.json"
# Where tokenizers that read one vocabulary by different rules part: spaces, line ends, runs of digits, contractions,
# signs, letters that Unicode can write in two ways, scripts without spaces, characters of several bytes.
PROBES = (
    "What is 2 plus 3?",
    "  two  spaces\n\n\tx = 10234.5;\r\nI'm, you'RE (a+b)*c != [d]{e}/f_g\\h\n",
    "\u00dcn\u00ef cafe\u0301 \ufb01 \u00bd \u4f60\u597d\uff0c\u4e16\u754c \u041f\u0440\u0438\u0432\u0435\u0442"
    " \u0e44\u0e17\u0e22 \u0928\u092e\u0938\u094d\u0924\u0947 \U0001f642\u00a0\u2014\u201cq\u201d",
)


def load_tokenizer(path: str, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model name or folder. A `tokenizer.json` is read as it stands: a class that would make
    other tokens of it is passed over. Raises ModelError if there is none, or if it loses spaces."""
    path = model_folder(path)
    if Path(path).is_dir() and not has_tokenizer(Path(path)):
        inside = [folder for folder in Path(path).glob("checkpoint-*") if folder.name.partition("-")[2].isdecimal()]
        if inside and not (Path(path) / "config.json").exists():
            newest = max(inside, key=lambda folder: int(folder.name.partition("-")[2]))
            raise ModelError(f"{path!r} is the folder of a run, not of a model; name a checkpoint in it: {newest}")
        tekken = "; tekken.json is Mistral's own form, which has no chat template" if _has(path, "tekken.json") else ""
        raise ModelError(
            f"model folder {path!r} has no tokenizer (no tokenizer*.json{tekken}); save one there or pass tokenizer="
        )
    with loading("the tokenizer of", path):
        rules, settings = cached_file_or_none(path, RULES), _settings(cached_file_or_none(path, SETTINGS))
        if rules is None or (trust_remote_code and "auto_map" in settings):
            tokenizer = _by_class(path, trust_remote_code)
            check_rules(tokenizer, rules)
            return tokenizer
        if settings.get("tokenizer_class") in ("TokenizersBackend", "PreTrainedTokenizerFast"):
            return PreTrainedTokenizerFast.from_pretrained(path)
        return _by_rules(path, trust_remote_code)


def usable_tokenizer(tokenizer: Any, argument: str, *, trust_remote_code: bool) -> Any:
    """Load a tokenizer that a user gives by name or folder; compare any other with its file (`check_rules`). argument:
    which it is given in, for errors. Raises ModelError."""
    if isinstance(tokenizer, str | os.PathLike):
        return load_tokenizer(os.fspath(tokenizer), trust_remote_code=trust_remote_code)
    check_rules(tokenizer, argument=argument)
    return tokenizer


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write a tokenizer into a folder, which is made, so that it can be loaded from there.

    The class of one that brings its own code is named as the pair that transformers reads (slow, fast): unless its name
    has "Tokenizer" in it, transformers writes the name alone. Of one that was loaded without that code the class is not
    named: the code is not written with it.
    """
    tokenizer.save_pretrained(folder)
    settings = {**_settings(str(folder / SETTINGS))}
    classes = settings.pop("auto_map", None)
    names = classes.get("AutoTokenizer") if isinstance(classes, dict) else classes
    if not names:
        return
    pair = [names, None] if isinstance(names, str) else names
    if any(name and (folder / f"{name.partition('.')[0]}.py").is_file() for name in pair):
        settings["auto_map"] = {"AutoTokenizer": pair}
    text = json.dumps(settings, indent=2, sort_keys=True, ensure_ascii=False)
    (folder / SETTINGS).write_text(text + "\n", encoding="utf-8")


def check_read_back(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Read a saved tokenizer again by its class. Raises ModelError if it makes other tokens, and whatever its code
    raises."""
    again = type(tokenizer).from_pretrained(folder)
    # A tokenizer.json says all, and is read as it stands: a class may read it by rules of its own, load_tokenizer not.
    text = None if _has(str(folder), RULES) else _difference(again, tokenizer)
    if text is not None:
        raise ModelError(f"read again it makes other tokens of {text!r}: its save_pretrained() leaves something out")


def _by_class(path: str, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """Load a tokenizer as transformers chooses its class; Mistral's own, which has no chat template, is left out."""
    return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code, mistral_format=False)


def _by_rules(path: str, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a `tokenizer.json`, as its class if that makes the same tokens of it.

    AutoTokenizer goes by the model's type and by tokenizer_config.json, whose class may build rules of its own around
    the vocabulary of the file, or by other files beside it (tekken.json), or need libraries that the file does not.
    """
    plain = PreTrainedTokenizerFast.from_pretrained(path)
    try:
        tokenizer = _by_class(path, trust_remote_code)
    except ImportError:
        return plain
    if _difference(tokenizer, plain) is None:
        return tokenizer
    logger.info(
        "%s: %s would make other tokens of %s than the file says; it is read as it stands",
        *(path, type(tokenizer).__name__, RULES),
    )
    return plain


def check_rules(tokenizer: Any, rules: str | None = None, argument: str = "tokenizer") -> None:
    """Compare a tokenizer with the `tokenizer.json` that it was loaded from, if that is here; warn of other token ids.

    rules: the file; None = that of the folder, or of the name in the hub's cache, that the tokenizer was loaded from.
    argument: which it was given in, for messages.

    Raises ModelError for a tokenizer that loses text which the file keeps; if there is no file, spaces.
    """
    origin = str(getattr(tokenizer, "name_or_path", None) or "")
    if not origin or not isinstance(tokenizer, PreTrainedTokenizerBase):
        return  # made by hand: there is nothing to compare it with
    is_theirs, kind, rules = rules is None, type(tokenizer).__name__, rules or _file_of(origin, RULES)
    if rules is None:
        back = _read(tokenizer, PROBES[0])[1]
        if back.lower() in [PROBES[0].replace(" ", mark).lower() for mark in ("", "\u0120")]:
            raise ModelError(
                f"the tokenizer of {origin!r} ({kind}) loses spaces: it gives {PROBES[0]!r} back as {back!r}; save it "
                f"with the model's own {RULES}, or with the class that it was made with"
            )
        return
    reference = PreTrainedTokenizerFast(tokenizer_file=rules)
    own = reference.get_vocab().items() - reference.get_added_vocab().items()
    if is_theirs and not own <= tokenizer.get_vocab().items():
        return  # another tokenizer, made from the one whose name it keeps
    text = _difference(tokenizer, reference)
    if text is None or tokenizer.init_kwargs.get("fix_mistral_regex"):
        return
    right, back = _read(reference, text)[1], _read(tokenizer, text)[1]
    remedy = f"pass {argument}={origin!r}, or PreTrainedTokenizerFast.from_pretrained({origin!r})"
    if right == text != back and type(tokenizer) is not PreTrainedTokenizerFast:
        raise ModelError(
            f"the tokenizer ({kind}) makes {back!r} of {text!r}, which {rules} keeps: the class reads that file by "
            f"other rules. {remedy[0].upper()}{remedy[1:]}"
        )
    logger.warning(
        "the tokenizer (%s) makes other tokens than %s, e.g. of %r; if the model has learned those of the file, %s",
        *(kind, rules, text, remedy),
    )


def _difference(tokenizer: Any, reference: PreTrainedTokenizerBase) -> str | None:
    """Return a text of which the two make other tokens, or give back something else; None if there is none."""
    marked = [f"a {token.content} b{token.content}\nc" for token in reference.added_tokens_decoder.values()]
    return next((text for text in (*PROBES, *marked) if _read(tokenizer, text) != _read(reference, text)), None)


def _read(tokenizer: Any, text: str) -> tuple[list[int] | None, str]:
    """Return the token ids of a text, None if it cannot be tokenised, and the text that they stand for."""
    try:
        ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
        return ids, str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
    except Exception as error:  # tokenizers raise anything, e.g. for an unknown character
        return None, f"{type(error).__name__}: {error}"


def lacks_bos(tokenizer: Any) -> bool:
    """Whether tokenizer_config.json asks for a token before each text that the tokenizer does not put there:
    transformers leaves that to tokenizer.json, which may put none."""
    settings = _settings(_file_of(str(getattr(tokenizer, "name_or_path", None) or ""), SETTINGS))
    bos = getattr(tokenizer, "bos_token_id", None)
    return bool(settings.get("add_bos_token")) and bos is not None and bos not in tokenizer("a")["input_ids"]


def _file_of(origin: str, name: str) -> str | None:
    """Return a file of a folder, or of a name in the hub's cache; None if it is not there."""
    if not origin or Path(origin).is_dir():
        return str(Path(origin) / name) if origin and _has(origin, name) else None
    try:
        cached = try_to_load_from_cache(origin, name)
    except ValueError:  # no name of the hub
        return None
    return cached if isinstance(cached, str) else None


def _settings(file: str | None) -> Mapping[str, Any]:
    """Return what a tokenizer_config.json says; nothing if it cannot be read, which its class will report."""
    try:
        settings = json.loads(Path(file or "").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return settings if isinstance(settings, dict) else {}


def _has(folder: str, name: str) -> bool:
    return (Path(folder) / name).is_file()


def has_tokenizer(folder: Path) -> bool:
    """Return whether a folder has a tokenizer."""
    return any(folder.glob("tokenizer*")) or any(folder.glob("vocab*"))


def check_tokenizer(tokenizer: Any, module: PreTrainedModel) -> None:
    """Raise ModelError for a tokenizer that does not fit the model."""
    if tokenizer is None:
        raise ModelError("if the model is a module, also pass tokenizer=")
    if not callable(tokenizer) or not hasattr(tokenizer, "decode"):
        raise ModelError(f"tokenizer={type(tokenizer).__name__} is not a tokenizer; pass one, or its name or folder")
    rows = vocabulary_size(module)
    if len(tokenizer) > rows:
        raise ModelError(
            f"the tokenizer has {len(tokenizer)} tokens but the model embeds {rows}; leave tokenizer= out to use the "
            "one in the model's folder, or resize the embeddings (module.resize_token_embeddings)"
        )


def stop_token_ids(module: PreTrainedModel, tokenizer: Any, extra: Iterable[int]) -> tuple[int, ...]:
    """Return the ids that end a completion: those of the tokenizer, of the model's generation config, and `extra`."""
    chosen: set[int] = set(extra)
    config = getattr(module, "generation_config", None)
    for source in (getattr(tokenizer, "eos_token_id", None), getattr(config, "eos_token_id", None)):
        chosen.update(source if isinstance(source, (list, tuple)) else [] if source is None else [source])
    rows = vocabulary_size(module)
    if strange := [token for token in chosen if type(token) is not int]:
        raise ModelError(f"eos_token_id must be a token's number, not {strange[0]!r}; correct generation_config.json")
    outside = sorted(token for token in chosen if not 0 <= token < rows)
    if outside:
        raise ModelError(f"stop tokens {outside} are outside the model's vocabulary of {rows}")
    if not chosen:
        raise ModelError("neither tokenizer nor model names an end-of-sequence token; set stop_token_ids")
    return tuple(sorted(chosen))


def end_of_turn(tokenizer: Any, template_kwargs: Mapping[str, Any]) -> int | None:
    """Return the id of the token with which the chat template ends an assistant's turn: the first token of its own that
    the template writes after the answer; if it writes none, the first with which it begins the next turn. None if the
    template has no such token, or does not render a plain conversation."""
    answer, question = "Seven, I think.", "Why?"
    asked, said = {"role": "user", "content": "Which?"}, {"role": "assistant", "content": answer}
    own = {token.content: token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.content}
    for messages in ([asked, said], [asked, said, {"role": "user", "content": question}]):
        try:
            text = str(tokenizer.apply_chat_template(messages, tokenize=False, **template_kwargs))
        except Exception:  # templates raise anything: some want other turns than these
            continue
        tail = text.rpartition(answer)[2].partition(question)[0] if answer in text else ""
        places = [(tail.find(content), -len(content), own[content]) for content in own if content in tail]
        if places:
            return min(places)[2]
    return None
