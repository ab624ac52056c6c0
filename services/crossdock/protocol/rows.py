"""Rows of requests where their sender has them: what its tensors are, and a copy of them as a request carries them."""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from crossdock.protocol import native
from crossdock.protocol.frames import DTYPES

_DESCRIBED, _ROWS = struct.Struct("=QQQIIIHH"), struct.Struct("=6Q")
"""`cd::Described`, `cd::Rows`."""
_ITEM_BYTES = {code: dtype.itemsize for code, dtype in DTYPES.items()}


class CallRows(NamedTuple):
    """The tensors of a call, contiguous and on the host.

    Attributes:
        x, topk_ids, topk_weights: addresses: [T, H], int32 or int64 [T, K], float32 [T, K].
        num_tokens, hidden, topk: T, H, K.
        dtype: of x.
        wide_ids: they are int64.
        width, row_bytes: bytes of one token's x, and of all that a request has of it.
        tensors: which live as long as this.
    """

    x: int
    topk_ids: int
    topk_weights: int
    num_tokens: int
    hidden: int
    topk: int
    dtype: torch.dtype
    wide_ids: int
    width: int
    row_bytes: int
    tensors: tuple[torch.Tensor, ...]

    def part(self, start: int, stop: int, *, with_x: bool = True) -> bytes:
        """`cd::Rows` of rows start..stop."""
        first, count = start * self.topk, (stop - start) * self.topk
        ids, x_bytes = self.topk_ids + first * (8 if self.wide_ids else 4), (stop - start) * self.width * with_x
        return _ROWS.pack(
            self.x + start * self.width, ids, self.topk_weights + 4 * first, x_bytes, count, self.wide_ids
        )


def usual_rows(x: Any, topk_ids: Any, topk_weights: Any) -> CallRows | None:
    """Of the tensors of a call, T > 0, that need no copy and fit each other; None: not all do."""
    describe = _describer()
    told = describe(x, topk_ids, topk_weights) if describe is not None else None
    if told is None or x.is_neg() or topk_ids.is_neg() or topk_weights.is_neg():
        return None
    x_at, ids_at, weights_at, num_tokens, hidden, topk, code, wide_ids = _DESCRIBED.unpack(told)
    width = hidden * _ITEM_BYTES[code]
    return CallRows(
        x_at, ids_at, weights_at, num_tokens, hidden, topk, DTYPES[code], wide_ids, width, width + 8 * topk,
        (x, topk_ids, topk_weights),
    )  # fmt: skip


def rows_of(x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> CallRows:
    """The same of tensors that are known to be so, or empty."""
    (num_tokens, hidden), topk, wide_ids = x.shape, topk_ids.shape[1], topk_ids.dtype is torch.int64
    width = hidden * x.itemsize
    return CallRows(
        x.data_ptr(), topk_ids.data_ptr(), topk_weights.data_ptr(), num_tokens, hidden, topk, x.dtype, wide_ids, width,
        width + 8 * topk, (x, topk_ids, topk_weights),
    )  # fmt: skip


def lay(rows: bytes, address: int) -> None:
    """Copy rows of a request there, as they follow their frame; int64 ids become int32, and what that cannot hold
    another number that a worker refuses. Other threads run meanwhile."""
    native.load().cd_lay(address, rows)


def packet(head: bytes, rows: bytes) -> bytes:
    """A request in one piece: header and fields, then the rows."""
    whole: bytes = native.load_held().cd_packet(head, len(head), rows)
    return whole


@functools.cache
def _describer() -> Callable[[object, object, object], bytes | None] | None:
    """Asks torch natively what tensors are; None: it does not say."""
    capsule, library = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None), native.load_held()
    if capsule is None:
        return None
    get = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
        ("PyCapsule_GetPointer", ctypes.pythonapi)
    )
    refused = library.cd_open_tensors(get(capsule, b"dlpack_exchange_api"), torch.Tensor)
    return None if refused else library.cd_describe
