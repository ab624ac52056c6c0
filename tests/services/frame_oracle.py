"""Frames, read by Python alone from bytes that are all here: what the native half of the product must find in them,
too (docs/request-protocol.md)."""

from __future__ import annotations

import struct
from typing import NamedTuple

from crossdock.protocol import frames
from crossdock.protocol.frames import Answer, Forward, FrameError, FrameKind

_FORWARD, _ANSWER = struct.Struct("<IIIHBBIHHI"), struct.Struct("<QQQQIIIBBH")


class Found(NamedTuple):
    """A frame with its rows."""

    kind: int
    id: int
    fields: bytes
    rows: bytes


def frames_in(data: bytes, max_rows_bytes: int) -> tuple[list[Found], str]:
    """The whole frames that the bytes begin with, and how it ends: "more" is to come, or "wrong": not our protocol."""
    found, at = list[Found](), 0
    while len(data) - at >= 16:
        num_rows, size, kind, zero, number = struct.unpack_from("<IHBBQ", data, at)
        limit = max_rows_bytes if kind in (FrameKind.FORWARD, FrameKind.ANSWER) else 0
        if zero or kind not in list(FrameKind) or size > frames.MAX_FIELDS_BYTES or num_rows > limit:
            return found, "wrong"
        fields = data[at + 16 : at + 16 + size]
        if len(fields) < size:
            break
        if not _fits(kind, number, fields, num_rows):
            return found, "wrong"
        rows = data[at + 16 + size : at + 16 + size + num_rows]
        if len(rows) < num_rows:
            break
        found.append(Found(kind, number, fields, rows))
        at += 16 + size + num_rows
    return found, "more"


def _fits(kind: int, number: int, fields: bytes, num_rows: int) -> bool:
    try:
        if kind == FrameKind.FORWARD:
            request = forward_of(number, fields)
            return num_rows == (request.num_bytes if request.place == frames.NOWHERE else 0)
        if kind == FrameKind.ANSWER:
            about = answer_of(fields)
            return num_rows == (0 if about.in_place else about.num_tokens * about.hidden * about.dtype.itemsize)
    except FrameError:
        return False
    return True


def forward_of(number: int, fields: bytes) -> Forward:
    """A request. Raises FrameError: its fields do not fit each other."""
    if len(fields) < _FORWARD.size:
        raise FrameError("short")
    layer, tokens, hidden, topk, code, zero, timeout_ms, model, trace, place = _FORWARD.unpack_from(fields)
    dtype, end = frames.DTYPES.get(code), _FORWARD.size + model
    if dtype is None or zero or len(fields) != end + trace:
        raise FrameError("fields")
    texts = (_text(fields[_FORWARD.size : end]), _text(fields[end:]))
    num_bytes = tokens * (hidden * dtype.itemsize + 8 * topk)
    return Forward(number, layer, tokens, hidden, topk, dtype, timeout_ms, *texts, num_bytes, place)


def answer_of(fields: bytes) -> Answer:
    """An answer. Raises FrameError: its fields do not fit each other."""
    if len(fields) < _ANSWER.size:
        raise FrameError("short")
    *times, steps, tokens, hidden, code, in_place, count = _ANSWER.unpack_from(fields)
    dtype, text = frames.DTYPES.get(code), fields[_ANSWER.size :]
    if dtype is None or in_place > 1 or len(text) != count:
        raise FrameError("fields")
    return Answer(*times, steps, tokens, hidden, dtype, _text(text), bool(in_place))


def _text(data: bytes) -> str:
    return data.decode(errors="surrogateescape")
