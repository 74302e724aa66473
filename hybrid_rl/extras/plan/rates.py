"""The rates at which GPUs compute and copy, by their data sheets, and the shares of them that an estimate assumes."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from hybrid_rl.errors import ConfigError


@dataclass(frozen=True)
class Rates:
    """The rates of one GPU, of its data sheet.

    memory: as sold, such as "80GB". flops: of dense bfloat16 products, a second. All others in bytes a second, in one
    direction. memory_bandwidth: of its own memory. host_bandwidth: of PCIe to the host. peer_bandwidth: to other GPUs
    of the host.
    """

    name: str
    memory: str
    flops: float
    memory_bandwidth: float
    host_bandwidth: float
    peer_bandwidth: float


GPUS = {
    gpu.name: gpu
    for gpu in (
        Rates("A100", "80GB", 312e12, 2.04e12, 32e9, 300e9),
        Rates("H100", "80GB", 989e12, 3.35e12, 64e9, 450e9),
        Rates("H200", "141GB", 989e12, 4.8e12, 64e9, 450e9),
        Rates("B200", "180GB", 2250e12, 8e12, 64e9, 900e9),
        Rates("L40S", "48GB", 362e12, 0.864e12, 32e9, 32e9),
    )
}


@dataclass(frozen=True)
class Assumptions:
    """What an estimate takes for granted; nothing of it was measured.

    training_share, prefill_share: of the GPU's products, in training and scoring, and for prompts. decode_share: of
    its memory bandwidth. link_share: of PCIe, NVLink and network. pass_seconds: of a decode pass besides reading
    memory: launches, sampling, the scheduler. network_bandwidth: of a GPU to other hosts, bytes a second.
    host_memory_bandwidth: of a host, for optimizers that stay there.
    """

    training_share: float = 0.30
    prefill_share: float = 0.40
    decode_share: float = 0.60
    link_share: float = 0.75
    pass_seconds: float = 2e-3
    network_bandwidth: float = 50e9
    host_memory_bandwidth: float = 200e9


def rates_of(name: str) -> Rates:
    """Return the rates of a GPU by its name, such as H100. Raises ConfigError for one that is not known."""
    gpus = {key.lower(): gpu for key, gpu in GPUS.items()}
    if name.lower() not in gpus:
        near = difflib.get_close_matches(name.lower(), gpus, n=1)
        hint = f" (did you mean {gpus[near[0]].name}?)" if near else ""
        raise ConfigError(f"the rates of GPU {name!r} are not known{hint}; use one of {', '.join(GPUS)}, or none")
    return gpus[name.lower()]


def rates_of_device(name: str) -> Rates | None:
    """Return the rates of a GPU by what its driver calls it ("NVIDIA H100 80GB HBM3"); None if it is not known, or is
    the slower form for PCIe."""
    words = name.upper().replace("-", " ").split()
    if "PCIE" in words and "L40S" not in words:
        return None
    return next((gpu for gpu in GPUS.values() if gpu.name in words), None)


def peak_flops(name: str) -> float | None:
    """Return the dense bfloat16 FLOP/s of a GPU by what its driver calls it; None if they are not known."""
    rates = rates_of_device(name)
    return None if rates is None else rates.flops
