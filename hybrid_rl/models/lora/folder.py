"""Adapter folders, in the form that peft writes and reads: its config, and the adapter's tensors by peft's names."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from hybrid_rl.errors import ModelError
from hybrid_rl.models.lora.inject import is_adapter_name
from hybrid_rl.models.lora.peft_config import require_peft
from hybrid_rl.models.saving import whole
from hybrid_rl.process.files import Sink, save_tensors
from hybrid_rl.weights.boxes import local_box, local_tensor
from hybrid_rl.weights.plain import ADAPTER, is_adapted
from hybrid_rl.weights.sources import FolderSource, WeightSource

CONFIG_FILE, WEIGHTS_FILE, PICKLED_FILE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
PREFIX = "base_model.model."  # of all names: peft's own two modules around the model


def is_adapter_folder(path: str | Path) -> bool:
    """Return whether a path is a folder with an adapter."""
    return (Path(path) / CONFIG_FILE).is_file()


def read_settings(folder: str | Path) -> Any:
    """Read the peft config of an adapter folder. Raises ModelError if it is damaged, ConfigError without peft."""
    require_peft()
    from peft import PeftConfig

    path = Path(folder) / CONFIG_FILE
    try:
        settings = PeftConfig.from_pretrained(str(folder))
        settings.inference_mode = False  # or its adapters would be frozen
        return settings
    except Exception as error:  # json, peft and its dataclasses raise errors of their own
        raise ModelError(f"{path} cannot be read: {type(error).__name__}: {error}") from error


def settings_of(module: nn.Module) -> Any:
    """Return the peft config of the adapters that are in a module; None if it has none."""
    configs = getattr(module, "peft_config", None)
    return configs.get(ADAPTER) if isinstance(configs, dict) and is_adapted(module) else None


def stored_name(name: str) -> str:
    """Return peft's name in a folder for a parameter of a module with adapters."""
    name = name.replace(f".modules_to_save.{ADAPTER}.", ".")
    name = re.sub(rf"(\.lora_\w+)\.{ADAPTER}(?=\.|$)", r"\1", name)
    return PREFIX + name.removesuffix(".weight" if name.endswith(".lora_magnitude_vector.weight") else "")


def stored_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return what an adapter folder holds of a module, by peft's names: the adapters and whatever else is trained."""
    return {
        stored_name(name): parameter
        for name, parameter in module.named_parameters()
        if is_adapter_name(name) or parameter.requires_grad
    }


@torch.no_grad()
def save_adapter(
    module: nn.Module,
    folder: Path,
    dtype: torch.dtype,
    *,
    base: str | None,
    is_writer: bool = True,
    sink: Sink | None = None,
) -> None:
    """Write the adapter of a module into a folder, which is made. base: name or path of the model that it belongs to,
    as peft looks for it. sink: takes the tensors instead of having them written.

    Every rank of a sharded module calls it, one with is_writer; tensors are gathered one after the other.
    """
    own = sink is not None
    whole_tensors = {name: whole(p, dtype, keep=is_writer, own=own) for name, p in stored_parameters(module).items()}
    if not is_writer:
        return
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.contiguous() for name, tensor in whole_tensors.items()}
    (sink or save_tensors)(tensors, folder / WEIGHTS_FILE, {"format": "pt"})
    settings = copy.deepcopy(settings_of(module))
    settings.base_model_name_or_path, settings.inference_mode = base, True
    if float(settings.lora_alpha).is_integer():
        settings.lora_alpha = int(settings.lora_alpha)  # as peft has it
    for name in ("target_modules", "exclude_modules", "target_parameters"):
        if isinstance(names := getattr(settings, name), set):
            setattr(settings, name, sorted(names))  # or its order, and so the file, would be another in every process
    settings.save_pretrained(str(folder))


@torch.no_grad()
def load_adapter(module: nn.Module, source: WeightSource) -> None:
    """Fill the adapters of a module from a source with peft's names. Of a sharded parameter only this rank's box is
    read, and nothing is communicated.

    Raises ModelError, before anything is overwritten, if tensors are missing, left over, or of another shape.
    """
    own, names = stored_parameters(module), set(source.names())
    shapes = {name: source.spec(name)[0] for name in names & own.keys()}
    wrong = [
        *(f"{name} is missing" for name in sorted(own.keys() - names)),
        *(f"{name} has no place in the model" for name in sorted(names - own.keys())),
        *(
            f"{name} is {list(shape)}, not {list(own[name].shape)}"
            for name, shape in sorted(shapes.items())
            if shape != tuple(own[name].shape)
        ),
    ]
    if wrong:
        more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        raise ModelError(
            f"{source.label} does not fit the adapters of this run: {wrong[0]}{more}; is it of another model, or of "
            "other settings (lora.r, lora.target_modules)?"
        )
    for name, parameter in own.items():
        target = local_tensor(parameter)
        if target.numel():
            target.copy_(source.read(name, local_box(parameter)))
    source.close()


class AdapterSource(FolderSource):
    """The tensors of an adapter folder, by peft's names."""

    uses_checkpoint_names = False

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.label = f"the adapter {path!r}"

    def _open(self) -> dict[str, Any]:
        path = Path(self.path) / WEIGHTS_FILE
        if not path.is_file():
            is_pickled = (path.parent / PICKLED_FILE).is_file()
            raise ModelError(
                f"cannot load {self.label}: it has no {WEIGHTS_FILE}"
                + (
                    f", only {PICKLED_FILE}; load it with peft once, and save it again with save_pretrained"
                    if is_pickled
                    else ""
                )
            )
        handle = safe_open(path, framework="pt")
        return dict.fromkeys(handle.keys(), handle)
