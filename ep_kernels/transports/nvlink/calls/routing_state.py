"""The routing of a dispatch, kept for its combine and for dispatches that use it again."""

from __future__ import annotations

import copy
import struct
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from ep_kernels.config import MoEConfig
from ep_kernels.kernels import abi
from ep_kernels.transports.nvlink.calls.outputs import Outputs, RecordAddresses, SlotMemory, part
from ep_kernels.transports.nvlink.calls.plan import StateMap
from ep_kernels.types import DispatchHandle, Mode


class Span(NamedTuple):
    """Bytes [offset, offset + num_bytes) of a tensor's memory (uint8 or int32)."""

    tensor: torch.Tensor
    offset: int
    num_bytes: int

    @classmethod
    def whole(cls, tensor: torch.Tensor) -> Span:
        return cls(tensor, 0, tensor.nbytes)

    @property
    def address(self) -> int:
        return self.tensor.data_ptr() + self.offset

    def bytes(self) -> torch.Tensor:
        return self.part(0, (self.num_bytes,), torch.uint8)

    def part(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return part(self.tensor, self.offset + offset, shape, dtype)


class StateParts:
    """`DispatchHandle.state`: the routing of one dispatch, apart from any recycled buffer. A dispatch with
    `previous_handle` shares `routing` and `routing_id` with it.

    Attributes:
        routing: routes, dst_rows, tokens, source_rows and saved_counts of `abi.DispatchArgs`, by `plan.StateMap`.
        routing_id: the `carried` of the dispatch that made the routing; its first word is that dispatch's seq.
        carried: words of the operation, then weights, by `plan.StateMap`.
        topk_weights: float32 [T, K]; a copy where combine reads it (exact), since callers may overwrite theirs.
        num_rows: rows delivered; None: the host has not read it.
        words: what plans take of it (`State` of operation.cpp).
        memory: what its addresses lie in.
    """

    __slots__ = ()
    routing: Span
    routing_id: Span
    carried: Span
    topk_weights: torch.Tensor
    num_rows: int | None
    words: bytes
    memory: tuple[torch.Tensor | None, ...]

    def flatten(self) -> list[torch.Tensor]:
        """See `base.HandleState`. By no address: torch.compile may trace it."""
        return [
            self.routing.bytes(), self.carried.bytes(), self.routing_id.part(0, (8 * abi.OP_WORDS,), torch.uint8),
            self.topk_weights,
        ]  # fmt: skip


_WORDS = struct.Struct("=4Q2q")
_ENDS, _ENDS_AT = struct.Struct("=2q"), 32
"""T and rows, at the end."""


def ends(words: bytes) -> tuple[int, int]:
    tokens, rows = _ENDS.unpack_from(words, _ENDS_AT)
    return tokens, rows


def with_rows(words: bytes, rows: int) -> bytes:
    """A state's words with this number of rows."""
    return words[:_ENDS_AT] + _ENDS.pack(ends(words)[0], rows)


@dataclass(slots=True)
class TensorState(StateParts):
    """A state of tensors, as `flatten` gave them: a compiled function's."""

    routing: Span
    routing_id: Span
    carried: Span
    topk_weights: torch.Tensor
    num_rows: int | None = None

    @property
    def words(self) -> bytes:  # type: ignore[override]
        at = self.routing.address, self.routing_id.address, self.carried.address, self.topk_weights.data_ptr()
        return _WORDS.pack(*at, self.topk_weights.shape[0], -1)

    @property
    def memory(self) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        return self.routing.tensor, self.routing_id.tensor, self.carried.tensor, self.topk_weights


class Origin(NamedTuple):
    """What the states of one rank share: communicator (0: not known here), epoch, where what is in a dispatch's
    memory, K, whether combine reads a copy of the weights, who makes outputs."""

    number: int
    epoch: int
    addresses: RecordAddresses
    topk: int
    keeps: bool
    outputs: Outputs


class DispatchState(StateParts):
    """State of a dispatch of this process, from its launch on. Fields of `StateParts` are made when read. Nothing of
    the region is in it: a handle would keep that of a closed communicator.

    Attributes:
        block: memory of the dispatch.
        maker: state whose routing it uses again; None: its own.
        tokens, delivered, num_dropped: T, rows delivered, rows dropped where the host reads that; set on delivery.

    Args:
        origin, seq, mode, topk_ids: of its handle.
        words, block: as above.
        former: of `previous_handle`, or None.
        scales: memory of its own that its scales are in, or None.
        given: weights of the call.
    """

    __slots__ = (
        "block", "delivered", "given", "maker", "mode", "num_dropped", "num_rows", "origin", "scales", "seq", "tokens",
        "topk_ids", "words",
    )  # fmt: skip

    def __init__(
        self, origin: Origin, seq: int, mode: Mode, words: bytes, block: torch.Tensor, former: StateParts | None,
        scales: torch.Tensor | None, topk_ids: torch.Tensor, given: torch.Tensor,
    ) -> None:  # fmt: skip
        self.origin = origin
        self.seq = seq
        self.mode = mode
        self.words = words
        self.block = block
        self.maker: StateParts | None = (former.maker or former) if type(former) is DispatchState else former
        self.scales = scales
        self.topk_ids = topk_ids
        self.given = given
        self.tokens = self.delivered = self.num_dropped = 0
        self.num_rows: int | None = None

    @property
    def carried(self) -> Span:  # type: ignore[override]
        at = self.origin.addresses
        return Span(self.block, at.carried_at, at.state.carried_bytes)

    @property
    def routing(self) -> Span:  # type: ignore[override]
        at = self.origin.addresses
        return Span(self.block, at.routing_at, at.state.routing_bytes) if self.maker is None else self.maker.routing

    @property
    def routing_id(self) -> Span:  # type: ignore[override]
        return self.carried if self.maker is None else self.maker.routing_id

    @property
    def topk_weights(self) -> torch.Tensor:  # type: ignore[override]
        if not self.origin.keeps:
            return self.given
        return part(self.block, self.origin.addresses.kept_at, (self.tokens, self.origin.topk), torch.float32)

    @property
    def memory(self) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        of_maker = () if self.maker is None else self.maker.memory
        return self.block, self.scales, self.topk_ids, self.given, *of_maker

    def of_output(self, places: SlotMemory, name: str) -> Any:
        """A field of what was delivered to these places."""
        return self.origin.outputs.field(name, self.block, *places, self.tokens, self.delivered)


def trimmed(handle: DispatchHandle, num_rows: int) -> DispatchHandle:
    """See `base.Transport`."""
    state = handle.state
    if type(state) is DispatchState:
        state = copy.copy(state)
        state.words = with_rows(state.words, num_rows)
    return replace(handle, rows_shape=(num_rows,), state=state)


def restored(handle: DispatchHandle) -> DispatchHandle:
    routing, carried, routing_id, topk_weights = handle.state
    state = TensorState(Span.whole(routing), Span.whole(routing_id), Span.whole(carried), topk_weights)
    return replace(handle, state=state)


def row_weights(handle: DispatchHandle, config: MoEConfig, where: StateMap) -> torch.Tensor:
    """float32 [L, slots] | [N], 0 for rows of no token."""
    state: StateParts = handle.state
    shape, size = torch.Size(handle.rows_shape), config.group.size
    positions = (size, config.max_tokens_per_rank, config.topk)
    dst_rows = state.routing.part(where.dst_rows, positions, torch.int32)
    weights = state.carried.part(where.weights, positions, torch.float32)
    sources = state.routing.part(where.source_rows, (size, 1, 1), torch.int32)
    filled = torch.arange(config.max_tokens_per_rank, device=dst_rows.device)[None, :, None] < sources
    dst_rows = torch.where(filled & (dst_rows >= 0), dst_rows, shape.numel()).flatten().long()
    rows = torch.zeros(shape.numel() + 1, device=dst_rows.device, dtype=torch.float32)
    rows.scatter_(0, dst_rows, weights.flatten())
    return rows[:-1].view(shape)


def source_rows(handle: DispatchHandle, config: MoEConfig, where: StateMap) -> torch.Tensor:
    """int32 [R], a view of the routing."""
    state: StateParts = handle.state
    return state.routing.part(where.source_rows, (config.group.size,), torch.int32)
