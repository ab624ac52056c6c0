"""DeepEP's high-throughput calls: compact rows, one per (token, rank); the caller applies weights, combine only sums.

A step may bring any number of tokens: before each dispatch of a new routing the ranks exchange their numbers, and
replace the communicator by a larger one where necessary. Rows are copies, because callers keep them (training).
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch

from crossdock.deep_ep.pool import Pool
from ep_kernels import ArgumentError, DispatchHandle, DispatchOutput, Layout, Mode, MoECommunicator
from ep_kernels.transports.base import EXCHANGE_WORDS

SMALLEST = 128
"""Tokens per rank of the first communicator; then powers of two."""

SPARE = 1024
"""Places for what is not counted: additions of a GPU to one place wait for each other."""

Payload = tuple[torch.Tensor, torch.Tensor | None]
"""x [T, H] and its scales [T, S], or None."""


@dataclass(frozen=True, slots=True)
class PoolKey:
    """Parameters of one communicator, except its number of tokens.

    Attributes:
        hidden: H.
        dtype: of x.
        scale_columns: S, 0 without scales.
        scale_dtype: of the scales.
        num_experts: E.
        topk: K.
        worst: most rows that a rank may receive, where shapes are fixed; 0 where they are exact.
        num_sms: multiprocessors of one operation, or None.
        output_dtype: of expert outputs, or None: that of x, bfloat16 where x is quantised.
    """

    hidden: int
    dtype: torch.dtype
    scale_columns: int
    scale_dtype: torch.dtype
    num_experts: int
    topk: int
    worst: int
    num_sms: int | None
    output_dtype: torch.dtype | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Handle:
    """The handle that dispatch gives to combine, and to a dispatch of the same routing.

    Attributes:
        comm: whose rows they are.
        inner, num_rows: its handle, and how many there are.
        trimmed: the handle for `num_rows` rows.
        kind: what it was made for.
    """

    comm: MoECommunicator
    inner: DispatchHandle
    num_rows: int
    trimmed: DispatchHandle
    kind: PoolKey


@dataclass(frozen=True, slots=True)
class Delivered:
    """What arrived: rows and scales [N, ...], local ids int64 and weights [N, K], handle; rows per local expert, on the
    device int32 [L] and as a list (None and empty where shapes are fixed)."""

    x: torch.Tensor
    scales: torch.Tensor | None
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor
    handle: Handle
    counts: torch.Tensor | None
    counted: list[int]


class HighThroughput:
    """High-throughput operations of a Buffer."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._numbers: weakref.WeakKeyDictionary[MoECommunicator, torch.Tensor] = weakref.WeakKeyDictionary()

    def kind(
        self, payload: Payload, num_experts: int, topk: int, worst: int, num_sms: int | None,
        output_dtype: torch.dtype | None = None,
    ) -> PoolKey:  # fmt: skip
        """The parameters for this payload."""
        self._pool.experts_per_rank(num_experts)
        if worst % self._pool.size:
            raise ArgumentError("num_worst_tokens", f"a multiple of the group's {self._pool.size} ranks", worst)
        return PoolKey(*_format(payload), num_experts, topk, worst, num_sms, output_dtype)

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
        comm = self._communicator(kind, payload[0])
        out, inner = comm.dispatch(_packed(payload), topk_idx, topk_weights)
        assert out.topk_ids is not None
        assert out.topk_weights is not None
        numbers = self._row_numbers(comm, out.topk_ids)
        ids = torch.where(numbers < out.num_rows, out.topk_ids, -1).long()
        num_rows, counts, counted, trimmed = len(ids), None, list[int](), inner
        if not kind.worst:
            size = comm.num_local_experts
            counts = _histogram(torch.where(ids < 0, size + numbers % SPARE, ids), size)
            *counted, num_rows = torch.cat([counts, out.num_rows]).tolist()
            ids, trimmed = ids[:num_rows], comm.trimmed(inner, num_rows)
        x, scales = _first(out, payload, num_rows)
        if keep:
            x, scales = x.clone(), None if scales is None else scales.clone()
        handle = Handle(comm, inner, num_rows, trimmed, kind)
        return Delivered(x, scales, ids, out.topk_weights[:num_rows], handle, counts, counted)

    def _row_numbers(self, comm: MoECommunicator, ids: torch.Tensor) -> torch.Tensor:
        """int32 [rows, 1]."""
        found = self._numbers.get(comm)
        if found is None:
            found = self._numbers[comm] = torch.arange(len(ids), dtype=torch.int32, device=ids.device)[:, None]
        return found

    def dispatch_again(self, payload: Payload, handle: Handle) -> Payload:
        """Other rows by the same routing. Rows that differ in dtype, size or scales from the first ones travel as the
        bytes of such rows, in as many dispatches as it takes."""
        kind, packed = handle.kind, _packed(payload)
        if _format(payload) == (kind.hidden, kind.dtype, kind.scale_columns, kind.scale_dtype):
            out, _ = handle.comm.dispatch(packed, None, None, previous_handle=handle.inner)
            x, scales = _first(out, payload, handle.num_rows)
            return x.clone(), None if scales is None else scales.clone()
        parts = packed if isinstance(packed, tuple) else (packed,)
        if len(parts[-1]) != len(parts[0]):
            raise ArgumentError("scales", f"[{len(parts[0])}, S]", list(parts[-1].shape))
        widths = [part.shape[1] * part.itemsize for part in parts]
        sent = torch.cat([_bytes(part) for part in parts], 1)
        moved = self._bytes_again(sent, handle)[:, : sum(widths)].split(widths, 1)
        got = [each.contiguous().view(part.dtype) for each, part in zip(moved, parts, strict=True)]
        return got[0], None if payload[1] is None else got[1].view(-1) if payload[1].ndim == 1 else got[1]

    def _bytes_again(self, rows: torch.Tensor, handle: Handle) -> torch.Tensor:
        """uint8 [T, B] by the routing of a handle: [N, B] and what fills up the last of its communicator's rows."""
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
            out, _ = handle.comm.dispatch(_packed((piece, scales)), None, None, previous_handle=handle.inner)
            got.append(out.tokens[: handle.num_rows].view(torch.uint8).clone())
        return torch.cat(got, 1)

    def combine(
        self, x: torch.Tensor, handle: Handle, topk_weights: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Rows [N, H] summed over the ranks at the source, [T, H]; and the returned weights [N, K], [T, K]."""
        if topk_weights is None:
            return handle.comm.combine(x, handle.trimmed), None
        request = handle.comm.combine_async(x, handle.trimmed, row_weights=topk_weights.contiguous())
        return request.wait(), request.weights

    def _communicator(self, kind: PoolKey, x: torch.Tensor) -> MoECommunicator:
        """A communicator large enough for this step's tokens of every rank. Collective."""
        comm = self._pool.get(kind)
        if kind.worst:
            return comm or self._make(kind, x, kind.worst // self._pool.size)
        most = self._most_tokens(comm, x.shape[0])
        if comm is not None and most <= comm.config.max_tokens_per_rank:
            return comm
        return self._make(kind, x, max(SMALLEST, 1 << (most - 1).bit_length()))

    def _most_tokens(self, comm: MoECommunicator | None, mine: int) -> int:
        if comm is not None:
            words = comm.exchange([mine] + [0] * (EXCHANGE_WORDS - 1))
            return max(word[0] for word in words if word is not None)
        answers = self._pool.group.all_gather(mine.to_bytes(8, "little"), 0)
        return max(1, *(int.from_bytes(answer, "little") for answer in answers))

    def _make(self, kind: PoolKey, x: torch.Tensor, max_tokens: int) -> MoECommunicator:
        scaled: dict[str, Any] = {}
        if kind.scale_columns:
            scaled = {"scale_columns": kind.scale_columns, "scale_dtype": kind.scale_dtype}
        return self._pool.make(
            kind, x, mode=Mode.HT, layout=Layout.FLAT, exact_shapes=False, dtype=kind.dtype,
            num_experts=kind.num_experts, hidden_size=kind.hidden, topk=kind.topk, max_tokens_per_rank=max_tokens,
            num_sms=kind.num_sms, output_dtype=kind.output_dtype, **scaled,
        )  # fmt: skip


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
