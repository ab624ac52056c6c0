"""DeepEP's high-throughput calls: compact rows, one per (token, rank); the caller applies weights, combine only sums.

A step may bring any number of tokens: before each dispatch of a new routing the ranks exchange their numbers, unless
the caller bounds them (`num_worst_tokens`), and replace the communicator by a larger one where necessary; sizes are
powers of two. Rows are copies, because callers keep them (training).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from crossdock.deep_ep.pool import Pool, PooledCommunicator
from ep_kernels import ArgumentError, DispatchHandle, DispatchOutput, Layout, Mode, MoECommunicator
from ep_kernels.transports.base import EXCHANGE_WORDS

SMALLEST = 128
"""Tokens per rank of the first communicator; then powers of two."""

SPARE = 1024
"""Places for what is not counted: additions of a GPU to one place wait for each other."""

Payload = tuple[torch.Tensor, torch.Tensor | None]
"""x [T, H] and its scales [T, S], or None."""


class PoolKey(NamedTuple):
    """Parameters of one communicator, except its number of tokens, and those of a call.

    Attributes:
        dtype: of x.
        scale_columns: S, 0 without scales.
        scale_dtype: of the scales.
        num_worst_tokens: rows that a rank gets, where shapes are fixed; 0 where they are exact, and in keys.
        dispatch_sms, combine_sms: multiprocessors of one operation, or None.
        output_dtype: of expert outputs, or None: that of x, bfloat16 where x is quantised.
        num_max_tokens_per_rank: M where all ranks name it; 0 where they ask each other, and in keys.
    """

    hidden: int
    dtype: torch.dtype
    scale_columns: int
    scale_dtype: torch.dtype
    num_experts: int
    topk: int
    num_worst_tokens: int
    dispatch_sms: int | None
    combine_sms: int | None
    output_dtype: torch.dtype | None = None
    num_max_tokens_per_rank: int = 0

    @property
    def key(self) -> PoolKey:
        return self._replace(num_worst_tokens=0, num_max_tokens_per_rank=0)


@dataclass(frozen=True, slots=True, eq=False)
class Handle:
    """The handle that dispatch gives to combine, and to a dispatch of the same routing.

    Attributes:
        comm: whose rows they are.
        inner, num_rows: its handle, and how many the caller has.
        kind: of the call.
    """

    comm: MoECommunicator
    inner: DispatchHandle
    num_rows: int
    kind: PoolKey

    def for_combine(self, y: torch.Tensor) -> tuple[torch.Tensor, DispatchHandle]:
        """Expert rows [N, H], and the communicator's handle for them. Of exact shapes: all that arrived. Fixed ones
        are filled up to all that may arrive, with NaN: a rank that was given fewer rows than came shows it."""
        if not self.kind.num_worst_tokens:
            return y.contiguous(), self.comm.trimmed(self.inner, self.num_rows)
        missing = self.inner.rows_shape[0] - self.num_rows
        if not missing:
            return y.contiguous(), self.inner
        return torch.nn.functional.pad(y, (0, 0, 0, missing), value=torch.nan), self.inner


@dataclass(frozen=True, slots=True)
class Delivered:
    """What arrived: rows and scales [N, ...], local ids int64 and weights [N, K], handle; rows per local expert, on the
    device int32 [L] and as a list (None and empty where shapes are fixed; with M named the first is there); rows per
    source rank, int32 [R], a view."""

    x: torch.Tensor
    scales: torch.Tensor | None
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor
    handle: Handle
    counts: torch.Tensor | None
    counted: list[int]
    source_rows: torch.Tensor


class HighThroughput:
    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def kind(
        self, payload: Payload, num_experts: int, topk: int, worst: int, dispatch_sms: int | None = None,
        combine_sms: int | None = None, output_dtype: torch.dtype | None = None, most: int = 0,
    ) -> PoolKey:  # fmt: skip
        """The parameters for this payload; `most`: M, or 0."""
        self._pool.experts_per_rank(num_experts)
        if type(worst) is not int or worst < 0 or worst % self._pool.size:
            wanted = f"a multiple of the group's {self._pool.size} ranks"
            raise ArgumentError("num_worst_tokens", wanted, repr(worst))
        if worst and worst < self._pool.size * len(payload[0]):
            raise ArgumentError("num_worst_tokens", f"R * T = {self._pool.size * len(payload[0])} or more", worst)
        return PoolKey(*_format(payload), num_experts, topk, worst, dispatch_sms, combine_sms, output_dtype, most)

    def dispatch(
        self,
        payload: Payload,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        kind: PoolKey,
        keep: bool = True,
    ) -> Delivered:
        """Each token to the ranks of its experts. Reads the device once, for the number of rows and the counts, unless
        shapes are fixed. Without `keep` the rows are views, good until the second dispatch after this."""
        place = self._place(kind, payload[0])
        with self._pool.step(place, kind) as comm:
            out, inner = comm.dispatch(_packed(payload), topk_idx, topk_weights)
        assert out.topk_ids is not None
        assert out.topk_weights is not None
        num_rows = kind.num_worst_tokens or len(out.topk_ids)
        arrived = place.numbers[:num_rows] < out.num_rows
        ids, weights = torch.where(arrived, out.topk_ids[:num_rows], -1).long(), out.topk_weights
        counts, counted = None, list[int]()
        if not kind.num_worst_tokens or kind.num_max_tokens_per_rank:
            size = comm.num_local_experts
            counts = _histogram(torch.where(ids < 0, size + place.numbers[:num_rows] % SPARE, ids), size)
        if kind.num_worst_tokens:
            weights = torch.where(arrived, weights[:num_rows], 0.0)
        else:
            assert counts is not None
            *counted, num_rows = torch.cat([counts, out.num_rows]).tolist()
        x, scales = _first(out, payload, num_rows)
        if keep:
            x, scales = x.clone(), None if scales is None else scales.clone()
        handle = Handle(comm, inner, num_rows, kind)
        return Delivered(x, scales, ids[:num_rows], weights[:num_rows], handle, counts, counted, out.counts)

    def dispatch_again(
        self, payload: Payload, handle: Handle, topk_weights: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """Other rows by the same routing, and weights [N, K], a view: these, or those of the first dispatch. Rows that
        differ in dtype, size or scales from the first ones travel as the bytes of such rows, in as many dispatches as
        it takes."""
        kind, packed = handle.kind, _packed(payload)
        if _format(payload) == (kind.hidden, kind.dtype, kind.scale_columns, kind.scale_dtype):
            out, _ = handle.comm.dispatch(packed, None, topk_weights, previous_handle=handle.inner)
            x, scales = _first(out, payload, handle.num_rows)
            assert out.topk_weights is not None
            return x.clone(), None if scales is None else scales.clone(), out.topk_weights[: handle.num_rows]
        parts = packed if isinstance(packed, tuple) else (packed,)
        if len(parts[-1]) != len(parts[0]):
            raise ArgumentError("scales", f"[{len(parts[0])}, S]", list(parts[-1].shape))
        widths = [part.shape[1] * part.itemsize for part in parts]
        sent = torch.cat([_bytes(part) for part in parts], 1)
        got_bytes, weights = self._bytes_again(sent, handle, topk_weights)
        moved = torch.split(got_bytes[:, : sum(widths)], widths, 1)
        got = [each.contiguous().view(part.dtype) for each, part in zip(moved, parts, strict=True)]
        return got[0], None if payload[1] is None else got[1].view(-1) if payload[1].ndim == 1 else got[1], weights

    def _bytes_again(
        self, rows: torch.Tensor, handle: Handle, topk_weights: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """uint8 [T, B] by the routing of a handle: [N, B] and what fills up the last of its communicator's rows; the
        weights [N, K] that came with the last ones."""
        kind, (num_tokens, num_bytes) = handle.kind, rows.shape
        width = kind.hidden * kind.dtype.itemsize
        number = -(-num_bytes // width)
        pieces = rows.new_zeros(num_tokens, number * width)
        pieces[:, :num_bytes] = rows
        scales = None
        if kind.scale_columns:
            scales = torch.zeros(num_tokens, kind.scale_columns, dtype=kind.scale_dtype, device=rows.device)
        got = []
        for piece in pieces.view(num_tokens, number, width).transpose(0, 1).contiguous().view(kind.dtype):
            out, _ = handle.comm.dispatch(_packed((piece, scales)), None, topk_weights, previous_handle=handle.inner)
            got.append(out.tokens[: handle.num_rows].view(torch.uint8).clone())
        assert out.topk_weights is not None
        return torch.cat(got, 1), out.topk_weights[: handle.num_rows]

    def combine(
        self, x: torch.Tensor, handle: Handle, topk_weights: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Rows [N, H] summed over the ranks at the source, [T, H]; and the returned weights [N, K], [T, K]."""
        y, inner = handle.for_combine(x)
        if topk_weights is None:
            return handle.comm.combine(y, inner), None
        weights, _ = handle.for_combine(topk_weights)
        request = handle.comm.combine_async(y, inner, row_weights=weights)
        return request.wait(), request.weights

    def _place(self, kind: PoolKey, x: torch.Tensor) -> PooledCommunicator:
        """A communicator large enough for this step's tokens of every rank. Collective."""
        place, most = self._pool.get(kind.key), x.shape[0]
        if kind.num_worst_tokens or kind.num_max_tokens_per_rank:
            most = kind.num_max_tokens_per_rank or kind.num_worst_tokens // self._pool.size
        elif place is not None:
            most = self._most(place, kind, most)
        if place is not None and most <= place.comm.config.max_tokens_per_rank:
            return place
        del place  # its memory may be needed for the other
        return self._make(kind, x, most)

    def _most(self, place: PooledCommunicator, kind: PoolKey, mine: int) -> int:
        with self._pool.step(place, kind) as comm:
            words = comm.exchange([mine] + [0] * (EXCHANGE_WORDS - 1))
        return max(word[0] for word in words if word is not None)

    def _make(self, kind: PoolKey, x: torch.Tensor, num_tokens: int) -> PooledCommunicator:
        scaled: dict[str, Any] = {}
        if kind.scale_columns:
            scaled = {"scale_columns": kind.scale_columns, "scale_dtype": kind.scale_dtype}
        place = self._pool.make(
            kind.key, kind, x, _room, num_tokens, mode=Mode.HT, layout=Layout.FLAT,
            exact_shapes=False, dtype=kind.dtype, num_experts=kind.num_experts, hidden_size=kind.hidden, topk=kind.topk,
            dispatch_sms=kind.dispatch_sms, combine_sms=kind.combine_sms, output_dtype=kind.output_dtype, **scaled,
        )  # fmt: skip
        rows = self._pool.size * place.comm.config.max_tokens_per_rank
        place.numbers = torch.arange(rows, dtype=torch.int32, device=x.device)[:, None]
        return place


