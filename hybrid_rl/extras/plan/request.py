"""What `hybrid-rl plan` is asked about: a recipe, a YAML file, a preset or keys, on GPUs that need not exist here."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hybrid_rl.config import TrainerConfig, load_config, resolve
from hybrid_rl.config.hardware import Hardware
from hybrid_rl.config.presets import PRESETS
from hybrid_rl.config.sizes import memory_bytes
from hybrid_rl.errors import ConfigError
from hybrid_rl.extras.plan.rates import Rates, rates_of
from hybrid_rl.models.recipe import ModelRecipe
from hybrid_rl.run.adapters import adapter_of, check_adapters, record_adapters

RECIPE_ARGUMENTS = ("reward", "config")  # of recipes, besides keys


@dataclass(frozen=True)
class Machine:
    """GPUs that a run is planned for. num_gpus: None for a run on CPUs. gpu_memory, host_memory: texts such as 80GB;
    None = that of the GPU by its name, and not known. gpu: its name, for estimates of time."""

    num_gpus: int | None = None
    gpu_memory: str | None = None
    gpu: str | None = None
    host_memory: str | None = None
    gpus_per_host: int = 8

    def check(self) -> None:
        """Raise ConfigError for numbers and sizes that make no sense."""
        if self.num_gpus is not None and self.num_gpus < 1:
            raise ConfigError(
                f"--gpus {self.num_gpus} must be at least 1; plan a run on CPUs with device=cpu, without it"
            )
        if self.gpus_per_host < 1:
            raise ConfigError(f"--gpus-per-host {self.gpus_per_host} must be at least 1; it is 8 if it is left out")
        rest = (self.num_gpus or 0) % self.gpus_per_host
        if self.num_gpus is not None and self.num_gpus > self.gpus_per_host and rest:
            raise ConfigError(
                f"--gpus {self.num_gpus} is no multiple of --gpus-per-host {self.gpus_per_host}, so a host would have "
                f"only some of its GPUs; give --gpus {self.num_gpus - rest + self.gpus_per_host}, or the right number "
                "per host"
            )
        for name, text in (("--gpu-memory", self.gpu_memory), ("--host-memory", self.host_memory)):
            if text is not None:
                memory_bytes(text, name)

    @property
    def device_memory(self) -> str | None:
        """What a run may take of a GPU."""
        if self.gpu_memory is not None or self.num_gpus is None or self.rates is None:
            return self.gpu_memory
        return self.rates.memory

    @property
    def device_option(self) -> str:
        """The option that says how much memory a GPU has; empty if none does."""
        if self.gpu_memory is not None:
            return f"--gpu-memory {self.gpu_memory}"
        return "" if self.gpu is None else f"--gpu {self.gpu}"

    @property
    def rates(self) -> Rates | None:
        """The rates of the GPU, if it is named. Raises ConfigError if its name is not known."""
        return None if self.gpu is None else rates_of(self.gpu)


def planned_config(words: Sequence[str], machine: Machine) -> TrainerConfig:
    """Return the resolved config of the run that words describe: a recipe (.py), a YAML file or a preset, if the first
    is one, and `key=value`.

    Raises ConfigError if they describe none, or if GPUs or keys are missing, or do not go together.
    """
    machine.check()
    base, settings, arguments = _base(words)
    keys = [argument.partition("=")[0] for argument in arguments]
    options = {"device_memory": machine.device_memory, "host_memory": machine.host_memory}
    for name, value in options.items():
        if value is not None and not {name, f"memory.{name}"} & set(keys):
            arguments.append(f"memory.{name}={value}")
    if machine.num_gpus is not None and "num_ranks" not in keys:
        settings["num_ranks"] = "auto"
    config, given_keys = load_config(base, settings, arguments)
    if config.model.path is None:
        raise ConfigError("the model is missing: set model.path to its name, or to a folder that has its config.json")
    config, given_keys, adapter = record_adapters(config, given_keys, None)
    if adapter is not None:
        config = load_config(config, {"model.path": adapter_of(str(config.model.path))[0]})[0]
    if machine.num_gpus is None and config.model.device != "cpu":
        raise ConfigError(
            "the GPUs are missing: give --gpus 8 --gpu-memory 80GB (or yours), or add device=cpu for the run that "
            "`hybrid-rl train` starts on a machine without a GPU"
        )
    if machine.num_gpus is not None and config.model.device == "cpu":
        raise ConfigError(f"--gpus {machine.num_gpus} and device=cpu exclude each other; leave one of them out")
    gpus = Hardware(machine.num_gpus or 0, machine.gpu or "", missing="the plan has none", is_here=False)
    if machine.num_gpus is not None and config.memory.device_memory is None:
        raise ConfigError("the memory of a GPU is missing: give --gpu-memory 80GB, or --gpu H100 for all of that GPU's")
    _refuse_more_than_there_is(config, machine)
    resolved = resolve(config, given_keys, hardware=gpus)
    if adapter is not None:
        trusts = resolved.model.trust_remote_code
        check_adapters(ModelRecipe.of_folder(str(config.model.path), trust_remote_code=trusts), adapter, resolved)
    return resolved


def _refuse_more_than_there_is(config: TrainerConfig, machine: Machine) -> None:
    """Raise ConfigError for keys that allow a run more memory than the machine has."""
    gpu = machine.device_option
    for name, option, there in (
        ("device_memory", gpu, machine.device_memory),
        ("host_memory", f"--host-memory {machine.host_memory}", machine.host_memory),
    ):
        limit = getattr(config.memory, name)
        if None not in (limit, there) and memory_bytes(limit, f"memory.{name}") > memory_bytes(str(there), option):
            raise ConfigError(
                f"memory.{name}={limit} is more than there is ({option}: {there}); leave one of them out, or make the "
                "key smaller"
            )


def _base(words: Sequence[str]) -> tuple[str | None, dict[str, object], list[str]]:
    """Return the YAML file to begin with (that of a run for its folder), settings over it, and the `key=value`
    arguments."""
    begins = words[0].removeprefix("config=") if words else ""  # as `hybrid-rl train` has it
    first = begins if begins and "=" not in begins else None
    arguments = list(words[1:] if first else words)
    if first is None:
        return None, {}, arguments
    path = Path(first)
    if path.suffix == ".py":
        return _recipe(path, arguments)
    if path.suffix in (".yaml", ".yml"):
        return first, {}, arguments
    if (path / "config.yaml").is_file() and not (path / "config.json").exists():  # the folder of a run
        return str(path / "config.yaml"), {}, arguments
    if first in PRESETS:
        return None, {"algorithm": first}, arguments
    near = difflib.get_close_matches(first, PRESETS, n=1)
    help_ = f"did you mean {near[0]!r}?" if near else "`hybrid-rl algorithms` lists the presets"
    if path.is_dir() or (not near and "/" in first):
        help_ = f"did you mean model.path={first}?"
    raise ConfigError(f"{first!r} is no recipe (.py), YAML file, folder of a run, preset or key=value; {help_}")


def _recipe(path: Path, arguments: list[str]) -> tuple[str | None, dict[str, object], list[str]]:
    """Read what a recipe would run: with a model of your own its algorithm and the library's defaults, and the YAML
    file of `config=`. Without one it runs the quickstart, whose model does not exist before."""
    beside = path.with_suffix(".yaml")
    if not path.is_file() or not beside.is_file():
        missing = path if not path.is_file() else beside
        raise ConfigError(f"{missing} does not exist; a recipe is a script with its settings in a YAML file beside it")
    parts = [argument.partition("=") for argument in arguments]
    values = {name: value for name, _, value in parts if name in RECIPE_ARGUMENTS}
    keys = [argument for argument, (name, _, _) in zip(arguments, parts, strict=True) if name not in RECIPE_ARGUMENTS]
    config, explicit = load_config(values.get("config"), arguments=keys)
    if config.model.path is None:
        raise ConfigError(
            f"{path} without model.path runs the quickstart, which builds its own model and needs no plan; set "
            f"model.path to the model that it will train"
        )
    algorithm = {} if "algorithm.name" in explicit else {"algorithm": load_config(beside)[0].algorithm.name}
    return values.get("config"), {**algorithm}, keys
