"""Files of the kernel cache, which many processes share: written at once or not at all, checked when they are read."""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_MAGIC = b"\x7fELF"
_DIGEST_BYTES = 32


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
def locked(fd: int) -> Iterator[None]:
    """An exclusive lock that the kernel drops when its owner dies."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
    except OSError:  # a file system without locks: two processes may compile the same kernel
        yield
        return
    try:
        yield
    finally:
        fcntl.flock(fd, fcntl.LOCK_UN)
