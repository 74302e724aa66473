"""What a rank writes and reads: checkpoints, merged models, and the base model of adapters."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from hybrid_rl.checkpoint.background import BackgroundWrite, Progress
from hybrid_rl.checkpoint.base_model import base_hashes, check_base, config_numbers, keep_base
from hybrid_rl.checkpoint.reading import BASE, Checkpoint
from hybrid_rl.checkpoint.snapshot import Room, SaveModel
from hybrid_rl.checkpoint.writing import begin_checkpoint, write_checkpoint, write_model
from hybrid_rl.config.buffer_keys import HeldConfig
from hybrid_rl.controller import dispatch
from hybrid_rl.controller.session import shared_memory, temporary_folder
from hybrid_rl.memory.byte_sizes import size_text
from hybrid_rl.memory.cycle import ACTOR
from hybrid_rl.metrics.metric_sums import now
from hybrid_rl.models.tokenizer import save_tokenizer
from hybrid_rl.process.files import Sink
from hybrid_rl.rollout.held_files import save_held, write_held
from hybrid_rl.training.actor import Actor
from hybrid_rl.workers.generating import GeneratingWorker
from hybrid_rl.workers.policy_versions import require_folder, require_room, write_policy
from hybrid_rl.workers.roles import Roles


class SavingWorker(GeneratingWorker):
    """The base of HybridWorker that saves and loads, and writes weights for other ranks."""

    _actor: Actor
    _roles: Roles
    _has_written_base = False
    _tokenizer: PreTrainedTokenizerBase
    _writing: BackgroundWrite | None = None  # the checkpoint of `begin_save`
    _ending: BackgroundWrite | None = None  # one of which nobody wants to know any more
    _tokenizer_files: tuple[Any, dict[str, bytes]] | None = None  # as texts, with what they were made of

    @dispatch(collect="leader")
    def save(self, folder: Path, state: dict[str, Any], held: list[str] | None = None) -> None:
        """Write a checkpoint: weights, tokenizer, optimizer, and the driver's state. Of a run with adapters the state
        has the base model (`keep_base`). held: what other ranks hold (`held_texts`); None = these ranks do."""
        self._actor.optimizer.check()
        self._await_end()
        with self.phase(self._cycle.save):
            write_checkpoint(folder, self._models_saved(state, held), **self._rest_saved(state))

    @dispatch(collect="leader")
    def begin_save(self, folder: Path, state: dict[str, Any], held: list[str] | None = None) -> str:
        """Copy what `save` would write into host memory, and begin to write that while training goes on:
        `save_progress` tells how far it is. Returns ""; if there is too little host memory, what is missing, and
        nothing has begun."""
        self._actor.optimizer.check()
        self._await_end()
        with self.phase(self._cycle.save):
            num_bytes = self._actor.saved_bytes() + self._roles.saved_bytes() if self._is_first else 0
            rest = self._rest_saved(state)
            begun = begin_checkpoint(folder, self._models_saved(state, held), model_bytes=num_bytes, **rest)
        if isinstance(begun, Room):
            return (
                f"{size_text(begun.num_bytes)} of {size_text(begun.available_bytes)} that are available on {begun.host}"
            )
        self._writing = begun
        return ""

    @dispatch(collect="all")
    def save_progress(self, wait_seconds: float) -> Progress:
        """Tell how far the checkpoint of `begin_save` is, at once or after waiting so long for its end."""
        if self._writing is None:
            return Progress(is_done=True, error="it was not begun", seconds=0.0)
        return self._writing.progress(wait_seconds)

    @dispatch(collect="leader")
    def end_save(self, is_given_up: bool) -> None:
        """Forget what `begin_save` began. is_given_up: a rank has failed, so that the others need not go on."""
        if is_given_up and self._writing is not None:
            self._writing.give_up()
        self._ending, self._writing = self._writing, None

    def _await_end(self) -> None:
        """Wait until nothing is written any more: what was given up deletes its folder, which may be used again."""
        for writing in (self._ending, self._writing):
            if writing is not None:
                writing.join()
        self._ending = self._writing = None

    @property
    def _is_first(self) -> bool:
        return self._context.rank == 0

    def _models_saved(self, state: Mapping[str, Any], held: list[str] | None) -> SaveModel:
        """Return what writes models, tokenizer and held groups of a checkpoint."""
        base = state.get(BASE)

        def save_model(folder: Path, sink: Sink | None = None) -> None:
            self._actor.save_model(folder, base, sink)
            self._roles.save_models(folder, base, sink)
            self._write_tokenizer(folder)
            if held is not None:
                for rank, text in enumerate(held if self._is_first else ()):
                    write_held(folder, rank, text)
            elif isinstance(self._config.buffer, HeldConfig):
                save_held(folder, self._context.rank, self._stream.held(state["global_step"]))

        return save_model

    def _rest_saved(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return everything else of a checkpoint, as arguments of what writes it."""
        context = self._context
        optimizers = {"optimizer": self._actor.optimizer_state(), "parts": self._roles.optimizer_state()}
        return {**optimizers, "state": state, "rank": context.rank, "gather": context.gather}

    @dispatch(collect="leader")
    def write_weights(self, root: Path, version: int) -> float:
        """Write the weights as this policy version for ranks that only generate (`write_policy`), with the trainer's
        half of the probe if it is due. root: the folder of all versions. Returns seconds. Raises HandoffError if they
        cannot be written."""
        self._actor.optimizer.check()
        require_folder(root)
        start, model, context = now(), self._actor.model, self._context
        is_embedded = self._config.rollout.placement == "embedded"
        with self.lease(frozenset({ACTOR})):
            if not self._has_written_base:  # nothing was written yet
                require_room(root, model, writes_base=not is_embedded)
            probe = self._expected(version)
            writes: Any = {"writes_base": not self._has_written_base, "rank": context.rank, "gather": context.gather}
            write_policy(root, version, model, probe=probe, is_embedded=is_embedded, **writes)
        self._has_written_base = True
        self._num_unproved -= probe is not None
        return now() - start

    def _write_tokenizer(self, folder: Path) -> None:
        if not self._is_first:
            return
        form = (len(self._tokenizer), str(self._tokenizer.chat_template))
        if self._tokenizer_files is None or self._tokenizer_files[0] != form:
            # A large vocabulary takes a second to be made into text; training would wait for it at every checkpoint.
            with temporary_folder("hrl-tokenizer-", shared_memory()) as place:
                root = place / "files"
                save_tokenizer(self._tokenizer, root)
                files = [path for path in sorted(root.rglob("*")) if path.is_file()]
                texts = {path.relative_to(root).as_posix(): path.read_bytes() for path in files}
            self._tokenizer_files = (form, texts)
        for name, text in self._tokenizer_files[1].items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(text)

    @dispatch(collect="leader")
    def save_merged(self, folder: Path) -> None:
        """Write the policy as a model without adapters, with its tokenizer."""
        self._actor.optimizer.check()

        def save_model(target: Path) -> None:
            self._actor.save_merged(target)
            self._write_tokenizer(target)

        with self.phase(self._cycle.save):
            write_model(folder, save_model, rank=self._context.rank, gather=self._context.gather)

    @dispatch(collect="leader")
    def keep_base(self, known: str | None, run_folder: Path) -> dict[str, Any]:
        """Return where the base model of the adapters is, with its hashes; write it into the run folder if it is
        nowhere. known: the name or folder that it was loaded from, if it was."""
        model, context = self._actor.model, self._context
        where = (known, run_folder, self._write_tokenizer)
        with self.phase(self._cycle.save):
            return keep_base(model.module, model.dtype, *where, rank=context.rank, gather=context.gather)

    @dispatch(collect="leader")
    def check_base(self, record: dict[str, Any], what: str) -> None:
        """Raise CheckpointError unless the base model is the one of this record (`keep_base`)."""
        with self.phase(self._cycle.save):
            self._compare_base(record, what)

    def _compare_base(self, record: Mapping[str, Any] | None, what: str) -> None:
        if record is not None:
            model, context = self._actor.model, self._context
            hashes = base_hashes(model.module, model.dtype, rank=context.rank, gather=context.gather)
            numbers = config_numbers(model.module) if context.rank == 0 else None  # one rank warns
            check_base(record, hashes, what, numbers)

    @dispatch(collect="leader")
    def load(self, checkpoint: Checkpoint) -> None:
        """Continue from a checkpoint. Raises CheckpointError if it is damaged, or of another model."""
        self._version, folder = None, checkpoint.folder
        with self.phase(self._cycle.save):
            self._compare_base(checkpoint.base, f"the adapter of {folder}")
            self._actor.load(folder)
            self._roles.load_models(folder)
