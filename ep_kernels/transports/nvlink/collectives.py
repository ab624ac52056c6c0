"""Collectives of the transport (see `transports/collective_base.py`): registered memory, kernels on the current stream,
copy engines on a stream of their own (collective_copies.py).

A failed wait is raised by the next call, or by `check`.
"""

from __future__ import annotations

import math
import struct
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ep_kernels import jit
from ep_kernels.collectives.collective_config import CollectiveConfig
from ep_kernels.collectives.collective_types import Algorithm, CollectiveCapabilities, CollectiveOp
from ep_kernels.collectives.pool import SymmetricPool
from ep_kernels.errors import ArgumentError, TransportError
from ep_kernels.kernels import abi, collective_abi
from ep_kernels.telemetry import merged
from ep_kernels.transports.collective_base import CollectiveTransport, GatherArgs, ReduceArgs
from ep_kernels.transports.nvlink.calls.engine import Call
from ep_kernels.transports.nvlink.calls.left_out import Unsent, unsent_in
from ep_kernels.transports.nvlink.calls.plan import Launch
from ep_kernels.transports.nvlink.copy_engines import collective_plan as plan
from ep_kernels.transports.nvlink.copy_engines import copies
from ep_kernels.transports.nvlink.copy_engines.collective_copies import GatherCopies, NvlinkTerms
from ep_kernels.transports.nvlink.copy_engines.collective_engine import CollectiveEngine, Shard
from ep_kernels.transports.nvlink.copy_engines.collective_work import (
    CopyPlan,
    CopyWork,
    DoneWork,
    KernelPlan,
    KernelWork,
)
from ep_kernels.transports.nvlink.copy_engines.copy_times import CopyTimes
from ep_kernels.transports.nvlink.gpu import launch
from ep_kernels.transports.nvlink.gpu.copy_schedule import CopyPlaces
from ep_kernels.transports.nvlink.gpu.launch import Quiet
from ep_kernels.transports.nvlink.gpu.signature import difference
from ep_kernels.transports.nvlink.memory import links
from ep_kernels.transports.nvlink.nvlink_member import NvlinkMember, require_cuda
from ep_kernels.types import LatencySample

COPY_MIN_BYTES = 128 << 20
"""Bytes that a rank sends from which copy engines are chosen. They move 8 % more a second than stores, and an operation
takes 40 us longer: on 2 H100 it took as long as with stores at 128 MiB, and 0.96 of that at 512."""
BESIDE_MIN_BYTES = 8 << 20
"""What a rank sends to another from which copy engines are chosen beside a product. Two H200, to the time with stores,
which hold multiprocessors: 4 MiB 1.38, 8 MiB 0.91 (7168 columns) and 1.04 (1792), 16 MiB 0.78, from 32 MiB on less."""
TERM_MIN_BYTES = 16 << 20
"""What a rank sends to another of a matmul from which copy engines bring it. Of 4096 x 4096 x 1792 they took 149 us
among two H200, stores 160; among four (8 MiB to another) 227, where the product alone takes 88 and a reduce-scatter of
twice the bytes 176."""
LIBRARY_MIN_BYTES = {CollectiveOp.REDUCE_SCATTER: {4: 128 << 20}}
"""Bytes of a rank's result at which NCCL was faster, by fewest ranks: four H200, 128 MiB, 1301 us against 1375 (16 MiB:
192, 176)."""
_SMALLER = "smaller pool_bytes or staging_bytes make it smaller"
_NUM_SMS = struct.Struct("<I")
"""Head of a ticket: multiprocessors of the rank's GPU."""
_COPIES = (Algorithm.COPY_PUSH, Algorithm.COPY_PULL)
_GATHERS = (Algorithm.KERNEL_PUSH, Algorithm.KERNEL_PULL, *_COPIES)


def create(config: CollectiveConfig) -> NvlinkCollectives:
    """Build the collectives; touches no GPU yet. Raises TransportError where this machine has none."""
    require_cuda()
    return NvlinkCollectives(config)


