"""Records that host and GPU share: declared once, as a `ctypes.Structure` here and as a C++ struct of the same size."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

_WORDS: dict[str, Any] = {
    "i32": ctypes.c_int32,
    "u32": ctypes.c_uint32,
    "u64": ctypes.c_uint64,
    "f32": ctypes.c_float,
    "u8": ctypes.c_uint8,
}


class Records:
    """The records of one header, in the order in which they are declared.

    Args:
        base: records of a header that is included before this one.
    """

    def __init__(self, base: Records | None = None) -> None:
        self._types: dict[str, Any] = dict(base._types if base else _WORDS)
        self._declared: list[tuple[str, list[tuple[str, str, str]], int]] = []

    def declare(self, name: str, *fields: tuple[str, str, str], align: int = 0) -> Any:
        """Declare a struct. A field is (name, type, contract); a type is i32, u32, u64, f32, `T*`, `T[n]` or a
        record. `align`: bytes to which the GPU may take it to be aligned, so that it moves in one
        access; 0 = as C++ does."""
        members = []
        for field, kind, _ in fields:
            if kind.endswith("*"):
                members.append((field, ctypes.c_uint64))
            elif kind.endswith("]"):
                base, count = kind[:-1].split("[")
                members.append((field, self._types[base] * int(count)))
            else:
                members.append((field, self._types[kind]))
        struct = type(name, (ctypes.Structure,), {"_fields_": members, "__slots__": ()})  # no other names are taken
        self._types[name] = struct
        self._declared.append((name, list(fields), align))
        return struct

    def lines(self) -> Iterator[str]:
        """C++ declarations of every record."""
        for name, fields, align in self._declared:
            yield f"struct alignas({align}) {name} {{" if align else f"struct {name} {{"
            for field, kind, contract in fields:
                base, bracket, count = kind.partition("[")
                array = f"[{count}" if bracket else ""
                yield f"  {base} {field}{array};" + (f"  // {contract}" if contract else "")
            yield "};"
            size = ctypes.sizeof(self._types[name])
            yield f'static_assert(sizeof({name}) == {size}, "{name}: host and GPU differ");'
