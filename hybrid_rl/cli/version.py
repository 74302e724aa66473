"""`hybrid-rl version`: what is installed."""

from __future__ import annotations

import platform
from importlib import metadata

NOT_INSTALLED = "not installed"
PACKAGES = ("hybrid_rl", "torch", "transformers", "numpy", "ray")


def print_version() -> None:
    """Print the versions of this library and of what it stands on.

    Examples:
      hybrid-rl version
      hybrid-rl doctor        the machine as well, and whether ranks fit on it
    """
    print("\n".join(f"{name:20}{version}" for name, version in installed().items()))


def installed() -> dict[str, str]:
    """Return the versions of packages by name, "not installed" if they are missing, without importing them."""
    versions = {"python": platform.python_version(), **{name: version_of(name) for name in PACKAGES}}
    # vLLM for CPUs is a distribution of another name.
    names = metadata.packages_distributions().get("vllm", ())
    versions["vllm"] = f"{metadata.version(names[0])} ({names[0]})" if names else NOT_INSTALLED
    return versions


def version_of(name: str) -> str:
    """Return the version of a distribution."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return NOT_INSTALLED
