"""Placement of the experts of every layer, and the map from expert ids to slots. Pure.

The data plane has only slots: P of them, in blocks by rank, each with a copy of an expert. The tables here, one per
layer, map slots to experts, so a layer's experts can move without any other change. The copies of an expert take its
tokens in turn: token t of rank s takes copy (s + t) % n, as `ep_kernels.routing.route` does.

Letters: T tokens, K experts per token, E experts, R ranks, P slots.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from crossdock.protocol.v1 import control_pb2


class PlacementError(ValueError):
    """The control plane sent a placement that does not fit the model or the group."""


@dataclass(frozen=True, slots=True)
class WeightsOf:
    """A checkpoint: 0 is that of the config, and needs neither path nor fingerprint."""

    number: int = 0
    path: str = ""
    fingerprint: str = ""


FROM_CONFIG = WeightsOf()


@dataclass(frozen=True, slots=True)
class Holder:
    """A member that may hold experts, and where it gives their weights: see control.proto."""

    address: str
    port: int
    socket: str
    host: str


@dataclass(frozen=True, slots=True)
class Placement:
    """One version of the tables.

    Attributes:
        version: grows with each change.
        layers: layer number -> expert of each slot; [P] each.
        checkpoints: layer number -> number of the checkpoint of its weights; empty: 0, that of the config, everywhere.
        refs: of the numbers but 0.
        holders: members that may hold experts.
    """

    version: int
    num_ranks: int
    layers: Mapping[int, tuple[int, ...]]
    checkpoints: Mapping[int, int] = field(default_factory=dict)
    refs: control_pb2.Checkpoints = field(default_factory=control_pb2.Checkpoints)
    holders: tuple[Holder, ...] = ()

    @staticmethod
    def blocks(num_experts: int, num_ranks: int, moe_layers: Sequence[int]) -> Placement:
        """Default placement: one copy each, in blocks by rank."""
        return Placement(0, num_ranks, dict.fromkeys(moe_layers, tuple(range(num_experts))))

    @staticmethod
    def parse(
        message: control_pb2.PlacementResponse, num_experts: int, num_ranks: int, moe_layers: Sequence[int]
    ) -> Placement:
        """Parse and check a message of the control plane. Raises PlacementError."""
        if len(message.layers) != len(moe_layers):
            raise PlacementError(f"layers: expected {len(moe_layers)} of them, got {len(message.layers)}")
        rows = {layer: tuple(row.experts) for layer, row in zip(moe_layers, message.layers, strict=True)}
        for layer, row in rows.items():
            if len(row) != message.num_slots:
                raise PlacementError(f"layer {layer}: expected {message.num_slots} slots, got {len(row)}")
            if set(row) != set(range(num_experts)):
                raise PlacementError(f"layer {layer}: expected every expert in 0..{num_experts - 1} and no other")
        numbers = {layer: row.checkpoint for layer, row in zip(moe_layers, message.layers, strict=True)}
        known = {0, *(ref.number for ref in message.checkpoints.refs)}
        if not known.issuperset(numbers.values()):
            raise PlacementError(f"checkpoints: expected some of {sorted(known)}, got {sorted(set(numbers.values()))}")
        holders = tuple(Holder(each.address, each.port, each.socket, each.host) for each in message.holders)
        return Placement(message.version, num_ranks, rows, numbers, message.checkpoints, holders)

    def weights(self, layer: int) -> WeightsOf:
        number = self.checkpoints.get(layer, 0)
        ref = next((ref for ref in self.refs.refs if ref.number == number), control_pb2.CheckpointRef())
        return WeightsOf(number, ref.path, ref.fingerprint)

    @property
    def num_slots(self) -> int:
        """P."""
        return len(next(iter(self.layers.values())))

    def of_rank(self, layer: int, rank: int) -> tuple[int, ...]:
        first = self.first_slot(rank)
        return self.layers[layer][first : self.first_slot(rank + 1)]

    def live_slots(self, mask: Sequence[bool]) -> tuple[bool, ...] | None:
        """By slot: whether its rank is True in `mask`; None: all are."""
        if all(mask):
            return None
        ranks = range(self.num_ranks)
        return tuple(mask[rank] for rank in ranks for _ in range(self.first_slot(rank), self.first_slot(rank + 1)))

    def first_slot(self, rank: int) -> int:
        share, more = divmod(self.num_slots, self.num_ranks)
        return rank * share + min(rank, more)


class SlotMap:
    """Expert ids -> slots, for one layer.

    Args:
        row: expert of each slot; [P].
        live: of each slot, whether its rank takes part; None: all do.

    Attributes:
        lost: experts without a copy on an active rank. Tokens that chose one must not be dispatched.
    """

    def __init__(self, row: Sequence[int], num_experts: int, live: Sequence[bool] | None = None) -> None:
        self._plain = live is None and tuple(row) == tuple(range(num_experts))
        copies: list[list[int]] = [[] for _ in range(num_experts)]
        for slot, expert in enumerate(row):
            if live is None or live[slot]:
                copies[expert].append(slot)
        self.lost = frozenset(expert for expert, slots in enumerate(copies) if not slots)
        self._num = torch.tensor([len(slots) for slots in copies], device="cpu")
        self._first = self._num.cumsum(0) - self._num
        self._slots = torch.tensor(
            [slot for slots in copies for slot in slots] or [-1], dtype=torch.int32, device="cpu"
        )

    def lost_in(self, topk_ids: torch.Tensor) -> list[int]:
        return sorted(self.lost.intersection(topk_ids.flatten().tolist())) if self.lost else []

    def slots(self, topk_ids: torch.Tensor, rank: int) -> torch.Tensor:
        """The slots, int32 [T, K], to which the tokens int32 [T, K] of `rank` go; -1 stays -1."""
        if self._plain:
            return topk_ids
        known, none = topk_ids.clamp(min=0).long(), topk_ids < 0
        num = torch.where(none, 1, self._num[known])  # expert 0, in the place of none, may be lost
        turn = (rank + torch.arange(topk_ids.shape[0], device="cpu"))[:, None] % num
        return torch.where(none, topk_ids, self._slots[self._first[known] + turn])
