"""`Buffer`: DeepEP's class, over one MoECommunicator per shape. It checks arguments and calls `HighThroughput` or
`LowLatency`.

The first call with a shape (or with more tokens than before) makes a communicator. That is collective, as the call
itself, and impossible while a CUDA graph is captured: run each shape once before.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from crossdock.common.log import get
from crossdock.deep_ep import hints
from crossdock.deep_ep.calls import Calls, Rows, biases, checked_ids, checked_weights, payload_of, with_bias
from crossdock.deep_ep.events import EventHandle, EventOverlap
from crossdock.deep_ep.high_throughput import Handle, layout
from crossdock.deep_ep.low_latency import Hook, LowLatency, LowLatencyHandle, Received, StepSignature, nothing
from crossdock.deep_ep.refused import WAITS, Unsupported, unknown, without
from ep_kernels import ArgumentError, PeerTimeout

log = get(__name__)

Dispatched = tuple[Rows, torch.Tensor | None, torch.Tensor | None, list[int] | None, Handle | None, EventOverlap]


class Buffer(Unsupported, Calls):
    """Communication of one group of ranks.

    Args:
        group: torch.distributed.ProcessGroup, gloo or nccl; used to bring communicators up, not to move tokens.
        num_nvl_bytes, num_rdma_bytes: kept for callers that compare them; regions are sized by actual use. Ranks of
            other hosts are reached by `network` of the FrameworkConfig, whatever is given here.
        low_latency_mode: kept for callers that read it; both kinds of calls always work.
        num_qps_per_rank, allow_nvlink_for_low_latency_mode, allow_mnnvl, use_fabric: taken, without effect.
        explicitly_destroy: as given; `destroy()` may be called either way, and is when the object is collected.
        enable_shrink: must be False: a lost rank ends in PeerTimeout.
        comm: must be None: ranks meet by `group`, not by MPI.

    Raises: ArgumentError.
    """

    num_sms: ClassVar[int] = hints.NUM_SMS
    """Read by callers. Only a number given to `set_num_sms` or `set_operation_sms` is a limit."""
    _chosen_sms: ClassVar[tuple[int | None, int | None]] = None, None

    def __init__(
        self, group: Any, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0, low_latency_mode: bool = False,
        num_qps_per_rank: int = 24, allow_nvlink_for_low_latency_mode: bool = True, allow_mnnvl: bool = False,
        use_fabric: bool = False, explicitly_destroy: bool = False, enable_shrink: bool = False, comm: Any = None,
        **newer: object,
    ) -> None:  # fmt: skip
        if newer:
            unknown("Buffer", newer)
        without(comm=(comm, "ranks meet by `group`"))
        if enable_shrink:
            raise ArgumentError("enable_shrink", "False: a lost rank ends in PeerTimeout, it is not masked", True)
        super().__init__(group, explicitly_destroy)
        self._low, self._said = LowLatency(self._pool), False
        self.rank, self.group_size = self._pool.rank, self._pool.size
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        self.low_latency_mode = low_latency_mode

    # What callers ask before they call.

    @staticmethod
    def is_sm90_compiled() -> bool:
        """True: kernels are compiled for the present GPU."""
        return True

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """Multiprocessors that one high-throughput operation may fill; for communicators made after this call. Equal on
        all ranks. Raises ArgumentError unless positive and even."""
        if type(new_num_sms) is not int or new_num_sms < 2 or new_num_sms % 2:
            raise ArgumentError("new_num_sms", "a positive even int", repr(new_num_sms))
        Buffer.num_sms, Buffer._chosen_sms = new_num_sms, (new_num_sms, new_num_sms)

    @staticmethod
    def set_operation_sms(dispatch_sms: int | None, combine_sms: int | None) -> None:
        """As `set_num_sms`, a number for each of the two operations; None: as many as keep the links busy. Not in
        DeepEP. Raises ArgumentError unless positive."""
        for name, value in (("dispatch_sms", dispatch_sms), ("combine_sms", combine_sms)):
            if value is not None and (type(value) is not int or value < 1):
                raise ArgumentError(name, "None or a positive int", repr(value))
        Buffer._chosen_sms = dispatch_sms, combine_sms

    @staticmethod
    def capture() -> EventOverlap:
        """An event after everything launched on the current stream so far."""
        return EventOverlap(EventHandle())

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """Approximate bytes per rank of low-latency steps of these sizes."""
        return hints.low_latency_bytes(num_max_dispatch_tokens_per_rank, hidden, num_ranks, num_experts)

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> hints.Config:
        """A Config, which nothing depends on."""
        return hints.Config(Buffer.num_sms)

    @staticmethod
    def get_combine_config(num_ranks: int) -> hints.Config:
        """A Config, which nothing depends on."""
        return hints.Config(Buffer.num_sms)

    # High throughput.

    def get_dispatch_layout(
        self, topk_idx: torch.Tensor, num_experts: int, previous_event: EventOverlap | None = None,
        async_finish: bool = False, allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, None, torch.Tensor, torch.Tensor, EventOverlap]:  # fmt: skip
        """Number of tokens of this rank by destination: (int32 [R], None, int32 [E], bool [T, R], event). `dispatch`
        computes these itself; of these arguments it reads only the length E."""
        checked_ids(topk_idx)
        self._pool.experts_per_rank(num_experts)
        with self._streams.enter(topk_idx, async_finish, previous_event) as turn:
            per_rank, per_expert, to_rank = layout(topk_idx, num_experts, self.group_size)
            event = turn.done([topk_idx], [per_rank, per_expert, to_rank])
        return per_rank, None, per_expert, to_rank, event

    def dispatch(
        self, x: Rows, handle: Handle | None = None, num_tokens_per_rank: torch.Tensor | None = None,
        num_tokens_per_rdma_rank: torch.Tensor | None = None, is_token_in_rank: torch.Tensor | None = None,
        num_tokens_per_expert: torch.Tensor | None = None, topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None, expert_alignment: int = 1, num_worst_tokens: int = 0,
        config: hints.Config | None = None, previous_event: EventOverlap | None = None, async_finish: bool = False,
        allocate_on_comm_stream: bool = False, **newer: object,
    ) -> Dispatched:  # fmt: skip
        """Each token to the ranks of its experts. Collective.

        Args:
            x: [T, H], or (x, scales [T, S] or [T]), which travel as they are.
            handle: of an earlier dispatch: its routing again, whatever became of the tensors that it was given, for x
                of any dtype and scales; then topk_idx and topk_weights must be None.
            num_tokens_per_expert: of `get_dispatch_layout`; its length is E. The others of it are not read.
            topk_idx: int64 [T, K], -1 = none. topk_weights: float32 [T, K].
            expert_alignment: to which the numbers of the fourth result are rounded up.
            num_worst_tokens: > 0: fixed shapes of this many rows (R times the most tokens of any rank), nothing is read
                back, ids past what arrived are -1, the fourth result is []. Needed in CUDA graphs.

        Returns (rows, or (rows, scales), [N, ...], by source rank and token; local expert ids int64 [N, K], -1 = not
        here; weights [N, K], 0 there; rows per local expert; handle; event). With `handle`: rows, four None, event.
        """
        if newer:
            unknown("dispatch", newer)
        payload = payload_of(x, expert_alignment)
        with self._watched, self._streams.enter(payload[0], async_finish, previous_event) as turn:
            if handle is not None:
                if topk_idx is not None or topk_weights is not None:
                    raise ArgumentError("topk_idx, topk_weights", "None beside a handle", "a tensor")
                x, scales, _ = self._high.dispatch_again(payload, _handle(handle))
                event = turn.done([*payload], [x, scales])
                return x if scales is None else (x, scales), None, None, None, None, event
            ids, weights = checked_ids(topk_idx), checked_weights(topk_weights)
            if num_tokens_per_expert is None:
                raise ArgumentError("num_tokens_per_expert", "what get_dispatch_layout gave", None)
            sizes = num_tokens_per_expert.numel(), ids.shape[1], num_worst_tokens, *Buffer._chosen_sms
            got = self._high.dispatch(payload, ids, weights, self._high.kind(payload, *sizes))
            event = turn.done([*payload, ids, weights], [got.x, got.scales, got.topk_idx, got.topk_weights])
        counts = [-(-count // expert_alignment) * expert_alignment for count in got.counted]
        rows = got.x if got.scales is None else (got.x, got.scales)
        return rows, got.topk_idx, got.topk_weights, counts, got.handle, event

    def combine(
        self, x: torch.Tensor, handle: Handle, topk_weights: torch.Tensor | None = None,
        bias: torch.Tensor | tuple[torch.Tensor, ...] | None = None, config: hints.Config | None = None,
        previous_event: EventOverlap | None = None, async_finish: bool = False, allocate_on_comm_stream: bool = False,
        **newer: object,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:  # fmt: skip
        """Sum rows [N, H], which the caller has weighted and reduced per token, over the ranks at the source.
        Collective.

        Args:
            topk_weights: float32 [N, K] to return, each to its (token, k), or None.
            bias: [T, H], or up to two of them, added at the source in fp32.

        Returns ([T, H], weights [T, K] or None, event).
        """
        if newer:
            unknown("combine", newer)
        extra = biases(bias, _handle(handle).inner.num_tokens, x.shape[1])
        with self._watched, self._streams.enter(x, async_finish, previous_event) as turn:
            z, home = self._high.combine(x.contiguous(), handle, topk_weights)
            z = with_bias(z, extra)
            event = turn.done([x, topk_weights, *extra], [z, home])
        return z, home, event

    # Over several hosts the same: `dispatch` and `combine` reach every rank, by the network where they must.
    internode_dispatch, internode_combine = dispatch, combine

    # Low latency.

    def clean_low_latency_buffer(self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int) -> None:
        """No effect: kinds of calls never share regions, and regions stay clean."""

    def low_latency_dispatch(
        self, x: torch.Tensor, topk_idx: torch.Tensor, num_max_dispatch_tokens_per_rank: int, num_experts: int,
        cumulative_local_expert_recv_stats: torch.Tensor | None = None,
        dispatch_wait_recv_cost_stats: torch.Tensor | None = None, use_fp8: bool = True,
        round_scale: bool = False, use_ue8m0: bool = False, async_finish: bool = False, return_recv_hook: bool = False,
        use_nvfp4: bool = False, x_global_scale: torch.Tensor | None = None, **newer: object,
    ) -> tuple[Received, torch.Tensor, LowLatencyHandle, EventOverlap, Hook]:  # fmt: skip
        """Each token to its experts. Collective; never reads the device.

        Args:
            x: bfloat16 (or float16) [T, H], T <= M. topk_idx: int64 [T, K], -1 = none.
            num_max_dispatch_tokens_per_rank: M. num_experts: E, a multiple of R.
            cumulative_local_expert_recv_stats: int32 [L] that grows by what each expert received, or None.
            use_fp8: quantise on the way, blocks of 128. round_scale: scales are powers of two. use_ue8m0: and packed.
            return_recv_hook: return when this rank's sends are done; results are valid once the hook has been called.
            dispatch_wait_recv_cost_stats, x_global_scale: must be None. use_nvfp4: must be False.

        Returns (rows [L, R*M, H], or (rows, scales); counts int32 [L]; handle; event; hook). Scales are float32
        [L, R*M, ceil(H/128)] or packed int32, the row index fast. Rows stay until the second dispatch after this.
        """
        if newer:
            unknown("low_latency_dispatch", newer)
        if use_nvfp4 or x_global_scale is not None or dispatch_wait_recv_cost_stats is not None:
            fp4 = "rows travel as they come or as fp8; quantise to fp4 after receiving"
            without(use_nvfp4=(use_nvfp4, fp4), x_global_scale=(x_global_scale, fp4))
            without(dispatch_wait_recv_cost_stats=(dispatch_wait_recv_cost_stats, WAITS))
        if topk_idx is None:
            checked_ids(topk_idx)
        signature = (
            num_max_dispatch_tokens_per_rank, num_experts, x.shape, x.dtype, topk_idx.shape, topk_idx.dtype,
            use_fp8, round_scale, use_ue8m0,
        )  # fmt: skip
        low, stats, hooked = self._low, cumulative_local_expert_recv_stats, return_recv_hook
        try:
            prepared = low.prepared.get(signature) or low.prepare(StepSignature(*signature), x)
            rows, counts, handle, hook = low.dispatch(x.contiguous(), topk_idx.contiguous(), prepared, stats, hooked)
        except PeerTimeout as error:
            self._watched.count(error)
            raise
        return rows, counts, handle, EventOverlap(EventHandle() if async_finish else None), self._counted(hook)

    def low_latency_combine(
        self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor, handle: LowLatencyHandle,
        use_logfmt: bool = False, zero_copy: bool = False, async_finish: bool = False, return_recv_hook: bool = False,
        out: torch.Tensor | None = None, combine_wait_recv_cost_stats: torch.Tensor | None = None,
        overlap: bool = False, packed_recv_count: torch.Tensor | None = None, comp_signal: torch.Tensor | None = None,
        block_m: int | None = None, threshold: int | None = None, num_sms: int | None = None,
        src_signals: torch.Tensor | None = None, src_signal_expect_value: int | None = None, **newer: object,
    ) -> tuple[torch.Tensor, EventOverlap, Hook]:  # fmt: skip
        """Return expert rows [L, R*M, H], weighted with topk_weights [T, K] and summed over k in fp32. Collective.

        Args:
            topk_idx: as dispatched; the handle knows them. use_logfmt: taken, rows travel unchanged.
            zero_copy: the rows are in what `get_next_low_latency_combine_buffer(handle)` gave; x is not read.
            out: [T, H] to write into, or None.
            combine_wait_recv_cost_stats: must be None.
            overlap: SGLang's single-batch overlap: a GEMM that was launched before still writes the rows. They are sent
                when the hook is called, or the event waited for, on the stream that is current then: the GEMM's.
            packed_recv_count, comp_signal, block_m, threshold, num_sms, src_signals, src_signal_expect_value: of the
                same: hints, not followed, which the log says once.

        Returns ([T, H], event, hook); with `return_recv_hook` valid once the hook has been called.
        """
        if newer:
            unknown("low_latency_combine", newer)
        if combine_wait_recv_cost_stats is not None:
            without(combine_wait_recv_cost_stats=(combine_wait_recv_cost_stats, WAITS))
        if not isinstance(handle, LowLatencyHandle):
            raise ArgumentError("handle", "what low_latency_dispatch gave", type(handle).__name__)
        weights = checked_weights(topk_weights)
        if zero_copy and handle.combine_buffer is None:
            raise ArgumentError("zero_copy", "get_next_low_latency_combine_buffer(handle) called before", True)
        rows = handle.combine_buffer if zero_copy and handle.combine_buffer is not None else x
        if overlap or num_sms is not None or src_signals is not None:
            self._say_once()
        if overlap:
            return self._combine_later(rows, weights, handle, out, async_finish, return_recv_hook)
        try:
            if not return_recv_hook:
                z, hook = self._low.combine_now(rows.contiguous(), weights, handle, out), nothing
            else:
                z = x.new_empty(handle.num_tokens, handle.shape.hidden) if out is None else out
                hook = self._low.combine(rows.contiguous(), weights, handle, z)
        except PeerTimeout as error:
            self._watched.count(error)
            raise
        return z, EventOverlap(EventHandle() if async_finish else None), self._counted(hook)

    def get_next_low_latency_combine_buffer(self, handle: LowLatencyHandle) -> torch.Tensor:
        """[L, R*M, H] to write expert rows into, for a combine with `zero_copy`."""
        return self._low.combine_buffer(handle)

    def _say_once(self) -> None:
        if not self._said:
            self._said = True
            log.warning("crossdock: low_latency_combine: single-batch overlap is a hint, combine runs after the GEMM")

    def _combine_later(
        self, rows: torch.Tensor, weights: torch.Tensor, handle: LowLatencyHandle, out: torch.Tensor | None,
        async_finish: bool, hooked: bool,
    ) -> tuple[torch.Tensor, EventOverlap, Hook]:  # fmt: skip
        """A combine that begins when the caller waits for it: until then a product may write its rows."""
        if not (async_finish or hooked):
            raise ArgumentError("overlap", "False without return_recv_hook or async_finish", True)
        z = rows.new_empty(handle.num_tokens, handle.shape.hidden) if out is None else out
        handle.received()
        before, done = EventHandle(), list[bool]()

        def run() -> None:
            if not done:
                before.current_stream_wait()  # z's memory may be that of another stream
                with self._watched:
                    self._low.combine_now(rows.contiguous(), weights, handle, z)
                done.append(True)

        event = EventOverlap(before if async_finish else None)
        if async_finish:
            event.register_hook_after_wait(run)
        return z, event, run if hooked else nothing

    def _counted(self, hook: Hook) -> Hook:
        if hook is nothing:
            return hook

        def run() -> None:
            with self._watched:
                hook()

        return run


def _handle(value: object) -> Handle:
    if not isinstance(value, Handle):
        raise ArgumentError("handle", "what dispatch gave", type(value).__name__)
    return value
