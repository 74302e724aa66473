"""The user's own cache on this machine, for what is made of a model once and read at every start."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from hybrid_rl.errors import ConfigError


def user_cache(name: str) -> Path:
    """Return a folder of this name that only this user can enter: under XDG_CACHE_HOME or ~/.cache, or among the
    temporary files if neither can be written. Raises ConfigError if there is none."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hybrid_rl" / name
    home = home.absolute()
    for root in (home, Path(tempfile.gettempdir()) / f"hybrid_rl-{name}-{os.getuid()}"):
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(root, os.W_OK | os.X_OK):
            break
    else:
        raise ConfigError(f"neither {home} nor {root} can be written; set XDG_CACHE_HOME to a folder that can")
    status = root.lstat()
    if status.st_uid != os.getuid() or not stat.S_ISDIR(status.st_mode):
        raise ConfigError(f"{root} is not a folder of this user's own; remove it, or change XDG_CACHE_HOME")
    if status.st_mode & 0o077:
        root.chmod(0o700)
    return root
