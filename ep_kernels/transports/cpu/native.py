"""The C ABI of the native half: structs as `native/args.hpp` and `collectives.hpp` declare them, and the loader. Calls
release the GIL."""

from __future__ import annotations

import ctypes
import functools
import os
import struct
import zlib
from collections.abc import Sequence
from ctypes import POINTER, c_float, c_int, c_int32, c_int64, c_uint64, c_void_p

import torch

from ep_kernels.errors import ArgumentError, ConfigError, HandleError, PeerTimeout, TransportError
from ep_kernels.network.network import STAYS
from ep_kernels.transports.build import Native, native_of
from ep_kernels.transports.library import Signature
from ep_kernels.transports.library import load as load_library
from ep_kernels.types import Layout, ScaleFormat

OK, TIMEOUT, ABORTED, DIFFERS, NOTHING, INTERRUPTED = range(6)
OPS = ("dispatch", "combine", "barrier", "exchange", "set_active", "all_gather", "reduce_scatter", "all_reduce")
_GONE, _GIVEN_UP, _DISCONNECTED, _UNSENT = 1, 2, 3, 4
"""`cd::Why` of a NativeFault; 0: silent."""
PHASES = (
    "credit", "payload", "arrival", "outputs", "routing", "membership", "arguments", "sums", "release", "contents",
)  # fmt: skip
_ROUND_BITS = 24
"""`cd::kRoundBits`: collectives count rounds within an operation."""
_ARGUMENTS = ("operation", "bytes", "dtype", "sizes of parts", "algorithm")
"""Fields of `cd::Fingerprint`."""
_CONTENTS = (("{} tokens", 0), ("place {} of a partial", -1))
"""By `cd::Wrong`: what it is, and the least that it may be."""
SEND, RECEIVE, BOTH, STEP = 1, 2, 3, 7
"""Phases of an operation, as bits. STEP: both of a dispatch, and until the expert outputs of its slot are free."""
MODES = ("LL", "HT")
"""Modes of a dispatch, by number."""
MAX_RANKS = 64
MAX_SLOTS = 64

_TYPES = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3, torch.float8_e4m3fn: 4}
_LAYOUTS = {Layout.EXPERT_MAJOR: 0, Layout.GROUPED: 1, Layout.RANK_MAJOR: 2, Layout.FLAT: 3}
SCALES: dict[object, int] = {
    ScaleFormat.FP32: 1, ScaleFormat.UE8M0: 2, ScaleFormat.UE8M0_PACKED: 3, "mxfp8": 5, "nvfp4": 6
}  # fmt: skip
"""`cd::Scales` of scales made by the quantiser, by `scale_format` of fp8, else by `quantize`."""
CALLER_SCALES = 4


def type_code(dtype: torch.dtype) -> int:
    """`cd::Type` of a dtype; bytes for all that is only moved."""
    return _TYPES.get(dtype, 0)


@functools.cache
def dtype_code(dtype: torch.dtype) -> int:
    """A number for a dtype, the same in every version of torch."""
    return zlib.crc32(str(dtype).encode())


