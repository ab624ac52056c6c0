"""Argument records at the price of a copy: the words that no call changes are set once."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from typing import Any


class RecordTemplate:
    """Makes copies of one record. What a call sets are two runs of neighbouring fields: int32, then addresses.

    Args:
        record: with its constant fields set.
        numbers, addresses: names of the fields of each run, in the order of the record.
    """

    def __init__(self, record: ctypes.Structure, numbers: Sequence[str], addresses: Sequence[str]) -> None:
        self._type: Any = type(record)
        self._bytes = bytes(record)
        self._numbers, self._numbers_at = self._run(numbers, "i")
        self._addresses, self._addresses_at = self._run(addresses, "Q")

    def _run(self, names: Sequence[str], code: str) -> tuple[struct.Struct, int]:
        packed = struct.Struct(f"={len(names)}{code}")
        first = int(getattr(self._type, names[0]).offset)
        width = struct.calcsize(f"={code}")
        at = [getattr(self._type, name).offset for name in names]
        assert at == [first + width * i for i in range(len(names))], f"{self._type.__name__}: not neighbours: {names}"
        return packed, first

    def record(self, numbers: Sequence[int], addresses: Sequence[int]) -> Any:
        """A copy with these words."""
        made = self._type.from_buffer_copy(self._bytes)
        self._numbers.pack_into(made, self._numbers_at, *numbers)
        self._addresses.pack_into(made, self._addresses_at, *addresses)
        return made
