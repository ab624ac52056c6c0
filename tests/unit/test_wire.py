"""Tensors on the wire: what goes in comes out, and nothing hostile gets past decode."""

from __future__ import annotations

import pytest
import torch

from crossdock.protocol import wire
from crossdock.protocol.v1 import expert_pb2

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", wire.NAMES)
@pytest.mark.parametrize("shape", [(3, 5), (1, 1), (0, 7), (4, 0)])
def test_round_trip(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.randn(shape) * 1000).to(dtype)
    message = expert_pb2.Tensor.FromString(wire.encode(tensor).SerializeToString())
    back = wire.decode(message, name="x", dtypes=[dtype], ndim=2)
    assert back.dtype is dtype
    assert torch.equal(back, tensor)
    back.fill_(1)


def test_nan_and_negative_zero_keep_their_bits() -> None:
    tensor = torch.tensor([[float("nan"), -0.0, float("inf"), -float("inf")]], dtype=torch.bfloat16)
    back = wire.decode(wire.encode(tensor), name="x", dtypes=FLOATS, ndim=2)
    assert torch.equal(back.view(torch.int16), tensor.view(torch.int16))


def test_strided_tensors_are_packed() -> None:
    tensor = torch.randn(6, 8)
    for view in (tensor.t(), tensor[::2], tensor[:, 1:5]):
        assert torch.equal(wire.decode(wire.encode(view), name="x", dtypes=FLOATS, ndim=2), view)


def test_little_endian_row_major() -> None:
    message = wire.encode(torch.tensor([[1, 2], [3, 256]], dtype=torch.int32))
    assert message.data == b"\1\0\0\0\2\0\0\0\3\0\0\0\0\1\0\0"
    assert (message.dtype, list(message.shape)) == ("int32", [2, 2])


def test_encode_refuses_other_dtypes() -> None:
    with pytest.raises(wire.WireError, match=r"dtype one of .*float64"):
        wire.encode(torch.zeros(1, 1, dtype=torch.float64))


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (expert_pb2.Tensor(dtype="float64", shape=[1, 1], data=bytes(8)), "topk_ids: expected dtype one of"),
        (expert_pb2.Tensor(dtype="", shape=[1, 1], data=bytes(4)), "topk_ids: expected dtype one of"),
        (expert_pb2.Tensor(dtype="float32", shape=[1, 1], data=bytes(4)), r"\['int32', 'int64'\], got 'float32'"),
        (expert_pb2.Tensor(dtype="x" * 10**6, shape=[1, 1]), "got 'x{32}'$"),
        (expert_pb2.Tensor(dtype="int32", shape=[4], data=bytes(16)), "expected 2 dimensions, got 1"),
        (expert_pb2.Tensor(dtype="int32", shape=[1] * 10**5, data=bytes(4)), "expected 2 dimensions, got 100000"),
        (expert_pb2.Tensor(dtype="int32", shape=[-1, -4], data=bytes(16)), "expected dimensions in 0"),
        (expert_pb2.Tensor(dtype="int32", shape=[2**62, 0]), "expected dimensions in 0"),
        (expert_pb2.Tensor(dtype="int32", shape=[2**31 - 1, 2**31 - 1]), "expected 18446744056529682436 bytes"),
        (expert_pb2.Tensor(dtype="int32", shape=[2, 2], data=bytes(15)), "expected 16 bytes for int32 .* got 15"),
        (expert_pb2.Tensor(dtype="int32", shape=[2, 2], data=bytes(17)), "expected 16 bytes for int32 .* got 17"),
        (expert_pb2.Tensor(dtype="int32", shape=[0, 2], data=bytes(1)), "expected 0 bytes"),
        (expert_pb2.Tensor(), "expected dtype one of"),
    ],
)
def test_decode_refuses(message: expert_pb2.Tensor, words: str) -> None:
    with pytest.raises(wire.WireError, match=words) as caught:
        wire.decode(message, name="topk_ids", dtypes=(torch.int32, torch.int64), ndim=2)
    assert caught.value.field == "topk_ids"
