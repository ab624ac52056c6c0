"""What two workers say on a connection by which one reads weights of the other (docs/request-protocol.md#weights), and
the connection itself. A message is its length, u32 little-endian, and msgpack.

    reader                                             holder
    Which                ─────────────────────────────▶
                         ◀─────────────────────────────  Held      checkpoint and experts of each layer
    Read                 ─────────────────────────────▶
                         ◀─────────────────────────────  Granted   or why not; of one host with its memory's descriptor
                         ◀─────────────────────────────  of each expert: its bytes, unless they lie in that memory, and
                                                         Sum
"""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from typing import Annotated, TypeVar

import msgspec
import torch

from crossdock.protocol.frames import close
from crossdock.worker.checkpoints.expert_sources import OneExpert

MAX_ASK_BYTES, MAX_ANSWER_BYTES = 256 << 10, 64 << 20
_LENGTH = struct.Struct("<I")
_Text = Annotated[str, msgspec.Meta(max_length=4096)]
_Number = Annotated[int, msgspec.Meta(ge=0)]
_Experts = Annotated[list[Annotated[int, msgspec.Meta(ge=0)]], msgspec.Meta(max_length=1 << 14)]
Kind = TypeVar("Kind")


class MessageError(ValueError):
    """The other end says something that is none of these messages, or too long."""


class Which(msgspec.Struct, frozen=True, tag=True):
    """What do you hold?"""


class Read(msgspec.Struct, frozen=True, tag=True):
    """Experts of one layer, in this order.

    Attributes:
        fingerprint: of the checkpoint whose weights are wanted.
        form: see `form_of`.
        maps: the reader can map memory of this host.
    """

    layer: int
    fingerprint: _Text
    form: _Text
    experts: _Experts
    maps: bool


class HeldExperts(msgspec.Struct, frozen=True, array_like=True):
    """Experts of one layer, and the fingerprint of their checkpoint."""

    layer: int
    fingerprint: _Text
    experts: _Experts


class Held(msgspec.Struct, frozen=True):
    layers: Annotated[list[HeldExperts], msgspec.Meta(max_length=1 << 10)]


class Granted(msgspec.Struct, frozen=True):
    """refused: why nothing follows; empty: it does. memory_bytes: of the memory whose descriptor is beside this; 0: the
    bytes follow."""

    refused: _Text = ""
    memory_bytes: _Number = 0


class Sum(msgspec.Struct, frozen=True):
    """One expert. sum: hash of its tensors' bytes. digest: as `Checkpoint.digest`; 0: unknown. places: of its tensors
    in the memory."""

    sum: _Number
    digest: _Number
    places: Annotated[list[_Number], msgspec.Meta(max_length=16)] = []


Ask = Which | Read


def form_of(expert: OneExpert) -> str:
    """Types and shapes of an expert's tensors: equal, if the bytes of one mean the same in the other."""
    tensors = ((stack, tensor) for stack in (expert.first, expert.down) for tensor in stack.tensors)
    return "; ".join(f"{stack.format}/{stack.parts} {tensor.dtype} {list(tensor.shape)}" for stack, tensor in tensors)


def bytes_of(piece: torch.Tensor) -> memoryview:
    """Of uint8 on the host."""
    return memoryview(piece.numpy())  # type: ignore[arg-type]


class WeightLine:
    """One end of the connection. One thread; every wait ends by the deadline that was set last.

    Args:
        sock: connected and known; closed by `close`.
    """

    def __init__(self, sock: socket.socket, seconds: float) -> None:
        self.sock = sock
        self.within(seconds)

    @property
    def is_local(self) -> bool:
        """Whether memory can be passed."""
        return self.sock.family == socket.AF_UNIX

    def within(self, seconds: float) -> None:
        """Set the deadline."""
        self._until = time.monotonic() + seconds

    def _armed(self) -> socket.socket:
        """Raises TimeoutError: too late."""
        left = self._until - time.monotonic()
        if left <= 0:
            raise TimeoutError("not in time")
        self.sock.settimeout(left)
        return self.sock

    def send(self, message: msgspec.Struct, descriptor: int = -1) -> None:
        """Raises OSError. descriptor: goes beside it, and is closed."""
        packed = msgspec.msgpack.encode(message)
        whole = _LENGTH.pack(len(packed)) + packed
        try:
            if descriptor >= 0:
                whole = whole[socket.send_fds(self._armed(), [whole], [descriptor]) :]
        finally:
            close(descriptor)
        self._armed().sendall(whole)

    def receive(self, kind: type[Kind] | object, most: int) -> Kind:
        """Raises OSError, EOFError, MessageError."""
        return self._decoded(kind, self._bytes(_LENGTH.size), most)

    def receive_granted(self) -> tuple[Granted, int]:
        """With the descriptor beside it; -1: none came. Raises as `receive`."""
        if not self.is_local:
            return self.receive(Granted, MAX_ASK_BYTES), -1
        head, descriptors, _, _ = socket.recv_fds(self._armed(), _LENGTH.size, 1, socket.MSG_CMSG_CLOEXEC)
        found = descriptors[0] if descriptors else -1
        try:
            head += self._bytes(_LENGTH.size - len(head)) if head else b""
            granted: Granted = self._decoded(Granted, head, MAX_ASK_BYTES)
        except BaseException:
            close(found)
            raise
        return granted, found

    def _decoded(self, kind: type[Kind] | object, head: bytes, most: int) -> Kind:
        if len(head) < _LENGTH.size:
            raise EOFError("closed by the other end")
        (count,) = _LENGTH.unpack(head)
        if count > most:
            raise MessageError(f"message: expected at most {most} bytes, got {count}")
        try:
            decoded: Kind = msgspec.msgpack.decode(self._bytes(count), type=kind)
        except msgspec.MsgspecError as error:
            raise MessageError(f"message: {error}") from None
        return decoded

    def _bytes(self, count: int) -> bytes:
        found = bytearray(count)
        self.receive_into(memoryview(found))
        return bytes(found)

    def send_piece(self, piece: memoryview) -> None:
        """Raises OSError."""
        self._armed().sendall(piece)

    def receive_into(self, room: memoryview) -> None:
        """Fill it. Raises OSError, EOFError."""
        while len(room):
            count = self._armed().recv_into(room)
            if not count:
                raise EOFError("closed by the other end")
            room = room[count:]

    def shut_down(self) -> None:
        """Have both ends see the end of it. Any thread."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.sock.close()
