"""A client of the expert service that has nothing of ours but the generated messages: one Forward stream per worker."""

from __future__ import annotations

import itertools
import queue
from collections.abc import Iterator

import torch

from crossdock.common import rpc
from crossdock.common.control_channel import current_view
from crossdock.protocol import wire
from crossdock.protocol.v1 import expert_pb2, expert_pb2_grpc


class ForeignClient:
    """One call at a time. target: host:port of a control plane."""

    def __init__(self, target: str) -> None:
        with rpc.channel(target) as control:
            addresses = [member.address for member in current_view(control, 10.0).members]
        self._streams = [_Stream(address) for address in addresses]
        self._turns = itertools.cycle(self._streams)

    def forward(
        self, layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, *, timeout_s: float
    ) -> torch.Tensor:
        """y [T, H], of a share of the rows from each worker, as `crossdock.client` cuts them. Raises RuntimeError."""
        first = next(self._turns)
        parts = max(1, min(len(self._streams), len(x) // 64))
        order = self._streams[self._streams.index(first) :] + self._streams[: self._streams.index(first)]
        bounds = [part * len(x) // parts for part in range(parts + 1)]
        for stream, begin, end in zip(order, bounds, bounds[1:], strict=False):
            rows = slice(begin, end)
            stream.send(layer, x[rows], ids[rows], weights[rows], timeout_s)
        return torch.cat([stream.read() for stream in order[:parts]])

    def close(self) -> None:
        """End the streams."""
        for stream in self._streams:
            stream.close()


class _Stream:
    def __init__(self, address: str) -> None:
        self._channel, self._ids = rpc.channel(address), itertools.count(1)
        self._out = queue.SimpleQueue[expert_pb2.ForwardRequest | None]()
        self._answers = expert_pb2_grpc.ExpertServiceStub(self._channel).Forward(self._requests())

    def send(self, layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, timeout_s: float) -> None:
        request = expert_pb2.ForwardRequest(id=next(self._ids), layer=layer, timeout_ms=int(1e3 * timeout_s))
        request.x.CopyFrom(wire.encode(x))
        request.topk_ids.CopyFrom(wire.encode(ids))
        request.topk_weights.CopyFrom(wire.encode(weights))
        self._out.put(request)

    def read(self) -> torch.Tensor:
        answer = next(self._answers)
        if answer.HasField("error"):
            raise RuntimeError(answer.error.message)
        return wire.decode(answer.y, name="y", dtypes=list(wire.NAMES), ndim=2)

    def close(self) -> None:
        self._out.put(None)
        self._channel.close()

    def _requests(self) -> Iterator[expert_pb2.ForwardRequest]:
        return iter(self._out.get, None)
