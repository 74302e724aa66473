"""What a rank writes and reads: checkpoints, merged models, and the base model of adapters."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybrid_rl.checkpoint.base_model import BASE, base_hashes, check_base, config_numbers, keep_base
from hybrid_rl.checkpoint.reading import read_state
from hybrid_rl.checkpoint.writing import write_checkpoint, write_model
from hybrid_rl.controller import dispatch
from hybrid_rl.memory.cycle import ACTOR
from hybrid_rl.metrics import now
from hybrid_rl.models.lora.plain import is_adapted
from hybrid_rl.rollout.held import save_held, write_held
from hybrid_rl.rollout.held_agents import HeldAgentRollout
from hybrid_rl.rollout.partial import PartialRollout
from hybrid_rl.training.actor import Actor
from hybrid_rl.workers.generating import GeneratingWorker
from hybrid_rl.workers.roles import Roles
from hybrid_rl.workers.versions import require_folder, write_policy


class SavingWorker(GeneratingWorker):
    """The base of HybridWorker that saves and loads, and writes weights for other ranks."""

    _actor: Actor
    _roles: Roles
    _has_written_base = False

    @dispatch(collect="leader")
    def save(self, folder: Path, state: dict[str, Any], held: list[str] | None = None) -> None:
        """Write a checkpoint: weights, tokenizer, optimizer, and the driver's state. Of a run with adapters the state
        has the base model (`keep_base`). held: what other ranks hold (`held_texts`); None = these ranks do."""
        self._actor.optimizer.check()
        base = state.get(BASE)

        def save_model(target: Path) -> None:
            self._actor.save_model(target, base)
            self._roles.save_models(target, base)
            self._write_tokenizer(target)
            if held is not None:
                for rank, text in enumerate(held if self._context.rank == 0 else ()):
                    write_held(target, rank, text)
            elif isinstance(self._rollout, PartialRollout | HeldAgentRollout):
                save_held(target, self._context.rank, self._rollout.held(state["global_step"]))

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
            probe = self._expected(version)
            writes: Any = {"writes_base": not self._has_written_base, "rank": context.rank, "gather": context.gather}
            write_policy(root, version, model.module, model.dtype, probe=probe, is_embedded=is_embedded, **writes)
        self._has_written_base = True
        self._num_unproved -= probe is not None
        return now() - start

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
