"""`ElasticBuffer` and `EPHandle`: DeepEP V2's interface, over the communicators of `HighThroughput`.

One kind of step for prefill, decode and training: rows come once per (token, rank), or expanded, once per (token,
expert). The largest number of tokens of any rank is named by the caller, so a step exchanges no sizes; with
`do_cpu_sync=False` it reads nothing back and may be captured in a CUDA graph, once it has run before.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from crossdock.common.config import FrameworkConfig
from crossdock.deep_ep import expansion, hints
from crossdock.deep_ep.calls import Calls, Rows, biases, checked_ids, checked_weights, payload_of, with_bias
from crossdock.deep_ep.events import EventHandle, EventOverlap
from crossdock.deep_ep.expansion import Expansion
from crossdock.deep_ep.high_throughput import Delivered, Handle, Payload
from crossdock.deep_ep.low_latency import check_stats
from crossdock.deep_ep.refused import BUFFERS, ENGRAM, UnsupportedElastic, unknown
from ep_kernels import ArgumentError, TorchGroup
from ep_kernels.topology.sysfs import boot_id

Event = EventHandle | EventOverlap
LAYOUTS = ("recv_src_metadata", "dst_buffer_slot_idx", "token_metadata_at_forward", "channel_linked_list")
"""Attributes of DeepEP's handle that tell of its buffers."""


@dataclass(frozen=True, slots=True, eq=False)
class EPHandle:
    """The routing of a dispatch, for its combine and for later dispatches of other rows.

    Attributes:
        do_expand, num_experts, expert_alignment, num_max_tokens_per_rank, num_sms: as given to the dispatch.
        topk_idx: int64 [T, K], a copy unless the dispatch had `do_handle_copy=False`; never read again.
        num_recv_tokens, num_expanded_tokens: N, and rows of all experts with padding; without CPU sync the most that
            may come.
        num_recv_tokens_per_expert_list: [L], with padding; [] without CPU sync.
        psum_num_recv_tokens_per_scaleup_rank: int32 [R], tokens of this and all lower ranks: each once. The last is
            their number. All ranks are scale-up ranks, whatever hosts they are on.
        psum_num_recv_tokens_per_expert: int32 [L], where the rows of each expert end: with its padding, or (expanded)
            without, so that the next one begins at its multiple of the alignment.
        num_unaligned_recv_tokens_per_expert: int32 [L], rows of each expert.
    """

    do_expand: bool
    num_experts: int
    expert_alignment: int
    num_max_tokens_per_rank: int
    num_sms: int
    topk_idx: torch.Tensor
    num_recv_tokens: int
    num_expanded_tokens: int
    num_recv_tokens_per_expert_list: list[int]
    psum_num_recv_tokens_per_scaleup_rank: torch.Tensor
    psum_num_recv_tokens_per_expert: torch.Tensor
    num_unaligned_recv_tokens_per_expert: torch.Tensor
    _inner: Handle
    _ids: torch.Tensor
    _expansion: Expansion | None

    def __getattr__(self, name: str) -> NoReturn:
        """AttributeError, as for any object; for attributes of DeepEP's handle with the reason."""
        why = f": {BUFFERS}" if name in LAYOUTS else ""
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{why}", name=name)


Dispatched = tuple[Rows, torch.Tensor | None, torch.Tensor | None, EPHandle, EventOverlap]


