"""DeepEP's low-latency calls: expert-major rows, weights given to combine, hooks that receive.

Callers give the weights to combine, so rows return unweighted (`exact_combine`) and are weighted at the source.
Dispatch sends, in place of weights, the origin of each row: `LowLatencyHandle` reads it back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, overload

import torch

from crossdock.deep_ep.pool import Pool
from ep_kernels import ArgumentError, DispatchHandle, HandleError, Layout, Mode, MoECommunicator, ScaleFormat

MARK_LIMIT = 1 << 24
"""Largest exact integer of float32: R * M must be less for `LowLatencyHandle` to identify rows."""
TMA_ROWS = 4
"""fp32 scales lie column-major, the columns 16 bytes apart at least, which are 4 rows."""

Received = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
Hook = Callable[[], None]


class BufferShape(NamedTuple):
    """Parameters of one communicator.

    Attributes:
        max_tokens: M.
        hidden: H.
        num_experts: E.
        topk: K.
        dtype: of x.
        scales: format of the fp8 scales, or None where x travels as it is.
    """

    max_tokens: int
    hidden: int
    num_experts: int
    topk: int
    dtype: torch.dtype
    scales: ScaleFormat | None


class StepSignature(NamedTuple):
    """Everything by which one call of `low_latency_dispatch` differs from another, but for its data."""

    max_tokens: int
    num_experts: int
    x_shape: tuple[int, ...]
    x_dtype: torch.dtype
    ids_shape: tuple[int, ...]
    ids_dtype: torch.dtype
    use_fp8: bool
    round_scale: bool
    use_ue8m0: bool


class PreparedStep(NamedTuple):
    """What calls of one signature share.

    Attributes:
        comm, shape: their communicator, and what it was made for.
        num_tokens: T.
        marks: weights that are no weights: the number of each token in the group, from 1 on.
    """

    comm: MoECommunicator
    shape: BufferShape
    num_tokens: int
    marks: torch.Tensor


class LowLatencyHandle(Sequence[Any]):
    """The handle that dispatch gives to combine. As DeepEP's, it is a sequence; its first two items are computed at
    first use:

    [0] int32 [L, R*M], the source's token index of each row (rows past the counts: 0)
    [1] int64 [L, R], begin << 32 | count of each source rank's rows
    [2] M, [3] H, [4] E
    """

    inner: DispatchHandle | None = None
    combine_buffer: torch.Tensor | None = None

    def __init__(self, prepared: PreparedStep) -> None:
        self.comm, self.shape, self.num_tokens, _ = prepared

    def received(self) -> DispatchHandle:
        """The communicator's own handle. HandleError before the receive hook has run."""
        if self.inner is None:
            raise HandleError("handle: its receive hook has not been called; call it before anything uses the rows")
        return self.inner

    def sources(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Parts [0] and [1]."""
        ranks, most = self.comm.size, self.shape.max_tokens
        if ranks * most >= MARK_LIMIT:
            raise ArgumentError("num_max_dispatch_tokens_per_rank", f"R * M < {MARK_LIMIT}", most)
        marks = self.comm.row_weights(self.received()).long() - 1
        filled = marks >= 0
        source = torch.where(filled, marks // most, ranks)
        counts = (source[..., None] == torch.arange(ranks, device=marks.device)).sum(1)
        begins = counts.cumsum(1) - counts
        return torch.where(filled, marks % most, 0).int(), begins << 32 | counts

    def __len__(self) -> int:
        return 5

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        shape = self.shape
        if isinstance(index, slice):
            return tuple(self[i] for i in range(*index.indices(len(self))))
        at = index + len(self) if index < 0 else index
        if not 0 <= at < len(self):
            raise IndexError(index)
        return self.sources()[at] if at < 2 else (shape.max_tokens, shape.hidden, shape.num_experts)[at - 2]


class LowLatency:
    """Low-latency operations of a Buffer."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._marks: dict[BufferShape, torch.Tensor] = {}
        self.prepared: dict[tuple[Any, ...], PreparedStep] = {}
        """Prepared calls, by signature."""

    def prepare(self, signature: StepSignature, like: torch.Tensor) -> PreparedStep:
        """For calls of this signature on tensors like this one; `prepared` has it then. Raises ArgumentError."""
        of = signature
        if len(of.ids_shape) != 2 or of.ids_dtype != torch.int64:
            raise ArgumentError("topk_idx", "int64 [T, K]", (list(of.ids_shape), of.ids_dtype))
        if of.use_ue8m0 and not (of.use_fp8 and of.round_scale):
            raise ArgumentError("use_ue8m0", "False unless use_fp8 and round_scale are on", True)
        if len(of.x_shape) != 2:
            raise ArgumentError("x", "[T, H]", list(of.x_shape))
        packed = ScaleFormat.UE8M0_PACKED if of.use_ue8m0 else ScaleFormat.UE8M0
        scales = (packed if of.round_scale else ScaleFormat.FP32) if of.use_fp8 else None
        tokens, hidden = of.x_shape
        shape = BufferShape(of.max_tokens, hidden, of.num_experts, of.ids_shape[1], of.x_dtype, scales)
        comm = self._communicator(shape, like)
        made = PreparedStep(comm, shape, tokens, self._marks[shape][:tokens])
        if tokens <= of.max_tokens:
            self.prepared[signature] = made
        return made

    def _communicator(self, shape: BufferShape, like: torch.Tensor) -> MoECommunicator:
        comm = self._pool.get(shape)
        if comm is not None:
            return comm
        self._pool.experts_per_rank(shape.num_experts)
        quantized = {} if shape.scales is None else {"quantize": True, "scale_format": shape.scales}
        comm = self._pool.make(
            shape, like, mode=Mode.LL, layout=Layout.EXPERT_MAJOR, exact_combine=True, dtype=shape.dtype,
            num_experts=shape.num_experts, hidden_size=shape.hidden, topk=shape.topk,
            max_tokens_per_rank=shape.max_tokens, **quantized,
        )  # fmt: skip
        first = 1 + self._pool.rank * shape.max_tokens
        marks = torch.arange(first, first + shape.max_tokens, dtype=torch.float32, device=like.device)
        self._marks[shape] = marks[:, None].expand(-1, shape.topk).contiguous()
        return comm

    def dispatch(
        self, x: torch.Tensor, topk_idx: torch.Tensor, prepared: PreparedStep, stats: torch.Tensor | None, hooked: bool
    ) -> tuple[Received, torch.Tensor, LowLatencyHandle, Hook]:
        """(rows [L, R*M, H], or (rows, scales); counts int32 [L]; handle; hook). With `hooked` results are valid
        once the hook has been called. `stats` [L] grows by the counts."""
        handle = LowLatencyHandle(prepared)
        comm, shape, _, marks = prepared
        if stats is not None:
            _check_stats(stats, shape.num_experts // self._pool.size)
        if not hooked:
            out, handle.inner = comm.dispatch(x, topk_idx, marks)
            counts = out.counts
            if shape.scales is None and stats is None:
                return out.tokens, counts, handle, nothing
            scales = None if shape.scales is None else _column_major(out.scales)
            _finish(None if scales is None else out.scales, scales, counts, stats)
            return _pair(out.tokens, scales), counts, handle, nothing
        request = comm.dispatch_async(x, topk_idx, marks)
        tokens, raw, counts = request.buffers()
        scales = _column_major(raw)

        def hook() -> None:
            if handle.inner is None:
                handle.inner = request.wait()[1]
                _finish(raw, scales, counts, stats)

        return _pair(tokens, scales), counts, handle, hook

    def combine_now(
        self, x: torch.Tensor, topk_weights: torch.Tensor, handle: LowLatencyHandle, out: torch.Tensor | None
    ) -> torch.Tensor:
        """Return rows, weighted: `out`, or a new tensor [T, H]."""
        if out is None or out.is_contiguous():
            return handle.comm.combine(x, handle.received(), out=out, topk_weights=topk_weights)
        return out.copy_(handle.comm.combine(x, handle.received(), topk_weights=topk_weights))

    def combine(self, x: torch.Tensor, topk_weights: torch.Tensor, handle: LowLatencyHandle, out: torch.Tensor) -> Hook:
        """Return rows, weighted, into `out` [T, H], which is complete once the hook has been called."""
        inner = handle.received()
        z = out if out.is_contiguous() else torch.empty_like(out, memory_format=torch.contiguous_format)
        request = handle.comm.combine_async(x, inner, out=z, topk_weights=topk_weights)

        def hook() -> None:
            if not request.done:
                request.wait()
                if z is not out:
                    out.copy_(z)

        return hook

    def combine_buffer(self, handle: LowLatencyHandle) -> torch.Tensor:
        """[L, R*M, H] to write expert rows into for a combine with `zero_copy`."""
        handle.combine_buffer = handle.comm.combine_input(handle.received())
        return handle.combine_buffer


def nothing() -> None:
    """The hook of a complete operation."""


def _check_stats(stats: torch.Tensor, num_local: int) -> None:
    """Before anything is sent: added to afterwards, others would be one step ahead."""
    if stats.dtype != torch.int32 or stats.shape != (num_local,):
        wanted, got = f"int32 [{num_local}]", (list(stats.shape), stats.dtype)
        raise ArgumentError("cumulative_local_expert_recv_stats", wanted, got)


def _pair(tokens: torch.Tensor, scales: torch.Tensor | None) -> Received:
    return tokens if scales is None else (tokens, scales)


def _column_major(scales: torch.Tensor | None) -> torch.Tensor | None:
    """Room for fp32 scales [L, rows, blocks] whose row index is the fast one; packed scales lie so already."""
    if scales is None or scales.dtype != torch.float32:
        return scales
    num_local, rows, blocks = scales.shape
    stride = -(-rows // TMA_ROWS) * TMA_ROWS
    room = torch.empty(num_local, blocks, stride, dtype=torch.float32, device=scales.device)
    return room.transpose(1, 2)[:, :rows]


def _finish(
    raw: torch.Tensor | None, scales: torch.Tensor | None, counts: torch.Tensor, stats: torch.Tensor | None
) -> None:
    if scales is not None and raw is not None and scales is not raw:
        scales.copy_(raw)
    if stats is not None:
        stats += counts
