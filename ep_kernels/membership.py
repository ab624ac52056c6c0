"""A rank's place in its group: usable, broken or closed; meeting the others, going on without some, leaving.

Moves no tokens: `communicator.MoECommunicator` and `collectives.Collectives` add the operations.

Three states: usable; broken (a TransportError ended an operation: every call raises that error at once, until
`set_active` makes the survivors usable again; after `abort` only `close` is left); closed. A KeyboardInterrupt, or
another exception of a signal handler, that ends an operation breaks the communicator, too. An ArgumentError, a
HandleError and a CapacityError break nothing. In a forked child every communicator is closed from the start, and the
parent's goes on: nothing that the child does with its copy, dropping it included, reaches the group.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Generic, NoReturn, ParamSpec, Protocol, Self, TypeVar

import torch

from ep_kernels import checks
from ep_kernels.errors import AbortedError, ArgumentError, ClosedError, EpError, TransportError
from ep_kernels.telemetry import Samples
from ep_kernels.transports import base
from ep_kernels.types import PeerTraffic

P = ParamSpec("P")
T = TypeVar("T")


class MemberConfig(Protocol):
    """What every configuration of a member has."""

    @property
    def group(self) -> Any:
        """A `config.Group`."""

    @property
    def timeout_s(self) -> float:
        """Deadline of every wait, seconds."""


C = TypeVar("C", bound=MemberConfig)
M = TypeVar("M", bound=base.MemberTransport)

_DROPPED_S = 1.0
"""Most seconds for which one that is dropped waits for its network."""
_REFUSALS = (EpError, RuntimeError, TypeError, ValueError, LookupError, AttributeError, MemoryError)
"""What we, torch and Python raise of arguments, before anything is sent."""
_ids = itertools.count(1)
_members: weakref.WeakSet[GroupMember[Any, Any]] = weakref.WeakSet()
_dropped: list[GroupMember[Any, Any]] = []
"""While a CUDA graph was captured; closed when the next one is made."""


class GroupMember(Generic[C, M]):
    """One rank of a group. All ranks call the same operations in the same order, from one thread; `samples`,
    `received`, `wake`, `abort`, `give_up` and `close` may come from any thread."""

    def __init__(self, config: C, transport: M) -> None:
        while _dropped:
            _dropped.pop()._drop()
        self._config, self._id = config, next(_ids)
        self._transport = transport
        self._epoch: int = config.group.epoch
        self._active: tuple[bool, ...] = (True,) * config.group.size
        self._fault: TransportError | None = None
        self._closed, self._pid = False, os.getpid()
        self._lock = threading.RLock()
        self._sampling = threading.RLock()  # its own: a driver may hold a copy up for as long as a kernel waits
        _members.add(self)

    # What it is.

    @property
    def config(self) -> C:
        """As given; of a MoECommunicator with AUTO's `ll_max_tokens` as agreed."""
        return self._config

    @property
    def rank(self) -> int:
        """This rank."""
        return self._config.group.rank  # type: ignore[no-any-return]

    @property
    def size(self) -> int:
        """Rank slots R, dead ranks included."""
        return self._config.group.size  # type: ignore[no-any-return]

    @property
    def epoch(self) -> int:
        """Membership counter, as the group or the last `set_active` gave it."""
        return self._epoch

    @property
    def active(self) -> tuple[bool, ...]:
        """Which ranks take part."""
        return self._active

    @property
    def domains(self) -> tuple[int, ...]:
        """[R], lowest rank of each rank's domain: ranks of one domain reach each other without a network."""
        return self._transport.domains

    @property
    def device_name(self) -> str:
        """What this rank computes on, as its maker names it: `tuning` keeps crossovers by it."""
        return self._transport.device_name()

    # Membership and meeting.

    def set_active(self, mask: Sequence[bool], epoch: int) -> None:
        """Go on without the ranks whose mask is False; collective of the others, and the way out of a PeerTimeout.

        Requests, works and handles of the old epoch are void. Where the expert map has replicas, they take over; a
        token whose expert has no copy left is flagged in `DispatchOutput.valid`.

        Args:
            mask: [R], 1 = alive; True for this rank; equal on all survivors.
            epoch: larger than the current one; equal on all survivors.
        """
        if self._closed or isinstance(self._fault, AbortedError):
            self._ready("set_active")
        values = checks.active_mask(mask, epoch, self.rank, self.size, self._epoch)
        self._run(self._transport.set_active, values, epoch)
        if isinstance(self._fault, AbortedError):  # another thread's, while the survivors agreed
            self._ready("set_active")
        self._active, self._epoch, self._fault = values, epoch, None
        self._forget()

    def barrier(self) -> None:
        """Meet all active ranks."""
        self._ready("barrier")
        self._run(self._transport.barrier)

    def exchange(self, words: Sequence[int]) -> list[tuple[int, ...] | None]:
        """All-gather of 8 int64 per rank on the host, in rank order; None for inactive ranks. Collective."""
        checks.int64_words(words, base.EXCHANGE_WORDS)
        self._ready("exchange")
        try:
            return self._transport.exchange(words)
        except BaseException as error:
            self._broken(error)
            raise

    def wait_for_peer(self, timeout_s: float) -> bool:
        """Sleep until a peer is in an `exchange` that this rank has not entered, or has called it, or `wake()`: True.
        Timeout: False."""
        self._ready("wait_for_peer")
        return self._idle(self._transport.wait_for_peer, timeout_s)

    def look_for_peer(self, timeout_s: float, fd: int) -> bool:
        """As `wait_for_peer`, but polls instead of sleeping; between two polls other threads of its processor run.
        False at the timeout, once file descriptor `fd` can be read, or earlier: the caller calls it again."""
        self._ready("look_for_peer")
        return self._idle(self._transport.look_for_peer, timeout_s, fd)

    def call_exchange(self) -> None:
        """Hint that this rank will soon enter an `exchange`: peers that wait for one may enter it at once, and are not
        waited for later. Any thread; does nothing once closed, and where the transport cannot signal peers at once."""
        with self._lock:
            if not self._closed:
                self._transport.call_exchange()

    def wake(self) -> None:
        """End this rank's `wait_for_peer`, the present or the next one. Any thread; does nothing once closed."""
        with self._lock:
            if not self._closed:
                self._transport.wake()

    def abort(self, reason: str) -> None:
        """End every wait of this rank, present and future, in AbortedError(reason). Any thread; then only close()."""
        with self._lock:
            if not self._closed:
                self._fault = AbortedError(reason)
                self._transport.abort(reason)

    def samples(self) -> Samples:
        """Latency records since the last call, oldest first. Any thread; empty once closed."""
        with self._sampling:
            return Samples.of(() if self._closed else self._transport.samples())

    def traffic(self) -> list[PeerTraffic]:
        """Messages and bytes between this rank and each rank of other hosts, by rank; [] on one host. Any thread;
        empty once closed."""
        with self._sampling:
            return [] if self._closed else self._transport.traffic()

    def give_up(self, ranks: Sequence[int]) -> None:
        """Treat these ranks as lost, as the owner of the group has decided: operations with them, present and future,
        end in PeerTimeout at once instead of at their deadline. Afterwards all remaining ranks call `set_active`
        without them. Any thread; does nothing once closed. Raises ArgumentError for ranks that are no peers."""
        wrong = [rank for rank in ranks if rank == self.rank or not 0 <= rank < self.size]
        if wrong:
            raise ArgumentError("ranks", f"other ranks of 0..{self.size - 1} than {self.rank}", wrong)
        with self._lock:
            if not self._closed:
                self._transport.give_up(ranks)

    # Life.

    def check(self) -> None:
        """Raise what broke this communicator, if anything did, or what an operation without a wait has found (a
        HandleError or CapacityError, once; it breaks nothing). Waits for nothing: on GPUs it raises
        what kernels have found so far, so synchronise first, for example after a graph's replay."""
        self._ready("check")
        self._transport.check_results()

    def failed(self) -> torch.Tensor:
        """int64 [1] on the device of the operations: 0 until one of them has ended in an error there, which the next
        call raises (or `check`). A copy of it on a stream, behind an operation, shows whether that one failed, also
        in a CUDA graph, whose replay raises nothing. Always 0 on the CPU."""
        return self._transport.failed()

    def fault(self) -> TransportError | None:
        """The error that broke this communicator, or that an operation on the device has met so far, whether or not a
        call has raised it; None where there is none, and once closed. Once the host knows that an operation has ended
        (a graph's replay, say), this has what it met. Breaks nothing, waits for nothing. Any thread."""
        return self._fault or self.unheard()

    def unheard(self) -> TransportError | None:
        """As `fault`, but None once a call has raised it: the replay of a graph raises none."""
        try:
            if not self._closed and self._fault is None:
                self._transport.check()
        except TransportError as error:
            return None if self._closed or self._fault is not None else error
        return None

    def close(self) -> None:
        """Free everything, after the operations that this rank has begun have ended, since peers may need their rows:
        bounded by the deadline of those operations, and at once where the communicator is broken or aborted.
        Idempotent; any thread. Tensors handed out stay readable. One that is dropped is closed. Memory that GPUs share
        by CUDA IPC, and that a peer still maps, is freed when this process makes or closes another communicator."""
        self.drain()
        self._leave()

    def drain(self, limit_s: float | None = None) -> None:
        """Wait until the operations that this rank has begun have ended, as `close` does; at most their deadline."""
        if not self._closed and self._fault is None:
            self._transport.drain(self._config.timeout_s if limit_s is None else limit_s)  # without the lock: `abort`

    def __del__(self) -> None:
        """Close an object that was dropped, except at the end of the process: its memory is not freed otherwise. The
        garbage collector may run on any thread, which peers that do not read must not hold up."""
        if not getattr(self, "_closed", True) and not sys.is_finalizing():
            if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():  # type: ignore[no-untyped-call]
                _dropped.append(self)  # to free memory would break the capture
            else:
                self._drop()

    def _drop(self) -> None:
        try:
            self.drain(min(_DROPPED_S, self._config.timeout_s))
        finally:
            self._leave()

    def __reduce__(self) -> NoReturn:
        """As copy, deepcopy and pickle of a module ask that has one."""
        raise TypeError(
            f"{type(self).__name__}: cannot be copied or pickled, since it is this process's place in a group; make "
            "one in each process, and let copies of a module share it"
        )

    def _leave(self) -> None:
        with self._lock, self._sampling:
            if not self._closed:
                self._closed = True
                self._fault = None  # its traceback holds this object, and so the regions
                self._transport.close()

    def _close_in_child(self) -> None:
        """This process is a forked child, which has copies of what the parent's rank is made of, and none of the
        threads that may hold its locks: close the copies, and touch nothing that the two share."""
        self._lock, self._sampling = threading.RLock(), threading.RLock()
        if not self._closed:
            self._closed, self._fault = True, None
            self._transport.close_in_child()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # For the operations.

    def _forget(self) -> None:
        """A new epoch has begun: what was under way is void."""

    def _ready(self, op: str) -> None:
        """Raise what makes every call useless; asked before each operation."""
        if self._closed:
            raise self._closed_error(op)
        fault = self._fault  # another thread may close
        if fault is not None:
            try:
                raise fault.with_traceback(None)
            finally:
                fault = None  # its traceback holds this frame, and so the communicator: a cycle, freed late
        try:
            self._transport.check(op)
        except BaseException as error:
            self._broken(error)
            raise

    def _closed_error(self, op: str) -> ClosedError:
        if self._pid == os.getpid():
            return ClosedError("the communicator is closed")
        return ClosedError(
            f"{op}: the communicator is that of process {self._pid}, and this is a forked child of it; start "
            "processes that are to be ranks by spawn or forkserver, and make a communicator there"
        )

    def _run(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """A call into the transport; remembers what it raises, if that breaks the communicator."""
        try:
            return call(*args, **kwargs)
        except BaseException as error:
            self._broken(error)
            raise

    def _idle(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """As `_run`, of a wait that peers do not depend on: a KeyboardInterrupt breaks nothing."""
        try:
            return call(*args, **kwargs)
        except TransportError as error:
            self._broken(error)
            raise

    def _broken(self, error: BaseException) -> None:
        """An operation has ended in this error. A TransportError, or what a signal handler may raise between any two
        instructions, as KeyboardInterrupt: calls raise it from now on. A refusal breaks nothing."""
        if not isinstance(error, TransportError):
            if isinstance(error, _REFUSALS):
                return
            error = TransportError(f"{type(error).__name__} ended an operation that peers may still wait for")
        with self._lock:
            if not self._closed and not isinstance(self._fault, AbortedError):
                self._fault = error


def _close_all_in_child() -> None:
    for member in list(_members):
        member._close_in_child()


os.register_at_fork(after_in_child=_close_all_in_child)