def _capabilities(fingerprint: str, size: int) -> CollectiveCapabilities:
    return CollectiveCapabilities(
        "cuda", False, True, fingerprint,
        {
            CollectiveOp.ALL_GATHER: _GATHERS,
            CollectiveOp.REDUCE_SCATTER: (Algorithm.KERNEL_PULL,),
            CollectiveOp.ALL_REDUCE: (Algorithm.TWO_SHOT, Algorithm.ONE_SHOT),
        },
        one_shot_max_bytes={1: plan.one_shot_max_bytes(size)}, copy_min_bytes=COPY_MIN_BYTES,
        beside_min_bytes=BESIDE_MIN_BYTES, term_min_bytes=TERM_MIN_BYTES, library_min_bytes=LIBRARY_MIN_BYTES,
    )  # fmt: skip


class _Block:
    """What the views of a registered tensor keep alive."""


class NvlinkCollectives(NvlinkMember, CollectiveTransport):
    """Collectives among the GPUs of one NVLink domain, a process each. The device is torch's current one at `allocate`.

    Attributes:
        capabilities: one-shot all-reduce is left out where a pair of GPUs is not joined by NVLink.
    """

    def __init__(self, config: CollectiveConfig) -> None:
        fingerprint = abi.fingerprint(collective_abi.header() + jit.all_sources())
        super().__init__(config, fingerprint)
        self.capabilities = _capabilities(fingerprint, config.group.size)
        self._size: int = config.group.size
        self.terms: NvlinkTerms | None = None
        self._pool = SymmetricPool(config.pool_bytes)
        self._keeps_peers = False  # a graph reads their memory

    # Life.

    def allocate(self) -> bytes:
        num_sms = self._enter_device([self.config.num_sms], max(plan.GATHER_BLOCKS, plan.REDUCE_BLOCKS))
        self._index: int = self._device.index
        c = self.config
        self._engine = CollectiveEngine(c.group, c.timeout_s, c.pool_bytes, c.staging_bytes, self._device, num_sms)
        self._tables = self._engine.tables
        launches = {variant: plan.launch_of(variant, c.group.size) for variant in jit.collective_variants()}
        self._load({**launches, plan.barrier_variant(): Launch(1, 0, 0, 0)})
        ticket = self._allocate(self._engine.region_bytes, self._engine.blank_bytes, _SMALLER)
        return _NUM_SMS.pack(num_sms) + ticket

    def import_regions(self, tickets: Sequence[bytes]) -> None:
        """See `base.MemberTransport`. Also agrees on the grids: a block waits for the same block of every peer."""
        parts = [ticket[_NUM_SMS.size :] for ticket in tickets]
        self._engine.available = min(_NUM_SMS.unpack_from(ticket)[0] for ticket in tickets)
        super().import_regions(parts)
        if not links.lines_are_whole(parts):
            can = self.capabilities.algorithms | {CollectiveOp.ALL_REDUCE: (Algorithm.TWO_SHOT,)}
            self.capabilities = replace(self.capabilities, algorithms=can)

    def _attach(self) -> None:
        from ep_kernels.transports.nvlink.gpu import driver

        # Where peers' regions lie.
        self._engine.attach(self._domain.addresses)
        size, base = self.config.group.size, self._domain.region.mapping.address
        self._pool_first = base + int(self._engine.map.pool)
        ready = copies.flag_row(self._engine.map, "READY", size)
        places = CopyPlaces(
            self.config.group.rank, (True,) * size, tuple(self._domain.addresses), ready,
            copies.flag_row(self._engine.map, "SHARD", size), self._engine.copy_word, 0, 0, 0,
            copies.flag_row(self._engine.map, "HALF", size),
        )  # fmt: skip
        # Copy engines, with a thread of their own and a stream, whose staging by a kernel waits for no product's tiles.
        self._copy_stream: torch.cuda.Stream = torch.cuda.Stream(self._device, priority=-1)  # type: ignore[no-untyped-call]
        flags = copies.FlagMemory(size, base + ready, self._tables.aborted.data_ptr())
        self._copies = copies.CopyEngines(
            places, self._tables.host, self.config.timeout_s, self._copy_stream.cuda_stream, launch.load(), flags,
            CopyTimes(size, driver.TimedEvents()),
        )  # fmt: skip
        # Operations by copy engines.
        enter = self._streams.enter
        self.terms = NvlinkTerms(self, self._engine, self._copies, enter, self._launch, self._check_device)
        self._gathers = GatherCopies(
            self, self._engine, self._copies, self._copy_stream, self._domain.region.mapping, self._region_offset
        )

    def _detach(self) -> None:
        self.terms = None  # it has this object
        if hasattr(self, "_copies"):
            self._copies.close()
        if hasattr(self, "_gathers"):
            del self._gathers  # its views keep the region mapped

    def _kept_for_graphs(self) -> list[Any]:
        return [self._domain.mappings] if self._keeps_peers else []

    def _barrier_call(self, left_out_epoch: int) -> Call:
        return self._engine.barrier(left_out_epoch)

    def _unsent(self, mask: Sequence[bool]) -> list[Unsent]:
        shape = len(abi.FLAGS), self.config.group.size
        flags = self._domain.region.mapping.view(0, shape, torch.int64).tolist()
        return unsent_in(flags, mask, self._tables.host.is_gone)

    def _sequence(self) -> tuple[int, int, int]:
        dispatch, combine, barrier = self._tables.sequence()
        return max(dispatch, self._copies.seq), combine, barrier

    def _settle_copies(self) -> None:
        self._copies.settle()

    def set_active(self, mask: Sequence[bool], epoch: int) -> None:
        """See `base.MemberTransport`. Raises TransportError where a rank that lives was left out and this group has
        pushed by copy engines: what it has begun cannot be called back."""
        super().set_active(mask, epoch)
        late = [rank for rank, active in enumerate(mask) if not active and self._is_alive(rank)]
        if late and self._copies.has_pushed:
            raise TransportError(
                f"set_active: rank {late[0]} is alive, and its copy engines may still write registered tensors of this "
                "rank; form a new group"
            )

    def _restart(self, dispatch: int, combine: int, mask: Sequence[bool]) -> None:
        shape = len(abi.FLAGS), self.config.group.size
        self._domain.region.mapping.view(0, shape, torch.int64)[abi.FLAGS.index("LEFT_OUT")] = 0
        self._engine.set_active(mask)
        self._copies.restart(dispatch, mask)

    # Errors.

    def raise_fault(self) -> None:
        if self._tables.host.is_quiet() and self._copies.is_quiet():
            return
        for found in (self._tables.host.mismatch(), self._copies.mismatch()):
            if found is not None:
                raise TransportError(f"{found.op}: rank {found.peer} brought {difference(found.mine, found.theirs)}")
        super().raise_fault()

    def undisturbed(self) -> torch.cuda.Stream | None:
        return None if self.untroubled() is None else self._streams.here()

    def used(self, x: torch.Tensor, out: torch.Tensor) -> None:
        if self._streams.event is not None:
            self._streams.leave((x, out))

    def untroubled(self) -> int | None:
        if not self._copies.is_quiet() or torch._C._cuda_getDevice() != self._index:
            return None
        return int(torch._C._cuda_getCurrentRawStream(self._index))

    def _quiet(self) -> Quiet:
        """What an operation that repeats looks at first, until `set_active`: nothing has failed, was found, or is
        ahead."""
        return Quiet([*self._tables.host.quiet_words(), *self._domain.mailbox.watched()])

    def note_capture(self) -> None:
        self._captured = True

    def check_results(self) -> None:
        self.raise_fault()

    # Memory.

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        num_bytes = math.prod(shape) * dtype.itemsize  # torch.Size.numel wraps around
        number, offset = self._pool.allocate(self.exchange(self._pool.request(num_bytes)))
        block = _Block()
        weakref.finalize(block, self._pool.drop, number).atexit = False
        at = int(self._engine.map.pool) + offset
        made: torch.Tensor = self._domain.region.mapping.view(at, tuple(shape), dtype, block)
        return made

    def offset_of(self, tensor: torch.Tensor) -> int | None:
        offset = tensor.data_ptr() - self._pool_first
        if not 0 <= offset < self.config.pool_bytes:
            return None
        num_bytes = tensor.numel() * tensor.itemsize
        return offset if num_bytes and offset <= self.config.pool_bytes - num_bytes else None

    def pool(self) -> range:
        return range(self._pool_first, self._pool_first + self.config.pool_bytes)

    def _region_offset(self, tensor: torch.Tensor) -> int | None:
        offset = self.offset_of(tensor)
        return None if offset is None else offset + int(self._engine.map.pool)

    # Operations.

    def all_gather(self, args: GatherArgs) -> KernelWork | CopyWork | DoneWork:
        self.check("all_gather")
        for part in args.parts:
            self._check_device("x", part.x)
            self._check_device("out", part.out)
        moved = [part for part in args.parts if part.x.numel()]
        if not moved:
            return DoneWork(self._ranks())
        shards = [Shard(part.x, part.out, self._region_offset(part.out), part.dtype) for part in moved]
        pushes = args.algorithm in (Algorithm.COPY_PUSH, Algorithm.KERNEL_PUSH)
        if pushes and any(shard.offset is None for shard in shards):
            raise ArgumentError("outs", f"registered tensors for {args.algorithm.value}", "one that is not")
        if args.algorithm in _COPIES:
            if torch.cuda.is_current_stream_capturing():
                self._gathers.capture(moved, self._launch_on)
                self._keeps_peers = True
                return KernelWork(self, self._copy_stream, self._ranks(), self.epoch)
            if pushes:
                return self._gathers.push(moved, args)
            return self._gathers.pull(moved)
        return self._run(self._engine.all_gather(shards, pushes, args.num_sms))

    @property
    def planner(self) -> NvlinkCollectives:
        """See `collective_base.CollectiveTransport`: it plans its own."""
        return self

    def reduce_scatter(self, args: ReduceArgs) -> KernelWork | DoneWork:
        self.check("reduce_scatter")
        self._check_device("x", args.x)
        return self._run(self._engine.reduce_scatter(args.x, args.out, args.num_sms))

    def all_reduce(self, args: ReduceArgs) -> KernelWork | DoneWork:
        self.check("all_reduce")
        self._check_device("x", args.x)
        offset = self._region_offset(args.out)
        return self._run(self._engine.all_reduce(args.x, args.out, offset, args.algorithm, args.num_sms))

    def plan_for(self, args: GatherArgs | ReduceArgs, op: CollectiveOp) -> KernelPlan | CopyPlan | None:
        """See `collective_base.Planner`: what is one launch, or a push of a shard in its place."""
        if isinstance(args, GatherArgs):
            return self._gather_plan(args)
        if op is CollectiveOp.REDUCE_SCATTER:
            calls = self._engine.reduce_scatter(args.x, args.out, args.num_sms)
        else:
            offset = self._region_offset(args.out)
            calls = self._engine.all_reduce(args.x, args.out, offset, args.algorithm, args.num_sms)
        return self._kernel_plan(calls, calls[0].args) if len(calls) == 1 else None

    def _gather_plan(self, args: GatherArgs) -> KernelPlan | CopyPlan | None:
        part, offset = args.parts[0], self._region_offset(args.parts[0].out)
        if len(args.parts) > 1 or not part.x.numel():
            return None
        if args.algorithm is Algorithm.COPY_PUSH:
            return self._gathers.plan_for(part, self._quiet())
        if args.algorithm in _COPIES:
            return None
        shard = Shard(part.x, part.out, offset, part.dtype)
        calls = self._engine.all_gather([shard], args.algorithm is Algorithm.KERNEL_PUSH, args.num_sms)
        if len(calls) > 1:
            return None
        return self._kernel_plan(calls, calls[0].args.parts[0])

    def _kernel_plan(self, calls: Sequence[Call], addressed: Any) -> KernelPlan:
        kernel = self._functions[calls[0].variant]
        return KernelPlan(self, kernel, calls[0], addressed, self._ranks(), self._quiet())

    def _run(self, calls: Sequence[Call]) -> KernelWork | DoneWork:
        for call in calls:
            self._launch(call)
        if not calls:
            return DoneWork(self._ranks())
        return KernelWork(self, torch.cuda.current_stream(), self._ranks(), self.epoch)

    def _ranks(self) -> list[int]:
        mine, active = self.config.group.rank, self._engine.active
        return [mine] + [rank for rank, alive in enumerate(active) if alive and rank != mine]

    # What works ask.

    def await_shard(self, seq: int, peer: int, half: bool = False) -> None:
        self._copies.await_shard(seq, peer, torch.cuda.current_stream().cuda_stream, half)

    def await_end(self, seq: int) -> None:
        self._copies.await_end(seq, torch._C._cuda_getCurrentRawStream(self._index))

    def has_ended(self, seq: int) -> bool:
        return self._copies.has_ended(seq)

    def samples(self) -> Sequence[LatencySample]:
        """See `base.MemberTransport`: of kernels and of copy engines, by when they began."""
        return merged(super().samples(), self._copies.samples())
