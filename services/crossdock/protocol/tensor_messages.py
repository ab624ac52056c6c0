"""Messages with tensors, without protobuf's copies; on the wire they are the same bytes.

Protobuf's Python classes copy a bytes field when it is set, when its message is put into another one, serialized or
parsed, and each time it is read. Here the parts of a message are joined once, and of a large message that came in the
tensors' bytes are found where they lie; only the rest is parsed by protobuf. What our own encoder would not write (a
tensor in two parts, say) is left to protobuf altogether.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from crossdock.protocol import wire
from crossdock.protocol.v1 import expert_pb2

Message = TypeVar("Message", expert_pb2.ForwardRequest, expert_pb2.ForwardResponse)

LARGE_BYTES = 16 << 10
"""Below, protobuf is faster."""
_MAX_FIELDS = 64
"""More are left to protobuf: a message may consist of a million small ones."""
_DATA = 1
_TENSORS: dict[type, dict[int, str]] = {
    expert_pb2.ForwardRequest: {3: "x", 4: "topk_ids", 5: "topk_weights"},
    expert_pb2.ForwardResponse: {2: "y"},
}
"""Their field numbers."""
_TAGS = [bytes([number << 3 | 2]) for number in range(6)]
"""What such a field begins with."""


@dataclass(frozen=True, slots=True)
class Received(Generic[Message]):
    """A message that came in.

    Attributes:
        message: the tensors in `data` have no bytes there.
        data: of tensors, by the field's name; views of the packet.
        num_bytes: of the packet.
    """

    message: Message
    data: Mapping[str, memoryview]
    num_bytes: int


def packed(head: Message, tensors: Mapping[str, torch.Tensor]) -> bytes:
    """The serialized message: `head`, and tensors by the field's name. Raises WireError: a dtype without a name."""
    numbers = {name: number for number, name in _TENSORS[type(head)].items()}
    parts: list[bytes | memoryview] = [head.SerializeToString()]
    for name, tensor in tensors.items():
        about = expert_pb2.Tensor(dtype=wire.name_of(tensor.dtype), shape=tensor.shape).SerializeToString()
        data = wire.bytes_of(tensor)
        start = _TAGS[_DATA] + _varint(len(data))
        parts += [_TAGS[numbers[name]] + _varint(len(start) + len(data) + len(about)) + start, data, about]
    return b"".join(parts)


def request_of(packet: bytes) -> Received[expert_pb2.ForwardRequest]:
    """A request. Raises DecodeError."""
    return _received(expert_pb2.ForwardRequest, packet)


def response_of(packet: bytes) -> Received[expert_pb2.ForwardResponse]:
    """An answer. Raises DecodeError."""
    return _received(expert_pb2.ForwardResponse, packet)


def _received(kind: type[Message], packet: bytes) -> Received[Message]:
    found = _split(packet, _TENSORS[kind]) if len(packet) >= LARGE_BYTES else None
    if found is None:
        return Received(kind.FromString(packet), {}, len(packet))
    rest, tensors = found
    message = kind.FromString(rest)
    for name, (about, _) in tensors.items():
        getattr(message, name).MergeFromString(about)
    return Received(message, {name: data for name, (_, data) in tensors.items()}, len(packet))


def _split(packet: bytes, names: Mapping[int, str]) -> tuple[bytes, dict[str, tuple[bytes, memoryview]]] | None:
    """Everything but the tensors, and of each tensor everything but its data, and its data. None: it is not so."""
    view, rest, tensors = memoryview(packet), list[memoryview](), dict[str, tuple[bytes, memoryview]]()
    fields = _fields(packet, 0, len(packet))
    for number, begin, value, end in fields or ():
        if (name := names.get(number)) is None:
            rest.append(view[begin:end])
            continue
        inner = _fields(packet, value, end)
        data = [each for each in inner or () if each[0] == _DATA]
        if inner is None or len(data) != 1 or name in tensors:
            return None
        _, data_begin, data_value, data_end = data[0]
        tensors[name] = packet[value:data_begin] + packet[data_end:end], view[data_value:data_end]
    return (b"".join(rest), tensors) if fields is not None else None


def _fields(packet: bytes, at: int, end: int) -> list[tuple[int, int, int, int]] | None:
    """(number, where it begins, where its value begins, where it ends) of each field. None: too many, or malformed."""
    found = list[tuple[int, int, int, int]]()
    while at < end:
        begin = at
        tag, at = _read_varint(packet, at, end)
        kind = tag & 7
        if kind == 2:
            size, at = _read_varint(packet, at, end)
            value, at = at, at + size
        elif kind == 0:
            value = at
            _, at = _read_varint(packet, at, end)
        else:
            value, at = at, at + {1: 8, 5: 4}.get(kind, end + 1)
        if at > end or len(found) == _MAX_FIELDS:
            return None
        found.append((tag >> 3, begin, value, at))
    return found


def _read_varint(packet: bytes, at: int, end: int) -> tuple[int, int]:
    """A number and where it ends; past `end` where it does not."""
    number = shift = 0
    while at < end and shift < 64:
        byte, at = packet[at], at + 1
        number |= (byte & 127) << shift
        if byte < 128:
            return number, at
        shift += 7
    return 0, end + 1


def _varint(number: int) -> bytes:
    made = bytearray()
    while number > 127:
        made.append(number & 127 | 128)
        number >>= 7
    made.append(number)
    return bytes(made)
