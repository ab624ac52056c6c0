"""MoECommunicator: what users call. Checks arguments once, then makes one call into the transport.

    comm = MoECommunicator(MoEConfig(group=..., num_experts=256, hidden_size=7168, topk=8, max_tokens_per_rank=128))
    out, handle = comm.dispatch(x, topk_ids, topk_weights)
    z = comm.combine(experts(out), handle)

Moves no bytes and knows no memory. What a rank does beside the operations (meeting, membership, closing) is in
`membership.py`; what `torch.compile` sees instead of these functions is in `ops.py`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TypeVar

import torch

from ep_kernels import bringup, checks, lazy_output, ops, quant
from ep_kernels.config import MoEConfig, may_overflow
from ep_kernels.errors import ArgumentError, CapacityError, HandleError
from ep_kernels.membership import GroupMember
from ep_kernels.ops import TraceSite
from ep_kernels.requests import Buffers, CombineRequest, DispatchRequest, InFlight
from ep_kernels.transports import base, create
from ep_kernels.types import Capabilities, DispatchHandle, DispatchOutput, KeptStep, Overflow

T = TypeVar("T")
Payload = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
"""x [T, H], or (x, scales [T, S])."""
Delivered = tuple[DispatchOutput, DispatchHandle]


_counters: list[torch.Tensor] = []
"""Those on GPUs, for good: the graph of a communicator that is closed may be replayed, and adds to them."""


def _received_counter(size: int, device: torch.device) -> torch.Tensor:
    """int64 [R], 0: tokens that dispatch brought, by source rank."""
    with torch.inference_mode(False):
        made = torch.zeros(size, dtype=torch.int64, device=device)
    if device.type != "cpu":
        _counters.append(made)
    return made


class MoECommunicator(GroupMember[MoEConfig, base.Transport]):
    """Dispatch and combine for the MoE layers of one group of ranks. Construction is collective.

    Regions are shared by all layers; `config.max_in_flight` dispatches may be open at once. Their requests may be
    waited for in any order, each before the `max_in_flight`-th dispatch after it begins; so may those of combines.

    Raises:
        ConfigError: a field that this transport cannot do, or that differs between ranks (named in the error).
        TransportError: a peer did not come, or its region cannot be mapped.
    """

    def __init__(self, config: MoEConfig) -> None:
        # Configuration and transport fit together.
        transport = create(config)
        try:
            bringup.check_capabilities(config, transport)
            config = bringup.settle(config, transport)
        except BaseException:
            transport.close()
            raise
        super().__init__(config, transport)
        # What is checked at every call.
        self._num_local_experts = config.resolved_expert_map.num_local_experts(self.rank)  # a map never changes
        self._device, self._wide_ids = transport.capabilities.device_type, transport.capabilities.wide_ids
        self._z_dtypes = checks.z_dtypes(config, self._device)
        may = self._device == "cpu" or may_overflow(config, self._num_local_experts)  # else a GPU is read for nothing
        self._reads_dropped = config.overflow is Overflow.RAISE and may
        self._dispatches = InFlight("dispatch", config.max_in_flight, self._device)
        self._combines = InFlight("combine", config.max_in_flight, self._device)
        self._recent: deque[tuple[int, int]] = deque(maxlen=config.max_in_flight)
        self._received: torch.Tensor | None = None
        self._step: KeptStep | None = None  # begun, and not ended
        self._step_number = -1  # of the dispatch of the step that was begun last
        # Meet: tickets, regions, the first barrier.
        try:
            with torch.inference_mode(False):  # what is kept is written later, from threads that are in no such mode
                tickets = bringup.meet(config, transport, transport.allocate(config.ll_max_tokens))
                transport.import_regions(tickets)
                transport.barrier()
            self._ll_max_tokens = transport.ll_max_tokens() if config.ll_max_tokens is None else config.ll_max_tokens
            self._quick = self._shortest()
            self._site = TraceSite.of(self._id, config, self._ll_max_tokens, self._device)
        except BaseException:
            self._leave()
            raise
        ops.register(self._site.comm, self)

    @property
    def capabilities(self) -> Capabilities:
        """What the transport can do."""
        return self._transport.capabilities

    @property
    def is_captured(self) -> bool:
        """Whether a CUDA graph has captured operations of it; such a graph refuses to run once it is closed."""
        return self._transport.is_captured()

    @property
    def num_local_experts(self) -> int:
        """L, experts (copies) of this rank."""
        return self._num_local_experts

    @property
    def ll_max_tokens(self) -> int:
        """AUTO: steps of at most this many tokens per rank run LL. Equal on all ranks."""
        return self._ll_max_tokens

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's row as dispatch moves it, scales included."""
        return quant.row_bytes(self._config)

    def wire_bytes(self, num_tokens: int) -> tuple[int, int]:
        """Bytes of a row in dispatch and in combine, for steps of `num_tokens` tokens: see `Transport.wire_bytes`."""
        return self._transport.wire_bytes(checks.resolve_mode(self._config, num_tokens, self._ll_max_tokens))

    def dispatch(
        self,
        x: Payload,
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
        if torch.compiler.is_compiling():
            return ops.dispatch(self, x, topk_ids, topk_weights, previous_handle, step_tokens)
        try:
            if self._quick is not None and self._is_free(self._dispatches):
                quick = self._quick.dispatch(x, topk_ids, topk_weights, previous_handle, step_tokens)
                if quick is not None:
                    return self._noted(self._dispatches.begin(), *quick)
            args = self._dispatch_args(x, topk_ids, topk_weights, previous_handle, step_tokens, at_once=True)
            pending = self._transport.dispatch(args)
            number = self._dispatches.begin()
            out, handle = pending.wait()
        except BaseException as error:
            self._broken(error)
            raise
        return self._delivered(number, out, handle, args)

    def dispatch_async(
        self,
        x: Payload,
        topk_ids: torch.Tensor | None,
        topk_weights: torch.Tensor | None,
        *,
        previous_handle: DispatchHandle | None = None,
        step_tokens: int | None = None,
    ) -> DispatchRequest:
        """As `dispatch`, but returns when this rank's sends are done; `.wait()` receives. x may be reused at once."""
        if torch.compiler.is_compiling():
            done = ops.dispatch(self, x, topk_ids, topk_weights, previous_handle, step_tokens)
            return DispatchRequest(lambda: done, lambda: (done[0].tokens, done[0].scales, done[0].counts))
        if self._quick is not None and step_tokens is None and self._is_free(self._dispatches):
            quick = self._run(self._quick.dispatch_async, x, topk_ids, topk_weights, previous_handle)
            if quick is not None:
                begun = self._dispatches.begin()
                ended = self._finisher(self._dispatches, begun, quick.wait)
                return DispatchRequest(lambda: self._noted(begun, *ended()), lambda: self._buffers(quick))
        args = self._dispatch_args(x, topk_ids, topk_weights, previous_handle, step_tokens, at_once=False)
        pending = self._run(self._transport.dispatch, args)
        number = self._dispatches.begin()
        finish = self._finisher(self._dispatches, number, pending.wait)
        return DispatchRequest(lambda: self._delivered(number, *finish(), args), lambda: self._buffers(pending))

    def combine(
        self,
        y: torch.Tensor,
        handle: DispatchHandle,
        *,
        out: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the expert rows to their source ranks, reduced. Collective.

        Args:
            y: expert outputs, contiguous, in the shape of `DispatchOutput.tokens` and the output dtype; anywhere in
                memory, or what `combine_input(handle)` gave.
            handle: of the dispatch; may be used more than once.
            out: [T, H] output dtype to write into, apart from y, or None; cpu, not compiled: or float
                `config.dtype`.
            topk_weights: [T, K] float32 to weigh with instead of those of the dispatch, for callers that get them only
                now. `exact_combine` only, and not inside torch.compile.

        Returns z [T, H] in the output dtype; zeros for a token without a valid expert.
        Raises: ArgumentError, HandleError (nothing was sent), PeerTimeout, AbortedError, ClosedError.
        """
        if torch.compiler.is_compiling():
            checks.uncompiled(topk_weights)
            return ops.combine(self, y, handle, out)[0]
        if out is not None:
            lazy_output.written(out)
        try:
            if self._quick is not None and self._is_free(self._combines):
                done = self._quick.combine(y, handle, out, topk_weights)
                if done is not None:
                    self._combines.begin()
                    return done
            args = self._combine_args(y, handle, out, None, True, topk_weights, at_once=True)
            pending = self._transport.combine(args)
            self._combines.begin()
            return pending.wait()[0]
        except BaseException as error:
            self._broken(error)
            raise

    def combine_async(
        self,
        y: torch.Tensor,
        handle: DispatchHandle,
        *,
        out: torch.Tensor | None = None,
        row_weights: torch.Tensor | None = None,
        apply_weights: bool = True,
        topk_weights: torch.Tensor | None = None,
    ) -> CombineRequest:
        """As `combine`, but returns when this rank's sends are done; `.wait()` receives. y may be reused at once,
        unless it is `combine_input`'s buffer: peers read that until a later `combine_input` returns it again.

        For backward passes: `row_weights` (float32, the leading shape of y; rank-wise layouts: and K) is returned
        to the source ranks, as the request's `.weights` [T, K]; `apply_weights=False` sums rows unweighted.
        """
        if torch.compiler.is_compiling():
            checks.uncompiled(topk_weights)
            done = ops.combine(self, y, handle, out, row_weights, apply_weights)
            return CombineRequest(lambda: done)
        if out is not None:
            lazy_output.written(out)
        pending: base.PendingCombine | None = None
        if self._quick is not None and row_weights is None and apply_weights and self._is_free(self._combines):
            pending = self._run(self._quick.combine_async, y, handle, out, topk_weights)
        if pending is None:
            args = self._combine_args(y, handle, out, row_weights, apply_weights, topk_weights, at_once=False)
            pending = self._run(self._transport.combine, args)
        return CombineRequest(self._finisher(self._combines, self._combines.begin(), pending.wait))

    def combine_now(
        self, y: torch.Tensor, handle: DispatchHandle, row_weights: torch.Tensor | None, apply_weights: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`combine_async` and both its results, as one operation."""
        args = self._combine_args(y, handle, None, row_weights, apply_weights, None, at_once=True)
        pending = self._run(self._transport.combine, args)
        self._combines.begin()
        return self._run(pending.wait)

    def _combine_args(
        self, y: torch.Tensor, handle: DispatchHandle, out: torch.Tensor | None, row_weights: torch.Tensor | None,
        apply_weights: bool, topk_weights: torch.Tensor | None, at_once: bool,
    ) -> base.CombineArgs:  # fmt: skip
        if self._transport.checks or self._fault is not None or self._closed:
            self._ready("combine")
        if type(handle) is not DispatchHandle or handle.owner != self._id or handle.epoch != self._epoch:
            checks.handle(handle, self._id, self._epoch)
        if type(handle.state) is tuple:  # a compiled function's
            handle = self._transport.restore(handle)
        checks.combine_arguments(y, out, row_weights, handle, self._config, self._device)
        weights = topk_weights
        if weights is not None:
            weights = checks.source_weights(weights, handle.num_tokens, self._config, self._device)
        if self._combines.pending:
            self._combines.check(self._run)
        return base.CombineArgs(y, handle, row_weights, apply_weights, at_once, weights, out)

    # Steps of a layer in memory that is kept between them: a dispatch, the experts, a combine, again and again.
    #
    #     step = comm.begin_step(comm.step_inputs(x, topk_ids, topk_weights), step_tokens)
    #     if step is not None:                   # else dispatch and combine
    #         experts(step.tokens, step.offsets, step.counts, out=step.y)
    #         comm.end_step(step, z)
    #
    # The same operations for the other ranks, who may call `dispatch` and `combine` instead. What is made anew for each
    # of those (a handle, a routing that lives as long as it, tensors) is made once.

    def step_inputs(self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> base.StepInputs:
        """Tensors for `begin_step`, as for `dispatch`, checked once for all steps that read them, while none is
        resized. Raises ArgumentError."""
        config, device = self._config, self._device
        rows = checks.payload(x, config, device)[0].shape[0]
        ids = checks.topk_ids(topk_ids, rows, config, device, self._wide_ids)
        given = x, ids, checks.topk_weights(topk_weights, rows, config, device)
        addresses = given[0].data_ptr(), given[1].data_ptr(), given[2].data_ptr()
        return base.StepInputs(self._id, given, addresses, rows, ids.dtype is torch.int64)

    def begin_step(self, inputs: base.StepInputs, step_tokens: int) -> KeptStep | None:
        """`dispatch`, with GROUPED rows; `end_step` is the next operation. Its tensors are valid until then, but
        `counts`, which is until the next step. None: nothing has begun, and `dispatch` serves this call (on GPUs; with
        several hosts, scales, `validate`, rows that may overflow, gradients, a request under way). Collective.

        Args: `inputs` of this communicator's `step_inputs`; `step_tokens` as `dispatch`.
        Raises: ArgumentError (nothing was sent), PeerTimeout, AbortedError, ClosedError.
        """
        transport, dispatches = self._transport, self._dispatches
        if not transport.keeps_steps or self._received is not None or dispatches.pending or self._combines.pending:
            return None
        if torch.is_grad_enabled():  # autograd may have saved the rows that are overwritten
            return None
        if transport.checks or self._fault is not None or self._closed:
            self._ready("dispatch")
        if inputs.owner != self._id:
            raise ArgumentError("inputs", "those that this communicator has checked", f"of another, {inputs.owner}")
        tokens = checks.step_tokens(step_tokens, inputs.num_tokens, self._config)
        mode = checks.resolve_mode(self._config, tokens, self._ll_max_tokens)
        try:
            step = self._step = transport.begin_step(inputs, mode)
        except BaseException as error:
            self._broken(error)
            raise
        dispatches.num_begun = self._step_number = dispatches.num_begun + 1
        return step

    def end_step(self, step: KeptStep, out: torch.Tensor) -> torch.Tensor:
        """`combine` of the rows in `step.y` into out [T, H], contiguous, of the output dtype or a float `config.dtype`.
        Collective.

        Raises: ArgumentError, HandleError (nothing was sent), PeerTimeout, AbortedError, ClosedError.
        """
        if self._transport.checks or self._fault is not None or self._closed:
            self._ready("combine")
        if self._dispatches.num_begun != self._step_number:
            raise HandleError("step: expected end_step before the next dispatch, whose rows take its memory")
        if step is not self._step or step is None:
            raise HandleError("step: expected the one that was begun last and has not ended")
        checks.tensor("out", out, (step.num_tokens, self._config.hidden_size), self._z_dtypes, self._device)
        if checks.share_memory(step.y, out):
            raise ArgumentError("out", "memory apart from y", "bytes in common")
        lazy_output.written(out)
        self._step = None
        try:
            self._transport.end_step(step, out)
        except BaseException as error:
            self._broken(error)
            raise
        self._combines.num_begun += 1
        return out

    # Buffers, and what is known of a dispatch.

    def dispatch_input(self, num_tokens: int) -> torch.Tensor:
        """A registered buffer [num_tokens, H] of `config.dtype` to write the next dispatch's x into, which dispatch
        then does not copy. From that dispatch on peers read it: call this again before writing again.

        Raises ArgumentError unless 0 <= num_tokens <= M, and what a wait for a peer may raise.
        """
        if torch.compiler.is_compiling():
            return ops.dispatch_input(self, num_tokens)
        checks.input_rows(num_tokens, self._config)
        self._ready("dispatch_input")
        return self._run(self._transport.dispatch_input, num_tokens)

    def combine_input(self, handle: DispatchHandle) -> torch.Tensor:
        """A registered buffer in the shape of the handle's tokens and the output dtype, to write expert rows into,
        which `combine` then does not copy. From that combine on peers read it: call this again before writing again
        (it waits until they have finished). HandleError once `max_in_flight` later dispatches have recycled it."""
        if torch.compiler.is_compiling():
            return ops.combine_input(self, handle)
        self._ready("combine_input")
        handle = self._own(handle)
        if not self.is_current(handle):
            raise HandleError(f"handle: the buffers of dispatch {handle.seq} have been recycled")
        return self._run(self._transport.combine_input, handle)

    def trimmed(self, handle: DispatchHandle, num_rows: int) -> DispatchHandle:
        """The handle of a dispatch in fixed shapes, cut to its `num_rows`, which the caller has read: `combine` takes
        [num_rows, H], never fewer than arrived (`cpu` refuses them). Raises ArgumentError, HandleError."""
        handle = self._own(handle)
        checks.trimmed_rows(num_rows, handle, self._config)
        return self._transport.trimmed(handle, num_rows)

    def is_current(self, handle: DispatchHandle) -> bool:
        """True while views of this dispatch's buffers (`DispatchOutput.tokens`, `combine_input`) may be read."""
        first = self._dispatches.num_begun - self._config.max_in_flight
        if handle.owner != self._id or handle.epoch != self._epoch:
            return False
        return any(seq == handle.seq and number >= first for number, seq in reversed(self._recent))

    def row_weights(self, handle: DispatchHandle) -> torch.Tensor:
        """float32 [L, slots] | [N]: the weight of every row, for backward passes. Per-expert layouts only."""
        if torch.compiler.is_compiling():
            return ops.row_weights(self, handle)
        self._ready("row_weights")
        checks.per_expert(self._config)
        return self._run(self._transport.row_weights, self._own(handle))

    def count_received(self) -> None:
        """Begin to count the tokens that dispatch brings here, for `received`: one addition of [R] per dispatch, on
        the device, in CUDA graphs captured from now on too. Nothing is read back. Idempotent; not while capturing."""
        self._ready("count_received")
        if self._received is None:
            self._received = _received_counter(self.size, self._transport.failed().device)

    def received(self) -> list[int] | None:
        """[R], tokens of each rank that dispatch has brought to this rank's experts since `count_received`, each once
        per dispatch, its own among them; as far as the device has got. None before that, once closed, and where the
        device is too busy to say. Waits for no operation. Any thread."""
        with self._sampling:
            if self._received is None or self._closed:
                return None
            words = self._transport.peek(self._received)
        return None if words is None else words.tolist()

    def dropped_rows(self) -> int | None:
        """Rows past the receive capacity that dispatches have dropped here so far, those of CUDA graphs among them, as
        far as the device has got. None once closed. Waits for no operation. Any thread."""
        with self._sampling:
            return None if self._closed else self._transport.dropped_rows()

    # Inside.

    def _dispatch_args(
        self, x: Payload, topk_ids: torch.Tensor | None, topk_weights: torch.Tensor | None,
        previous: DispatchHandle | None, step_tokens: int | None, at_once: bool,
    ) -> base.DispatchArgs:  # fmt: skip
        if self._transport.checks or self._fault is not None or self._closed:
            self._ready("dispatch")
        config, device = self._config, self._device
        body, scales = checks.payload(x, config, device)
        rows = body.shape[0]
        tokens = config.max_tokens_per_rank if step_tokens is None else checks.step_tokens(step_tokens, rows, config)
        mode = checks.resolve_mode(config, tokens, self._ll_max_tokens)
        if previous is not None:
            previous = self._own(previous)
            if previous.num_tokens != rows:
                raise HandleError(f"previous_handle: made for {previous.num_tokens} tokens, x has {rows}")
            mode, topk_ids = previous.mode, previous.topk_ids
            topk_weights = previous.topk_weights if topk_weights is None else topk_weights
        ids = checks.topk_ids(topk_ids, rows, config, device, self._wide_ids)
        weights = checks.topk_weights(topk_weights, rows, config, device)
        if self._dispatches.pending:
            self._dispatches.check(self._run)
        return base.DispatchArgs(body, scales, ids, weights, mode, previous, at_once, tokens)

    def _own(self, handle: DispatchHandle) -> DispatchHandle:
        """The handle, checked, with the transport's own state (a compiled function's carries tensors instead)."""
        checks.handle(handle, self._id, self._epoch)
        return self._transport.restore(handle) if type(handle.state) is tuple else handle

    def _buffers(self, pending: base.PendingDispatch) -> Buffers:
        checks.known_early(self._config)
        return pending.buffers()

    def _forget(self) -> None:
        self._step = None
        self._dispatches.pending.clear()
        self._combines.pending.clear()
        self._recent.clear()
        self._quick = self._shortest()

    def _leave(self) -> None:
        super()._leave()
        self._step = None  # it keeps the region

    def _is_free(self, kind: InFlight) -> bool:
        """Whether nothing of this rank's own stands against an operation."""
        return self._fault is None and not self._closed and kind.has_room()

    def _shortest(self) -> base.QuickCalls | None:
        if self._config.validate:  # what is in the tensors is looked at, too
            return None
        mode = checks.resolve_mode(self._config, self._config.max_tokens_per_rank, self._ll_max_tokens)
        with torch.inference_mode(False):
            return self._transport.quick(self._id, mode, self._ll_max_tokens)

    def _finisher(self, kind: InFlight, number: int, wait: Callable[[], T]) -> Callable[[], T]:
        """The request of that operation is pending from now on; what its `wait()` has to call, once."""
        epoch = self._epoch

        def finish() -> T:
            if epoch != self._epoch:
                raise HandleError(f"{kind.kind}: begun in epoch {epoch}, the group is in epoch {self._epoch}")
            self._ready(kind.kind)
            del kind.pending[number]
            return self._run(wait)

        return kind.wait_for(number, finish, wait)

    def _delivered(self, number: int, out: DispatchOutput, made: DispatchHandle, args: base.DispatchArgs) -> Delivered:
        made.owner, made.topk_ids, made.topk_weights = self._id, args.topk_ids, args.topk_weights
        return self._noted(number, out, made)

    def _noted(self, number: int, out: DispatchOutput, made: DispatchHandle) -> Delivered:
        """Note that the buffers of a dispatch are current. Raises CapacityError if it overflowed."""
        self._recent.append((number, made.seq))
        if self._received is not None:
            self._received += self._transport.source_rows(made)
        if self._reads_dropped and (dropped := self._transport.dropped_by(out, made)):
            raise CapacityError(dropped, out, made)
        return out, made
