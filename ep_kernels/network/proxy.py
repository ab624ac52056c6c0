"""The C ABI of the native half: `native/api.cpp`, and the loader. Calls release the GIL."""

from __future__ import annotations

import ctypes
import functools
from ctypes import POINTER, c_int, c_int32, c_int64, c_uint32, c_uint64, c_void_p

from ep_kernels.transports.build import Native, network
from ep_kernels.transports.library import Signature
from ep_kernels.transports.library import load as load_library


class Traffic(ctypes.Structure):
    """`cd::Traffic`."""

    _fields_ = [(name, c_uint64) for name in ("sent_messages", "sent_bytes", "received_messages", "backlog_most")]


_SIGNATURES: dict[str, Signature] = {
    "cn_open": (c_void_p, (c_int64, POINTER(c_int32), c_int)),
    "cn_shut": (None, (c_void_p,)),
    "cn_forsake": (None, (c_void_p,)),
    "cn_channel": (
        c_void_p,
        (c_void_p, c_int, c_void_p, c_uint64, c_void_p, c_uint64, c_void_p, c_void_p, c_int, c_uint64, c_int64, c_int),
    ),
    "cn_outbox": (c_void_p, (c_void_p,)),
    "cn_device": (None, (c_void_p, c_uint64, c_uint64, POINTER(c_uint64))),
    "cn_push": (c_int, (c_void_p, c_int, c_uint64, c_uint32, c_uint32)),
    "cn_bench_box_bytes": (c_uint64, ()),
    "cn_bench_echo": (c_int, (c_void_p, c_void_p, c_int64, c_int64)),
    "cn_bench_ring": (c_int, (c_int64, POINTER(c_int64))),
    "cn_bench_handler": (c_void_p, ()),
    "cn_bench_mail": (None, (c_void_p, c_void_p, c_int, c_uint32, c_int64, POINTER(c_int64))),
    "cn_bench_sockets": (c_int, (c_int, c_int, c_void_p, c_void_p, c_uint32, c_int64, POINTER(c_int64))),
    "cn_bench_stream": (c_int64, (c_void_p, c_void_p, c_int, POINTER(c_uint32), c_int64, c_uint64)),
    "cn_join": (c_int, (c_void_p, c_int, c_int, POINTER(c_int32), c_int)),
    "cn_leave": (None, (c_void_p, c_int, c_uint64)),
    "cn_up": (c_uint64, (c_void_p,)),
    "cn_traffic": (None, (c_void_p, POINTER(Traffic))),
    "cn_quiet": (c_int, (c_void_p, c_uint64)),
    "cn_close": (None, (c_void_p,)),
    "cn_free": (None, (c_void_p,)),
}


@functools.cache
def load(library: Native = network()) -> ctypes.CDLL:
    """The library, checked. Raises TransportError: missing, unloadable or stale, with the command that cures it."""
    return load_library("network", library, _SIGNATURES)
