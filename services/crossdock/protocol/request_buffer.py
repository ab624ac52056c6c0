"""Memory for one request at a time, where its tensors lie, and how a client and a worker of one host share it.

    client                                            worker
    OpenBuffer(host, num_bytes) ──── gRPC ──────────▶ checks role, host, room; offers a socket and a ticket
    connect, ticket ─────────── UNIX socket ────────▶ makes the memfd, sends its descriptor
    x, ids, weights ─▶ memory
    ForwardRequest without data ── UNIX socket ─────▶ copies ids and weights, checks them; a step reads x in place
    y ◀─ memory  ◀── ForwardResponse without y ────── writes y in place
    either end closes the socket ═══════════════════▶ the other end has its end

A packet of the socket is one message. The memory is a memfd that the worker makes and seals: its size cannot change,
so neither end can fault the other. Places follow from T, H, K and the itemsize alone; no offset travels. Of a client of
another host the memory is the worker's own (request_connection.py).

Letters: T tokens, H hidden size, K experts per token.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import mmap
import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from crossdock.protocol import wire
from crossdock.protocol.v1 import expert_pb2

MAX_PACKET_BYTES = 4096
"""Most bytes of a message without data; longer error texts are cut."""
MAX_BUFFER_BYTES = 16 << 20
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_ALIGN = 64
_SHAPES = 256
"""Number of request shapes whose places are cached."""


def host_identity() -> str:
    """The kernel and the network namespace of this process, where abstract socket names are known; empty: unknown."""
    proc = Path("/proc")
    try:
        boot = (proc / "sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{(proc / 'self/ns/net').stat().st_ino}"
    except OSError:
        return ""


@dataclass(frozen=True, slots=True)
class Places:
    """Places of the tensors of a request of one shape: offsets in bytes, and what they need in all."""

    x: int
    ids: int
    weights: int
    y: int
    num_bytes: int

    @staticmethod
    @functools.lru_cache(_SHAPES)
    def of(num_tokens: int, hidden: int, topk: int, itemsize: int) -> Places:
        """For x [T, H], topk_ids int32 [T, K], topk_weights float32 [T, K] and y [T, H]."""
        rows, few = _aligned(num_tokens * hidden * itemsize), _aligned(4 * num_tokens * topk)
        return Places(0, rows, rows + few, rows + 2 * few, 2 * rows + 2 * few)


class RoutingCopy:
    """A copy of what a request says of experts, out of its sender's reach, in one of two places: what was there at one
    `turn` stays until the next.

    Args:
        theirs: bytes of topk_ids and of topk_weights, half each, in the request's memory.
        shape: [T, K].

    Attributes:
        count: T * K.
        ids, weights: int32 and float32 [T, K].
        id_values, weight_values: the same without their shape.
    """

    def __init__(self, theirs: memoryview, shape: tuple[int, int]) -> None:
        self._theirs, self.count = theirs, shape[0] * shape[1]
        self._place, self._other = (_routing_place(len(theirs), shape) for _ in range(2))
        self._own, self.ids, self.weights, self.id_values, self.weight_values = self._place

    def take(self) -> None:
        """Copy what is there now."""
        self._own[:] = self._theirs

    def turn(self) -> None:
        """The request that was taken last is answered: the next ones go to the other place."""
        self._place, self._other = self._other, self._place
        self._own, self.ids, self.weights, self.id_values, self.weight_values = self._place


def _routing_place(
    num_bytes: int, shape: tuple[int, int]
) -> tuple[memoryview, torch.Tensor, torch.Tensor, memoryview[int], memoryview[float]]:
    half, own, count = num_bytes // 2, bytearray(num_bytes), shape[0] * shape[1]
    with torch.inference_mode(False):  # as the rows
        ids = torch.frombuffer(own, dtype=torch.int32, count=count).view(shape)
        weights = torch.frombuffer(own, dtype=torch.float32, count=count, offset=half).view(shape)
    view = memoryview(own)
    return view, ids, weights, view[: 4 * count].cast("i"), view[half : half + 4 * count].cast("f")


@dataclass(frozen=True, slots=True)
class RequestRows:
    """The tensors of a request in its memory, which a client of this host may change at any time: x [T, H], topk_ids
    int32 [T, K], topk_weights float32 [T, K], y [T, H] and its first column, and a copy of ids and weights. `sent`,
    `answered`: bytes of x, ids and weights, and of y; `start`: address of the first."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    y: torch.Tensor
    first_column: torch.Tensor
    routing: RoutingCopy
    sent: tuple[memoryview, memoryview, memoryview]
    answered: memoryview
    places: Places
    start: int


