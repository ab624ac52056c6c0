"""What the network brings a rank on a GPU (transports/nvlink/native/box_words.cpp): words grow when all parts of an
operation are here, whatever order they come in."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from ctypes import CFUNCTYPE, c_int32, c_uint64, c_void_p
from typing import Any

import pytest
import torch

from ep_kernels.errors import ConfigError
from ep_kernels.kernels import abi
from ep_kernels.network import NetworkConfig
from ep_kernels.transports.nvlink.calls import plan
from ep_kernels.transports.nvlink.calls.plan import slices_of
from ep_kernels.transports.nvlink.gpu import launch
from ep_kernels.transports.nvlink.network.remote import check, stripe_of
from ep_kernels.types import CombineOrder, Layout, Mode
from tests.cases import RoutingCase
from tests.gpu.loopback_group import LoopGroup

RANKS = 3
ARRIVED, DOWN, LEFT_OUT, UP = range(4)
FLAGS = ("METADATA", "PAYLOAD", "COMBINE", "STARTED")
METADATA, PAYLOAD, COMBINE, STARTED = (abi.FLAGS.index(name) for name in FLAGS)


class Box:
    """The native half, called as the proxy calls it."""

    def __init__(self) -> None:
        self.words = torch.zeros(len(abi.FLAGS) + 2, RANKS, dtype=torch.int64)
        self.slices = self.words[len(abi.FLAGS) :]
        self.gone = torch.zeros(RANKS, dtype=torch.int64)
        self.lib = launch.library()
        self.pointer = self.lib.cd_boxes_new(RANKS, self.words.data_ptr(), self.gone.data_ptr())
        prototype = CFUNCTYPE(None, c_void_p, c_int32, c_int32, c_uint64)
        self._handler: Callable[..., None] = prototype(self.lib.cd_boxes_handler())

    def tell(self, rank: int, event: int, value: int) -> None:
        self._handler(self.pointer, rank, event, value)

    def part(self, rank: int, flag: int, seq: int, parts: int = 1) -> None:
        """One of the `parts` messages of an operation: as `net::immediate` of push.cuh has it."""
        self.tell(rank, ARRIVED, flag << 28 | (parts - 1) << abi.SEQ_BITS | seq % (1 << abi.SEQ_BITS))

    def slice(self, rank: int, flag: int, seq: int, number: int, parts: int = 1) -> None:
        """One of the `parts` messages of a slice."""
        which, low = len(abi.FLAGS) + (flag == COMBINE), seq % (1 << abi.SEQ_BITS)
        self.tell(rank, ARRIVED, which << 28 | (number << 5 | (parts - 1)) << abi.SEQ_BITS | low)

    def slices_here(self, rank: int, flag: int, seq: int) -> set[int]:
        """As kernels read them."""
        word = int(self.slices[int(flag == COMBINE), rank])
        return {bit for bit in range(32) if word >> bit & 1} if word >> 32 & 0xFFFFFFFF == seq % (1 << 32) else set()

    def word(self, rank: int, flag: int) -> int:
        return int(self.words[flag, rank])


@pytest.fixture
def box() -> Iterator[Box]:
    made = Box()
    yield made
    made.lib.cd_boxes_free(made.pointer)


@pytest.mark.parametrize("start", [0, (1 << abi.SEQ_BITS) - 5, (1 << 40) - 3])
@pytest.mark.parametrize("flag", [METADATA, PAYLOAD, COMBINE])
def test_parts_in_any_order(flag: int, start: int, box: Box) -> None:
    """Messages of ten operations of one to 300 parts, shuffled; the low bits of seq wrap on the way."""
    box.lib.cd_boxes_restart(box.pointer, start, start, start)
    sizes = {start + n: random.choice((1, 2, 5, 300)) for n in range(1, 11)}
    messages = [seq for seq, parts in sizes.items() for _ in range(parts)]
    random.shuffle(messages)
    left = dict(sizes)
    for seq in messages:
        box.part(1, flag, seq, sizes[seq])
        left[seq] -= 1
        whole = next((s - 1 for s in sizes if left[s]), start + 10)
        assert box.word(1, flag) == whole
    assert box.word(0, flag) == start, "other sources are not touched"


@pytest.mark.parametrize("start", [0, (1 << abi.SEQ_BITS) - 3, (1 << 32) - 3])
@pytest.mark.parametrize("flag", [PAYLOAD, COMBINE])
def test_slices_in_any_order(flag: int, start: int, box: Box) -> None:
    """Of five operations, shuffled: a slice is here when all its parts are, and its operation is the next one."""
    box.lib.cd_boxes_restart(box.pointer, start, start, start)
    of = {start + n: {s: random.choice((1, 3, 32)) for s in random.sample(range(32), 9)} for n in range(1, 6)}
    messages = [(seq, s) for seq, slices in of.items() for s, parts in slices.items() for _ in range(parts)]
    messages += [(seq, -1) for seq in of]  # one part that is in no slice, and says how many there are
    random.shuffle(messages)
    left = [list(messages)]
    for seq, number in messages:
        parts = sum(of[seq].values()) + 1
        box.part(1, flag, seq, parts) if number < 0 else box.slice(1, flag, seq, number, of[seq][number])
        left[0].remove((seq, number))
        whole = next((s - 1 for s in of if any(one == s for one, _ in left[0])), start + 5)
        assert box.word(1, flag) == whole
        here = {s for s in of.get(whole + 1, {}) if (whole + 1, s) not in left[0]}
        assert box.slices_here(1, flag, whole + 1) == here
    assert box.slices_here(0, flag, start + 1) == set(), "other sources are not touched"


def test_a_word_without_parts_only_grows(box: Box) -> None:
    for seq, want in ((3, 3), (2, 3), (3, 3), (9, 9)):
        box.part(2, STARTED, seq)
        assert box.word(2, STARTED) == want


def test_what_belongs_to_an_earlier_epoch_counts_no_more(box: Box) -> None:
    box.part(1, PAYLOAD, 1, 2)
    box.lib.cd_boxes_restart(box.pointer, 7, 5, 2)
    assert [box.word(1, flag) for flag in (STARTED, METADATA, PAYLOAD, COMBINE)] == [7, 7, 7, 5]
    box.part(1, PAYLOAD, 1, 2)
    box.part(1, PAYLOAD, 8, 2)
    assert box.word(1, PAYLOAD) == 7
    box.part(1, PAYLOAD, 8, 2)
    assert box.word(1, PAYLOAD) == 8


def test_flags_that_no_version_sends(box: Box) -> None:
    before = box.words.clone()
    for flag in (abi.FLAGS.index("LEFT_OUT"), len(abi.FLAGS) + 2, 15):
        box.part(0, flag, 3)
    assert torch.equal(box.words, before)


def test_life_of_a_rank(box: Box) -> None:
    """A rank is dead when its connections end, and not any more when they are made again; given up stays given up."""
    box.tell(1, DOWN, 104)
    assert box.gone.tolist() == [0, abi.DEAD, 0]
    box.tell(1, UP, 0)
    assert box.gone.tolist() == [0, 0, 0]
    box.gone[1] = abi.GIVEN_UP
    box.tell(1, UP, 0)
    assert box.gone.tolist() == [0, abi.GIVEN_UP, 0]
    box.tell(2, LEFT_OUT, 12)
    assert box.word(2, abi.FLAGS.index("LEFT_OUT")) == 12


@pytest.mark.parametrize("box_bytes", [4096, 1 << 26, 3 << 30, 1 << 36])
def test_an_operation_has_few_enough_parts(box_bytes: int) -> None:
    """Whatever lies in a box, with several lanes; one lane needs no stripes but those of a descriptor's size."""
    assert box_bytes / stripe_of(box_bytes, 4) + 4 < abi.MAX_PARTS
    assert stripe_of(box_bytes, 1) < 1 << 32


def test_what_takes_too_many_descriptors_has_no_slices() -> None:
    """As of a device that writes few bytes at once."""
    case = RoutingCase(64, 32, 64, (1, 1), max_tokens=2000)
    config = case.config(LoopGroup(0, 2), mode=Mode.HT, network=NetworkConfig(lanes=4), layout=Layout.FLAT)
    shape = plan.sizes_of(config).shape
    assert all(slices_of(shape, stripe_of(abi.box_bytes(shape), 4)))
    assert all(slices_of(shape, 16384))
    assert slices_of(shape, 8192) == (0, 0)


def test_what_gpus_cannot_do_over_a_network_is_refused_by_name() -> None:
    case = RoutingCase(4, 2, 64, (3, 3), max_tokens=3)
    fields: dict[str, Any] = {"mode": Mode.LL, "network": NetworkConfig(), "layout": Layout.EXPERT_MAJOR}
    with pytest.raises(ConfigError, match="combine_order"):
        check(case.config(LoopGroup(0, 2), combine_order=CombineOrder.DOMAIN, **fields))
    check(case.config(LoopGroup(0, 2), exact_combine=True, **fields))
