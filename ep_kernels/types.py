"""Plain frozen records that cross the public API. No behaviour beyond what a record needs.

Letters: T tokens on this rank, H hidden size, K experts per token, E experts, R ranks, L experts on this rank,
M most tokens per rank, N rows received, S scale columns.
"""

from __future__ import annotations

import enum
import os
import secrets
from dataclasses import dataclass, fields
from typing import Any, Protocol

import torch


class Mode(enum.Enum):
    """Which algorithm moves the tokens."""

    LL = "ll"
    """Low latency: fixed slots, no count exchange before the payload. Decode."""
    HT = "ht"
    """High throughput: counts first, then every row straight to its final compact place. Prefill, training."""
    AUTO = "auto"
    """One communicator, one layout; LL or HT chosen per call from `step_tokens`, which must be equal on all ranks."""


class CombineOrder(enum.Enum):
    """In which order combine adds the partials of a token's ranks; defined in `reference.combine`."""

    RANK = "rank"
    """Ascending ranks. The bits do not depend on which rank runs on which host."""
    DOMAIN = "domain"
    """The partials of one domain (ranks of one host) first, in ascending rank, then the sums of the domains, in
    ascending order of their lowest rank. The sum of another domain than the token's own is rounded to the combine dtype
    as it crosses; a partial alone in its domain crosses as it is. So a domain may send one row per token."""


class Layout(enum.Enum):
    """What the rows of `DispatchOutput.tokens` are, and so who applies the weights."""

    EXPERT_MAJOR = "expert_major"
    """[L, slots, H], one row per (token, expert); combine applies the weights."""
    GROUPED = "grouped"
    """[N, H] compact, rows of one expert together, groups padded to `expert_alignment`; combine applies the weights."""
    RANK_MAJOR = "rank_major"
    """[R, M, H], one row per (token, rank); the caller weights and reduces its experts, combine sums over ranks."""
    FLAT = "flat"
    """[N, H] compact, one row per (token, rank), by (source rank, token); weights as RANK_MAJOR."""

    @property
    def per_expert(self) -> bool:
        """True where there is one row per (token, expert) and combine applies the weights."""
        return self in (Layout.EXPERT_MAJOR, Layout.GROUPED)


class Overflow(enum.Enum):
    """What happens to rows past the receive capacity."""

    RAISE = "raise"
    """The receiving rank raises CapacityError at wait(). Where `max_recv_rows` is less than may arrive, that costs GPUs
    one host read per dispatch: decode loops want DROP, and graph capture refuses RAISE. Elsewhere nothing is read."""
    DROP = "drop"
    """Rows past the capacity are dropped in canonical order and counted in `DispatchOutput.num_dropped`."""


class ScaleFormat(enum.Enum):
    """How fp8 block scales are rounded and laid out."""

    FP32 = "fp32"
    """scale = amax / 448 in fp32, row-major [rows, ceil(H/128)] float32."""
    UE8M0 = "ue8m0"
    """scale = amax / 448 rounded up to a power of two, row-major [rows, ceil(H/128)] float32."""
    UE8M0_PACKED = "ue8m0_packed"
    """UE8M0 exponents, 4 to an int32, column-major (the row index is the fast one), as DeepGEMM reads it."""


@dataclass(frozen=True, slots=True)
class DispatchOutput:
    """What dispatch delivered to this rank. Rows past the counts hold unspecified bytes and must not be read.

    Attributes:
        layout: what the rows are.
        tokens: [L, slots, H] | [N, H] | [R, M, H] | [N, H] for EXPERT_MAJOR | GROUPED | RANK_MAJOR | FLAT;
            dtype of the payload (float8_e4m3fn when quantised, the caller's dtype when passed through). May be a view
            of a registered buffer, which is recycled `max_in_flight` dispatches later: see `HandleError`.
        scales: block scales beside `tokens` (same leading shape; see ScaleFormat), or None; a view, too, maybe.
        counts: int32; [L] rows per local expert (EXPERT_MAJOR, GROUPED, without padding) or [R] rows per source rank.
        offsets: int32 [L+1], start row of each expert's group with padding included (GROUPED), else None.
        topk_ids: local expert ids, -1 = not here (`absent_id`: global ones); int32 [R, M, K] | [N, K] (RANK_MAJOR |
            FLAT), else None.
        topk_weights: float32, same shape as topk_ids, 0 where an expert is not here; else None.
        num_rows: int32 [1], rows delivered (GROUPED: padding included); the truth when shapes are worst-case.
        valid: bool [T] of the *source* tokens of this rank: False where every copy of a chosen expert is gone.
        num_dropped: int32 [1], rows dropped here by Overflow.DROP.
        num_invalid_ids: int32 [1], ids of this rank's topk_ids that were out of range and acted as -1.
    """

    layout: Layout
    tokens: torch.Tensor
    scales: torch.Tensor | None
    counts: torch.Tensor
    offsets: torch.Tensor | None
    topk_ids: torch.Tensor | None
    topk_weights: torch.Tensor | None
    num_rows: torch.Tensor
    valid: torch.Tensor
    num_dropped: torch.Tensor
    num_invalid_ids: torch.Tensor


