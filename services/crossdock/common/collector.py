"""Python's garbage collector around large imports."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Import torch in this: its objects are many and none is garbage, but a tenth of its import is a search for some.
    What was made by the end is never searched again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
