"""A model, loaded, with an error that names each way to fail."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)

from hybrid_rl.compat.noise import bars_hidden
from hybrid_rl.compat.transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
from hybrid_rl.errors import ModelError
from hybrid_rl.memory.offload import own_memory

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


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
