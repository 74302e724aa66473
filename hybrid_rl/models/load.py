"""A model and its tokenizer, loaded, with an error that names each way to fail."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
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

from hybrid_rl.compat.noise import bars_hidden
from hybrid_rl.compat.transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
from hybrid_rl.errors import ModelError
from hybrid_rl.memory.offload import own_memory

Medium = Literal["images", "audio"]
# Entries of a config that only models have which take something besides text.
MEDIA: dict[Medium, tuple[str, ...]] = {
    "images": ("vision_config", "vq_config", "image_token_id", "image_token_index"),
    "audio": ("audio_config", "speech_config", "audio_token_id", "audio_token_index"),
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def load_tokenizer(path: str, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model name or folder. Raises ModelError if there is none."""
    refuse_missing_folder(path)
    if Path(path).is_dir() and not has_tokenizer(Path(path)):
        inside = [folder for folder in Path(path).glob("checkpoint-*") if folder.name.partition("-")[2].isdecimal()]
        if inside and not (Path(path) / "config.json").exists():
            newest = max(inside, key=lambda folder: int(folder.name.partition("-")[2]))
            raise ModelError(f"{path!r} is the folder of a run, not of a model; name a checkpoint in it: {newest}")
        raise ModelError(
            f"model folder {path!r} has no tokenizer (no tokenizer*.json); save one there or pass tokenizer="
        )
    # AutoTokenizer goes by the model's type and would put, say, Qwen's own rules in the place of a tokenizer that was
    # saved as a plain tokenizer.json: other token ids, silently.
    is_plain = _saved_class(path) in ("TokenizersBackend", "PreTrainedTokenizerFast")
    with loading("the tokenizer of", path):
        if is_plain:
            return PreTrainedTokenizerFast.from_pretrained(path)
        return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)


def has_tokenizer(folder: Path) -> bool:
    """Return whether a folder has a tokenizer."""
    return any(folder.glob("tokenizer*")) or any(folder.glob("vocab*"))


def auto_class(config: PreTrainedConfig) -> Any:
    """Return the class of transformers that makes a model of this config: vision-language models, which are trained on
    text here, are not among its causal LMs. Raises ModelError if there is none."""
    own_code = getattr(config, "auto_map", None) or {}
    is_causal = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or "AutoModelForCausalLM" in own_code
    sees = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    if not is_causal and not sees:  # transformers would list all that it has
        raise ModelError(
            f"config.json says {config.model_type!r}, of which transformers has no causal language model; name another "
            "model, or put config.json back if it was edited"
        )
    return AutoModelForImageTextToText if sees and not is_causal else AutoModelForCausalLM


def media_of(config: PreTrainedConfig) -> tuple[Medium, ...]:
    """Return what a model of this config takes besides text. The config of its text part alone is a model of text."""
    return tuple(
        medium for medium, names in MEDIA.items() if any(getattr(config, name, None) is not None for name in names)
    )


def load_model(
    path: str, *, dtype: str, device: torch.device | str = "cpu", trust_remote_code: bool = False
) -> PreTrainedModel:
    """Load a causal LM by name or folder; each tensor goes from the files to the device at once, without a copy of the
    model in host memory. On a CPU it owns its weights: they are no views of mapped files. Raises ModelError if it
    cannot be loaded, or a weight is missing."""
    refuse_missing_folder(path)
    target = torch.device(device)
    with loading("model", path), bars_hidden():
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        loaded: Any = auto_class(config).from_pretrained(
            path,
            dtype=DTYPES[dtype],
            device_map=None if target.type == "cpu" else {"": target},
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
        )
    model, info = loaded
    for kind in ("missing_keys", "mismatched_keys"):
        if info.get(kind):
            shown = ", ".join(str(name) for name in sorted(map(str, info[kind]))[:3])
            raise ModelError(
                f"model {path!r}: {len(info[kind])} {kind.replace('_', ' ')}, e.g. {shown}; "
                "these weights would start random. Is the checkpoint complete, and of this architecture?"
            )
    own_memory(model)
    return model


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


def stop_token_ids(module: PreTrainedModel, tokenizer: Any, extra: list[int]) -> tuple[int, ...]:
    """Return the ids that end a completion: those of the tokenizer, of the model's generation config, and `extra`."""
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
    """Return the class that a folder's tokenizer was saved from, None if it does not say."""
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
    """Raise ModelError for a file, and for a name that looks like a local folder and is not one."""
    if Path(path).is_file():
        raise ModelError(f"model {path!r} is a file; name the folder that has the model's config.json")
    looks_local = path.startswith((".", "/", "~")) or path.count("/") > 1
    if looks_local and not Path(path).is_dir():
        raise ModelError(f"model folder {path!r} does not exist")


@contextmanager
def loading(what: str, path: str) -> Iterator[None]:
    """Raise a ModelError that names the path for any error of transformers inside the block.

    A name that is not a folder here is looked for on the hub: with a typo in a relative path, an error about a
    connection would not lead to it.
    """
    try:
        yield
    except ModelError as error:
        raise ModelError(f"cannot load {what} {path!r}: {error}") from error
    except Exception as error:  # OSError, ValueError, KeyError, RuntimeError, SafetensorError and others
        if "ignore_mismatched_sizes" in str(error):  # an argument that nobody here has given
            raise ModelError(
                f"cannot load {what} {path!r}: its weights have other shapes than config.json says; put config.json "
                "back if it was edited, or name a folder whose weights and config.json belong together"
            ) from error
        on_hub = (
            " (there is no such folder here, so it was looked for on the Hugging Face hub; offline, name a folder, or "
            "set HF_HUB_OFFLINE=1 to look only at what was downloaded before, without waiting)"
        )
        where = "" if Path(path).is_dir() else on_hub
        raise ModelError(f"cannot load {what} {path!r}{where}: {first_line(error)}") from error


def first_line(error: Exception) -> str:
    """Return type and first line of an error, whose full text may be a page long."""
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
