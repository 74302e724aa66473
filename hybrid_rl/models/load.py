"""Loading a model and its tokenizer, with every way to go wrong named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from hybrid_rl.compat.transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
from hybrid_rl.errors import ModelError

Medium = Literal["images", "audio"]
# Entries of a config by which a model is known that can be shown something beside text.
MEDIA: dict[Medium, tuple[str, ...]] = {
    "images": ("vision_config", "vq_config", "image_token_id", "image_token_index"),
    "audio": ("audio_config", "speech_config", "audio_token_id", "audio_token_index"),
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def load_tokenizer(path: str, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of a model name or folder. Raises ModelError if there is none."""
    refuse_missing_folder(path)
    if Path(path).is_dir() and not any(Path(path).glob("tokenizer*")) and not any(Path(path).glob("vocab*")):
        raise ModelError(
            f"model folder {path!r} has no tokenizer (no tokenizer*.json); save one there or pass tokenizer="
        )
    # AutoTokenizer goes by the model's type and would put, say, Qwen's own rules in the place of a tokenizer that was
    # saved as a plain tokenizer.json: other token ids, silently.
    is_plain = _saved_class(path) in ("TokenizersBackend", "PreTrainedTokenizerFast")
    try:
        if is_plain:
            return PreTrainedTokenizerFast.from_pretrained(path)
        return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:  # transformers raises OSError, ValueError, KeyError and others here
        raise ModelError(f"cannot load the tokenizer of {path!r}{elsewhere(path)}: {first_line(error)}") from error


def auto_class(config: PreTrainedConfig) -> Any:
    """The class of transformers that makes a model of this config: vision-language models, which are trained on text
    here, are not among its causal LMs."""
    own_code = getattr(config, "auto_map", None) or {}
    is_causal = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or "AutoModelForCausalLM" in own_code
    sees = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    return AutoModelForImageTextToText if sees and not is_causal else AutoModelForCausalLM


def media_of(config: PreTrainedConfig) -> tuple[Medium, ...]:
    """What a model of this config could be shown beside text. The config of its text part only is a model of text."""
    return tuple(
        medium for medium, names in MEDIA.items() if any(getattr(config, name, None) is not None for name in names)
    )


def load_model(
    path: str, *, dtype: str, device: torch.device | str = "cpu", trust_remote_code: bool = False
) -> PreTrainedModel:
    """A causal LM by name or folder, all of its weights found; each tensor goes from the files to the device at once,
    without a copy of the model in host memory. Raises ModelError otherwise."""
    refuse_missing_folder(path)
    target = torch.device(device)
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        loaded: Any = auto_class(config).from_pretrained(
            path,
            dtype=DTYPES[dtype],
            device_map=None if target.type == "cpu" else {"": target},
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
        )
    except Exception as error:  # transformers raises OSError, ValueError, RuntimeError, SafetensorError and others here
        raise ModelError(f"cannot load model {path!r}{elsewhere(path)}: {first_line(error)}") from error
    model, info = loaded
    for kind in ("missing_keys", "mismatched_keys"):
        if info.get(kind):
            shown = ", ".join(str(name) for name in sorted(map(str, info[kind]))[:3])
            raise ModelError(
                f"model {path!r}: {len(info[kind])} {kind.replace('_', ' ')}, e.g. {shown}; "
                "these weights would start random. Is the checkpoint complete, and of this architecture?"
            )
    return model


def check_tokenizer(tokenizer: Any, module: PreTrainedModel) -> None:
    """Refuse a tokenizer that cannot go with the model."""
    if tokenizer is None:
        raise ModelError("a model passed as a module needs tokenizer= beside it")
    if not callable(tokenizer) or not hasattr(tokenizer, "decode"):
        raise ModelError(f"tokenizer={type(tokenizer).__name__} is not a tokenizer")
    rows = vocabulary_size(module)
    if len(tokenizer) > rows:
        raise ModelError(
            f"the tokenizer has {len(tokenizer)} tokens but the model embeds {rows}; resize the embeddings or use its "
            f"own tokenizer"
        )


def stop_token_ids(module: PreTrainedModel, tokenizer: Any, extra: list[int]) -> tuple[int, ...]:
    """Ids that end a completion: those of the tokenizer, of the model's generation config, and `extra`."""
    found: set[int] = set(extra)
    config = getattr(module, "generation_config", None)
    for source in (getattr(tokenizer, "eos_token_id", None), getattr(config, "eos_token_id", None)):
        found.update(source if isinstance(source, (list, tuple)) else [] if source is None else [source])
    rows = vocabulary_size(module)
    outside = sorted(token for token in found if not 0 <= token < rows)
    if outside:
        raise ModelError(f"stop tokens {outside} are outside the model's vocabulary of {rows}")
    if not found:
        raise ModelError("neither tokenizer nor model names an end-of-sequence token; set stop_token_ids")
    return tuple(sorted(found))


def _saved_class(path: str) -> str | None:
    """The class that a local folder says its tokenizer was saved from."""
    try:
        settings = json.loads((Path(path) / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return settings.get("tokenizer_class") if isinstance(settings, dict) else None


def vocabulary_size(module: PreTrainedModel) -> int:
    """Return how many tokens the model embeds."""
    embeddings: Any = module.get_input_embeddings()
    return int(embeddings.weight.shape[0])


def refuse_missing_folder(path: str) -> None:
    """Raise ModelError for a name that looks like a local folder and is not one."""
    looks_local = path.startswith((".", "/", "~")) or path.count("/") > 1
    if looks_local and not Path(path).is_dir():
        raise ModelError(f"model folder {path!r} does not exist")


def elsewhere(path: str) -> str:
    """What an error says of a name that is no folder here: one letter wrong in a relative path makes it a name of the
    hub, and an error about a connection would not lead there."""
    return (
        "" if Path(path).is_dir() else " (there is no such folder here, so it was looked for on the Hugging Face hub)"
    )


def first_line(error: Exception) -> str:
    """Type and first line of an error whose full text is a page long."""
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
