"""Messages of other libraries that say nothing to a user of this one: each by its words, so that all others stay."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

# Logger and beginning of the message. Of torch on machines without Triton; of math-verify, which is told to use no
# timers because its own work in the main thread only; of Ray in a notebook, about widgets that nobody asked for.
MESSAGES = (
    ("torch._library.triton", "Triton not available"),
    ("math_verify.parser", "Timeout is disabled"),
    ("math_verify.grader", "Timeout is disabled"),
    ("ray.widgets.util", "Missing packages"),
)
# vLLM looks at every name of torch.distributed, the deprecated ones too.
WARNINGS = ((r"`torch\.distributed\.reduce_op` is deprecated", FutureWarning),)

_shows_all = False


def _is_wanted(record: logging.LogRecord) -> bool:
    return _shows_all or not any(
        record.name == name and record.getMessage().startswith(words) for name, words in MESSAGES
    )


def hush(*, shows_all: bool = False) -> None:
    """Keep these messages from the console from now on, or, if `shows_all`, show them again."""
    global _shows_all
    _shows_all = shows_all
    for name, _ in MESSAGES:
        logging.getLogger(name).addFilter(_is_wanted)  # a second time it does nothing
    for words, category in WARNINGS:
        warnings.filterwarnings("default" if shows_all else "ignore", words, category)


@contextmanager
def bars_hidden() -> Iterator[None]:
    """Show no progress bars of transformers ("Loading weights") inside the block: the console says what is done."""
    from transformers.utils import logging as transformers_logging

    if _shows_all or not transformers_logging.is_progress_bar_enabled():
        yield
        return
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.enable_progress_bar()
