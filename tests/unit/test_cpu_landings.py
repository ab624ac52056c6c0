"""What the network brings a rank of the `cpu` transport, by its handler alone: which messages count."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest
import torch

from ep_kernels.config import MoEConfig
from ep_kernels.transports.cpu import native
from ep_kernels.transports.cpu.comm import NativeComm
from ep_kernels.transports.cpu.geometry import geometry_of
from ep_kernels.transports.cpu.region import OwnRegion
from tests.groups import LonelyGroup

HANDLER = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32, ctypes.c_uint64)
ARRIVED, DISPATCH_HEAD = 0, 1
SEQ_BITS = 18
"""Of the number in an immediate (native/remote.hpp)."""


class Receiver:
    """Rank 0 of two hosts, which goes on without rank 1 of the other until that one's messages come."""

    def __init__(self) -> None:
        config = MoEConfig(group=LonelyGroup(0, 2), num_experts=2, hidden_size=8, topk=1, max_tokens_per_rank=4)
        self.lib, self.geometry = native.load(), geometry_of(config)
        geometry = ctypes.byref(self.geometry)
        self.comm = NativeComm(config, self.lib, self.geometry)
        self.region = OwnRegion(self.lib.cd_region_bytes(geometry))
        self.mirror_bytes: int = self.lib.cd_mirror_bytes(geometry)
        self.landing = OwnRegion(2 * self.mirror_bytes)
        self.lib.cd_attach_own(self.comm.pointer, self.region.bytes.data_ptr())
        assert self.lib.cd_attach_network(self.comm.pointer, self.landing.bytes.data_ptr()) == 0
        self.lib.cd_set_hosts(self.comm.pointer, (ctypes.c_int32 * 2)(0, 1))
        self.lib.cd_activate(self.comm.pointer, 1)
        self.parts = (ctypes.c_int64 * 6)()
        self.lib.cd_region_parts(geometry, self.parts)
        self.handle = HANDLER(self.lib.cd_network_handler())

    def dispatches(self, number: int) -> None:
        """Without tokens, by this rank alone."""
        op = native.dispatch_op((0,) * 6, (0, 0), (0,) * 4, (1, 1), (0,) * 7)
        for _ in range(number):
            assert self.lib.cd_dispatch_send(self.comm.pointer, ctypes.byref(op)) == native.OK

    def counts(self, seq: int) -> bool:
        """Whether the head of rank 1's dispatch `seq`, which has no other message, wakes this rank."""
        slot, events = seq % self.geometry.in_flight, self.region.bytes[:4].view(torch.int32)
        seq_at = self.mirror_bytes + self.parts[0] + slot * self.parts[1] + 8
        self.landing.bytes[seq_at : seq_at + 8].view(torch.int64)[0] = seq
        before = int(events[0])
        immediate = DISPATCH_HEAD << 28 | slot << SEQ_BITS | seq & (1 << SEQ_BITS) - 1
        self.handle(self.comm.pointer, 1, ARRIVED, immediate)
        return int(events[0]) > before


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    yield made
    for region in (made.region, made.landing):
        region.close()


def test_a_message_counts_once_and_not_behind_a_later_one(receiver: Receiver) -> None:
    assert receiver.counts(1)
    assert not receiver.counts(1)
    receiver.dispatches(3)
    assert receiver.counts(3)
    assert not receiver.counts(1)


def test_messages_count_after_a_long_time_without_any(receiver: Receiver) -> None:
    """Rank 1 sends to another rank of this host during many dispatches. Then the low bits of the next number are below
    those of the last number received here."""
    assert receiver.counts(1)
    assert receiver.counts(2)
    receiver.dispatches((1 << SEQ_BITS - 1) + 10)
    assert receiver.counts((1 << SEQ_BITS - 1) + 10)
    assert receiver.counts((1 << SEQ_BITS - 1) + 11)
