"""The folder with the config.json from which vLLM builds its model: the same one for the same model at every start.

vLLM finds what it has compiled by a hash of its configuration, and the folder's path is a part of that: a new folder
would mean half a minute or more of compiling at every start of every rank. It is in the user's own cache, and only as
many are kept as are of use.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from pathlib import Path

from transformers import PreTrainedModel
from transformers.utils import CONFIG_NAME

from hybrid_rl.checkpoint.owners import Owner
from hybrid_rl.compat.transformers import save_own_code
from hybrid_rl.models.saving import stored_config
from hybrid_rl.models.user_cache import user_cache

MAX_FOLDERS = 64  # of a few kilobytes each
UNFINISHED = ".new-"


def config_folder(module: PreTrainedModel) -> Path:
    """Return the folder of this model's configuration, written if it is not there yet. Nothing of the module but its
    class and config is looked at.

    Raises ConfigError if the cache is not this user's own, or cannot be written.
    """
    root = user_cache("vllm")
    _forget_unfinished(root)
    with tempfile.TemporaryDirectory(prefix=f"{UNFINISHED}{Owner.here().token}.", dir=root) as made:
        written = Path(made) / "config"
        written.mkdir(mode=0o700)
        _write(module, written)
        folder = root / _digest(written)
        try:
            written.rename(folder)
        except OSError:
            # It is there already: another start's, with the same content, unless somebody has changed it since.
            if not folder.is_dir() or _digest(folder) != folder.name:
                shutil.rmtree(folder, ignore_errors=True)
                written.rename(folder)
    os.utime(folder)
    _forget_oldest(root)
    return folder


def _write(module: PreTrainedModel, folder: Path) -> None:
    config = stored_config(module)  # which says whether the embeddings are tied: vLLM believes it
    config.architectures = [type(module).__name__.removeprefix("FSDP")]  # FSDP2 derives a class of the same name
    save_own_code((config,), config, folder)
    config.to_json_file(folder / CONFIG_NAME)


def _digest(folder: Path) -> str:
    """Return a hash of the names and the content of all files."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        for part in (path.relative_to(folder).as_posix().encode(), path.read_bytes()):
            digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


def _forget_unfinished(root: Path) -> None:
    """Remove what starts left that were killed while they wrote."""
    for path in root.glob(f"{UNFINISHED}*"):
        owner = Owner.of_token(path.name.removeprefix(UNFINISHED).rpartition(".")[0])
        if owner is not None and owner.standing() == "gone":
            shutil.rmtree(path, ignore_errors=True)


def _forget_oldest(root: Path) -> None:
    """Keep those that were used last. Folders that a start was killed over count as well."""
    folders = []
    for path in root.iterdir():
        try:
            folders.append((path.stat().st_mtime, path))
        except OSError:
            continue  # another start's, gone by now
    for _, path in sorted(folders)[:-MAX_FOLDERS]:
        shutil.rmtree(path, ignore_errors=True)
