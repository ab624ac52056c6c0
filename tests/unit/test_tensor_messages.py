"""Messages with tensors: the bytes are protobuf's, whichever way they are written and read."""

from __future__ import annotations

import random

import pytest
import torch
from google.protobuf.message import DecodeError

from crossdock.protocol import tensor_messages, wire
from crossdock.protocol.tensor_messages import LARGE_BYTES, packed, request_of, response_of
from crossdock.protocol.v1 import expert_pb2

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def request(num_tokens: int, dtype: torch.dtype) -> tuple[expert_pb2.ForwardRequest, dict[str, torch.Tensor]]:
    head = expert_pb2.ForwardRequest(id=random.getrandbits(60), layer=3, timeout_ms=9, model="f" * 32)
    ids, weights = torch.randint(-1, 9, (num_tokens, 4)), torch.rand(num_tokens, 4)
    return head, {"x": torch.randn(num_tokens, 128).to(dtype), "topk_ids": ids, "topk_weights": weights}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [0, 1, 7, 300])
def test_a_request_is_what_protobuf_writes_and_reads(num_tokens: int, dtype: torch.dtype) -> None:
    head, tensors = request(num_tokens, dtype)
    whole = expert_pb2.ForwardRequest()
    whole.CopyFrom(head)
    for name, tensor in tensors.items():
        getattr(whole, name).CopyFrom(wire.encode(tensor))
    packet = packed(head, tensors)
    assert expert_pb2.ForwardRequest.FromString(packet) == whole
    for sent in (packet, whole.SerializeToString()):
        got = request_of(sent)
        assert got.num_bytes == len(sent)
        assert (got.data != {}) == (len(sent) >= LARGE_BYTES)
        assert (got.message.id, got.message.layer, got.message.model) == (head.id, 3, "f" * 32)
        for name, tensor in tensors.items():
            field = getattr(got.message, name)
            read = wire.decode(field, name=name, dtypes=[tensor.dtype], ndim=2, data=got.data.get(name))
            assert torch.equal(read, tensor)


def test_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    y, timing = torch.randn(200, 64), expert_pb2.Timing(queue_ns=7)
    packet = packed(expert_pb2.ForwardResponse(id=5, timing=timing), {"y": y.t()})
    got = response_of(packet)
    assert got.message.timing == timing
    assert torch.equal(wire.decode(got.message.y, name="y", dtypes=[y.dtype], ndim=2, data=got.data["y"]), y.t())
    with pytest.raises(wire.WireError, match=r"y: expected 51200 bytes .* got 51199"):
        wire.decode(got.message.y, name="y", dtypes=[y.dtype], ndim=2, data=got.data["y"][1:])
    with pytest.raises(wire.WireError, match="dtype"):
        packed(expert_pb2.ForwardResponse(), {"y": y.double()})


def test_what_our_encoder_would_not_write_is_left_to_protobuf() -> None:
    head, tensors = request(300, torch.float32)
    packet = packed(head, tensors)
    small = expert_pb2.ForwardRequest(cancel=True).SerializeToString()
    twice = packet + packed(expert_pb2.ForwardRequest(), {"x": tensors["x"][:2]})
    for odd in (twice, packet + 60 * small, packet + b"\x0b\x0c"):  # merged tensors, many fields, an unknown group
        got = request_of(odd)
        assert not got.data
        assert got.message == expert_pb2.ForwardRequest.FromString(odd)
    assert request_of(packet + small).message.cancel


def test_random_damage_is_an_error_or_what_protobuf_reads() -> None:
    head, tensors = request(100, torch.float32)
    packet = packed(head, tensors)
    for seed in range(400):
        dice = random.Random(seed)
        damaged = bytearray(packet[: dice.choice([len(packet), dice.randrange(LARGE_BYTES, len(packet))])])
        for _ in range(dice.randrange(4)):
            damaged[dice.choice([dice.randrange(len(damaged)), dice.randrange(60)])] = dice.randrange(256)
        try:
            expected = expert_pb2.ForwardRequest.FromString(bytes(damaged))
        except DecodeError:
            with pytest.raises(DecodeError):
                request_of(bytes(damaged))
            continue
        got = request_of(bytes(damaged))
        for name, data in got.data.items():
            getattr(got.message, name).data = bytes(data)
        assert got.message == expected, seed


def test_numbers_of_fields() -> None:
    for kind, fields in tensor_messages._TENSORS.items():
        named = kind.DESCRIPTOR.fields_by_number  # type: ignore[attr-defined]
        assert {number: named[number].name for number in fields} == fields
        assert set(fields.values()) == {
            field.name for field in named.values() if field.message_type is expert_pb2.Tensor.DESCRIPTOR
        }
    assert expert_pb2.Tensor.DESCRIPTOR.fields_by_name["data"].number == tensor_messages._DATA
