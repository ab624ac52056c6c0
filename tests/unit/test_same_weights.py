"""Digests of experts, and the comparison of their sums."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
import torch

from crossdock.worker.checkpoints.checkpoint import Checkpoint, CheckpointError
from crossdock.worker.experts.placement import Placement
from crossdock.worker.group.control_client import JoinRefused
from crossdock.worker.group.same_weights import Parcel, differences, sum_of
from crossdock.worker.group.seat import ControlGroup, Seat
from crossdock.worker.group.session import WeightsComparison
from crossdock.worker.steps.work import Fault
from ep_kernels import TransportError
from tests.unit.moe_files import (
    Sizes,
    config_of,
    draw_weights,
    quantise,
    tensors_of,
    write_gpt_oss,
    write_tensors,
)

SIZES = Sizes(num_experts=3, hidden=24, inner=16, layers=2)


def digests(path: Path) -> dict[tuple[int, int], int]:
    checkpoint = Checkpoint.open(path)
    spec = checkpoint.spec
    return {(layer, expert): checkpoint.digest(layer, expert) for layer in spec.moe_layers for expert in range(3)}


@pytest.mark.parametrize("kind", ["named float32", "fused float32", "named fp8", "fused fp8", "mxfp4"])
def test_every_byte_of_an_expert_counts(tmp_path: Path, kind: str) -> None:
    """Of its matrices, scales and biases."""
    if kind == "mxfp4":
        tensors = write_gpt_oss(tmp_path)
    else:
        layout, dtype = kind.split()
        tensors = tensors_of("qwen3_moe", SIZES, draw_weights(SIZES), layout)
        tensors = quantise(tensors) if dtype == "fp8" else tensors
        (tmp_path / "config.json").write_text(json.dumps(config_of("qwen3_moe", SIZES)))
        write_tensors(tmp_path, tensors)
    first = digests(tmp_path)
    assert len(set(first.values())) == len(first) == 6
    for name, tensor in tensors.items():
        changed = tensor.clone()
        changed.view(-1).view(torch.uint8)[-1] ^= 1  # the last byte, of the last expert if they are stacked
        write_tensors(tmp_path, tensors | {name: changed})
        assert digests(tmp_path) != first, name


def test_ranks_with_another_sum_are_named() -> None:
    parcels = [Parcel(b"a", sum_of([2**63, 2**63, 5])), Parcel(b"b", 6), Parcel(b"c", 8, [1])]
    assert sum_of([2**63, 2**63, 5]) == 5
    assert differences([5, 6, 8], parcels) == {}
    assert differences([], parcels) == {}
    found = differences([5, 7, 8], parcels)
    assert list(found) == [1]
    assert found[1].startswith(
        f"weights of rank 1: expected {7:016x} as rank 0's files give, got {6:016x}: are its files"
    )


class Compared:
    """Rank 0 of three, and what its comparison did."""

    def __init__(self, sums: list[int] | CheckpointError, active: frozenset[int] | None = None) -> None:
        model: Any = Mock(is_read=Mock(return_value=False), sum=Mock(return_value=5))
        model.read_all = Mock(side_effect=[(sums, 0xBEEF)] if isinstance(sums, list) else sums)
        self.reported: list[tuple[int, Fault]] = []
        self.comparison = WeightsComparison(model, lambda epoch, fault: self.reported.append((epoch, fault)))
        self.seat = Seat(4, 0, 3, active)
        self.placement = replace(Placement.blocks(3, 3, [0]), version=7)

    def run(self) -> Compared:
        parcels = [self.comparison.packing(self.placement, 0)(b""), Parcel(b"", 6), Parcel(b"", 8)]
        self.comparison.take(self.seat, self.placement, parcels)
        assert self.comparison.weights(7) == ""
        asyncio.run(self.comparison.run(self.seat))
        return self


def test_the_digest_holds_for_the_placement_that_was_compared() -> None:
    equal = Compared([5, 6, 8]).run()
    assert [equal.comparison.weights(version) for version in (7, 8, None)] == ["000000000000beef", "", ""]
    assert not equal.reported


def test_a_rank_with_other_weights_ends_the_epoch_unless_it_is_out() -> None:
    other = Compared([5, 7, 8]).run()
    [(epoch, fault)] = other.reported
    assert (epoch, other.comparison.weights(7)) == (4, "")
    assert fault.reason.startswith("weights of rank 1: ")
    assert not Compared([5, 7, 8], frozenset({0, 2})).run().reported


def test_unreadable_files_compare_nothing() -> None:
    unread = Compared(CheckpointError("written since")).run()
    assert (unread.reported, unread.comparison.weights(7)) == ([], "")


def test_the_others_are_refused_or_wait() -> None:
    placement = Placement.blocks(3, 3, [0])
    parcels = [Parcel(b"", 5, [5, 7, 8]), Parcel(b"", 6), Parcel(b"", 8)]
    for rank, expected in ((1, JoinRefused), (2, TransportError), (0, TransportError)):
        with pytest.raises(expected, match="weights of rank 1: "):
            WeightsComparison(Mock(), Mock()).take(Seat(1, rank, 3), placement, parcels)


def test_a_region_of_another_version_is_named() -> None:
    async def gather() -> None:
        async def publish(epoch: int, rank: int, region: bytes) -> None:
            assert msgspec.msgpack.decode(region, type=Parcel) == Parcel(b"mine", 3)

        async def table(epoch: int) -> list[bytes]:
            return [b"\x81\xa3abi"]

        control: Any = SimpleNamespace(publish_region=publish, region_table=table)
        group = ControlGroup(Seat(1, 0, 1), control, asyncio.get_running_loop(), lambda region: Parcel(region, 3))
        with pytest.raises(TransportError, match="bring-up of epoch 1: a region of another version"):
            await group._gather(b"mine")

    asyncio.run(gather())
