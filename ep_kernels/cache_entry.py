"""Files of the kernel cache, which many processes share: written at once or not at all, checked when they are read."""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_MAGIC = b"\x7fELF"
_DIGEST_BYTES = 32
WAIT_S = 60.0
"""A kernel compiles in seconds. Who holds its lock for longer is stopped, or on a lost host that shares the folder."""
_LOOK_S = 0.02


def read(path: Path) -> bytes | None:
    """A cache entry is digest + cubin; anything else (torn by a crash of the machine, say) counts as absent."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    digest, cubin = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
    whole = cubin.startswith(_MAGIC) and hashlib.sha256(cubin).digest() == digest
    return cubin if whole else None


def write(path: Path, cubin: bytes) -> None:
    """Atomic: readers see nothing or all of it. A full disk is no error: the next process compiles again."""
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".tmp-")
    except OSError:
        return
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(hashlib.sha256(cubin).digest() + cubin)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        Path(temporary).unlink(missing_ok=True)


@contextmanager
def locked(fd: int, timeout_s: float = WAIT_S) -> Iterator[None]:
    """An exclusive lock that the kernel drops when its owner dies; without it on a file system that has none, and after
    `timeout_s`: two processes may then compile the same kernel."""
    held = _lock(fd, time.monotonic() + timeout_s)
    try:
        yield
    finally:
        if held:
            fcntl.flock(fd, fcntl.LOCK_UN)


def _lock(fd: int, until: float) -> bool:
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until:
                return False
            time.sleep(_LOOK_S)
        except OSError:
            return False
        else:
            return True
