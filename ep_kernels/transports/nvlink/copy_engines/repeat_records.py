"""What the native library needs to begin an operation again by one call: records of native/launch.cpp, filled once."""

from __future__ import annotations

import ctypes
import itertools
from array import array
from collections.abc import Callable, Iterable
from ctypes import c_int64, c_uint64, c_void_p
from typing import Any

from ep_kernels.transports.nvlink.copy_engines.copy_times import TimedKind
from ep_kernels.transports.nvlink.gpu.copy_schedule import FLAG_BYTES, SEEN_SLOTS, CopyMarks, CopyPlaces, StreamOp

DISTURBED = -2
"""Status of a call that has begun nothing: the full path must check."""
_ANY_SEQ, _ANY_EVENT = 1 << 62, 1 << 61
"""Stand for the number of an operation, and, counted on, for its events in a template; no address, length or signature
is one of them."""
_STEP_WORDS = 4


class QuietWord(ctypes.Structure):
    """`QuietWord` of native/launch.cpp."""

    _fields_ = (("word", c_uint64), ("most", c_int64))


class QuietRecord(ctypes.Structure):
    """`Quiet` of native/launch.cpp."""

    _fields_ = (("words", c_void_p), ("count", c_int64))


class KernelRepeat(ctypes.Structure):
    """`KernelRepeat` of native/launch.cpp."""

    _fields_ = tuple((name, c_void_p) for name in ("quiet", "prepared", "argument", "x", "out"))


class CopyRepeat(ctypes.Structure):
    """`CopyRepeat` of native/launch.cpp."""

    _fields_ = (
        *((name, c_void_p) for name in ("quiet", "steps", "numbers", "marks")),
        *((name, c_int64) for name in ("count", "num_numbers", "num_marks", "seen_at")),
        *((name, c_uint64) for name in ("seen_first", "seen_bytes", "seen_slots")),
        ("stream", c_void_p),
    )


class Quiet:
    """Words that an operation looks at before it repeats.

    Attributes:
        address: of the record.

    Args:
        words: (address of an int64, the most that it may be).
    """

    def __init__(self, words: Iterable[tuple[int, int]]) -> None:
        listed = [QuietWord(*word) for word in words]
        self._words = (QuietWord * len(listed))(*listed)
        self._record = QuietRecord(ctypes.addressof(self._words), len(listed))
        self.address = ctypes.addressof(self._record)


class PushTemplate:
    """A push for any number and events: what changes is told apart once.

    Attributes:
        address: of the `CopyRepeat`. Its events are those of `CopyMarks.listed`.
        signature, kind: of the operation.

    Args:
        places, signature: as in `push`.
        kind: for its records, with those whose shards are marked.
        steps_of: the steps of a push with that `seq` and those `marks`.
        stream: CUstream.
        quiet: what it looks at first.
    """

    def __init__(
        self,
        places: CopyPlaces,
        kind: TimedKind,
        signature: int,
        steps_of: Callable[..., list[StreamOp]],
        stream: int,
        quiet: Quiet,
    ) -> None:
        self.signature, self.kind = signature, kind
        marks = CopyMarks.of(range(_ANY_EVENT, _ANY_EVENT + 2 + len(kind.arrivals)), kind.arrivals)
        steps = steps_of(seq=_ANY_SEQ, marks=marks)
        words = array("Q", itertools.chain.from_iterable(steps))
        numbers = array("q", (i for i, word in enumerate(words) if word == _ANY_SEQ))
        marked = array("q", (words.index(event) for event in marks.listed()))
        (at, _), (numbers_at, num_numbers), (marked_at, num_marked) = (
            each.buffer_info() for each in (words, numbers, marked)
        )
        seen_at = (len(steps) - 2) * _STEP_WORDS + 1  # `to` of the copy at the end
        record = CopyRepeat(
            quiet.address, at, numbers_at, marked_at, len(steps), num_numbers, num_marked, seen_at, places.seen,
            FLAG_BYTES * len(places.active), SEEN_SLOTS, stream,
        )  # fmt: skip
        self.address = ctypes.addressof(record)
        self._keep: Any = words, numbers, marked, record, quiet
