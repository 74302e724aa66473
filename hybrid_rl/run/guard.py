"""Guard of a training step: it is completed, or it did not happen."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from hybrid_rl.data.sampler import PromptSampler
from hybrid_rl.errors import HandoffError
from hybrid_rl.process.interrupts import deferred_interrupt


class StepGuard:
    """Keeps a training step whole if an error or Ctrl-C breaks it off.

    Before `commit` the step is taken back: its prompts come again in the next one. From `commit` to the end of the step
    Ctrl-C waits (a second one does not). Between `commit` and `complete` the weights belong to no step: if the step
    breaks off there, they are torn.

    is_stepping: whether a step is under way that is not complete.
    is_torn: whether the weights are between two training steps.
    """

    def __init__(self, sampler: PromptSampler) -> None:
        self._sampler = sampler
        self._hold = contextlib.ExitStack()
        self._position = sampler.state_dict()
        self.is_stepping = self.is_torn = False

    @property
    def data_position(self) -> dict[str, Any]:
        """State of the sampler after the last complete step, with what the user changed since."""
        return self._position if self.is_stepping else self._sampler.state_dict()

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Enclose a training step, and the work that is due after it."""
        with self._hold:
            self._position, self.is_stepping = self._sampler.state_dict(), True
            try:
                yield
            except BaseException:
                if self.is_stepping:
                    self._sampler.load_state_dict(self._position)
                raise
            finally:
                self.is_stepping = False

    def commit(self) -> None:
        """Note that the weights change from here on."""
        self._hold.enter_context(deferred_interrupt())
        self.is_torn = True

    @contextlib.contextmanager
    def update(self, *, has_critic: bool) -> Iterator[None]:
        """Enclose the update. A HandoffError comes before the policy's first optimizer step, so that without a critic,
        which is updated before it, no weights have changed."""
        try:
            yield
        except HandoffError:
            self.is_torn = has_critic
            raise

    def complete(self) -> None:
        """Note that the step is done: an error from here on does not take it back."""
        self.is_stepping = self.is_torn = False
