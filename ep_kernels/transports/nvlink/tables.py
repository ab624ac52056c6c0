"""What a rank keeps beside its region: device tables, counters and latency records, and the page of host memory that
kernels write to."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ep_kernels.config import MoEConfig, may_overflow
from ep_kernels.errors import AbortedError, CapacityError, HandleError, PeerTimeout, TransportError
from ep_kernels.kernels import abi
from ep_kernels.transports.nvlink import launch, plan, samples
from ep_kernels.types import LatencySample, Overflow

_GONE_RANK = -2
"""Routing: every copy of the expert is on ranks that take no part."""
_STATE_WORDS = ctypes.sizeof(abi.State) // 8
_WORD = {name: getattr(abi.State, name).offset // 8 for name, _ in abi.State._fields_}


class HostPage:
    """Pinned memory that kernels write: what failed and what was found; and what they read from the host: the abort
    word and who is dead."""

    def __init__(self, size: int) -> None:
        self._words = torch.zeros(ctypes.sizeof(abi.HostPage) // 8, dtype=torch.int64, pin_memory=True)
        self._gone = torch.zeros(size, dtype=torch.int64, pin_memory=True)
        self._page = abi.HostPage.from_address(self._words.data_ptr())
        self._fence = launch.fence()
        self.clock_offset_ns = 0
        self._num_dropped = 0
        self.address, self.gone_address = self._words.data_ptr(), self._gone.data_ptr()
        self.reason = ""

    def abort(self, reason: str) -> None:
        """End this rank's waits on the device, present and future."""
        self.reason = self.reason or reason
        self._page.abort = 1

    @contextmanager
    def interrupted(self) -> Iterator[None]:
        """Waits that are under way on the device end at once; afterwards none of it is remembered."""
        self._page.abort = 1
        try:
            yield
        finally:
            self._page.abort = int(bool(self.reason))  # an abort that came meanwhile stays
            self.clear()

    def mark_gone(self, rank: int) -> None:
        """That rank's process is dead: nobody waits for it any longer."""
        self._gone[rank] = abi.DEAD

    def give_up(self, rank: int) -> None:
        """Nobody waits for that rank any longer, whatever its process does."""
        if not self._gone[rank]:
            self._gone[rank] = abi.GIVEN_UP

    def is_gone(self, rank: int) -> bool:
        """Whether its process is dead."""
        return int(self._gone[rank]) == abi.DEAD

    def fault(self) -> TransportError | None:
        """The first wait that failed, as an error."""
        record = self._page.postmortem
        stop = abi.STOPS[record.status]
        self._fence()  # kernels write the status last
        if self._page.abort or stop == "ABORTED":
            return AbortedError(self.reason)
        if stop == "RUNNING":
            return None
        op, phase = abi.OPS[record.op], abi.PHASES[record.phase]
        if stop == "LEFT_OUT":
            return _left_out(op, record.peer, record.seen)
        return PeerTimeout(
            peer=record.peer, op=op, phase=phase, expected=record.expected, seen=record.seen,
            waited_s=record.waited_ns / 1e9, gone=stop == "GONE" and self.is_gone(record.peer),
            given_up=stop == "GONE" and not self.is_gone(record.peer),
        )  # fmt: skip

    def finding(self) -> HandleError | CapacityError | None:
        """What an operation found that breaks nothing, as an error; each is told once."""
        found = self._page.mismatch
        if found.status:
            self._fence()
            op, mine, theirs = abi.OPS[found.op], f"dispatch {found.mine}", f"dispatch {found.theirs}"
            text = f"{op}: this rank brought the routing of {mine}, rank {found.peer} that of {theirs}"
            found.status = 0
            return HandleError(text)
        dropped, self._num_dropped = self._page.dropped - self._num_dropped, self._page.dropped
        return CapacityError(dropped, None, None) if dropped else None

    def clear(self) -> None:
        """Forget the failed wait, and findings of operations that are void now."""
        self._page.postmortem = abi.Postmortem()
        self._page.mismatch = abi.RoutingMismatch()

    def relate_clocks(self) -> None:
        """Call when a barrier has just ended: its last act was to read the GPU's clock."""
        self.clock_offset_ns = time.monotonic_ns() - self._page.clock_ns


