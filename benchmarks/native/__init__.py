"""The native half of the benchmarks: what is timed where Python would be most of the time. Compiled at first use."""

from __future__ import annotations

import ctypes
import functools
from ctypes import POINTER, c_int, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from pathlib import Path

from ep_kernels.transports.build import NETWORK, Native
from ep_kernels.transports.library import Signature
from ep_kernels.transports.library import load as load_library

_HERE = Path(__file__).resolve().parent
LIBRARY = Native(_HERE, _HERE / "_native.so", (NETWORK / "native",))
_SIGNATURES: dict[str, Signature] = {
    "cd_bench_box_bytes": (c_uint64, ()),
    "cd_bench_echo": (c_int, (c_void_p, c_void_p, c_int64, c_int64, POINTER(c_int64))),
    "cd_bench_ring": (c_int, (c_int64, POINTER(c_int64))),
    "cd_bench_ponger": (c_void_p, ()),
    "cd_bench_ping": (None, (c_void_p,)),
    "cd_bench_mail": (c_int, (c_void_p, c_void_p, c_int, c_uint32, c_int64, POINTER(c_int64))),
    "cd_bench_sockets": (c_int, (c_int, c_int, c_void_p, c_void_p, c_uint32, c_int64, POINTER(c_int64))),
    "cd_bench_stream": (
        c_int64,
        (c_void_p, c_void_p, POINTER(c_int32), POINTER(c_uint32), c_int64, c_uint64, c_uint64, c_int64),
    ),
}


@functools.cache
def load() -> ctypes.CDLL:
    """The library. Raises build.BuildError: no compiler, or it failed."""
    LIBRARY.build()
    return load_library("benchmarks", LIBRARY, _SIGNATURES)
