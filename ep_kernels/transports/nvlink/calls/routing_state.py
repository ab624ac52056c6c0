"""The routing of a dispatch, kept for its combine and for dispatches that use it again."""

from __future__ import annotations

import copy
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from ep_kernels.config import MoEConfig
from ep_kernels.kernels import abi
from ep_kernels.transports.nvlink.calls.addresses import RecordAddresses
from ep_kernels.transports.nvlink.calls.outputs import Outputs, part
from ep_kernels.transports.nvlink.calls.plan import StateMap
from ep_kernels.types import DispatchHandle, Mode


class Span(NamedTuple):
    """Bytes [offset, offset + num_bytes) of a tensor's memory (uint8 or int32)."""

    tensor: torch.Tensor
    offset: int
    num_bytes: int
    address: int

    @classmethod
    def whole(cls, tensor: torch.Tensor) -> Span:
        return cls(tensor, 0, tensor.nbytes, tensor.data_ptr())

    def bytes(self) -> torch.Tensor:
        return self.part(0, (self.num_bytes,), torch.uint8)

    def part(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return part(self.tensor, self.offset + offset, shape, dtype)


class StateParts:
    """What both kinds of state do."""

    __slots__ = ()
    routing: Span
    routing_id: Span
    carried: Span
    topk_weights: torch.Tensor
    num_rows: int | None

    def flatten(self) -> list[torch.Tensor]:
        return [
            self.routing.bytes(), self.carried.bytes(), self.routing_id.part(0, (8 * abi.OP_WORDS,), torch.uint8),
            self.topk_weights,
        ]  # fmt: skip


@dataclass(slots=True)
class DispatchState(StateParts):
    """`DispatchHandle.state`: the routing of one dispatch, apart from any recycled buffer. A dispatch with
    `previous_handle` shares `routing` and `routing_id` with it.

    Attributes:
        routing: routes, dst_rows, tokens, source_rows and saved_counts of `abi.DispatchArgs`, by `plan.StateMap`.
        routing_id: the `carried` of the dispatch that made the routing; its first word is that dispatch's seq.
        carried: words of the operation, then weights, by `plan.StateMap`.
        topk_weights: float32 [T, K]; a copy where combine reads it (exact), since callers may overwrite theirs.
        num_rows: rows delivered; None: the host has not read it.
    """

    routing: Span
    routing_id: Span
    carried: Span
    topk_weights: torch.Tensor
    num_rows: int | None = None


class Origin(NamedTuple):
    """What the states of one rank's plans share: communicator, epoch, where what is in a dispatch's memory, K, whether
    combine reads a copy of the weights, who makes outputs."""

    number: int
    epoch: int
    addresses: RecordAddresses
    topk: int
    keeps: bool
    outputs: Outputs


class QuickState(StateParts):
    """State of a dispatch by a plan (`quick_calls`), from its launch on. Fields of `DispatchState` are made when read.

    Attributes:
        words: what plans take of it.
        block: memory of the dispatch.
        former: whose routing it uses again, or None.
        tokens, delivered, shape, num_rows: T, rows delivered, their leading shape, and see `DispatchState`; set on
            delivery.

    Args:
        origin, seq, mode, topk_ids: of its handle.
        words, block, former: as above.
        rows, scales: memory of its rows.
        given: weights of the call.
    """

    __slots__ = (
        "block", "delivered", "former", "given", "mode", "num_rows", "origin", "rows", "scales", "seq", "shape",
        "tokens", "topk_ids", "words",
    )  # fmt: skip

    def __init__(
        self, origin: Origin, seq: int, mode: Mode, words: bytes, block: torch.Tensor, former: QuickState | None,
        rows: torch.Tensor, scales: torch.Tensor | None, topk_ids: torch.Tensor, given: torch.Tensor,
    ) -> None:  # fmt: skip
        self.origin = origin
        self.seq = seq
        self.mode = mode
        self.words = words
        self.block = block
        self.former: QuickState | None = former if former is None or former.former is None else former.former
        self.rows = rows
        self.scales = scales
        self.topk_ids = topk_ids
        self.given = given
        self.tokens = self.delivered = 0
        self.shape: tuple[int, ...] = ()

    @property
    def carried(self) -> Span:  # type: ignore[override]
        at = self.origin.addresses
        return self._span(at.carried_at, at.state.carried_bytes)

    @property
    def routing(self) -> Span:  # type: ignore[override]
        """Of the dispatch that made it."""
        at = self.origin.addresses
        return self._span(at.routing_at, at.state.routing_bytes) if self.former is None else self.former.routing

    @property
    def routing_id(self) -> Span:  # type: ignore[override]
        return self.carried if self.former is None else self.former.routing_id

    @property
    def topk_weights(self) -> torch.Tensor:  # type: ignore[override]
        """The copy, or what was given."""
        if not self.origin.keeps:
            return self.given
        return part(self.block, self.origin.addresses.kept_at, (self.tokens, self.origin.topk), torch.float32)

    def flatten(self) -> list[torch.Tensor]:
        """See `base.HandleState`. By no address: torch.compile may trace it."""
        at, maker = self.origin.addresses, self.former or self
        return [
            part(maker.block, at.routing_at, (at.state.routing_bytes,), torch.uint8),
            part(self.block, at.carried_at, (at.state.carried_bytes,), torch.uint8),
            part(maker.block, at.carried_at, (8 * abi.OP_WORDS,), torch.uint8),
            self.topk_weights,
        ]

    def _span(self, offset: int, num_bytes: int) -> Span:
        return Span(self.block, offset, num_bytes, self.block.data_ptr() + offset)

    def of_output(self, name: str) -> Any:
        return self.origin.outputs.field(name, self.block, self.rows, self.scales, self.tokens, self.delivered)


class QuickHandle(DispatchHandle):
    """The handle of a dispatch by a plan: its state, whose fields are the handle's."""

    __slots__ = ("quick",)

    def __new__(cls, *args: Any, **fields: Any) -> DispatchHandle:  # type: ignore[misc]
        """With fields, as `dataclasses.replace` calls it: one that has them."""
        return DispatchHandle(*args, **fields)


def _of_state(read: Callable[[QuickState], Any]) -> property:
    return property(lambda self: read(self.quick))


for _name, _read in {
    "owner": lambda state: state.origin.number,
    "seq": lambda state: state.seq,
    "num_tokens": lambda state: state.tokens,
    "mode": lambda state: state.mode,
    "epoch": lambda state: state.origin.epoch,
    "state": lambda state: state,
    "rows_shape": lambda state: state.shape,
    "topk_ids": lambda state: state.topk_ids,
    "topk_weights": lambda state: state.given,
}.items():
    setattr(QuickHandle, _name, _of_state(_read))


def quick_handle(state: QuickState) -> DispatchHandle:
    """The handle of a dispatch by a plan."""
    made: DispatchHandle = object.__new__(QuickHandle)
    object.__setattr__(made, "quick", state)
    return made


def quick_state(handle: object, origin: Origin) -> QuickState | None:
    """The state of a handle that a plan of this origin has made; None for others."""
    state: QuickState | None = handle.quick if type(handle) is QuickHandle else None  # type: ignore[attr-defined]
    return state if state is not None and state.origin is origin else None


_ENDS_AT = 32
"""In a state's words: T and rows."""


def trimmed(handle: DispatchHandle, num_rows: int) -> DispatchHandle:
    if type(handle) is not QuickHandle:
        return replace(handle, rows_shape=(num_rows,))
    state: QuickState = handle.quick  # type: ignore[attr-defined]
    made = copy.copy(state)
    made.words = state.words[:_ENDS_AT] + struct.pack("=2q", state.tokens, num_rows)
    made.shape = (num_rows,)
    return quick_handle(made)


def restored(handle: DispatchHandle) -> DispatchHandle:
    routing, carried, routing_id, topk_weights = handle.state
    state = DispatchState(Span.whole(routing), Span.whole(routing_id), Span.whole(carried), topk_weights)
    return replace(handle, state=state)


def row_weights(handle: DispatchHandle, config: MoEConfig, where: StateMap) -> torch.Tensor:
    """float32 [L, slots] | [N], 0 for rows of no token."""
    state: DispatchState = handle.state
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
    state: DispatchState = handle.state
    return state.routing.part(where.source_rows, (config.group.size,), torch.int32)
