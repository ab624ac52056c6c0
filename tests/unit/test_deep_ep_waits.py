"""How often `deep_ep` and the vLLM plugin read the device in a step of exact shapes: once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch.overrides import TorchFunctionMode

from crossdock.common.config import FrameworkConfig
from crossdock.deep_ep.high_throughput import Delivered, HighThroughput
from crossdock.deep_ep.pool import Pool
from ep_kernels import MoECommunicator
from tests.groups import LonelyGroup

READS = {
    torch.Tensor.tolist, torch.Tensor.item, torch.Tensor.cpu, torch.Tensor.numpy, torch.Tensor.__int__,
    torch.Tensor.__bool__, torch.Tensor.__float__, torch.Tensor.__index__, torch.Tensor.nonzero,
}  # fmt: skip
"""Each makes the host wait for a device."""


class Reads(TorchFunctionMode):
    """Counts those outside of the communicator's own dispatch, which on a CPU may look at what it likes."""

    def __init__(self) -> None:
        super().__init__()
        self.number, self.dispatches, self._inside = 0, 0, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += func in READS and not self._inside
        return func(*args, **(kwargs or {}))

    def dispatch(self, comm: MoECommunicator, *args: Any, **kwargs: Any) -> Any:
        self._inside, self.dispatches = True, self.dispatches + 1
        try:
            return _dispatch(comm, *args, **kwargs)
        finally:
            self._inside = False


_dispatch = MoECommunicator.dispatch


@pytest.fixture
def calls() -> Iterator[HighThroughput]:
    with mock.patch("crossdock.deep_ep.pool.TorchGroup", return_value=LonelyGroup()):
        pool = Pool(None, FrameworkConfig(metrics=False, exit_on_fault=False))
    yield HighThroughput(pool)
    pool.close()


def test_a_step_reads_the_device_once(calls: HighThroughput) -> None:
    x, ids = torch.randn(5, 64).bfloat16(), torch.tensor([[0, 3, -1]] * 5)
    kind = calls.kind((x, None), 4, 3, 0)
    calls.dispatch((x, None), ids, torch.ones(5, 3), kind)
    reads = Reads()

    def dispatch(comm: MoECommunicator, *args: Any, **kwargs: Any) -> Any:
        return reads.dispatch(comm, *args, **kwargs)

    with mock.patch.object(MoECommunicator, "dispatch", dispatch), reads:
        got: Delivered = calls.dispatch((x, None), ids, torch.ones(5, 3), kind, keep=False)
        again, *_ = calls.dispatch_again((x, None), got.handle)
        calls.combine(got.x.contiguous(), got.handle, None)
    assert (reads.dispatches, reads.number) == (2, 1)
    assert not got.handle.comm.config.exact_shapes, "else the communicator reads, too"
    assert got.counts is not None
    assert (got.counted, got.counts.tolist()) == ([5, 0, 0, 5], [5, 0, 0, 5])
    assert got.x.shape == again.shape == x.shape


def test_layers_share_the_communicators_of_a_pool(calls: HighThroughput) -> None:
    x, ids = torch.randn(5, 64).bfloat16(), torch.tensor([[0, 3]] * 5)
    for layer in (calls, HighThroughput(calls._pool)):
        got = layer.dispatch((x, None), ids, torch.ones(5, 2), layer.kind((x, None), 4, 2, 0))
        assert torch.equal(got.x, x)
    assert len(calls._pool.communicators()) == 1
