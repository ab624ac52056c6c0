"""DeepEP's low-latency calls: expert-major rows, weights given to combine, hooks that receive.

Callers give the weights to combine, so rows return unweighted (`exact_combine`) and are weighted at the source.
Dispatch sends, in place of weights, the origin of each row: `LowLatencyHandle` reads it back.

Callers name M in each call, and get rows [L, R*M, H]. The first few M have communicators of that size, whose rows
callers get as they lie. Later ones share those of the next power of two, at the price of a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, overload

import torch

from crossdock.deep_ep.pool import Pool, PooledCommunicator
from ep_kernels import ArgumentError, DispatchHandle, HandleError, Layout, Mode, ScaleFormat

MARK_LIMIT = 1 << 24
"""Largest exact integer of float32: R * M must be less for `LowLatencyHandle` to identify rows."""
TMA_ROWS = 4
"""Scales lie column-major, the columns 16 bytes apart at least, which are 4 rows."""
EXACT_SIZES = 4
"""Communicators of one shape whose M is the caller's: an engine has one or two."""
PREPARED = 4096
"""Signatures that are remembered: one for each T."""

Received = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
Hook = Callable[[], None]


class BufferShape(NamedTuple):
    """Parameters of one communicator.

    Attributes:
        max_tokens: M, or more.
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

    num_max_dispatch_tokens_per_rank: int
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
        place, shape: their communicator, and what it was made for.
        call: parameters that are equal on all ranks.
        marks: weights that are no weights: the number of each token in the group, from 1 on.
    """

    place: PooledCommunicator
    shape: BufferShape
    call: LowLatencyCall
    num_tokens: int
    most: int
    marks: torch.Tensor


