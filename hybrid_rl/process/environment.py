"""Environment variables that are set for a while."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


@contextmanager
def environment_kept(variables: Mapping[str, str] | None = None) -> Iterator[None]:
    """Set `variables` inside the block; after it all variables are as before, including those that the block
    changed."""
    # The mapping that os.environ decodes from: copying it takes a microsecond, copying the decoded one a hundred.
    encoded: dict[bytes, bytes] = vars(os.environ)["_data"]
    before = encoded.copy()
    os.environ.update(variables or {})
    try:
        yield
    finally:
        if encoded != before:
            for name in encoded.keys() - before.keys():
                del os.environb[name]
            os.environb.update(before)
