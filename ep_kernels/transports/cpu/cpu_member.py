"""What the transports of this folder share: meeting, membership, errors and measurements over one native member."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Sequence
from typing import Any, Generic, TypeVar, cast

from ep_kernels.errors import AbortedError, ClosedError, TransportError
from ep_kernels.telemetry import RING_SIZE, Samples, record_bytes
from ep_kernels.transports.base import EXCHANGE_WORDS, MemberTransport
from ep_kernels.transports.cpu import native
from ep_kernels.transports.cpu.region import OwnRegion, Ticket, open_peer
from ep_kernels.types import LatencySample

_NS = 1_000_000_000
_WORDS = struct.Struct(f"={EXCHANGE_WORDS}q")
_DRAIN = 512
"""Sample records fetched at a time."""


class NativeOwner:
    """Owner of a native member and of the memory it works on. Freed when the last operation that uses it has returned,
    whatever `close` does meanwhile; the region when the last tensor made of it has died, too.

    Args:
        pointer: of the member. None: TransportError, memory was short.
    """

    region: OwnRegion | None = None

    def __init__(self, lib: ctypes.CDLL, pointer: int | None) -> None:
        self.lib, self.pointer = lib, cast(Any, pointer)  # None once it is freed
        if not pointer:
            raise TransportError("cpu transport: out of memory")

    def close(self) -> None:
        """Peers cannot find this rank any more. What operations work on stays."""
        if self.region is not None:
            self.region.close()

    def close_in_child(self) -> None:
        """In a forked child, where no operation returns: free it now, but own memory that a tensor is made of."""
        self.__del__()
        self.close()
        self.region = None

    def __del__(self) -> None:
        pointer, self.pointer = getattr(self, "pointer", None), None
        if pointer:
            self.free(pointer)

    def free(self, pointer: int) -> None:
        self.lib.cd_destroy(pointer)


N = TypeVar("N", bound=NativeOwner)


class CpuMember(MemberTransport, Generic[N]):
    """See `transports.base.MemberTransport`."""

    def __init__(self, owner: N, group: Any) -> None:
        MemberTransport.__init__(self, group)
        self.comm: N | None = owner
        self.lib, self.size = owner.lib, group.size
        self.reason: str | None = None
        self.checks = False
        """Whether a signal handler's exception has ended an operation."""
        self._own_words = ctypes.create_string_buffer(_WORDS.size)
        self._all_words = ctypes.create_string_buffer(_WORDS.size * group.size)

    # Life.

    def make_region(self, comm: N) -> OwnRegion:
        comm.region = region = OwnRegion(self.lib.cd_region_bytes(comm.pointer))
        self.lib.cd_attach_own(comm.pointer, region.bytes.data_ptr(), region.nonce)
        return region

    def map_region(self, comm: N, rank: int, ticket: Ticket, landing_bytes: int = 0) -> None:
        """Map the region of a rank of this host; where there is a network, its mirrors of `landing_bytes`, too. Raises
        TransportError."""
        if ticket.landing_bytes != landing_bytes or (ticket.landing_fd >= 0) != (landing_bytes > 0):
            raise TransportError(
                f"cpu transport: cannot map the region of rank {rank}: mirrors of {ticket.landing_bytes} bytes, "
                f"expected {landing_bytes}; give every rank one config"
            )
        region_fd, landing_fd, process_fd = open_peer(rank, ticket)
        error = self.lib.cd_attach_peer(comm.pointer, rank, region_fd, process_fd, ticket.nonce)
        os.close(region_fd)
        if error > 0:
            os.close(process_fd)
        elif landing_fd >= 0:
            error = error or self.lib.cd_attach_landing(comm.pointer, rank, landing_fd)
        if landing_fd >= 0:
            os.close(landing_fd)
        if error > 0:
            raise TransportError(f"cpu transport: cannot map the region of rank {rank}: {os.strerror(error)}")
        if error < 0:
            raise TransportError(f"cpu transport: the region of rank {rank} is not what its ticket promised")

    def close(self) -> None:
        """See `MemberTransport.close`. Memory goes when the last operation has returned and the last view has died."""
        comm, self.comm = self.comm, None
        if comm is None:
            return
        self.lib.cd_stop(comm.pointer)
        comm.close()
        self.clear()  # an operation of another thread may be going through the old ones

    def close_in_child(self) -> None:
        comm, self.comm = self.comm, None
        if comm is not None:
            comm.close_in_child()
        self.clear()

    def clear(self) -> None:
        """Forget what is under way."""

    def abort(self, reason: str) -> None:
        comm = self.comm
        if comm is not None:
            self.reason = reason
            self.lib.cd_stop(comm.pointer)

    def give_up(self, ranks: Sequence[int]) -> None:
        comm = self.comm
        if comm is not None:
            self.lib.cd_give_up(comm.pointer, sum(1 << rank for rank in set(ranks)))

    # The group.

    def check(self, op: str = "check") -> None:
        """See `MemberTransport.check`. Every wait is on the host here and raises by itself; a signal handler's
        exception, which ended one, is none that breaks a communicator."""
        if self.checks:
            raise TransportError(f"{op}: a signal handler's exception ended an operation that peers may still wait for")

    def barrier(self) -> None:
        comm = self.native()
        self.judge(self.lib.cd_barrier(comm.pointer))

    def set_active(self, mask: Sequence[bool], epoch: int) -> None:
        """See `MemberTransport.set_active`. A new mask needs a new epoch; unfinished operations are void."""
        comm, status = self.native(), native.NOTHING
        while status == native.NOTHING:
            limit_ns = int(self.renew(mask) * _NS)
            status = self.lib.cd_resync(comm.pointer, mask_of(mask), epoch, limit_ns)
        self.judge(status)
        self.active, self.epoch, self.checks = tuple(mask), epoch, False

    def renew(self, mask: Sequence[bool]) -> float:
        """Make connections with active ranks that have ended anew; seconds after which to ask again, 0: never."""
        return 0.0

    def exchange(self, words: Sequence[int]) -> list[tuple[int, ...] | None]:
        comm = self.native()
        _WORDS.pack_into(self._own_words, 0, *words)
        status = self.lib.cd_exchange(comm.pointer, self._own_words, self._all_words)
        if status:
            self.judge(status)
        rows = _WORDS.iter_unpack(self._all_words)
        if all(self.active):
            return list(rows)
        return [row if alive else None for row, alive in zip(rows, self.active, strict=True)]

    def wait_for_peer(self, timeout_s: float) -> bool:
        comm = self.native()
        return self._came(self.lib.cd_wait_for_peer(comm.pointer, int(timeout_s * _NS)))

    def look_for_peer(self, timeout_s: float, fd: int) -> bool:
        comm = self.native()
        return self._came(self.lib.cd_look_for_peer(comm.pointer, int(timeout_s * _NS), fd))

    def _came(self, status: int) -> bool:
        """What a wait for a peer has ended with. A signal handler's exception breaks nothing there."""
        if status == native.INTERRUPTED:
            native.raise_kept(self.lib)
        self.judge(native.OK if status == native.NOTHING else status)
        return status != native.NOTHING

    def call_exchange(self) -> None:
        comm = self.comm
        if comm is not None:
            self.lib.cd_call_exchange(comm.pointer)

    def wake(self) -> None:
        comm = self.comm
        if comm is not None:
            self.lib.cd_wake(comm.pointer)

    def samples(self) -> Sequence[LatencySample]:
        comm, one = self.comm, record_bytes(self.size)
        if comm is None:
            return []
        records, found, count = ctypes.create_string_buffer(_DRAIN * one), bytearray(), _DRAIN
        while count == _DRAIN and len(found) < RING_SIZE * one:
            count = self.lib.cd_samples(comm.pointer, records, _DRAIN)
            found += memoryview(records)[: count * one]
        return Samples(found, self.size)

    # For the operations.

    def native(self) -> N:
        """The native object, kept alive by the caller while it uses it. Raises ClosedError, AbortedError."""
        comm = self.comm
        if comm is None:
            raise ClosedError("cpu transport: closed")
        if self.reason is not None:
            raise AbortedError(self.reason)
        return comm

    def judge(self, status: int) -> None:
        """Turn a native status into the exception it stands for."""
        if status == native.OK:
            return
        if status == native.INTERRUPTED:
            self.checks = True
            native.raise_kept(self.lib)
        comm = self.comm
        if comm is None:
            raise ClosedError("cpu transport: closed while waiting")
        if status == native.ABORTED:
            raise AbortedError(self.reason or "aborted")
        fault = native.NativeFault()
        self.lib.cd_fault(comm.pointer, ctypes.byref(fault))
        raise fault.difference() if status == native.DIFFERS else fault.timeout(self._why(fault.peer))

    def _why(self, peer: int) -> str:
        """Why the connection with the rank ended, as far as it is known."""
        return ""


def mask_of(active: Sequence[bool]) -> int:
    """A bit per active rank."""
    return sum(1 << rank for rank, alive in enumerate(active) if alive)
