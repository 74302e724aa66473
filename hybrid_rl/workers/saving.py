"""What a rank writes and reads: checkpoints, merged models, and the base model of adapters."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from hybrid_rl.checkpoint.base_model import BASE, base_hashes, check_base, config_numbers, keep_base
from hybrid_rl.checkpoint.reading import read_state
from hybrid_rl.checkpoint.writing import write_checkpoint, write_model
from hybrid_rl.controller import RankContext, dispatch
from hybrid_rl.memory.cycle import Cycle
from hybrid_rl.models.lora.plain import is_adapted
from hybrid_rl.training.actor import Actor
from hybrid_rl.workers.base import WorkerBase
from hybrid_rl.workers.roles import Roles


class SavingWorker(WorkerBase):
    """The base of HybridWorker that saves and loads. _version: of the actor's weights, from their publication to the
    next update."""

    _context: RankContext
    _cycle: Cycle
    _actor: Actor
    _roles: Roles
    _tokenizer: PreTrainedTokenizerBase
    _version: int | None = None

    @dispatch(collect="leader")
    def save(self, folder: Path, state: dict[str, Any]) -> None:
        """Write a checkpoint: weights, tokenizer, optimizer, and the driver's state. Of a run with adapters the state
        has the base model (`keep_base`)."""
        self._actor.optimizer.check()
        base = state.get(BASE)

        def save_model(target: Path) -> None:
            self._actor.save_model(target, base)
            self._roles.save_models(target, base)
            self._write_tokenizer(target)

        with self.phase(self._cycle.save):
            write_checkpoint(
                folder,
                save_model,
                self._actor.optimizer_state(),
                state,
                parts=self._roles.optimizer_state(),
                rank=self._context.rank,
                gather=self._context.gather,
            )

    def _write_tokenizer(self, folder: Path) -> None:
        if self._context.rank == 0:
            self._tokenizer.save_pretrained(folder)

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
    def load(self, folder: Path) -> None:
        """Continue from a checkpoint. Raises CheckpointError if it is damaged, or of another model."""
        self._version = None
        with self.phase(self._cycle.save):
            if is_adapted(self._actor.model.module):
                self._compare_base(read_state(folder).get(BASE), f"the adapter of {folder}")
            self._actor.load(folder)
            self._roles.load_models(folder)
