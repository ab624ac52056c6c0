"""The collectives of the `cpu` transport: processes of one host through shared memory. See docs/collectives.md.

Python allocates and keeps order; all waiting, moving and summing happens in the native half, without the GIL.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import threading
import weakref
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ep_kernels.collectives.collective_config import CollectiveConfig
from ep_kernels.collectives.collective_types import Algorithm, CollectiveCapabilities, CollectiveOp
from ep_kernels.collectives.pool import SymmetricPool
from ep_kernels.errors import ArgumentError, ClosedError, ConfigError, HandleError, TransportError
from ep_kernels.transports.collective_base import CollectiveTransport, GatherArgs, ReduceArgs
from ep_kernels.transports.cpu import native
from ep_kernels.transports.cpu.cpu_member import CpuMember, NativeOwner, mask_of
from ep_kernels.transports.cpu.native import Collective, CollectiveGeometry, Part
from ep_kernels.transports.cpu.region import read_ticket

ALGORITHMS = (Algorithm.PULL, Algorithm.ONE_SHOT, Algorithm.TWO_SHOT)
"""By `cd::Algorithm`."""

ZERO_COPY_BYTES = 64 << 10
"""A registered x of this size or larger is read where it lies. A smaller one is staged: copying it takes less time
than the second meeting, after which x is the caller's again."""
ONE_SHOT_BYTES = 32 << 10
"""all_reduce up to here is one-shot: its second meeting would cost more than the sums that it saves."""
_PAGE = 4096
_ONE_HOST = "the collectives of this transport need one host"


def create(config: CollectiveConfig) -> CpuCollectives:
    """Build the transport; nothing is allocated yet. Raises TransportError when the native library is missing."""
    return CpuCollectives(config)


def geometry_of(config: CollectiveConfig) -> CollectiveGeometry:
    return CollectiveGeometry(
        rank=config.group.rank,
        ranks=config.group.size,
        in_flight=config.max_in_flight,
        staging_bytes=config.staging_bytes,
        pool_bytes=config.pool_bytes,
        timeout_ns=int(config.timeout_s * 1_000_000_000),
    )


class CpuCollective:
    """See `collective_base.PendingGather`.

    Args:
        op: the arguments, by address.
        kept: what those addresses belong to.
    """

    halves = False

    def __init__(self, transport: CpuCollectives, op: Collective, kept: tuple[Any, ...]) -> None:
        self._transport, self.op, self._kept = transport, op, kept
        self.epoch = transport.epoch
        self.done = False

    def finish(self) -> None:
        self.done, self._kept = True, ()

    def wait(self) -> None:
        self._transport.complete(self)

    def is_completed(self) -> bool:
        return self._transport.poll(self)

    def shards(self) -> Iterator[list[int]]:
        given = 0
        while True:
            fresh = self.op.arrived & ~given
            given |= fresh
            if fresh:
                yield [rank for rank in range(fresh.bit_length()) if fresh >> rank & 1]
            if given == mask_of(self._transport.active):
                break
            self._transport.one_shard(self)
        self.wait()


