"""What a rank of a communicator keeps beside its region: routing tables, and what every rank has (`RankTables`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ep_kernels.config import MoEConfig, may_overflow
from ep_kernels.kernels import abi
from ep_kernels.telemetry import Samples
from ep_kernels.transports.nvlink.calls import plan
from ep_kernels.transports.nvlink.calls.rank_tables import RankTables
from ep_kernels.types import Mode, Overflow

_GONE_RANK = -2
"""Routing: every copy of the expert is on ranks that take no part."""


class Tables(RankTables):
    """Device memory that only this rank's kernels use, and the `World` record that points to all of it.

    Args:
        config: of the communicator.
        sizes: `plan.sizes_of(config)`.
        device: CUDA device.
        num_blocks: most blocks of a launch whose blocks count for one another (HT dispatch).
    """

    def __init__(self, config: MoEConfig, sizes: plan.Sizes, device: torch.device, num_blocks: int) -> None:
        super().__init__(config.group, config.timeout_s, device)
        self._config = config
        self._capacities = torch.tensor(sizes.capacities, dtype=torch.int32, device=device)
        counters = sizes.num_keys + config.group.size
        pairs = num_blocks * abi.count_pairs(counters)
        self._block_counts = torch.zeros(pairs * abi.PAIR_BYTES, dtype=torch.uint8, device=device)
        self._zeros = torch.zeros(config.hidden_size * 4 + 16, dtype=torch.uint8, device=device)
        num_copies = sum(map(len, config.resolved_expert_map.replicas))
        self._experts = torch.zeros(config.num_experts, 4, dtype=torch.int32, device=device)
        self._copies = torch.zeros(2, num_copies + 1, dtype=torch.int32, device=device)
        self._fill_world(sizes)
        self.set_active([True] * config.group.size)

    def _fill_world(self, sizes: plan.Sizes) -> None:
        c, shape = self._config, sizes.shape
        self.host.none_dropped = c.overflow is Overflow.RAISE and not may_overflow(c, sizes.num_local)
        self._set(
            hidden=c.hidden_size, topk=c.topk, max_tokens=c.max_tokens_per_rank,
            ll_tokens=shape.ll_tokens, num_experts=c.num_experts, local_stride=c.resolved_expert_map.stride,
            num_local=sizes.num_local, capacity=sizes.capacity, alignment=c.expert_alignment,
            num_in_flight=c.max_in_flight,
            row_bytes=shape.row_bytes, scale_bytes=shape.scale_bytes, combine_row_bytes=shape.combine_row_bytes,
            row_packets=shape.row_packets, combine_packets=shape.combine_packets, metadata_lines=shape.metadata_lines,
            first_id=c.first_id, absent_id=c.resolved_absent_id,
            filled_rows=0 if c.absent_id is None or c.exact_shapes else sizes.capacity,
            count_lines=shape.count_lines, capacities=self._capacities.data_ptr(),
            block_counts=self._block_counts.data_ptr(), zeros=self._zeros.data_ptr(),
            experts=self._experts.data_ptr(), replica_ranks=self._copies[0].data_ptr(),
            replica_slots=self._copies[1].data_ptr(), map=abi.region_map(shape),
        )  # fmt: skip

    def samples(self) -> Samples:
        """See `RankTables.samples`. Where LL's kernels run HT's steps, too, its records say HT."""
        found, asked = super().samples(), self._config.mode
        if asked is plan.algorithm(self._config, asked) or asked is Mode.AUTO:
            return found
        kinds = {number: (op, asked.value) for number, (op, _) in found.kinds.items()}
        return Samples(found.records, found.ranks, kinds)

    def set_active(self, mask: Sequence[bool]) -> None:
        """Route around ranks whose mask is False, and wait for them no more. In place: graphs captured before go on."""
        super().set_active(mask)
        first, ranks, slots = self._config.resolved_expert_map.tables(mask)
        listed = torch.full(self._copies.shape, _GONE_RANK, dtype=torch.int32, device="cpu")
        listed[0, : len(ranks)], listed[1, : len(slots)] = ranks, slots
        begin, copies = first[:-1], first.diff()
        place = torch.where(copies > 0, begin, listed.shape[1] - 1).long()
        self._experts.copy_(torch.stack([*listed[:, place], copies, begin], 1))
        self._copies.copy_(listed)

    def restart(self, dispatch: int, combine: int, barrier: int) -> None:
        """See `RankTables.restart`."""
        super().restart(dispatch, combine, barrier)
        self._block_counts.zero_()


def wire_bytes(config: MoEConfig, mode: Mode) -> tuple[int, int]:
    """See `base.Transport.wire_bytes`."""
    shape = plan.sizes_of(config).shape
    if plan.algorithm(config, mode) is Mode.LL:
        routing = shape.metadata_lines * abi.LINE_BYTES
        return shape.row_packets * abi.PACKET_BYTES + routing, shape.combine_packets * abi.PACKET_BYTES
    return shape.row_bytes + shape.scale_bytes + config.topk * abi.METADATA_BYTES, shape.combine_row_bytes
