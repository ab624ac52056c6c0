"""The safetensors files of one checkpoint directory, as one name -> tensor map. Knows nothing of models.

Files are mapped, never read whole: `read` touches the bytes of the slice it is asked for. Errors of the safetensors
library and of the file system become CheckpointError here and nowhere else.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open

from crossdock.common.small_files import read_small

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

DTYPES: dict[str, torch.dtype] = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I32": torch.int32,
}
"""Element types that expert weights and their scales may have, by safetensors' name."""


_MAX_JSON_BYTES = 64 << 20
"""An index of 100,000 tensors has ten million bytes."""


class CheckpointError(ValueError):
    """A checkpoint directory cannot be served: something is missing, broken or not supported. Says what, and where."""


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises CheckpointError: missing, unreadable, too large, or not a JSON object."""
    _check_regular(path)
    try:
        data = json.loads(read_small(path, _MAX_JSON_BYTES))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: no such file") from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: unreadable: {error}") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path}: expected a JSON object, got {type(data).__name__}")
    return data


def _check_regular(path: Path) -> None:
    """Raises CheckpointError: opening a pipe would wait for a writer for ever."""
    if path.exists() and not path.is_file():
        raise CheckpointError(f"{path}: unreadable: expected a regular file")


def _check_unchanged(path: Path, mapped: os.stat_result) -> None:
    """Raises CheckpointError: the mapped file was written since, so its bytes may be of other weights, or not there,
    which would end the process. One that was replaced (renamed over) or removed is there as long as it is mapped."""
    try:
        now = path.stat()
    except OSError:
        return
    same = (now.st_dev, now.st_ino) == (mapped.st_dev, mapped.st_ino)
    if same and (now.st_size, now.st_mtime_ns) != (mapped.st_size, mapped.st_mtime_ns):
        raise CheckpointError(f"{path}: expected the file as it was opened, got one that was written since")


class Shards:
    """All tensors of a directory: `model.safetensors`, or the shards that `model.safetensors.index.json` names.

    Raises:
        CheckpointError: no safetensors in the directory, or a broken index.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._open: dict[str, tuple[Any, frozenset[str], os.stat_result]] = {}
        """Handle, tensor names, and the state at its opening, of each mapped file."""
        self._file_of = self._index()

    def _index(self) -> dict[str, str]:
        index = self._directory / INDEX
        if index.is_file():
            files = read_json(index).get("weight_map")
            if not isinstance(files, dict) or not all(isinstance(name, str) for name in files.values()):
                raise CheckpointError(f"{index}: expected weight_map: tensor name -> file name")
            outside = sorted(name for name in set(files.values()) if not _is_file_name(name))
            if outside:
                raise CheckpointError(f"{index}: expected file names of this directory, got {outside[0]!r}")
            return files
        if not (self._directory / SINGLE).is_file():
            found = sorted(path.name for path in self._directory.iterdir())[:8]
            raise CheckpointError(f"{self._directory}: expected {SINGLE} or {INDEX}, found {found}")
        _, names = self._mapped(SINGLE)
        return dict.fromkeys(names, SINGLE)

    def _mapped(self, file: str) -> tuple[Any, frozenset[str]]:
        found, path = self._open.get(file), self._directory / file
        if found is None:
            _check_regular(path)
            try:
                state = path.stat()
                handle = safe_open(path, framework="pt")
            except FileNotFoundError as error:
                raise CheckpointError(f"{path}: missing shard, named by {INDEX}") from error
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{path}: truncated or corrupt shard: {error}") from error
            found = handle, frozenset(handle.keys()), state  # type: ignore[no-untyped-call]
            self._open[file] = found
        _check_unchanged(path, found[2])
        return found[:2]

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def file(self, name: str) -> Path:
        return self._directory / self._file_of[name]

    def _slice(self, name: str) -> Any:
        file = self._file_of.get(name)
        if file is None:
            raise CheckpointError(f"{self._directory}: tensor {name} is missing")
        handle, names = self._mapped(file)  # which another thread may unmap just then
        if name not in names:
            raise CheckpointError(f"{self._directory / file}: tensor {name} is missing, though {INDEX} puts it here")
        return handle.get_slice(name)

    def describe(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        """dtype and shape of a tensor, without touching its data.

        Raises:
            CheckpointError: missing tensor or shard, broken shard, or an element type that is not supported.
        """
        view = self._slice(name)
        dtype = DTYPES.get(view.get_dtype())
        if dtype is None:
            raise CheckpointError(
                f"{self.file(name)}: {name}: expected one of {sorted(DTYPES)}, got {view.get_dtype()}"
            )
        return dtype, tuple(view.get_shape())

    def read(self, name: str, index: int | None = None) -> torch.Tensor:
        """The tensor, or `tensor[index]` alone. May be a view of the mapped file: copy before you keep or write it.

        Raises:
            CheckpointError: as `describe`, or the bytes cannot be read.
        """
        view = self._slice(name)
        try:
            tensor: torch.Tensor = view[...] if index is None else view[index : index + 1][0]
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{self.file(name)}: {name}: unreadable: {error}") from error
        return tensor

    def samples(self, wanted: Iterable[tuple[str, int | None]], num_bytes: int) -> Iterator[bytes]:
        """The first bytes of each (name, index), as `read` would give the tensor; at most `num_bytes` of each. Read
        from the files, for a page that is touched in a mapping brings 128 KiB with it.

        Raises:
            CheckpointError: as `read`.
        """
        with contextlib.ExitStack() as opened:
            files: dict[str, _RawFile] = {}
            for name, index in wanted:
                self._slice(name)
                file = self._file_of[name]
                try:
                    if file not in files:
                        files[file] = opened.enter_context(_RawFile(self._directory / file))
                    yield files[file].sample(name, index, num_bytes)
                except (OSError, ValueError, KeyError) as error:
                    raise CheckpointError(f"{self.file(name)}: {name}: unreadable: {error}") from error

    def close(self) -> None:
        """Unmap every file. The next read maps again."""
        self._open.clear()


def _is_file_name(name: str) -> bool:
    return name not in ("", ".", "..") and "/" not in name and name.isprintable()


class _RawFile:
    """A safetensors file whose header `safe_open` has checked: eight bytes of its length, the header (JSON), data."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_RANDOM)
        length = int.from_bytes(os.pread(self._fd, 8, 0), "little")
        self._header, self._data = json.loads(os.pread(self._fd, length, 8)), 8 + length

    def sample(self, name: str, index: int | None, num_bytes: int) -> bytes:
        tensor = self._header[name]
        start, end = tensor["data_offsets"]
        if index is not None:
            step = (end - start) // tensor["shape"][0]
            start, end = start + index * step, start + (index + 1) * step
        return os.pread(self._fd, min(num_bytes, end - start), self._data + start)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)
