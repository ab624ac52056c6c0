"""MoECommunicator: what users call. Checks arguments once, then makes one call into the transport.

    comm = MoECommunicator(MoEConfig(group=..., num_experts=256, hidden_size=7168, topk=8, max_tokens_per_rank=128))
    out, handle = comm.dispatch(x, topk_ids, topk_weights)
    z = comm.combine(experts(out), handle)

Moves no bytes and knows no memory. All ranks call the same operations in the same order, from one thread; `samples`,
`wake`, `abort` and `close` may come from any thread.

Three states: usable; broken (a TransportError ended an operation: every call raises that error at once, until
`set_active` makes the survivors usable again; after `abort` only `close` is left); closed. An ArgumentError, a
HandleError and a CapacityError break nothing.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import TracebackType
from typing import Self, TypeVar

import torch

from ep_kernels import bringup, checks
from ep_kernels.config import MoEConfig
from ep_kernels.errors import AbortedError, ArgumentError, CapacityError, ClosedError, HandleError, TransportError
from ep_kernels.requests import CombineRequest, DispatchRequest
from ep_kernels.transports import base, create
from ep_kernels.types import Capabilities, DispatchHandle, DispatchOutput, LatencySample, Overflow

T = TypeVar("T")

_ids = itertools.count(1)


class MoECommunicator:
    """Dispatch and combine for the MoE layers of one group of ranks. Construction is collective.

    Regions are shared by all layers; `config.max_in_flight` dispatches may be open at once.

    Raises:
        ConfigError: a field that this transport cannot do, or that differs between ranks (named in the error).
        TransportError: a peer did not come, or its region cannot be mapped.
    """

    def __init__(self, config: MoEConfig) -> None:
        self._config, self._id = config, next(_ids)
        self._experts = config.resolved_expert_map
        self._epoch: int = config.group.epoch
        self._active: tuple[bool, ...] = (True,) * config.group.size
        self._fault: TransportError | None = None
        self._closed = False
        self._lock = threading.RLock()
        self._num_dispatches = 0
        self._recent: list[tuple[int, int]] = []
        self._num_pending = Counter[str]()
        self._transport = create(config)
        try:
            bringup.check_capabilities(config, self._transport)
            agreed = bringup.meet(config, self._transport, self._transport.allocate())
            self._ll_max_tokens = agreed.ll_max_tokens
            self._transport.import_regions(agreed.tickets)
            self._transport.barrier()
        except BaseException:
            self.close()
            raise

    # What it is.

    @property
    def config(self) -> MoEConfig:
        """As given."""
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
    def num_local_experts(self) -> int:
        """L, experts (copies) of this rank."""
        return self._experts.num_local_experts(self.rank)

    @property
    def epoch(self) -> int:
        """Membership counter, as the group or the last `set_active` gave it."""
        return self._epoch

    @property
    def active(self) -> tuple[bool, ...]:
        """Which ranks take part."""
        return self._active

    @property
    def ll_max_tokens(self) -> int:
        """AUTO: steps of at most so many tokens per rank run LL. Equal on all ranks."""
        return self._ll_max_tokens

    @property
    def capabilities(self) -> Capabilities:
        """What the transport can do."""
        return self._transport.capabilities

    # The two operations.

    def dispatch(
        self,
        x: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        topk_ids: torch.Tensor | None,
        topk_weights: torch.Tensor | None,
        *,
        previous_handle: DispatchHandle | None = None,
        step_tokens: int | None = None,
    ) -> tuple[DispatchOutput, DispatchHandle]:
        """Send each token to the ranks of its experts; receive this rank's rows. Collective.

        Args:
            x: [T, H] `config.dtype`, contiguous, T <= M, T may be 0 and may differ between ranks; or the pair
                (x, scales [T, S]) where `config.scale_columns` = S.
            topk_ids: [T, K] int32 or int64, logical ids; -1 = no expert. Others out of range act as -1 and are counted
                in `num_invalid_ids` (`validate`: refused).
            topk_weights: [T, K] float32. NaN propagates into the token's result (`validate`: refused).
            previous_handle: use its routing again and skip the count exchange. topk_ids is then not looked at, and
                topk_weights None means the former ones. All ranks pass the handle of the same step.
            step_tokens: largest T of the step, equal on all ranks; AUTO picks the algorithm by it. None: M.

        Raises: ArgumentError, HandleError (nothing was sent), CapacityError, PeerTimeout, AbortedError, ClosedError.
        """
        return self._begin_dispatch(x, topk_ids, topk_weights, previous_handle, step_tokens, at_once=True).wait()

    def dispatch_async(
        self,
        x: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        topk_ids: torch.Tensor | None,
        topk_weights: torch.Tensor | None,
        *,
        previous_handle: DispatchHandle | None = None,
        step_tokens: int | None = None,
    ) -> DispatchRequest:
        """As `dispatch`, but returns when this rank's sends are done; `.wait()` receives. x may be reused at once."""
        return self._begin_dispatch(x, topk_ids, topk_weights, previous_handle, step_tokens, at_once=False)

    def _begin_dispatch(
        self,
        x: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        topk_ids: torch.Tensor | None,
        topk_weights: torch.Tensor | None,
        previous_handle: DispatchHandle | None,
        step_tokens: int | None,
        at_once: bool,
    ) -> DispatchRequest:
        self.check()
        body, scales = checks.payload(x, self._config, self._device)
        rows = body.shape[0]
        tokens = checks.step_tokens(step_tokens, rows, self._config)
        mode = checks.resolve_mode(self._config, tokens, self._ll_max_tokens)
        if previous_handle is not None:
            self._check_handle(previous_handle)
            if previous_handle.num_tokens != rows:
                raise HandleError(f"previous_handle: made for {previous_handle.num_tokens} tokens, x has {rows}")
            mode, topk_ids = previous_handle.mode, previous_handle.topk_ids
            topk_weights = previous_handle.topk_weights if topk_weights is None else topk_weights
        ids = checks.topk_ids(topk_ids, rows, self._config, self._device)
        weights = checks.topk_weights(topk_weights, rows, self._config, self._device)
        self._check_pending("dispatch")
        args = base.DispatchArgs(body, scales, ids, weights, mode, previous_handle, at_once)
        with self._guard():
            number, self._num_dispatches = self._num_dispatches, self._num_dispatches + 1
            pending = self._transport.dispatch(args)
        self._num_pending["dispatch"] += 1
        epoch = self._epoch
        return DispatchRequest(lambda: self._receive(epoch, number, pending, ids, weights))

    def combine(self, y: torch.Tensor, handle: DispatchHandle, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """Bring the expert rows home, reduced. Collective.

        Args:
            y: expert outputs, contiguous, in the shape of `DispatchOutput.tokens` and the output dtype; anywhere in
                memory, or what `combine_input(handle)` gave.
            handle: of the dispatch; may be used more than once.
            out: [T, H] output dtype to write into, or None.

        Returns z [T, H] in the output dtype; zeros for a token without a valid expert.
        Raises: ArgumentError, HandleError (nothing was sent), PeerTimeout, AbortedError, ClosedError.
        """
        return self._begin_combine(y, handle, out, None, True, at_once=True).wait()

    def combine_async(
        self,
        y: torch.Tensor,
        handle: DispatchHandle,
        *,
        out: torch.Tensor | None = None,
        row_weights: torch.Tensor | None = None,
        apply_weights: bool = True,
    ) -> CombineRequest:
        """As `combine`, but returns when this rank's sends are done; `.wait()` receives. y may be reused at once,
        unless it is `combine_input`'s buffer: that is lent until a later `combine_input` gives it again.

        For backward passes: `row_weights` (float32, the leading shape of y; rank-wise layouts: and K) travels home,
        where the request has it as `.weights` [T, K]; `apply_weights=False` sums rows unweighted.
        """
        return self._begin_combine(y, handle, out, row_weights, apply_weights, at_once=False)

    def _begin_combine(
        self,
        y: torch.Tensor,
        handle: DispatchHandle,
        out: torch.Tensor | None,
        row_weights: torch.Tensor | None,
        apply_weights: bool,
        at_once: bool,
    ) -> CombineRequest:
        self.check()
        self._check_handle(handle)
        checks.combine_arguments(y, out, row_weights, handle, self._config, self._device)
        self._check_pending("combine")
        with self._guard():
            pending = self._transport.combine(base.CombineArgs(y, handle, row_weights, apply_weights, at_once))
        self._num_pending["combine"] += 1
        epoch = self._epoch
        return CombineRequest(lambda: self._finish("combine", epoch, lambda: pending.wait(out)))

    def dispatch_input(self, num_tokens: int) -> torch.Tensor:
        """A registered buffer [num_tokens, H] of `config.dtype` to write the next dispatch's x into: dispatch copies it
        no more. From that dispatch on it is lent to the peers: to write again, ask again.

        Raises ArgumentError unless 0 <= num_tokens <= M, and what a wait for a peer may raise.
        """
        if not 0 <= num_tokens <= self._config.max_tokens_per_rank:
            raise ArgumentError("num_tokens", f"0..{self._config.max_tokens_per_rank}", num_tokens)
        with self._guard():
            return self._transport.dispatch_input(num_tokens)

    def combine_input(self, handle: DispatchHandle) -> torch.Tensor:
        """A registered buffer in the shape of the handle's tokens and the output dtype, to write expert rows into:
        `combine` copies them no more. From that combine on it is lent to the peers: to write again, ask again (which
        waits until they are done). HandleError once `max_in_flight` later dispatches have recycled it."""
        self.check()
        self._check_handle(handle)
        if not self.is_current(handle):
            raise HandleError(f"handle: the buffers of dispatch {handle.seq} have been recycled")
        with self._guard():
            return self._transport.combine_input(handle)

    def is_current(self, handle: DispatchHandle) -> bool:
        """True while views of this dispatch's buffers (`DispatchOutput.tokens`, `combine_input`) may be read."""
        first = self._num_dispatches - self._config.max_in_flight
        current = any(seq == handle.seq and number >= first for number, seq in self._recent)
        return current and handle.owner == self._id and handle.epoch == self._epoch

    def row_weights(self, handle: DispatchHandle) -> torch.Tensor:
        """float32 [L, slots] | [N]: the weight of every row, for backward passes. Per-expert layouts only."""
        self.check()
        self._check_handle(handle)
        if not self._config.resolved_layout.per_expert:
            raise ArgumentError("layout", "a per-expert layout", self._config.resolved_layout.value)
        with self._guard():
            return self._transport.row_weights(handle)

    # Membership and meeting.

    def set_active(self, mask: Sequence[bool], epoch: int) -> None:
        """Go on without the ranks whose mask is False; collective of the others, and the way out of a PeerTimeout.

        Requests and handles of the old epoch are void. Where the expert map has replicas, they take over; a token whose
        expert has no copy left is flagged in `DispatchOutput.valid`.

        Args:
            mask: [R], 1 = alive; True for this rank; equal on all survivors.
            epoch: larger than the current one; equal on all survivors.
        """
        if self._closed or isinstance(self._fault, AbortedError):
            self.check()
        values = checks.active_mask(mask, epoch, self.rank, self.size, self._epoch)
        with self._guard(broken=True):
            self._transport.set_active(values, epoch)
        self._active, self._epoch, self._fault = values, epoch, None
        self._num_pending.clear()
        self._recent.clear()

    def barrier(self) -> None:
        """Meet all active ranks."""
        with self._guard():
            self._transport.barrier()

    def exchange(self, words: Sequence[int]) -> list[tuple[int, ...] | None]:
        """All-gather of 8 int64 per rank on the host, in rank order; None for inactive ranks. Collective."""
        checks.int64_words(words, base.EXCHANGE_WORDS)
        with self._guard():
            return self._transport.exchange(words)

    def wait_for_peer(self, timeout_s: float) -> bool:
        """Sleep until a peer is in an `exchange` that this rank has not entered, or `wake()`: True. Timeout: False."""
        with self._guard():
            return self._transport.wait_for_peer(timeout_s)

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

    def samples(self) -> list[LatencySample]:
        """Latency records since the last call, oldest first. Any thread; empty once closed."""
        with self._lock:
            return [] if self._closed else self._transport.samples()

    # Life.

    def check(self) -> None:
        """Raise what broke this communicator, if anything did. Waits for nothing: on GPUs it says what kernels have met
        so far, so synchronise first to hear of all of them (after a graph's replay, say)."""
        if self._closed:
            raise ClosedError("the communicator is closed")
        if self._fault is not None:
            raise self._fault.with_traceback(None)
        with self._guard(broken=True):
            self._transport.check()

    def close(self) -> None:
        """Free everything; never waits for a peer. Idempotent; any thread. Tensors handed out stay readable."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Inside.

    @property
    def _device(self) -> str:
        return self._transport.capabilities.device_type

    @contextmanager
    def _guard(self, broken: bool = False) -> Iterator[None]:
        """Around each call into the transport: checks before (unless `broken`), remembers a TransportError."""
        if not broken:
            self.check()
        try:
            yield
        except TransportError as error:
            if not isinstance(self._fault, AbortedError):
                self._fault = error
            raise

    def _check_handle(self, handle: DispatchHandle) -> None:
        if not isinstance(handle, DispatchHandle):
            raise ArgumentError("handle", "a DispatchHandle", type(handle).__name__)
        if handle.owner != self._id:
            raise HandleError("handle: made by another communicator")
        if handle.epoch != self._epoch:
            raise HandleError(f"handle: made in epoch {handle.epoch}, the group is in epoch {self._epoch}")

    def _check_pending(self, kind: str) -> None:
        if self._num_pending[kind] >= self._config.max_in_flight:
            raise HandleError(f"{kind}: max_in_flight = {self._config.max_in_flight} are pending; wait() for one first")

    def _finish(self, kind: str, epoch: int, wait: Callable[[], T]) -> T:
        if epoch != self._epoch:
            raise HandleError(f"{kind}: begun in epoch {epoch}, the group is in epoch {self._epoch}")
        with self._guard():
            self._num_pending[kind] -= 1
            return wait()

    def _receive(
        self, epoch: int, number: int, pending: base.PendingDispatch, ids: torch.Tensor, weights: torch.Tensor
    ) -> tuple[DispatchOutput, DispatchHandle]:
        out, handle = self._finish("dispatch", epoch, pending.wait)
        self._recent = [*self._recent, (number, handle.seq)][-self._config.max_in_flight :]
        rows_shape = tuple(out.tokens.shape[:-1])
        handle = replace(handle, owner=self._id, rows_shape=rows_shape, topk_ids=ids, topk_weights=weights)
        if self._config.overflow is Overflow.RAISE and int(out.num_dropped):  # on GPUs, the host read RAISE is for
            raise CapacityError(int(out.num_dropped), out, handle)
        return out, handle
