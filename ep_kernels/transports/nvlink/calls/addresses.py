"""Where the addresses of argument records point."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ep_kernels.transports.nvlink.calls.outputs import FieldPlace, round_up
from ep_kernels.transports.nvlink.calls.plan import StateMap

_ALIGN = 16


@dataclass(frozen=True, slots=True)
class NumberOffsets:
    """Offsets of the numbers of a dispatch in its memory, bytes; 0 also for those that its layout does not have, which
    are never the first."""

    num_rows: int
    num_dropped: int
    num_invalid_ids: int
    counts: int
    valid: int
    offsets: int = 0
    topk_ids: int = 0
    topk_weights: int = 0


class RecordAddresses:
    """Addresses in the records of one configuration.

    Attributes:
        state: byte map of the routing and of what is carried.
        carried_at, ids_at, kept_at, routing_at, num_bytes: in the memory of one dispatch: its numbers, what it carries,
            narrowed ids, a copy of its weights, its routing.
        num_rows_at: there, with num_dropped behind it.

    Args:
        number_bytes: of them all.
        routed_bytes: of the most ids, and of the most weights.
        keeps: whether weights are copied.
    """

    def __init__(
        self, state: StateMap, numbers: Mapping[str, FieldPlace], number_bytes: int, routed_bytes: int, keeps: bool
    ) -> None:
        self.state = state
        self.carried_at = round_up(number_bytes, _ALIGN)
        self.ids_at = self.carried_at + round_up(state.carried_bytes, _ALIGN)
        self.kept_at = self.ids_at + round_up(routed_bytes, _ALIGN)
        self.routing_at = self.kept_at + round_up(routed_bytes * keeps, _ALIGN)
        self.num_bytes = self.routing_at + state.routing_bytes
        self.num_rows_at = numbers["num_rows"].offset
        assert numbers["num_dropped"].offset == self.num_rows_at + 4, "they are read together"
        self._numbers = NumberOffsets(**{name: place.offset for name, place in numbers.items()})

    def dispatch(
        self, block: int, routing: int, routing_id: int, carried: int, x: int, x_scales: int, topk_ids: int,
        weights: int, scales: int,
    ) -> tuple[int, ...]:  # fmt: skip
        """Addresses of a dispatch's record, in its order."""
        at, to = self.state, self._numbers
        return (
            carried, routing_id, x, x_scales, topk_ids, weights, routing + at.routes, block + to.valid,
            block + to.num_invalid_ids, routing + at.dst_rows, carried + at.weights, routing + at.tokens,
            routing + at.source_rows, routing + at.saved_counts, block + to.counts, to.offsets and block + to.offsets,
            block + to.num_rows, block + to.num_dropped, scales, to.topk_ids and block + to.topk_ids,
            to.topk_weights and block + to.topk_weights,
        )  # fmt: skip

    def combine(
        self,
        op: int,
        routing: int,
        routing_id: int,
        carried: int,
        y: int,
        row_weights: int,
        weights: int,
        z: int,
        z_weights: int,
    ) -> tuple[int, ...]:
        """Addresses of a combine's record, in its order."""
        at = self.state
        return (
            op, routing_id, y, row_weights, routing + at.dst_rows, carried + at.weights, routing + at.tokens,
            routing + at.source_rows, routing + at.routes, weights, z, z_weights,
        )  # fmt: skip