def _room(num_tokens: int) -> int:
    """M of a communicator that serves `num_tokens` per rank."""
    return max(SMALLEST, 1 << (num_tokens - 1).bit_length())


def layout(topk_idx: torch.Tensor, num_experts: int, num_ranks: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(tokens per rank int32 [R], per expert int32 [E], bool [T, R]: which token goes there). Never synchronises."""
    device, valid = topk_idx.device, (topk_idx >= 0) & (topk_idx < num_experts)
    rank = torch.where(valid, topk_idx // (num_experts // num_ranks), num_ranks)
    to_rank = torch.zeros(len(topk_idx), num_ranks + 1, dtype=torch.bool, device=device).scatter_(1, rank, True)
    to_rank = to_rank[:, :num_ranks].contiguous()
    return (
        to_rank.sum(0, dtype=torch.int32),
        _histogram(torch.where(valid, topk_idx, num_experts), num_experts),
        to_rank,
    )


def _histogram(ids: torch.Tensor, size: int) -> torch.Tensor:
    """int32 [size]: how often each value occurs; `size` and SPARE - 1 values from there on are not counted. `bincount`
    would synchronise."""
    flat = ids.flatten()
    counts = torch.zeros(size + SPARE, dtype=torch.int32, device=ids.device)
    return counts.scatter_add_(0, flat, counts.new_ones(1).expand(len(flat)))[:size]


def _format(payload: Payload) -> tuple[int, torch.dtype, int, torch.dtype]:
    """(H, dtype of x, S or 0, dtype of the scales)."""
    x, scales = payload
    columns = 0 if scales is None else 1 if scales.ndim == 1 else scales.shape[1]
    return x.shape[1], x.dtype, columns, torch.float32 if scales is None else scales.dtype


def _packed(payload: Payload) -> Any:
    x, scales = payload
    if scales is None:
        return x.contiguous()
    return x.contiguous(), (scales[:, None] if scales.ndim == 1 else scales).contiguous()


def _bytes(rows: torch.Tensor) -> torch.Tensor:
    """uint8 [T, B], a view; contiguous rows without a token may have any strides."""
    return rows.detach().as_strided(rows.shape, (rows.shape[1], 1)).view(torch.uint8)


def _first(out: DispatchOutput, payload: Payload, num_rows: int) -> Payload:
    """So many rows; scales with as many dimensions as the caller's."""
    scales = payload[1]
    if scales is None or out.scales is None:
        return out.tokens[:num_rows], None
    return out.tokens[:num_rows], out.scales[:num_rows].view(-1) if scales.ndim == 1 else out.scales[:num_rows]
