"""The C ABI of the native half of frames (native/frames.hpp). Calls release the interpreter lock."""

from __future__ import annotations

import ctypes
import functools
from ctypes import c_char_p, c_int, c_int32, c_int64, c_uint8, c_uint16, c_uint32, c_uint64, c_void_p, py_object
from pathlib import Path

from ep_kernels.transports.build import Native, network
from ep_kernels.transports.library import Signature
from ep_kernels.transports.library import load as load_library

NOTHING, ROWS, ENDED, WRONG = 0, 100, -1, -2
"""`cd::Got`."""
WRONG_ID = 1
"""Of `cd_copy_routing`: an id is none of -1..most."""
BUFFER_BYTES = 32 << 10
"""Read at once: a small request comes in one piece with its header."""


class Line(ctypes.Structure):
    """`cd::Line`."""

    _fields_ = (
        ("fd", c_int32),
        ("is_tls", c_int32),
        ("takes_descriptor", c_int32),
        ("descriptor", c_int32),
        ("error", c_int32),
        ("max_rows_bytes", c_uint32),
        ("rows_bytes", c_uint32),
        ("are_coming", c_uint32),
        ("into", c_void_p),
        ("left", c_uint64),
        ("begin", c_uint32),
        ("end", c_uint32),
        ("heard_ns", c_int64),
        ("id", c_uint64),
        ("request_bytes", c_uint64),
        ("fields_at", c_uint32),
        ("fields_bytes", c_uint16),
        ("kind", c_uint16),
        ("buffer", c_uint8 * BUFFER_BYTES),
    )


_SIGNATURES: dict[str, Signature] = {
    "cd_line_bytes": (c_uint64, ()),
    "cd_next": (c_int, (c_void_p,)),
    "cd_wait": (c_int, (c_void_p, c_int64, c_int)),
    "cd_rows": (c_int, (c_void_p, c_void_p)),
    "cd_open_python": (c_int, ()),
    "cd_open_tensors": (c_int, (c_void_p, py_object)),
    "cd_describe": (py_object, (py_object, py_object, py_object)),
    "cd_lay": (None, (c_void_p, c_char_p)),
    "cd_packet": (py_object, (c_char_p, c_uint64, c_char_p)),
    "cd_copy_hashed": (c_uint64, (c_void_p, c_void_p, c_uint64, c_uint64)),
    "cd_copy_routing": (c_int, (c_void_p, c_void_p, c_void_p, c_void_p, c_int64, c_int32)),
}


def library() -> Native:
    here = Path(__file__).resolve().parent
    return Native(here / "native", here / "_native.so", (network().sources,))


@functools.cache
def load() -> ctypes.CDLL:
    """The library, checked. Raises TransportError: missing, unloadable or stale, with the command that cures it."""
    return load_library("request connections", library(), _SIGNATURES)


@functools.cache
def load_held() -> ctypes.PyDLL:
    """The same; its calls keep the interpreter lock: for what takes less than to get that again."""
    library = ctypes.PyDLL(load()._name)
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, tuple(arguments)
    if library.cd_open_python():
        raise ImportError("request connections: expected Python's stable ABI in this process, found none")
    return library