class RequestMemory:
    """Memory, pages of zeros; it lives until the last tensor made of it dies.

    Args:
        num_bytes: size.
        fd: of a memfd to map, which is not kept; -1: memory of this process alone.

    Raises:
        OSError: there is no room.
    """

    def __init__(self, num_bytes: int, fd: int = -1) -> None:
        self._mapping = _mapped(num_bytes, fd)
        with torch.inference_mode(False):
            self._all = torch.frombuffer(self._mapping, dtype=torch.uint8).numpy().data
        self.num_bytes = num_bytes
        self._rows: tuple[tuple[object, ...], RequestRows] | None = None

    def tensor(self, dtype: torch.dtype, shape: tuple[int, int], offset: int) -> torch.Tensor:
        """A view of the memory, which the other end may change at any time. The caller has checked that it fits."""
        count = shape[0] * shape[1]
        with torch.inference_mode(False):  # it is kept, and written in no such mode, too
            return torch.frombuffer(self._mapping, dtype=dtype, count=count, offset=offset).view(shape)

    def rows(self, num_tokens: int, hidden: int, topk: int, dtype: torch.dtype) -> RequestRows:
        """The tensors of a request of that shape; the caller has checked that they fit."""
        key = num_tokens, hidden, topk, dtype
        if self._rows is None or self._rows[0] != key:  # as a rule the one before had the same
            places = Places.of(num_tokens, hidden, topk, dtype.itemsize)
            wide, few = (num_tokens, hidden), (num_tokens, topk)
            x_bytes, few_bytes = num_tokens * hidden * dtype.itemsize, 4 * num_tokens * topk
            y, chosen = self.tensor(dtype, wide, places.y), self._all[places.ids : places.y]
            sent = (
                self._bytes(places.x, x_bytes),
                self._bytes(places.ids, few_bytes),
                self._bytes(places.weights, few_bytes),
            )
            x = self.tensor(dtype, wide, places.x)
            made = RequestRows(
                x,
                self.tensor(torch.int32, few, places.ids),
                self.tensor(torch.float32, few, places.weights),
                y,
                y[:, 0],
                RoutingCopy(chosen, few),
                sent,
                self._bytes(places.y, x_bytes),
                places,
                x.data_ptr() - places.x,
            )
            self._rows = key, made
        return self._rows[1]

    def give_back(self) -> None:
        """Free the pages, also where another process still maps them."""
        address = ctypes.c_void_p(ctypes.addressof(self._mapping))
        _LIBC.madvise(address, ctypes.c_size_t(self.num_bytes), mmap.MADV_REMOVE)  # else they go with the last mapping

    def _bytes(self, start: int, count: int) -> memoryview:
        return self._all[start : start + count]


def _mapped(num_bytes: int, fd: int) -> ctypes.Array[ctypes.c_ubyte]:
    """Shared memory without a descriptor: `mmap.mmap` would keep a copy of `fd`. Raises OSError."""
    flags = mmap.MAP_SHARED | (mmap.MAP_ANONYMOUS if fd < 0 else 0)
    length, access = ctypes.c_size_t(num_bytes), mmap.PROT_READ | mmap.PROT_WRITE
    address = _LIBC.mmap(None, length, access, flags, fd, ctypes.c_long(0))
    if address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), f"request buffer: cannot map {num_bytes} bytes")
    mapping = (ctypes.c_ubyte * num_bytes).from_address(address)
    weakref.finalize(mapping, _LIBC.munmap, ctypes.c_void_p(address), length).atexit = False
    return mapping


class SharedMemory(RequestMemory):
    """One mapping of memory that two processes of this host share.

    Args:
        fd: of the memfd; not kept.
        num_bytes: size.

    Raises:
        OSError: no such memory, or one that is smaller, or whose size could change.
    """

    def __init__(self, fd: int, num_bytes: int) -> None:
        if os.fstat(fd).st_size < num_bytes or fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS != SEALS:
            raise OSError(f"request buffer: expected {num_bytes} sealed bytes")
        super().__init__(num_bytes, fd)

    @staticmethod
    def make(num_bytes: int) -> tuple[SharedMemory, int]:
        """New memory, and its descriptor, which the caller closes. Raises OSError."""
        fd = os.memfd_create("crossdock-request", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, num_bytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
            return SharedMemory(fd, num_bytes), fd
        except BaseException:
            os.close(fd)
            raise


class RepeatedRequests:
    """Requests of one buffer as packets. Most differ from the one before in their id alone, the first field: what
    follows it is neither written nor parsed again. One thread at a time."""

    def __init__(self) -> None:
        self._fields: tuple[object, ...] = ()
        self._rest: bytes | None = None
        self._request = expert_pb2.ForwardRequest()

    def packet_of(
        self, number: int, fields: tuple[object, ...], make: Callable[[], expert_pb2.ForwardRequest]
    ) -> bytes:
        """A request with that id, of which `fields` say all the rest, and `make()` makes it."""
        if self._rest is None or fields != self._fields:
            self._rest, self._fields = make().SerializeToString(), fields
        return _id_field(number) + self._rest

    def request_of(self, packet: bytes) -> tuple[expert_pb2.ForwardRequest, bool]:
        """The request, valid until the next call, and whether but for its id it is the one before. Raises
        DecodeError."""
        number, end = _read_id(packet)
        if end and packet[end:] == self._rest:
            self._request.id = number
            return self._request, True
        self._request = expert_pb2.ForwardRequest.FromString(packet)
        self._rest = packet[end:] if end and self._request.id == number else None
        return self._request, False


_ID_TAG, _MORE = 0x08, 0x80
_ID_BYTES = 11
"""Most bytes of an id field: its tag, and 64 bits by sevens."""


def _id_field(number: int) -> bytes:
    """The first field of a ForwardRequest, as protobuf writes it: it may be joined with the others."""
    field = [_ID_TAG]
    while number >= _MORE:
        field.append(number % _MORE | _MORE)
        number //= _MORE
    return bytes([*field, number])


def _read_id(packet: bytes) -> tuple[int, int]:
    """(id, where the other fields begin); (0, 0): it does not begin with an id."""
    number = 0
    for place, byte in enumerate(packet[1:_ID_BYTES] if packet[0] == _ID_TAG else b""):
        number += byte % _MORE << 7 * place
        if byte < _MORE:
            return number % (1 << 64), place + 2
    return 0, 0


def described(dtype: torch.dtype, shape: tuple[int, int]) -> expert_pb2.Tensor:
    """A tensor that lies in the memory."""
    return expert_pb2.Tensor(dtype=wire.NAMES[dtype], shape=shape)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGN) * _ALIGN