class ElasticBuffer(UnsupportedElastic, Calls):
    """Communication of one group of ranks.

    Args:
        group: torch.distributed.ProcessGroup, gloo or nccl; used to bring communicators up, not to move tokens.
        num_bytes: kept for callers that read it; regions are sized by actual use. None: a hint.
        num_cpu_bytes: must be 0: no store is kept.
        num_max_tokens_per_rank: M of dispatches that name none. hidden, num_topk, use_fp8_dispatch: read for
            `num_bytes` alone.
        deterministic: taken; results always are.
        allow_multiple_reduction: taken; the expanded rows of a rank are summed in fp32, rounded once and sent once.
        prefer_overlap_with_compute, allow_hybrid_mode, sl_idx, num_allocated_qps: taken, without effect.
        num_cpu_timeout_secs, num_gpu_timeout_secs: taken; the deadline is `timeout_s` of the FrameworkConfig.
        explicitly_destroy: as given; `destroy()` may be called either way, and is when the object is collected.

    Raises: ArgumentError; ConfigError for keywords that it has not.
    """

    def __init__(
        self, group: Any, num_bytes: int | None = None, num_cpu_bytes: int = 0, num_max_tokens_per_rank: int = 0,
        hidden: int = 0, num_topk: int = 0, use_fp8_dispatch: bool = False, deterministic: bool = False,
        allow_hybrid_mode: bool = True, allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True, sl_idx: int = 3, num_allocated_qps: int = 0,
        num_cpu_timeout_secs: int = 300, num_gpu_timeout_secs: int = 100, explicitly_destroy: bool = False,
        **newer: object,
    ) -> None:  # fmt: skip
        if newer:
            unknown("ElasticBuffer", newer)
        if num_cpu_bytes:
            raise ArgumentError("num_cpu_bytes", f"0 ({ENGRAM})", num_cpu_bytes)
        super().__init__(group, explicitly_destroy)
        size = self._pool.size
        self.rank_idx, self.num_ranks = self._pool.rank, size
        self.num_max_tokens_per_rank = num_max_tokens_per_rank
        self.num_bytes = num_bytes
        if num_bytes is None:
            self.num_bytes = hints.elastic_bytes(num_max_tokens_per_rank, hidden, size, use_fp8_dispatch)
        self.deterministic, self.allow_hybrid_mode = deterministic, allow_hybrid_mode
        self.allow_multiple_reduction = allow_multiple_reduction
        self.prefer_overlap_with_compute = prefer_overlap_with_compute
        self.num_allocated_qps = num_allocated_qps
        self.num_rdma_ranks, self.num_nvlink_ranks = self.get_physical_domain_size()
        self.num_scaleout_ranks, self.num_scaleup_ranks = self.get_logical_domain_size()
        self.scaleout_rank_idx, self.scaleup_rank_idx = 0, self.rank_idx

    # What callers ask before they call.

    @staticmethod
    def get_buffer_size_hint(
        group: Any, num_max_tokens_per_rank: int, hidden: int, num_topk: int = 0, use_fp8_dispatch: bool = False,
        allow_hybrid_mode: bool = True, allow_multiple_reduction: bool = True,
    ) -> int:  # fmt: skip
        """Approximate bytes per rank of steps of these sizes."""
        return hints.elastic_bytes(num_max_tokens_per_rank, hidden, group.size(), use_fp8_dispatch)

    @staticmethod
    def capture() -> EventHandle:
        """An event after everything launched on the current stream so far."""
        return EventHandle()

    def get_physical_domain_size(self) -> tuple[int, int]:
        """As the function. Collective where a network is configured; without one the group is one host."""
        return get_physical_domain_size(self.group) if self._settings.network else (1, self.num_ranks)

    def get_logical_domain_size(self) -> tuple[int, int]:
        """(1, R): a rank reaches every other one directly, over the network or not."""
        return 1, self.num_ranks

    def get_theoretical_num_sms(self, num_experts: int, num_topk: int, **_: object) -> int:
        """Multiprocessors that an operation fills, about. Given to a call, it leaves the number open, as 0 does."""
        return hints.NUM_SMS

    def get_theoretical_num_qps(self, num_sms: int) -> int:
        """0: queue pairs are the network's, not the caller's."""
        return 0

    def barrier(self, use_comm_stream: bool = True, with_cpu_sync: bool = False, sequential: bool = True) -> None:
        """Wait on the host for all ranks to have finished what they launched on the current stream, and, with
        `use_comm_stream`, on the stream of asynchronous calls. Not in CUDA graphs."""
        if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize() if with_cpu_sync else torch.cuda.current_stream().synchronize()
            if use_comm_stream:
                self.get_comm_stream().synchronize()
        self._pool.group.all_gather(b"", self._settings.timeout_s)

    # The two operations.

    def dispatch(
        self, x: Rows, topk_idx: torch.Tensor | None = None, topk_weights: torch.Tensor | None = None,
        cumulative_local_expert_recv_stats: torch.Tensor | None = None, num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None, expert_alignment: int | None = None, num_sms: int = 0,
        num_qps: int = 0, previous_event: Event | None = None, previous_event_before_epilogue: Event | None = None,
        async_with_compute_stream: bool = False, allocate_on_comm_stream: bool = False, handle: EPHandle | None = None,
        do_handle_copy: bool = True, do_cpu_sync: bool | None = None, do_expand: bool = False,
        do_zero_padding: bool = False, use_tma_aligned_col_major_sf: bool = False, **newer: object,
    ) -> Dispatched:  # fmt: skip
        """Each token to the ranks of its experts. Collective.

        Args:
            x: [T, H], or (x, scales [T, S]), which travel as they are. T <= M.
            topk_idx: int64 [T, K], -1 = none; a token names an expert once. topk_weights: float32 [T, K], or None.
            cumulative_local_expert_recv_stats: int32 [L] that grows by what each expert received, or None.
            num_experts: E, a multiple of R.
            num_max_tokens_per_rank: M, equal on all ranks. None: the Buffer's.
            expert_alignment: to which the rows of each expert are padded. None: 1.
            num_sms: multiprocessors of both operations, equal on all ranks; 0: as many as keep the links busy.
            previous_event, previous_event_before_epilogue: to wait for before anything is launched.
            async_with_compute_stream: on a stream of its own; the event tells when it is done.
            handle: of an earlier dispatch: its routing again. Then topk_idx must be None; of topk_weights those given,
                or none, travel; what is given beside must be as then.
            do_handle_copy: whether the handle gets a copy of topk_idx.
            do_cpu_sync: exact shapes and lists of counts, for which the host waits. None: unless there is a handle.
                False: shapes are the most that may come, R * M rows.
            do_expand: a row per (token, expert), those of an expert together.
            do_zero_padding: rows that pad an expert are 0, not unspecified; expanded only.
            use_tma_aligned_col_major_sf: scales with the row index as the fast one.
            num_qps, allocate_on_comm_stream: taken, without effect.

        Returns (rows, or (rows, scales), [N, ...] by source rank and token, or [P, ...]; local ids int64 [N, K], -1 =
        not here, None when expanded; weights [N, K] or [P], 0 there and in padding, None without; handle; event).
        """
        if newer:
            unknown("dispatch", newer)
        if do_zero_padding and not do_expand:
            raise ArgumentError("do_zero_padding", "False unless do_expand", True)
        if handle is not None:
            sizes = num_experts, num_max_tokens_per_rank, expert_alignment
            _same_routing(handle, topk_idx, do_cpu_sync, do_expand, sizes)
        payload = payload_of(x, 1 if expert_alignment is None else expert_alignment)
        weights = None if topk_weights is None else checked_weights(topk_weights)
        before, stats = (previous_event, previous_event_before_epilogue), cumulative_local_expert_recv_stats
        with self._watched, self._streams.enter(payload[0], async_with_compute_stream, *before) as turn:
            if handle is None:
                kind, ids = self._kind(payload, topk_idx, num_experts, num_max_tokens_per_rank, num_sms, do_cpu_sync)
                if stats is not None:
                    check_stats(stats, self._pool.experts_per_rank(kind.num_experts))
                sent = torch.zeros(ids.shape, dtype=torch.float32, device=ids.device) if weights is None else weights
                got = self._high.dispatch(payload, ids, sent, kind, keep=not do_expand)
                handle = _handle_of(got, ids, do_handle_copy, do_expand, expert_alignment or 1, num_sms)
                rows, local, came = [got.x, got.scales], got.topk_idx, got.topk_weights
                if stats is not None:
                    stats += handle.num_unaligned_recv_tokens_per_expert
            else:
                *rows, came = self._high.dispatch_again(payload, handle._inner, weights)
                local, came = handle._ids, torch.where(handle._ids < 0, 0.0, came)
            taken, scales, came = _arranged(handle, rows, came, do_zero_padding, use_tma_aligned_col_major_sf)
            made = [taken, scales, came, handle.topk_idx, *_kept(handle)]
            event = turn.done([*payload, topk_idx, weights, stats], made)
        received = taken if scales is None else (taken, scales)
        return received, None if do_expand else local, None if weights is None else came, handle, event

    def combine(
        self, x: torch.Tensor, handle: EPHandle, topk_weights: torch.Tensor | None = None,
        bias: torch.Tensor | tuple[torch.Tensor, ...] | None = None, num_sms: int = 0, num_qps: int = 0,
        previous_event: Event | None = None, previous_event_before_epilogue: Event | None = None,
        async_with_compute_stream: bool = False, allocate_on_comm_stream: bool = False, **newer: object,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:  # fmt: skip
        """Sum rows, which the caller has weighted, at the source. Collective.

        Args:
            x: [N, H] in the order of dispatch, or expanded [P, H], whose padding is not read.
            topk_weights: float32 [N, K], expanded [P], to return, each to its (token, k), or None.
            bias: [T, H], or up to two of them, added at the source in fp32.
            num_sms: taken; that of the dispatch counts.
            Others: as in `dispatch`.

        Returns ([T, H], weights [T, K] or None, event).
        """
        if newer:
            unknown("combine", newer)
        if not isinstance(handle, EPHandle):
            raise ArgumentError("handle", "what dispatch gave", type(handle).__name__)
        extra = biases(bias, handle._inner.inner.num_tokens, x.shape[1])
        _check_rows(handle, x, topk_weights)
        before = previous_event, previous_event_before_epilogue
        with self._watched, self._streams.enter(x, async_with_compute_stream, *before) as turn:
            y, weights = x, topk_weights
            if handle._expansion is not None:
                y = handle._expansion.summed(x)
                weights = None if topk_weights is None else handle._expansion.folded(topk_weights)
            z, home = self._high.combine(y.contiguous(), handle._inner, weights)
            z = with_bias(z, extra)
            event = turn.done([x, topk_weights, *extra, *_kept(handle)], [z, home])
        return z, home, event

    # Inside.

    def _kind(
        self, payload: Payload, topk_idx: torch.Tensor | None, num_experts: int | None, most: int | None,
        num_sms: int, do_cpu_sync: bool | None,
    ) -> tuple[Any, torch.Tensor]:  # fmt: skip
        ids = checked_ids(topk_idx)
        if num_experts is None:
            raise ArgumentError("num_experts", "the number of all experts", None)
        most = self.num_max_tokens_per_rank if most is None else most
        if type(most) is not int or most < max(1, len(payload[0])):
            raise ArgumentError("num_max_tokens_per_rank", f"T = {len(payload[0])} or more, and 1", repr(most))
        sms = None if num_sms in (0, hints.NUM_SMS) else num_sms
        fixed = self._pool.size * most if do_cpu_sync is False else 0
        return self._high.kind(payload, num_experts, ids.shape[1], fixed, sms, sms, most=most), ids


def get_physical_domain_size(group: Any) -> tuple[int, int]:
    """(hosts, ranks of each) of a torch.distributed.ProcessGroup. Collective. ArgumentError where hosts differ."""
    hosts = Counter(TorchGroup(group).all_gather(boot_id().encode(), FrameworkConfig.from_env().timeout_s))
    if len(set(hosts.values())) > 1:
        raise ArgumentError("group", "as many ranks on every host", sorted(hosts.values()))
    return len(hosts), min(hosts.values())


def get_logical_domain_size(group: Any, allow_hybrid_mode: bool = True) -> tuple[int, int]:
    """(1, R) of a torch.distributed.ProcessGroup: see `ElasticBuffer.get_logical_domain_size`."""
    return 1, group.size()


def _same_routing(
    handle: object, topk_idx: torch.Tensor | None, do_cpu_sync: bool | None, do_expand: bool,
    given: tuple[int | None, int | None, int | None],
) -> None:  # fmt: skip
    """What is given beside a handle must be what it was made with."""
    if not isinstance(handle, EPHandle):
        raise ArgumentError("handle", "what dispatch gave", type(handle).__name__)
    if topk_idx is not None:
        raise ArgumentError("topk_idx", "None beside a handle", "a tensor")
    if do_cpu_sync:
        raise ArgumentError("do_cpu_sync", "None or False beside a handle", True)
    names = "num_experts", "num_max_tokens_per_rank", "expert_alignment"
    for name, value in zip((*names, "do_expand"), (*given, do_expand), strict=True):
        if value is not None and value != getattr(handle, name):
            raise ArgumentError(name, f"{getattr(handle, name)} as of the handle", value)


def _handle_of(
    got: Delivered, ids: torch.Tensor, copied: bool, do_expand: bool, alignment: int, num_sms: int
) -> EPHandle:
    """Of a dispatch, with where its expanded rows lie."""
    kind, counts = got.handle.kind, got.counts
    assert counts is not None
    padded = [-(-count // alignment) * alignment for count in got.counted]
    num_rows = got.handle.num_rows
    fixed = expansion.most_rows(num_rows, kind.topk, len(counts), alignment)
    num_expanded = fixed if kind.num_worst_tokens else sum(padded)
    return EPHandle(
        do_expand, kind.num_experts, alignment, kind.num_max_tokens_per_rank, num_sms, ids.clone() if copied else ids,
        num_rows, num_expanded, padded, got.source_rows.cumsum(0, dtype=torch.int32),
        expansion.groups(counts, alignment)[do_expand].int(), counts, got.handle, got.topk_idx,
        Expansion.of(got.topk_idx, counts, alignment, num_expanded) if do_expand else None,
    )  # fmt: skip


def _arranged(
    handle: EPHandle, payload: list[Any], weights: torch.Tensor, zero_padding: bool, column_major: bool
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """What came [N, ...], as the caller gets it; column_major: of scales."""
    rows, scales = payload
    if handle._expansion is not None:
        rows, scales = handle._expansion.payload(rows, scales, zero_padding)
        weights = handle._expansion.weights(weights)
    return rows, expansion.column_major(scales) if scales is not None and column_major else scales, weights


def _kept(handle: EPHandle) -> list[torch.Tensor]:
    """Tensors of a handle that later operations read."""
    found = handle._expansion
    counts = handle.num_unaligned_recv_tokens_per_expert, handle.psum_num_recv_tokens_per_expert
    slots = () if found is None else (found.slots, found.origins)
    return [handle._ids, handle.psum_num_recv_tokens_per_scaleup_rank, *counts, *slots]


def _check_rows(handle: EPHandle, x: torch.Tensor, topk_weights: torch.Tensor | None) -> None:
    expanded = handle._expansion is not None
    rows = handle.num_expanded_tokens if expanded else handle.num_recv_tokens
    if x.ndim != 2 or len(x) != rows:
        raise ArgumentError("x", f"[{rows}, H]", list(x.shape))
    shape = (rows,) if expanded else (rows, handle.topk_idx.shape[1])
    if topk_weights is not None and (topk_weights.shape != shape or topk_weights.dtype != torch.float32):
        got = list(topk_weights.shape), topk_weights.dtype
        raise ArgumentError("topk_weights", f"float32 {list(shape)}", got)
