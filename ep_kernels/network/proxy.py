"""The C ABI of the native half: `native/api.cpp`, and the loader. Calls release the GIL."""

from __future__ import annotations

import ctypes
import functools
from ctypes import POINTER, c_char, c_char_p, c_int, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p

from ep_kernels.transports.build import Native, network
from ep_kernels.transports.library import Signature
from ep_kernels.transports.library import load as load_library


class Traffic(ctypes.Structure):
    """`cd::Traffic`."""

    _fields_ = [(name, c_uint64) for name in ("sent_messages", "sent_bytes", "received_messages", "backlog_most")]


class NetMemory(ctypes.Structure):
    """`cd::NetMemory`."""

    _fields_ = (
        ("own", c_void_p),
        ("own_bytes", c_uint64),
        ("landing", c_void_p),
        ("stride", c_uint64),
        ("box", c_uint64),
        ("dma_bufs", POINTER(c_int32)),
        *((name, c_int32) for name in ["ranks", "lanes", "device", "unused"]),
    )


class NetSettings(ctypes.Structure):
    """`cd::NetSettings`."""

    _fields_ = (
        ("provider", c_char * 64),
        ("devices", c_char * 256),
        ("address", c_char * 64),
        *((name, c_int32) for name in ["lanes", "shuffled", "gid_index", "traffic_class", "service_level", "mtu"]),
        *((name, c_int32) for name in ["ack_timeout", "retries"]),
        ("seed", c_uint64),
        ("drop_after", c_int64),
        ("patience_ns", c_int64),
    )


class Text(ctypes.Structure):
    """`cd::Text`: a message for people."""

    _fields_ = (("at", c_char * 512),)

    def __str__(self) -> str:
        return bytes(self.at).decode(errors="replace")


_SIGNATURES: dict[str, Signature] = {
    "cn_open": (c_void_p, (c_int64, POINTER(c_int32), c_int)),
    "cn_shut": (None, (c_void_p,)),
    "cn_close_in_child": (None, (c_void_p,)),
    "cn_channel": (
        c_void_p,
        (c_void_p, POINTER(NetMemory), POINTER(NetSettings), c_void_p, c_void_p, POINTER(Text)),
    ),
    "cn_sizes": (None, (POINTER(c_uint64),)),
    "cn_devices": (c_int, (c_char_p, c_char_p, c_size_t, POINTER(Text))),
    "cn_why": (None, (c_void_p, c_int, POINTER(Text))),
    "cn_outbox": (c_void_p, (c_void_p,)),
    "cn_device": (None, (c_void_p, c_uint64, POINTER(c_uint64))),
    "cn_device_restart": (None, (c_void_p,)),
    "cn_wake": (None, (c_void_p,)),
    "cn_push": (c_int, (c_void_p, c_int, c_uint64, c_uint32, c_uint32)),
    "cn_mark_handler": (c_void_p, ()),
    "cn_join": (c_int, (c_void_p, c_int, c_int, POINTER(c_int32), c_int)),
    "cn_leave": (c_int, (c_void_p, c_int, c_uint64)),
    "cn_up": (c_uint64, (c_void_p,)),
    "cn_joined": (c_uint64, (c_void_p,)),
    "cn_traffic": (None, (c_void_p, POINTER(Traffic))),
    "cn_quiet": (c_int, (c_void_p, c_uint64)),
    "cn_close": (None, (c_void_p,)),
    "cn_free": (None, (c_void_p,)),
}


@functools.cache
def load(library: Native = network()) -> ctypes.CDLL:
    """The library, checked. Raises TransportError: missing, unloadable or stale, with the command that cures it."""
    return load_library("network transport", library, _SIGNATURES)
