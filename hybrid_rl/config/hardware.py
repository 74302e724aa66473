"""Resolution of `auto` for device, dtype and num_ranks, and checks against the available GPUs."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from hybrid_rl.config.algorithm import ranks_apart
from hybrid_rl.config.rank_keys import ControllerConfig, RayControllerConfig
from hybrid_rl.config.schema import TrainerConfig
from hybrid_rl.errors import ConfigError

Device = Literal["cpu", "cuda"]


@dataclass(frozen=True)
class Hardware:
    """The GPUs that a run can have: those of this process, or of a Ray cluster that it joins.

    name: of the first one, empty if unknown.
    missing: the reason if there is none.
    is_broken: whether this machine has GPUs that this torch, built for them, cannot use: no run takes the CPU instead
    unless it is asked to.
    is_overlooked: whether it probably has GPUs that were kept from this process, or that torch was not built for.
    has_bfloat16: in hardware; assumed for a cluster that is joined, where every rank checks its own GPU.
    is_here: whether they belong to this machine.
    """

    num_gpus: int = 0
    name: str = ""
    missing: str = "none was looked for"
    is_broken: bool = False
    is_overlooked: bool = False
    has_bfloat16: bool = True
    is_here: bool = True


NO_GPU = Hardware()


def settled(
    config: TrainerConfig, given: frozenset[str], hardware: Hardware, module_device: Device | None = None
) -> TrainerConfig:
    """Return the config with number of ranks, kind of device and dtype in place of `auto`.

    module_device: "cpu" or "cuda", the device of a module that was passed. One rank in this process trains it there;
    ranks on Ray get a copy of its weights on their own devices.

    Raises ConfigError if there are fewer GPUs than the config asks for, GPUs without bfloat16, or GPUs that cannot be
    used and no key that chooses the CPU.
    """
    config = _with_ranks(config, given, hardware)
    if isinstance(config.controller, RayControllerConfig):
        module_device = None
    device, dtype = _device(config, hardware, module_device), config.model.dtype
    if dtype == "auto":
        dtype = "bfloat16" if device == "cuda" and hardware.has_bfloat16 else "float32"
    elif dtype == "bfloat16" and device == "cuda" and not hardware.has_bfloat16:
        raise ConfigError(
            f"dtype=bfloat16, but {hardware.name} has no hardware support for it; use dtype=float32, or leave dtype out"
        )
    settled = dataclasses.replace(config, model=dataclasses.replace(config.model, device=device, dtype=dtype))
    _check_gpus(settled, hardware)
    return settled


def _with_ranks(config: TrainerConfig, given: frozenset[str], hardware: Hardware) -> TrainerConfig:
    """Resolve num_ranks=auto: one rank per GPU, less those with a role of their own; Ray only if it is needed, or if
    any of its keys is set."""
    if config.num_ranks != "auto":
        return config
    num_gpus = 0 if config.model.device == "cpu" else hardware.num_gpus
    num_ranks, controller = max(1, num_gpus - sum(ranks_apart(config).values())), config.controller
    if num_ranks == 1 and controller == RayControllerConfig() and "controller.backend" not in given:
        controller = ControllerConfig()
    return dataclasses.replace(config, num_ranks=num_ranks, controller=controller)


def _device(config: TrainerConfig, hardware: Hardware, module_device: Device | None) -> Device:
    asked = config.model.device
    if module_device is not None:
        if asked not in ("auto", module_device):
            raise ConfigError(
                f"device={asked}, but the module that was passed is on {module_device}; move it with "
                f'.to("{asked}"), or leave device out'
            )
        return module_device
    if asked == "auto":
        if hardware.is_broken:
            raise ConfigError(f"no GPU can be used: {hardware.missing}; or set device=cpu to train on the CPU")
        return "cuda" if hardware.num_gpus else "cpu"
    if asked == "cuda" and not hardware.num_gpus:
        raise ConfigError(f"device=cuda, but there is no GPU: {hardware.missing}; use device=auto or cpu")
    return asked


def _check_gpus(config: TrainerConfig, hardware: Hardware) -> None:
    """Raise ConfigError unless each rank on Ray gets a GPU."""
    assert config.num_ranks != "auto"
    apart = ranks_apart(config)
    wanted = config.num_ranks + sum(apart.values())
    if config.controller.backend == "local" or config.model.device == "cpu" or wanted <= hardware.num_gpus:
        return
    named = [f"{name}={number}" for name, number in {"num_ranks": config.num_ranks, **apart}.items()]
    asked = f"{' and '.join(named)} {'need' if apart else 'needs'}"
    raise ConfigError(
        f"{asked} {wanted} GPUs, one per rank, but there "
        f"{'is 1' if hardware.num_gpus == 1 else f'are {hardware.num_gpus}'}; use num_ranks=auto for one rank per "
        f"GPU, or device=cpu for ranks on CPU cores"
    )
