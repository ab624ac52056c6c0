"""What a rank keeps beside its region: what every rank has (`RankTables`), and the routing tables of a communicator."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from ep_kernels.config import Group, MoEConfig, may_overflow
from ep_kernels.kernels import abi
from ep_kernels.telemetry import Samples
from ep_kernels.transports.nvlink.calls import plan
from ep_kernels.transports.nvlink.memory import samples
from ep_kernels.transports.nvlink.memory.host_page import HostPage
from ep_kernels.types import Mode, Overflow

_GONE_RANK = -2
"""Routing: every copy of the expert is on ranks that take no part."""


_STATE_WORDS = ctypes.sizeof(abi.State) // 8
_WORD = {name: getattr(abi.State, name).offset // 8 for name, _ in abi.State._fields_}


class RankTables:
    """Device memory that only this rank's kernels use.

    Attributes:
        host: page of host memory that kernels write to.
        state: int64 words of an `abi.State`.
        world: `abi.World` that points to all of it, as far as it is known here; kernels take a copy with each launch.

    Args:
        timeout_s: deadline of every wait on the device, seconds.
    """

    def __init__(self, group: Group, timeout_s: float, device: torch.device) -> None:
        size = group.size
        self.host = HostPage(size)
        self.state = torch.zeros(_STATE_WORDS, dtype=torch.int64, device=device)
        head = self.state[_WORD["sample_head"] :][:1]
        self._ring = samples.SampleRing(size, head, samples.DeviceCopy(samples.CHUNK * (abi.SAMPLE_WORDS + size)))
        self._active = torch.ones(size, dtype=torch.uint8, device=device)
        self.world: Any = abi.World(
            rank=group.rank, size=size, timeout_ns=int(timeout_s * 1e9), active=self._active.data_ptr(),
            state=self.state.data_ptr(), host=self.host.address, gone=self.host.gone_address,
            samples=self._ring.records.data_ptr(),
        )  # fmt: skip

    def _set(self, **fields: Any) -> None:
        for name, value in fields.items():
            setattr(self.world, name, value)

    def set_peers(self, addresses: Sequence[int]) -> None:
        """Base address of every rank's region, as this process maps it."""
        self.world.peers[: len(addresses)] = list(addresses)

    def set_network(self, record: Any) -> None:
        """How ranks of other hosts are reached: an `abi.Network`."""
        words = torch.frombuffer(bytearray(bytes(record)), dtype=torch.int64)
        self.state[_WORD["network"] :].copy_(words)

    def set_active(self, mask: Sequence[bool]) -> None:
        """Wait no more for ranks whose mask is False. In place: graphs captured before go on."""
        self._active.copy_(torch.tensor([int(m) for m in mask], dtype=torch.uint8, device="cpu"))

    def sequence(self) -> tuple[int, int, int]:
        """(dispatch, combine, barrier) operations so far. Synchronises."""
        names = ("dispatch_seq", "combine_seq", "barrier_seq")
        words = self.state.tolist()
        dispatch, combine, barrier = (words[_WORD[name]] for name in names)
        return dispatch, combine, barrier

    def samples(self) -> Samples:
        """Latency records since the last call, oldest first. Any thread; waits for no kernel."""
        return self._ring.take(self.host.clock_offset_ns)

    def peek(self, words: torch.Tensor) -> torch.Tensor | None:
        return self._ring.peek(words)

    @property
    def aborted(self) -> torch.Tensor:
        """int64 [1]: index into abi.STOPS, 0 while all is well."""
        return self.state[_WORD["aborted"] :][:1]

    def stop(self) -> None:
        """Kernels of this rank that are launched from now on, by graphs for instance, return at once."""
        self.state[_WORD["aborted"]] = abi.STOPS.index("ABORTED")

    def restart(self, dispatch: int, combine: int, barrier: int) -> None:
        """Forget what was under way; count on from here. Latency records go on being numbered as they were."""
        words = torch.zeros(_STATE_WORDS, dtype=torch.int64, device="cpu")
        words[_WORD["sample_head"]] = self.state[_WORD["sample_head"]]
        words[_WORD["dispatch_seq"]] = words[_WORD["counted_dispatch_seq"]] = dispatch  # see Engine.restart_flags
        words[_WORD["combine_seq"]] = combine
        words[_WORD["barrier_seq"]] = barrier
        words[_WORD["network"] :] = self.state[_WORD["network"] :]
        words[_WORD["network"] + abi.Network.seen.offset // words.itemsize :] = 0
        self.state.copy_(words)
        self._ring.skip()
        self.host.clear()


class Tables(RankTables):
    """Device memory that only this rank's kernels use, and the `World` record that points to all of it.

    Args:
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
        super().restart(dispatch, combine, barrier)
        self._block_counts.zero_()


def wire_bytes(config: MoEConfig, mode: Mode) -> tuple[int, int]:
    shape = plan.sizes_of(config).shape
    if plan.algorithm(config, mode) is Mode.LL:
        routing = shape.metadata_lines * abi.LINE_BYTES
        return shape.row_packets * abi.PACKET_BYTES + routing, shape.combine_packets * abi.PACKET_BYTES
    return shape.row_bytes + shape.scale_bytes + config.topk * abi.METADATA_BYTES, shape.combine_row_bytes
