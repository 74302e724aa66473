"""Comparison of a checkpoint with its manifest, before anything in it is used."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path

from hybrid_rl.errors import CheckpointError
from hybrid_rl.resharding.folders import MANIFEST_FILE, Content, read_manifest

logger = logging.getLogger("hybrid_rl")

STATE_FILE = "trainer_state.json"
WEIGHTS = (".safetensors", ".safetensors.index.json")


def check_checkpoint(folder: Path, *, needs_manifest: bool = True) -> None:
    """Raise CheckpointError, naming the file, if a checkpoint is not what was written. needs_manifest: also if it has
    no manifest to compare with, as an incomplete copy; otherwise that is a warning.

    Warns about texts of the model that seem to have been edited.
    """
    files = _read(folder)
    if files is None and needs_manifest:
        raise CheckpointError(
            f"{folder} has no {MANIFEST_FILE}, so nothing in it can be checked, as in an incomplete copy "
            f"(resume={folder} reads it all the same). Use another checkpoint"
        )
    if files is None:
        logger.warning(
            "%s has no %s, so nothing in it can be checked: it was deleted, or the copy is incomplete",
            *(folder, MANIFEST_FILE),
        )
        return
    _check(folder, files, files)


def is_whole(folder: Path) -> bool:
    """Return whether a folder has every file of its manifest at the size that was written. Nothing is read but the
    manifest."""
    try:
        files = _read(folder)
    except CheckpointError:
        return False
    return files is not None and all(
        content.problem_of(folder / name, is_read=False) is None for name, content in files.items()
    )


def check_model_texts(folder: Path) -> None:
    """Raise CheckpointError if the config or tokenizer of a model is damaged. This is cheap, and done before they are
    read; `check_model` checks the rest."""
    for name, content in (_read(folder) or {}).items():
        if _is_text_of_the_model(name) and not _is_readable(folder / name):
            _check(folder, {name: content}, [name])


def check_model(folder: Path) -> None:
    """Check the model in a folder (its weights, config and tokenizer, no optimizer) as `check_checkpoint` does, if the
    folder is a checkpoint or the critic of one; other models have no manifest."""
    files = _read(folder)
    if files is None and (above := _read(folder.parent)) is not None:
        prefix = f"{folder.name}/"
        files = {name.removeprefix(prefix): content for name, content in above.items() if name.startswith(prefix)}
    if files:
        _check(folder, files, [name for name in files if "/" not in name and name != STATE_FILE])


def _check(folder: Path, files: Mapping[str, Content], names: Iterable[str]) -> None:
    for name in names:
        problem = files[name].problem_of(folder / name)
        if problem and _is_text_of_the_model(name) and _is_readable(folder / name):
            logger.warning(
                "%s differs from what was written: %s. If nobody edited it, it is damaged", folder / name, problem
            )
        elif problem:
            raise CheckpointError(
                f"{folder / name} is damaged: {problem}. Use another checkpoint; if it was changed on purpose, delete "
                f"{MANIFEST_FILE} next to it to skip this check"
            )


def _is_text_of_the_model(name: str) -> bool:
    """Return whether people edit this file: config, tokenizer, chat template, a model card. Resuming does not read
    them."""
    return "/" not in name and name != STATE_FILE and not name.endswith(WEIGHTS)


def _is_readable(path: Path) -> bool:
    """Return whether a changed file is one that somebody may have edited: JSON that can be parsed, or a text. A file
    that is missing, empty, cut or not a text is damaged."""
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".json":
            json.loads(text)
    except (OSError, ValueError):
        return False
    return bool(text.strip()) and "\0" not in text


def _read(folder: Path) -> dict[str, Content] | None:
    """Return the contents by name in the folder; None if there is no manifest."""
    try:
        manifest = read_manifest(folder)
    except ValueError as error:
        raise CheckpointError(f"{error}. Use another checkpoint, or delete the manifest to skip this check") from error
    return None if manifest is None else manifest[0]
