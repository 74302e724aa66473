"""What a script has trained is not lost because of an error in a later line of it, a misspelled name for example."""

from __future__ import annotations

import functools
import logging
import sys
import weakref
from types import TracebackType

from hybrid_rl.run.crew import Crew
from hybrid_rl.run.saver import Saver
from hybrid_rl.run.tenancy import Tenancy

logger = logging.getLogger("hybrid_rl")

_fitted: weakref.WeakSet[Rescue] = weakref.WeakSet()  # of the runs of this process that came to an end of `fit()`


class Rescue:
    """Saves what a complete `fit()` has trained and nobody has saved, when the script ends with an error."""

    def __init__(self, crew: Crew, tenancy: Tenancy, saver: Saver) -> None:
        self._crew, self._position, self._log = crew, crew.position, crew.log
        self._tenancy, self._saver = tenancy, saver
        self._fitted_step = 0  # the last one of a `fit()` that came to its end

    def note_fitted(self) -> None:
        """Note that a `fit()` came to its end: a script that fails from now on does not cost what was trained."""
        self._fitted_step = self._position.step
        _fitted.add(self)
        _watch_script()

    def keep(self) -> None:
        """Save what is not saved yet. A failure is a warning: the script ends with another error."""
        tenancy, step = self._tenancy, self._position.step
        is_due = self._fitted_step and self._fitted_step == step and tenancy.is_own
        if not is_due or tenancy.closed or tenancy.work:
            return
        if self._crew.policy.has_ended or self._saver.saved_folder is not None:
            return
        try:
            self._log.display.message(f"the script ends with an error, and step {step} was not saved yet:")
            self._saver.save()
        except Exception as error:
            logger.warning("step %d could not be saved: %s", step, error)


@functools.cache
def _watch_script() -> None:
    """Save what was trained, once, when an error ends the program and its traceback was shown."""
    show = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        show(kind, error, trace)
        if isinstance(error, Exception):
            for rescue in list(_fitted):
                rescue.keep()

    sys.excepthook = hook