class CpuCollectives(CpuMember[NativeOwner], CollectiveTransport):
    def __init__(self, config: CollectiveConfig) -> None:
        if config.group.size > native.MAX_RANKS:
            raise ConfigError("group", f"at most {native.MAX_RANKS} ranks with transport cpu", config.group.size)
        self._config, self._geometry = config, geometry_of(config)
        lib = native.load()
        super().__init__(NativeOwner(lib, lib.cd_collectives_create(ctypes.byref(self._geometry))), config.group)
        self._rank: int = config.group.rank
        self._pool = SymmetricPool(config.pool_bytes // _PAGE * _PAGE)
        self._pool_at = self._pool_address = 0
        self._pending: deque[CpuCollective] = deque()
        self._moving = threading.RLock()  # `close` may drain in another thread than that of the operations
        sums = (Algorithm.ONE_SHOT, Algorithm.TWO_SHOT)
        self.capabilities = CollectiveCapabilities(
            device_type="cpu",
            cross_host=False,
            graphs=False,
            abi=f"cpu-collectives-{self.lib.cd_collectives_abi():016x}",
            algorithms={
                CollectiveOp.ALL_GATHER: (Algorithm.PULL,),
                CollectiveOp.REDUCE_SCATTER: (Algorithm.PULL,),
                CollectiveOp.ALL_REDUCE: sums,
            },
            one_shot_max_bytes={1: ONE_SHOT_BYTES},
        )

    # Life.

    def allocate(self) -> bytes:
        region = self.make_region(self.native())
        self._pool_at = self.lib.cd_collectives_pool_offset(ctypes.byref(self._geometry))
        self._pool_address = region.bytes.data_ptr() + self._pool_at
        return region.ticket(self.lib.cd_collectives_abi())

    def import_regions(self, tickets: Sequence[bytes]) -> None:
        comm, abi = self.native(), self.lib.cd_collectives_abi()
        num_bytes = self.lib.cd_region_bytes(comm.pointer)
        read = [read_ticket(r, raw, abi=abi, num_bytes=num_bytes, cure=_ONE_HOST) for r, raw in enumerate(tickets)]
        for rank, ticket in enumerate(read):
            if rank != self._rank:
                self.map_region(comm, rank, ticket)
        self.lib.cd_activate(comm.pointer, mask_of(self.active))

    def drain(self, timeout_s: float) -> None:
        """See `MemberTransport.drain`. What fails here would be raised by a `wait` that nobody makes."""
        with contextlib.suppress(TransportError, ClosedError):
            self._complete_all()

    def clear(self) -> None:
        self._pending.clear()

    # The group.

    def barrier(self) -> None:
        self._complete_all()
        super().barrier()

    def set_active(self, mask: Sequence[bool], epoch: int) -> None:
        self.clear()
        super().set_active(mask, epoch)

    # Memory.

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        num_bytes = math.prod(shape) * dtype.itemsize
        comm = self.native()
        assert comm.region is not None
        block, offset = self._pool.allocate(self.exchange(self._pool.request(num_bytes)))
        if not num_bytes:
            self._pool.drop(block)
            return torch.empty(tuple(shape), dtype=dtype, device="cpu")
        memory = (ctypes.c_uint8 * num_bytes).from_address(self._pool_address + offset)
        memory.region = comm.region.bytes  # type: ignore[attr-defined]  # the mapping lives as long as the last view
        weakref.finalize(memory, self._pool.drop, block).atexit = False
        return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(tuple(shape))

    def offset_of(self, tensor: torch.Tensor) -> int | None:
        num_bytes = tensor.numel() * tensor.element_size()
        offset = tensor.data_ptr() - self._pool_address
        return offset if num_bytes and 0 <= offset <= self._pool.num_bytes - num_bytes else None

    def _source(self, tensor: torch.Tensor) -> int:
        """Where a registered tensor lies in the region; -1: it is none."""
        offset = self.offset_of(tensor)
        return -1 if offset is None else self._pool_at + offset

    # Operations.

    def all_gather(self, args: GatherArgs) -> CpuCollective:
        total, apart, count = 0, 0, len(args.parts)
        parts, sizes = (Part * count)(), list[tuple[int, torch.dtype]]()
        for i, part in enumerate(args.parts):
            num_bytes = part.x.numel()
            source = self._source(part.x) if num_bytes else 0
            parts[i] = Part(part.x.data_ptr(), part.out.data_ptr(), num_bytes, source)
            sizes.append((num_bytes, part.dtype))
            total, apart = total + num_bytes, apart + (source < 0)
        op = Collective(
            op=native.OPS.index("all_gather"),
            num_bytes=total,
            dtype=native.dtype_code(args.parts[0].dtype),
            part_sizes=_sizes_code(tuple(sizes)),
            algorithm=ALGORITHMS.index(args.algorithm),
            parts=ctypes.addressof(parts),
            num_parts=count,
            source=-2,
            zero_copy=total >= ZERO_COPY_BYTES and not apart and count <= native.MAX_ZERO_COPY_PARTS,
        )
        return self._begin(op, (args, parts))

    def reduce_scatter(self, args: ReduceArgs) -> CpuCollective:
        return self._reduce("reduce_scatter", args)

    def all_reduce(self, args: ReduceArgs) -> CpuCollective:
        return self._reduce("all_reduce", args)

    def _reduce(self, op: str, args: ReduceArgs) -> CpuCollective:
        num_bytes, source = args.x.numel() * args.x.element_size(), self._source(args.x)
        in_place = args.x.data_ptr() == args.out.data_ptr()
        # One-shot, a peer may read all of x while this rank writes out.
        apart = not in_place or args.algorithm is not Algorithm.ONE_SHOT
        collective = Collective(
            op=native.OPS.index(op),
            num_bytes=num_bytes,
            dtype=native.dtype_code(args.x.dtype),
            algorithm=ALGORITHMS.index(args.algorithm),
            x=args.x.data_ptr(),
            out=args.out.data_ptr(),
            source=source,
            count=args.x.numel(),
            type=native.type_code(args.x.dtype),
            zero_copy=source >= 0 and num_bytes >= ZERO_COPY_BYTES and apart,
        )
        return self._begin(collective, (args,))

    def _begin(self, op: Collective, kept: tuple[Any, ...]) -> CpuCollective:
        with self._moving:
            while len(self._pending) >= self._config.max_in_flight:
                self.complete(self._pending[0])
            comm = self.native()
            pending = CpuCollective(self, op, kept)
            status = comm.lib.cd_collective_begin(comm.pointer, ctypes.byref(op))
            if status == native.NOTHING:
                raise ArgumentError("x", "at most 2^24 rounds through staging_bytes", f"{op.num_bytes} bytes")
            self.judge(status)
            self._pending.append(pending)
        return pending

    def complete(self, pending: CpuCollective) -> None:
        """Finish it and those before it."""
        with self._moving:
            while not pending.done:
                self._advance(self._next_of(pending), one_shard=False)

    def one_shard(self, pending: CpuCollective) -> None:
        """Finish those before it, and go on with it until a shard has arrived."""
        with self._moving:
            while not pending.done:
                first = self._next_of(pending)
                self._advance(first, one_shard=first is pending)
                if first is pending:
                    break

    def poll(self, pending: CpuCollective) -> bool:
        """Go on, without waiting, with it and those before it; whether it is done."""
        if not self._moving.acquire(blocking=False):
            return pending.done
        try:
            comm = self.comm
            while comm is not None and self.reason is None and self._pending and not pending.done:
                first = self._pending[0]
                if comm.lib.cd_collective_advance(comm.pointer, ctypes.byref(first.op), 0, 0) != native.OK:
                    break  # a failure is raised by `wait`, which meets it again
                self._pending.popleft()
                first.finish()
            return pending.done
        finally:
            self._moving.release()

    def _complete_all(self) -> None:
        with self._moving:
            while self._pending:
                self.complete(self._pending[0])

    def _next_of(self, pending: CpuCollective) -> CpuCollective:
        if pending.epoch != self.epoch:
            raise HandleError(f"wait: begun in epoch {pending.epoch}, the group is in epoch {self.epoch}")
        self.native()
        if pending not in self._pending:
            raise TransportError("wait: an operation before this one has failed")
        return self._pending[0]

    def _advance(self, first: CpuCollective, one_shard: bool) -> None:
        comm = self.native()
        try:
            self.judge(comm.lib.cd_collective_advance(comm.pointer, ctypes.byref(first.op), 1, one_shard))
        except BaseException:
            self.clear()
            raise
        if (not one_shard or first.op.phase == _DONE) and self._pending:
            self._pending.popleft()
            first.finish()


@functools.lru_cache(512)
def _sizes_code(parts: tuple[tuple[int, torch.dtype], ...]) -> int:
    """A number for bytes and dtype of each part, the same in every version of torch."""
    return zlib.crc32(repr([(num_bytes, str(dtype)) for num_bytes, dtype in parts]).encode())


_DONE = 5
"""`kDone` of native/collectives.cpp."""
