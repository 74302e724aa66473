"""A model, loaded, with an error that names each way to fail.

GGUF files (llama.cpp's format: weights, tokenizer and chat template in one file, mostly quantised) are loaded too.
transformers dequantises them with the package `gguf`. All that trains, generates and saves reads ordinary folders, so
such a file is converted into one, once: its weights are float32 there, which holds every value of the file.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
)

from hybrid_rl.compat.noise import bars_hidden
from hybrid_rl.compat.transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
from hybrid_rl.errors import ModelError
from hybrid_rl.memory.offload import own_memory
from hybrid_rl.models.user_cache import user_cache
from hybrid_rl.process.files import write_text

logger = logging.getLogger("hybrid_rl")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
PART = re.compile(r"-(\d{5})-of-(\d{5})$")  # of a GGUF file in several


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
    path = model_folder(path)
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
    complete(path, info)
    own_memory(model)
    return model


def complete(path: str, info: Mapping[str, Any]) -> None:
    """Raise ModelError if transformers found no weight, or one of another shape, for a parameter of the model."""
    for kind in ("missing_keys", "mismatched_keys"):
        if info.get(kind):
            shown = ", ".join(str(name) for name in sorted(map(str, info[kind]))[:3])
            raise ModelError(
                f"model {path!r}: {len(info[kind])} {kind.replace('_', ' ')}, e.g. {shown}; "
                "these weights would start random. Is the checkpoint complete, and of this architecture?"
            )


def vocabulary_size(module: PreTrainedModel) -> int:
    """Return how many tokens the model embeds."""
    embeddings: Any = module.get_input_embeddings()
    return int(embeddings.weight.shape[0])


def model_folder(path: str) -> str:
    """Return what to load a model from: a name or folder as it is; of a GGUF file, or a folder with one and no
    config.json, the folder that it was converted into.

    Raises ModelError for any other file, for a name that looks like a local folder and is not one, and for a GGUF file
    that cannot be converted; ConfigError if there is nowhere to write.
    """
    path = os.path.expanduser(path)
    if (file := gguf_file(Path(path))) is not None:
        return str(_converted(file.resolve()))
    if path.lower().endswith(".gguf"):
        raise ModelError(f"there is no GGUF file {path!r}")
    if Path(path).is_file():
        raise ModelError(f"model {path!r} is a file; name the folder that has the model's config.json, or a .gguf file")
    looks_local = path.startswith((".", "/", "~")) or path.count("/") > 1
    if looks_local and not Path(path).is_dir():
        raise ModelError(f"model folder {path!r} does not exist")
    return path


def gguf_file(path: Path) -> Path | None:
    """Return the GGUF file that a path means, if it means one. Raises ModelError if a folder has several, or it is
    a part of a model."""
    files = [path] if path.is_file() and path.suffix.lower() == ".gguf" else []
    if path.is_dir() and not (path / "config.json").exists():
        files = [file for file in sorted(path.glob("*.gguf")) if not file.name.startswith("mmproj")]
    if not files:
        return None
    if PART.search(files[0].stem):
        raise ModelError(f"{files[0]} is a part of a model; join the parts with llama-gguf-split --merge")
    if len(files) > 1:
        raise ModelError(f"{path} has {len(files)} GGUF files; name one: {', '.join(file.name for file in files)}")
    return files[0]


def _converted(file: Path) -> Path:
    status = file.stat()
    key = f"{file} {status.st_size} {status.st_mtime_ns} {transformers.__version__}"
    root = user_cache("gguf")
    folder = root / f"{file.stem[:100]}-{hashlib.blake2b(key.encode(), digest_size=8).hexdigest()}"
    if any(folder.glob("*.safetensors")):
        return folder
    if importlib.util.find_spec("gguf") is None:
        raise ModelError(f"model {str(file)!r} needs the package that reads GGUF files: pip install 'hybrid_rl[gguf]'")
    logger.warning("%s is dequantised to float32 and written to %s, once", file, folder)
    with tempfile.TemporaryDirectory(dir=root) as made:
        _convert(file, Path(made) / "model")
        try:
            (Path(made) / "model").rename(folder)
        except OSError:  # another process was faster, or this is what somebody left of a folder
            if not any(folder.glob("*.safetensors")):
                shutil.rmtree(folder, ignore_errors=True)
                (Path(made) / "model").rename(folder)
    return folder


def _convert(file: Path, folder: Path) -> None:
    # By itself: transformers would prefer a tokenizer.json beside it to the tokenizer in it.
    alone, source = folder.with_name("alone"), {"gguf_file": file.name}
    alone.mkdir()
    (alone / file.name).symlink_to(file)
    with loading("GGUF file", str(file)), bars_hidden():
        config = AutoConfig.from_pretrained(alone, **source)
        model, info = auto_class(config).from_pretrained(alone, dtype=torch.float32, output_loading_info=True, **source)
        complete(str(file), info)
        tokenizer = AutoTokenizer.from_pretrained(alone, **source)
        # They are plain numbers now; transformers would refuse to save what its config calls quantised.
        model.hf_quantizer, model.is_quantized = None, False
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        # transformers 5.19 adds tokens that the model does not embed to some vocabularies.
        rules = json.loads((folder / "tokenizer.json").read_text())
        size = vocabulary_size(model)
        rules["added_tokens"] = [token for token in rules["added_tokens"] if token["id"] < size]
        write_text(folder / "tokenizer.json", json.dumps(rules, ensure_ascii=False))


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
        where = "" if Path(path).exists() else on_hub
        raise ModelError(f"cannot load {what} {path!r}{where}: {first_line(error)}") from error


def first_line(error: Exception) -> str:
    """Return type and first line of an error, whose full text may be a page long."""
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
