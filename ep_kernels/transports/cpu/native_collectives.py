"""The C ABI of the collectives: structs as `native/collectives.hpp` declares them, and the loader."""

from __future__ import annotations

import ctypes
import functools
from ctypes import POINTER, c_int, c_int32, c_int64, c_uint64, c_void_p

from ep_kernels.collectives.collective_config import CollectiveConfig
from ep_kernels.collectives.collective_types import Algorithm
from ep_kernels.errors import TransportError
from ep_kernels.transports.build import Native, native_of
from ep_kernels.transports.cpu import native
from ep_kernels.transports.cpu.region import OwnRegion
from ep_kernels.transports.library import Signature
from ep_kernels.transports.library import load as load_library

ALGORITHMS = (Algorithm.PULL, Algorithm.ONE_SHOT, Algorithm.TWO_SHOT)
"""By `cd::Algorithm`."""
MAX_ZERO_COPY_PARTS = 512
"""Their places fit the smallest staging slot."""


def _fields(kind: type, names: str) -> list[tuple[str, type]]:
    return [(name, kind) for name in names.split()]


class CollectiveGeometry(ctypes.Structure):
    """`cd::CollectiveGeometry`."""

    _fields_ = _fields(c_int32, "rank ranks in_flight pad") + _fields(c_int64, "staging_bytes pool_bytes timeout_ns")


class Part(ctypes.Structure):
    """`cd::Part`."""

    _fields_ = _fields(c_void_p, "x out") + _fields(c_int64, "bytes source")


class Collective(ctypes.Structure):
    """`cd::Collective`."""

    _fields_ = (
        _fields(c_int64, "op num_bytes dtype part_sizes algorithm")
        + _fields(c_void_p, "parts")
        + _fields(c_int64, "num_parts")
        + _fields(c_void_p, "x out")
        + _fields(c_int64, "source count")
        + _fields(c_int32, "type zero_copy")
        + _fields(c_uint64, "seq")
        + _fields(c_int64, "start_ns send_ns receive_ns inside_ns slices stride_bytes chunk_bytes rounds round staged")
        + _fields(c_uint64, "missing")
        + _fields(c_int64, "started looked began")
        + _fields(c_int32, "phase status")
        + _fields(c_uint64, "arrived")
    )


_SIGNATURES: dict[str, Signature] = {
    **native.MEMBER_SIGNATURES,
    "cd_collectives_abi": (c_uint64, ()),
    "cd_collective_bytes": (c_int64, ()),
    "cd_collectives_region_bytes": (c_int64, (POINTER(CollectiveGeometry),)),
    "cd_collectives_pool_offset": (c_int64, (POINTER(CollectiveGeometry),)),
    "cd_collectives_create": (c_void_p, (POINTER(CollectiveGeometry),)),
    "cd_collectives_destroy": (None, (c_void_p,)),
    "cd_collectives_attach_own": (None, (c_void_p, c_void_p, c_uint64)),
    "cd_collectives_attach_peer": (c_int, (c_void_p, c_int, c_int, c_int, c_uint64)),
    "cd_collective_begin": (c_int, (c_void_p, POINTER(Collective))),
    "cd_collective_advance": (c_int, (c_void_p, POINTER(Collective), c_int, c_int)),
}


@functools.cache
def load(library: Native = native_of("cpu")) -> ctypes.CDLL:
    """The library, checked, as `native.load`."""
    return load_library("cpu transport", library, _SIGNATURES)


def geometry_of(config: CollectiveConfig) -> CollectiveGeometry:
    """Everything that fixes a region."""
    return CollectiveGeometry(
        rank=config.group.rank,
        ranks=config.group.size,
        in_flight=config.max_in_flight,
        staging_bytes=config.staging_bytes,
        pool_bytes=config.pool_bytes,
        timeout_ns=int(config.timeout_s * 1_000_000_000),
    )


class NativeCollectives:
    """See `cpu_member.NativeOwner`. The region is freed when the last tensor made of it has died, too."""

    def __init__(self, geometry: CollectiveGeometry) -> None:
        self.lib = load()
        self.geometry = geometry
        self.region: OwnRegion | None = None
        self.pointer: int | None = self.lib.cd_collectives_create(ctypes.byref(geometry))
        if not self.pointer:
            raise TransportError("cpu transport: out of memory")

    def close(self) -> None:
        if self.region is not None:
            self.region.close()

    def close_in_child(self) -> None:
        self.__del__()
        self.close()
        self.region = None

    def __del__(self) -> None:
        pointer, self.pointer = getattr(self, "pointer", None), None
        if pointer:
            self.lib.cd_collectives_destroy(pointer)