class LowLatencyCall(NamedTuple):
    """Parameters of a call that all ranks give alike."""

    num_max_dispatch_tokens_per_rank: int
    num_experts: int
    hidden: int
    topk: int
    x_dtype: torch.dtype
    scales: ScaleFormat | None


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
        self.comm, self.shape, self.num_tokens = prepared.place.comm, prepared.shape, prepared.num_tokens
        self.most = prepared.most
        self.num_rows = self.comm.size * self.most

    def received(self) -> DispatchHandle:
        """The communicator's own handle. HandleError before the receive hook has run."""
        if self.inner is None:
            raise HandleError("handle: its receive hook has not been called; call it before anything uses the rows")
        return self.inner

    def sources(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Parts [0] and [1]."""
        ranks, most = self.comm.size, self.shape.max_tokens  # by which they were marked
        if ranks * most >= MARK_LIMIT:
            raise ArgumentError("num_max_dispatch_tokens_per_rank", f"R * M < {MARK_LIMIT}", most)
        marks = self.comm.row_weights(self.received())[:, : self.num_rows].long() - 1
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
        return self.sources()[at] if at < 2 else (self.most, shape.hidden, shape.num_experts)[at - 2]


class LowLatency:
    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self.prepared: dict[tuple[Any, ...], PreparedStep] = pool.shortcuts
        """Prepared calls, by signature."""

    def prepare(self, signature: StepSignature, like: torch.Tensor) -> PreparedStep:
        """For calls of this signature on tensors like this one; `prepared` has it then. Raises ArgumentError."""
        of, most = signature, signature.num_max_dispatch_tokens_per_rank
        if len(of.ids_shape) != 2 or of.ids_dtype != torch.int64:
            raise ArgumentError("topk_idx", "int64 [T, K]", (list(of.ids_shape), of.ids_dtype))
        if of.use_ue8m0 and not (of.use_fp8 and of.round_scale):
            raise ArgumentError("use_ue8m0", "False unless use_fp8 and round_scale are on", True)
        if len(of.x_shape) != 2:
            raise ArgumentError("x", "[T, H]", list(of.x_shape))
        tokens, hidden = of.x_shape
        if type(most) is not int or most < max(tokens, 1):
            raise ArgumentError("num_max_dispatch_tokens_per_rank", f"an int, x has {tokens} tokens", repr(most))
        packed = ScaleFormat.UE8M0_PACKED if of.use_ue8m0 else ScaleFormat.UE8M0
        scales = (packed if of.round_scale else ScaleFormat.FP32) if of.use_fp8 else None
        call = LowLatencyCall(most, of.num_experts, hidden, of.ids_shape[1], of.x_dtype, scales)
        shape = self._shape(call)
        place = self._pool.get(shape) or self._make(shape, call, like)
        made = PreparedStep(place, shape, call, tokens, most, place.numbers[:tokens])
        if len(self.prepared) >= PREPARED:
            self.prepared.clear()
        self.prepared[signature] = made
        return made

    def _shape(self, call: LowLatencyCall) -> BufferShape:
        """Of the communicator that serves a call."""
        most = call.num_max_dispatch_tokens_per_rank
        shape = BufferShape(most, call.hidden, call.num_experts, call.topk, call.x_dtype, call.scales)
        sizes = [key.max_tokens for key in self._pool.shapes() if isinstance(key, BufferShape) and key[1:] == shape[1:]]
        if most in sizes or len(sizes) < EXACT_SIZES:
            return shape
        return shape._replace(max_tokens=1 << (most - 1).bit_length())

    def _make(self, shape: BufferShape, call: LowLatencyCall, like: torch.Tensor) -> PooledCommunicator:
        self._pool.experts_per_rank(shape.num_experts)
        quantized: dict[str, Any] = {} if shape.scales is None else {"quantize": True, "scale_format": shape.scales}
        place = self._pool.make(
            shape, call, like, shape.max_tokens, mode=Mode.LL, layout=Layout.EXPERT_MAJOR, exact_combine=True,
            dtype=shape.dtype, num_experts=shape.num_experts, hidden_size=shape.hidden, topk=shape.topk, **quantized,
        )  # fmt: skip
        first = 1 + self._pool.rank * shape.max_tokens
        marks = torch.arange(first, first + shape.max_tokens, dtype=torch.float32, device=like.device)
        place.numbers = marks[:, None].expand(-1, shape.topk).contiguous()
        return place

    def dispatch(
        self, x: torch.Tensor, topk_idx: torch.Tensor, prepared: PreparedStep, stats: torch.Tensor | None, hooked: bool
    ) -> tuple[Received, torch.Tensor, LowLatencyHandle, Hook]:
        """(rows [L, R*M, H], or (rows, scales); counts int32 [L]; handle; hook). With `hooked` results are valid
        once the hook has been called. `stats` [L] grows by the counts."""
        handle = LowLatencyHandle(prepared)
        comm, shape, pool = handle.comm, handle.shape, self._pool
        if stats is not None:
            check_stats(stats, shape.num_experts // pool.size)
        pool.begin(prepared.place, prepared.call)
        try:
            if hooked:
                request = comm.dispatch_async(x, topk_idx, prepared.marks)
            else:
                out, handle.inner = comm.dispatch(x, topk_idx, prepared.marks)
        except BaseException as error:
            pool.failed(error)
            raise
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        tokens, raw, counts = request.buffers() if hooked else (out.tokens, shape.scales and out.scales, out.counts)
        rows, scales = _exact(tokens, handle.num_rows, copies), _column_major(raw, handle.num_rows, copies)
        if not hooked:
            _finish(copies, counts, stats)
            return _pair(rows, scales), counts, handle, nothing

        def hook() -> None:
            if handle.inner is None:
                handle.inner = request.wait()[1]
                _finish(copies, counts, stats)

        return _pair(rows, scales), counts, handle, hook

    def combine_now(
        self, x: torch.Tensor, topk_weights: torch.Tensor, handle: LowLatencyHandle, out: torch.Tensor | None
    ) -> torch.Tensor:
        """Return rows, weighted: `out`, or a new tensor [T, H]."""
        if out is None or out.is_contiguous():
            return handle.comm.combine(_all_rows(x, handle), handle.received(), out=out, topk_weights=topk_weights)
        return out.copy_(self.combine_now(x, topk_weights, handle, None))

    def combine(self, x: torch.Tensor, topk_weights: torch.Tensor, handle: LowLatencyHandle, out: torch.Tensor) -> Hook:
        """Return rows, weighted, into `out` [T, H], which is complete once the hook has been called."""
        inner = handle.received()
        z = out if out.is_contiguous() else torch.empty_like(out, memory_format=torch.contiguous_format)
        request = handle.comm.combine_async(_all_rows(x, handle), inner, out=z, topk_weights=topk_weights)

        def hook() -> None:
            if not request.done:
                request.wait()
                if z is not out:
                    out.copy_(z)

        return hook

    def combine_buffer(self, handle: LowLatencyHandle) -> torch.Tensor:
        """[L, R*M, H] to write expert rows into for a combine with `zero_copy`."""
        room = handle.comm.combine_input(handle.received())
        handle.combine_buffer = room if room.shape[1] == handle.num_rows else room[:, : handle.num_rows].contiguous()
        return handle.combine_buffer


def nothing() -> None:
    """The hook of a complete operation."""


def check_stats(stats: torch.Tensor, num_local: int) -> None:
    """Before anything is sent: added to afterwards, others would be one step ahead."""
    if stats.dtype != torch.int32 or stats.shape != (num_local,):
        wanted, got = f"int32 [{num_local}]", (list(stats.shape), stats.dtype)
        raise ArgumentError("cumulative_local_expert_recv_stats", wanted, got)


def _pair(tokens: torch.Tensor, scales: torch.Tensor | None) -> Received:
    return tokens if scales is None else (tokens, scales)


def _exact(rows: torch.Tensor, num_rows: int, copies: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """[L, num_rows, H] of [L, rows, H]; what is to be copied for it, (to, from), goes to `copies`."""
    if rows.shape[1] == num_rows:
        return rows
    room = rows.new_empty(rows.shape[0], num_rows, rows.shape[2])
    copies.append((room, rows[:, :num_rows]))
    return room


def _column_major(
    scales: torch.Tensor | None, num_rows: int, copies: list[tuple[torch.Tensor, torch.Tensor]]
) -> torch.Tensor | None:
    """As `_exact` of scales [L, rows, blocks], with the row index as the fast one; packed ones lie so already."""
    if scales is None or (scales.dtype != torch.float32 and scales.shape[1] == num_rows):
        return scales
    num_local, _, blocks = scales.shape
    stride = -(-num_rows // TMA_ROWS) * TMA_ROWS
    room = scales.new_empty(num_local, blocks, stride).transpose(1, 2)[:, :num_rows]
    copies.append((room, scales[:, :num_rows]))
    return room


def _all_rows(y: torch.Tensor, handle: LowLatencyHandle) -> torch.Tensor:
    """Expert rows [L, R*M, H] in the shape of the communicator's rows; those past the counts are not read."""
    shape = handle.received().rows_shape
    if shape[1] == handle.num_rows or y.shape[:2] != (shape[0], handle.num_rows):  # the communicator names what it is
        return y
    room = y.new_empty(*shape, y.shape[2])
    room[:, : handle.num_rows] = y
    return room


def _finish(copies: list[tuple[torch.Tensor, torch.Tensor]], counts: torch.Tensor, stats: torch.Tensor | None) -> None:
    for to, source in copies:
        to.copy_(source)
    if stats is not None:
        stats += counts