def dtype_name(code: int) -> str:
    """What `dtype_code` was made of."""
    known = {dtype_code(dtype): str(dtype) for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
    return known.get(code, f"of code {code}")


def layout_code(layout: Layout) -> int:
    return _LAYOUTS[layout]


def _fields(kind: type, names: str) -> list[tuple[str, type]]:
    return [(name, kind) for name in names.split()]


class Geometry(ctypes.Structure):
    """`cd::Geometry`."""

    _fields_ = (
        _fields(c_int32, "rank ranks experts local_experts stride topk max_tokens in_flight")
        + _fields(c_int32, "hidden exact alignment by_domain x_type out_type combine_type layout scales")
        + _fields(c_int32, "first_id absent_id two_hop_tokens")
        + _fields(c_int64, "row_bytes scale_bytes capacity slots y_rows timeout_ns")
    )


class Routing(ctypes.Structure):
    """`cd::Routing`."""

    _fields_ = (
        _fields(c_void_p, "dest weights rows row_weights source_tokens source_dest")
        + _fields(c_uint64, "origin")
        + _fields(c_int32, "tokens mode")
    )


class DispatchOp(ctypes.Structure):
    """`cd::DispatchOp`."""

    _fields_ = (
        _fields(c_uint64, "seq")
        + _fields(c_int64, "start_ns send_ns receive_ns")
        + _fields(Routing, "routing")
        + _fields(c_void_p, "x scales ids weights")
        + _fields(c_int32, "fresh exact_shapes wide_ids pad")
        + _fields(c_void_p, "valid tokens out_scales out_ids out_weights counts offsets")
        + _fields(c_int32, "num_rows num_dropped num_invalid packed_stride")
    )


class CombineOp(ctypes.Structure):
    """`cd::CombineOp`."""

    _fields_ = (
        _fields(c_uint64, "seq")
        + _fields(c_int64, "start_ns send_ns receive_ns")
        + _fields(Routing, "routing")
        + _fields(c_void_p, "y row_weights")
        + _fields(c_int32, "outputs_slot apply_weights")
        + _fields(c_void_p, "z z_weights")
        + _fields(c_int32, "z_type to_collect")
    )


_OF_DISPATCH, _OF_COMBINE = struct.Struct("=4q7Q2i4Q4i7Q4i"), struct.Struct("=4q7Q2i2Q2i2Q2i")
"""All of a DispatchOp, of a CombineOp. To fill one word by word costs microseconds."""


def dispatch_op(
    routing: Sequence[int], of_routing: Sequence[int], given: Sequence[int], flags: Sequence[int], out: Sequence[int],
    totals: Sequence[int] = (0, 0, 0),
) -> DispatchOp:  # fmt: skip
    """A DispatchOp with these words: addresses and origin of the routing, tokens and mode of it; x and what follows;
    `fresh`, `exact_shapes` and `wide_ids`; `valid` and what follows; `num_rows` and what follows."""
    op = DispatchOp()
    _OF_DISPATCH.pack_into(op, 0, 0, 0, 0, 0, *routing, *of_routing, *given, *flags, 0, *out, *totals, 0)
    return op


def combine_op(
    routing: Sequence[int], of_routing: Sequence[int], given: Sequence[int], flags: Sequence[int], z: Sequence[int]
) -> CombineOp:
    """The same of a CombineOp: y and what follows; `outputs_slot` and what follows; z and what follows."""
    op = CombineOp()
    _OF_COMBINE.pack_into(op, 0, 0, 0, 0, 0, *routing, *of_routing, *given, *flags, *z, 0)
    return op


class RegionParts(ctypes.Structure):
    """What `cd_region_parts` gives, in bytes: offset and slot size of each part; offset of the rows in a dispatch slot;
    size of a mirror, and of the region."""

    _fields_ = _fields(c_int64, "dispatch dispatch_slot combine combine_slot outputs outputs_slot rows mirror total")


def region_parts(geometry: Geometry) -> RegionParts:
    parts = RegionParts()
    load().cd_region_parts(ctypes.byref(geometry), ctypes.byref(parts))
    return parts


class Sent(ctypes.Structure):
    """`cd::Sent`: what was sent to ranks of other hosts."""

    _fields_ = _fields(c_uint64, "messages bytes")


SENT_KINDS = ("rows", "records", "words")


def raise_kept(library: ctypes.CDLL) -> None:
    """Raise the exception of a signal handler, for which a wait ended in INTERRUPTED."""
    ctypes.PYFUNCTYPE(None)(("cd_raise_kept", library))()


class NativeFault(ctypes.Structure):
    """`cd::Fault`."""

    _fields_ = _fields(c_int32, "peer why op phase") + _fields(c_int64, "expected seen waited_ns error")

    def difference(self) -> ArgumentError | HandleError | TransportError:
        """The exception for DIFFERS: what ranks must have in common, they have not."""
        op = OPS[self.op]
        if PHASES[self.phase] == "membership":
            return TransportError(f"{op}: rank {self.peer} has gone on in epoch {self.seen - 1} without this rank")
        if PHASES[self.phase] == "release":
            return TransportError(f"{op}: rank {self.peer} failed in it, and its registered tensor may have changed")
        if PHASES[self.phase] == "contents":
            what, least = _CONTENTS[self.error]
            sent = what.format(self.seen)
            return TransportError(f"{op}: rank {self.peer} sent {sent}, expected {least}..{self.expected}")
        if PHASES[self.phase] == "arguments" and op == "dispatch":
            text = f"one that is equal on all ranks: here it chooses {MODES[self.expected]}"
            other = MODES[self.seen] if 0 <= self.seen < len(MODES) else f"mode {self.seen}"
            return ArgumentError("step_tokens", text, f"{other} on rank {self.peer}")
        if PHASES[self.phase] == "arguments":
            return self._other_arguments()
        mine, other = f"dispatch {self.expected}", f"dispatch {self.seen}"
        return HandleError(f"{op}: this rank brought the routing of {mine}, rank {self.peer} that of {other}")

    def _other_arguments(self) -> TransportError:
        what, mine, other = _ARGUMENTS[self.error], str(self.expected), str(self.seen)
        if what == "operation":
            mine, other = OPS[self.expected], OPS[self.seen] if 0 <= self.seen < len(OPS) else other
        if what == "dtype":
            mine, other = dtype_name(self.expected), dtype_name(self.seen)
        text = f"{what} {other}, this rank {mine}; every rank must bring the same operation, sizes and dtype"
        return TransportError(f"{OPS[self.op]}: rank {self.peer} brought {text}")

    def _end(self, why: str) -> str:
        if self.why == _UNSENT:
            return f"{STAYS}: its own network thread stands still, or that peer does"
        if self.why != _DISCONNECTED:
            return ""
        error = why or (os.strerror(self.error) if self.error else "closed by the other end")
        return f"its connection has ended ({error})"

    def timeout(self, why: str = "") -> PeerTimeout:
        """The exception for TIMEOUT. `why`: what the network knows of the end of the peer's connection."""
        rounds = _ROUND_BITS if self.op >= OPS.index("all_gather") else 0
        return PeerTimeout(
            peer=self.peer,
            op=OPS[self.op],
            phase=PHASES[self.phase],
            expected=self.expected >> rounds,
            seen=self.seen >> rounds,
            waited_s=self.waited_ns / 1e9,
            gone=self.why in {_GONE, _DISCONNECTED},
            end=self._end(why),
            given_up=self.why == _GIVEN_UP,
        )


MAX_ZERO_COPY_PARTS = 512
"""Of a collective: their places fit the smallest staging slot."""


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
    # Of all members.
    "cd_destroy": (None, (c_void_p,)),
    "cd_region_bytes": (c_int64, (c_void_p,)),
    "cd_attach_own": (None, (c_void_p, c_void_p, c_uint64)),
    "cd_attach_peer": (c_int, (c_void_p, c_int, c_int, c_int, c_uint64)),
    "cd_sample_bytes": (c_int64, ()),
    "cd_activate": (None, (c_void_p, c_uint64)),
    "cd_next": (c_void_p, (c_void_p,)),
    "cd_barrier": (c_int, (c_void_p,)),
    "cd_exchange": (c_int, (c_void_p, c_void_p, c_void_p)),
    "cd_call_exchange": (None, (c_void_p,)),
    "cd_wait_for_peer": (c_int, (c_void_p, c_int64)),
    "cd_look_for_peer": (c_int, (c_void_p, c_int64, c_int)),
    "cd_resync": (c_int, (c_void_p, c_uint64, c_uint64, c_int64)),
    "cd_set_spin": (None, (c_void_p, c_int64, c_int64)),
    "cd_wake": (None, (c_void_p,)),
    "cd_stop": (None, (c_void_p,)),
    "cd_give_up": (None, (c_void_p, c_uint64)),
    "cd_raise_kept": (None, ()),
    "cd_fault": (None, (c_void_p, POINTER(NativeFault))),
    "cd_samples": (c_int64, (c_void_p, c_void_p, c_int64)),
    # Of dispatch and combine.
    "cd_abi": (c_uint64, ()),
    "cd_region_parts": (None, (POINTER(Geometry), c_void_p)),
    "cd_create": (c_void_p, (POINTER(Geometry), c_void_p, c_void_p)),
    "cd_attach_network": (c_int, (c_void_p, c_void_p)),
    "cd_network_handler": (c_void_p, ()),
    "cd_set_outbox": (None, (c_void_p, c_void_p)),
    "cd_set_hosts": (None, (c_void_p, POINTER(c_int32))),
    "cd_start_helper": (c_int, (c_void_p,)),
    "cd_attach_landing": (c_int, (c_void_p, c_int, c_int)),
    "cd_sent": (None, (c_void_p, POINTER(Sent))),
    "cd_dispatch_free": (c_int, (c_void_p,)),
    "cd_dispatch": (c_int, (c_void_p, POINTER(DispatchOp), c_int)),
    "cd_combine": (c_int, (c_void_p, POINTER(CombineOp), c_int)),
    "cd_outputs_free": (c_int, (c_void_p, c_int)),
    # Of collectives.
    "cd_collectives_abi": (c_uint64, ()),
    "cd_collective_bytes": (c_int64, ()),
    "cd_collectives_pool_offset": (c_int64, (POINTER(CollectiveGeometry),)),
    "cd_collectives_create": (c_void_p, (POINTER(CollectiveGeometry),)),
    "cd_collective_begin": (c_int, (c_void_p, POINTER(Collective))),
    "cd_collective_advance": (c_int, (c_void_p, POINTER(Collective), c_int, c_int)),
    # Of rows.
    "cd_quantize_mxfp8": (None, (c_int, c_void_p, c_void_p, c_void_p, c_int64)),
    "cd_quantize_nvfp4": (None, (c_int, c_void_p, c_void_p, c_void_p, c_float, c_int64)),
    "cd_quantize": (None, (c_int, c_void_p, c_void_p, c_void_p, c_int, c_int64)),
    "cd_scale_add": (None, (c_int, c_void_p, c_void_p, c_int, c_float, c_int64)),
    "cd_convert": (None, (c_int, c_void_p, c_void_p, c_int, c_int, c_int64)),
}


@functools.cache
def load(library: Native = native_of("cpu")) -> ctypes.CDLL:
    """The library, checked. Raises TransportError: missing, unloadable or stale, with the command that cures it."""
    return load_library("cpu transport", library, _SIGNATURES)


def check_limits(ranks: int, in_flight: int) -> None:
    """Refuse what the region's byte map has no room for. Raises ConfigError."""
    if ranks > MAX_RANKS:
        raise ConfigError("group", f"at most {MAX_RANKS} ranks with transport cpu", ranks)
    if in_flight > MAX_SLOTS:
        raise ConfigError("max_in_flight", f"at most {MAX_SLOTS} with transport cpu", in_flight)