@dataclass(slots=True, eq=False)
class DispatchHandle:
    """Carries the routing of one dispatch; opaque: only the communicator that made it writes to it. Reusable: for
    combine, for `previous_handle`, for backward.

    Attributes:
        owner: id of the communicator that made it, in this process; 0: none.
        seq: sequence number of the dispatch.
        num_tokens: T of the dispatch.
        mode: the algorithm that ran: LL or HT.
        epoch: membership under which the routing was made; a handle of an older epoch is refused.
        state: what the transport needs to find its rows again.
        rows_shape: leading shape of `DispatchOutput.tokens` (all but H).
        topk_ids: int32 or int64 [T, K] and
        topk_weights: float32 [T, K], as dispatched; used when the handle is a `previous_handle`. Not copies: the caller
            must not overwrite them while the handle lives. Set by the communicator, as is `owner`.
    """

    owner: int
    seq: int
    num_tokens: int
    mode: Mode
    epoch: int
    state: Any
    rows_shape: tuple[int, ...] = ()
    topk_ids: torch.Tensor | None = None
    topk_weights: torch.Tensor | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """As copies and pickle ask. What comes out in another process is of no communicator there, whose numbers are
        the same on all ranks."""
        return _reduced, (_process(), [getattr(self, field.name) for field in fields(self)])


_TOKEN = secrets.token_bytes(8)


def _process() -> tuple[int, bytes]:
    """This process, apart from those it forks, which have its token, and from those of other hosts."""
    return os.getpid(), _TOKEN


def _reduced(process: tuple[int, bytes], values: list[Any]) -> DispatchHandle:
    """The handle whose `__reduce__` this is."""
    return DispatchHandle(values[0] if process == _process() else 0, *values[1:])


class KeptStep(Protocol):
    """A dispatch whose combine is still to come, in memory that a later one takes again. Letters as in DispatchOutput.

    Attributes:
        tokens: [N, H], rows by expert.
        offsets: int32 [L + 1] and
        counts: int32 [L] of them.
        y: [N, H], output dtype: where the rows of the experts go.
        num_tokens: T.
    """

    tokens: torch.Tensor
    offsets: torch.Tensor
    counts: torch.Tensor
    y: torch.Tensor
    num_tokens: int


@dataclass(frozen=True, slots=True)
class LatencySample:
    """One operation as the kernel's own clock saw it.

    Attributes:
        op: "dispatch", "combine", "exchange", "all_gather", "reduce_scatter" or "all_reduce".
        mode: "ll" or "ht"; of an exchange "host"; of a collective its algorithm.
        seq: sequence number of the operation.
        tokens: T; of an exchange 0; of a collective the bytes of one rank's x, at most 2^31 - 1.
        start_ns: monotonic time at entry of the send half.
        send_ns: nanoseconds until this rank's own sends were done, from start.
        peer_wait_ns: per rank, nanoseconds from the start of the receive half until that peer's data was there
            (0 for itself and for inactive ranks). On GPUs as one of its blocks saw it. Of a rank that sums for this
            one's host (`CombineOrder.DOMAIN`) from when all ranks of its own host had come: it waits for them.
        total_ns: nanoseconds spent inside the operation (send half + receive half, without the time between).
    """

    op: str
    mode: str
    seq: int
    tokens: int
    start_ns: int
    send_ns: int
    peer_wait_ns: tuple[int, ...]
    total_ns: int


@dataclass(frozen=True, slots=True)
class PeerTraffic:
    """What has passed between this rank and one of another host since the communicator was made.

    Attributes:
        peer: the other rank.
        is_up: whether their connections stand.
        sent_messages, sent_bytes: by this rank to that one, payload only; a host gets each row once, through one rank.
        received_messages: by this rank from that one.
    """

    peer: int
    is_up: bool
    sent_messages: int
    sent_bytes: int
    received_messages: int


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a transport can do; tests and the communicator ask this, never the transport's name.

    Attributes:
        device_type: torch device type of payload tensors.
        cross_host: True if ranks may live on several hosts.
        dtypes: payload dtypes.
        modes: algorithms.
        graphs: True if operations can be captured in a CUDA graph.
        abi: hash of the region's byte map; ranks with different hashes must not form a group.
        samples: True if every operation leaves a LatencySample.
        wide_ids: True if dispatch takes int64 topk_ids as they are; else they are narrowed first.
        quantize: values of `MoEConfig.quantize`.
    """

    device_type: str
    cross_host: bool
    dtypes: tuple[torch.dtype, ...]
    modes: tuple[Mode, ...]
    graphs: bool
    abi: str
    samples: bool = False
    wide_ids: bool = False
    quantize: tuple[bool | str, ...] = (False, True)