class Tables:
    """Device memory that only this rank's kernels use, and the `World` record that points to all of it.

    Args:
        config: of the communicator.
        sizes: `plan.sizes_of(config)`.
        device: CUDA device.
        num_blocks: most blocks of a launch whose blocks count for one another (HT dispatch).
    """

    def __init__(self, config: MoEConfig, sizes: plan.Sizes, device: torch.device, num_blocks: int) -> None:
        self._config, self._device = config, device
        self.host = HostPage(config.group.size)
        self.state = torch.zeros(_STATE_WORDS, dtype=torch.int64, device=device)
        words = samples.CHUNK * (abi.SAMPLE_WORDS + config.group.size)
        head = self.state[_WORD["sample_head"] :][:1]
        self._ring = samples.SampleRing(config.group.size, head, samples.DeviceCopy(words))
        self._active = torch.ones(config.group.size, dtype=torch.uint8, device=device)
        self._capacities = torch.tensor(sizes.capacities, dtype=torch.int32, device=device)
        counters = sizes.num_keys + config.group.size
        pairs = num_blocks * abi.count_pairs(counters)
        self._block_counts = torch.zeros(pairs * abi.PAIR_BYTES, dtype=torch.uint8, device=device)
        self._zeros = torch.zeros(config.hidden_size * 4 + 16, dtype=torch.uint8, device=device)
        num_copies = sum(map(len, config.resolved_expert_map.replicas))
        self._experts = torch.zeros(config.num_experts, 4, dtype=torch.int32, device=device)
        self._copies = torch.zeros(2, num_copies + 1, dtype=torch.int32, device=device)
        self.world = self._world(sizes)
        self.set_active([True] * config.group.size)

    def _world(self, sizes: plan.Sizes) -> Any:
        c, shape = self._config, sizes.shape
        return abi.World(
            rank=c.group.rank, size=c.group.size, hidden=c.hidden_size, topk=c.topk, max_tokens=c.max_tokens_per_rank,
            ll_tokens=shape.ll_tokens, num_experts=c.num_experts, local_stride=c.resolved_expert_map.stride,
            num_local=sizes.num_local, capacity=sizes.capacity, alignment=c.expert_alignment,
            num_in_flight=c.max_in_flight,
            report_dropped=int(c.overflow is Overflow.RAISE and not may_overflow(c, sizes.num_local)),
            row_bytes=shape.row_bytes, scale_bytes=shape.scale_bytes, combine_row_bytes=shape.combine_row_bytes,
            row_packets=shape.row_packets, combine_packets=shape.combine_packets, metadata_lines=shape.metadata_lines,
            count_lines=shape.count_lines,
            timeout_ns=int(c.timeout_s * 1e9), active=self._active.data_ptr(),
            capacities=self._capacities.data_ptr(), state=self.state.data_ptr(), host=self.host.address,
            gone=self.host.gone_address, block_counts=self._block_counts.data_ptr(), zeros=self._zeros.data_ptr(),
            experts=self._experts.data_ptr(), replica_ranks=self._copies[0].data_ptr(),
            replica_slots=self._copies[1].data_ptr(), samples=self._ring.records.data_ptr(), map=abi.region_map(shape),
        )  # fmt: skip

    def set_peers(self, addresses: Sequence[int]) -> None:
        """Base address of every rank's region, as this process maps it."""
        self.world.peers[: len(addresses)] = list(addresses)

    def set_active(self, mask: Sequence[bool]) -> None:
        """Route around ranks whose mask is False, and wait for them no more. In place: graphs captured before go on."""
        self._active.copy_(torch.tensor([int(m) for m in mask], dtype=torch.uint8))
        first, ranks, slots = self._config.resolved_expert_map.tables(mask)
        listed = torch.full(self._copies.shape, _GONE_RANK, dtype=torch.int32)
        listed[0, : len(ranks)], listed[1, : len(slots)] = ranks, slots
        begin, copies = first[:-1], first.diff()
        place = torch.where(copies > 0, begin, listed.shape[1] - 1).long()
        self._experts.copy_(torch.stack([*listed[:, place], copies, begin], 1))
        self._copies.copy_(listed)

    def sequence(self) -> tuple[int, int, int]:
        """(dispatch, combine, barrier) operations so far. Synchronises."""
        names = ("dispatch_seq", "combine_seq", "barrier_seq")
        words = self.state.tolist()
        dispatch, combine, barrier = (words[_WORD[name]] for name in names)
        return dispatch, combine, barrier

    def samples(self) -> list[LatencySample]:
        """Latency records since the last call, oldest first. Any thread; waits for no kernel."""
        return self._ring.take(self.host.clock_offset_ns)

    def peek(self, words: torch.Tensor) -> torch.Tensor | None:
        """See `base.Transport`."""
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
        words = torch.zeros(_STATE_WORDS, dtype=torch.int64)
        words[_WORD["sample_head"]] = self.state[_WORD["sample_head"]]
        words[_WORD["dispatch_seq"]] = words[_WORD["counted_dispatch_seq"]] = dispatch  # see Engine.restart_flags
        words[_WORD["combine_seq"]] = combine
        words[_WORD["barrier_seq"]] = barrier
        self.state.copy_(words)
        self._block_counts.zero_()
        self._ring.skip()
        self.host.clear()


def _left_out(op: str, peer: int, word: int) -> TransportError:
    if word & abi.ALSO_LEFT_OUT:
        epoch = word & ~abi.ALSO_LEFT_OUT
        return TransportError(f"{op}: the group has gone on in epoch {epoch} without this rank and rank {peer}")
    return TransportError(f"{op}: rank {peer} has gone on in epoch {word} without this rank")
