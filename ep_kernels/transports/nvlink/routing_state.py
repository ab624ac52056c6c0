"""The routing of a dispatch, kept for its combine and for dispatches that use it again."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from ep_kernels.config import MoEConfig
from ep_kernels.kernels import abi
from ep_kernels.transports.nvlink.addresses import RecordAddresses
from ep_kernels.transports.nvlink.outputs import Outputs, part
from ep_kernels.transports.nvlink.plan import StateMap
from ep_kernels.types import DispatchHandle, DispatchOutput, Mode


class Span(NamedTuple):
    """Bytes [offset, offset + num_bytes) of a tensor's memory (uint8 or int32)."""

    tensor: torch.Tensor
    offset: int
    num_bytes: int
    address: int

    @classmethod
    def whole(cls, tensor: torch.Tensor) -> Span:
        """Of a whole tensor."""
        return cls(tensor, 0, tensor.nbytes, tensor.data_ptr())

    def bytes(self) -> torch.Tensor:
        """As a tensor, uint8."""
        return self.part(0, (self.num_bytes,), torch.uint8)

    def part(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A view of some of it."""
        return part(self.tensor, self.offset + offset, shape, dtype)


@dataclass(slots=True)
class DispatchState:
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

    def flatten(self) -> list[torch.Tensor]:
        """See `base.HandleState`."""
        return [
            self.routing.bytes(), self.carried.bytes(), self.routing_id.part(0, (8 * abi.OP_WORDS,), torch.uint8),
            self.topk_weights,
        ]  # fmt: skip


class Origin(NamedTuple):
    """What the states of one rank's plans share: communicator, epoch, where what is in a dispatch's memory, K, whether
    combine reads a copy of the weights, who makes outputs."""

    number: int
    epoch: int
    addresses: RecordAddresses
    topk: int
    keeps: bool
    outputs: Outputs


class QuickState(DispatchState):
    """Of a dispatch by a plan (`quick_calls`), from its launch on; what a `DispatchState` has, its output and its
    handle are made when they are first read.

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
        "block", "delivered", "former", "given", "mode", "origin", "rows", "scales", "seq", "shape", "tokens",
        "topk_ids", "words",
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

    def __getattr__(self, name: str) -> Any:
        at = self.origin.addresses
        if name == "carried":
            self.carried = self._span(at.carried_at, at.state.carried_bytes)
        elif name == "routing":
            own = self.former is None
            self.routing = self._span(at.routing_at, at.state.routing_bytes) if own else self.former.routing
        elif name == "topk_weights" and self.origin.keeps:
            self.topk_weights = part(self.block, at.kept_at, (self.tokens, self.origin.topk), torch.float32)
        elif name == "topk_weights":
            self.topk_weights = self.given
        elif name == "routing_id":
            self.routing_id = self.carried if self.former is None else self.former.routing_id
        else:
            raise AttributeError(name)
        return getattr(self, name)

    def _span(self, offset: int, num_bytes: int) -> Span:
        return Span(self.block, offset, num_bytes, self.block.data_ptr() + offset)

    def of_handle(self, name: str) -> Any:
        """A field of its handle."""
        if name == "state":
            return self
        if name in ("owner", "epoch"):
            return self.origin.number if name == "owner" else self.origin.epoch
        named = {"num_tokens": "tokens", "rows_shape": "shape", "topk_weights": "given"}
        return getattr(self, named.get(name, name))

    def of_output(self, name: str) -> Any:
        """A field of its output."""
        outputs = self.origin.outputs
        if name == "layout":
            return outputs.layout
        return outputs.field(name, self.block, self.rows, self.scales, self.tokens, self.delivered)


_OF_HANDLE = frozenset(DispatchHandle.__dataclass_fields__)
_OF_OUTPUT = frozenset(DispatchOutput.__dataclass_fields__)
_new, _set = object.__new__, object.__setattr__


class QuickHandle(DispatchHandle):
    """The handle of a dispatch by a plan: its state, and the fields that somebody has read."""

    __slots__ = ("quick",)

    def __getattr__(self, name: str) -> Any:
        if name not in _OF_HANDLE:  # `quick`, too, of a copy with other fields
            raise AttributeError(name)
        value = self.quick.of_handle(name)
        _set(self, name, value)
        return value


class QuickOutput(DispatchOutput):
    """Its output, likewise."""

    __slots__ = ("quick",)

    def __getattr__(self, name: str) -> Any:
        if name not in _OF_OUTPUT:
            raise AttributeError(name)
        value = self.quick.of_output(name)
        _set(self, name, value)
        return value


def quick_results(state: QuickState) -> tuple[DispatchOutput, DispatchHandle]:
    """Its output and its handle."""
    out, handle = _new(QuickOutput), _new(QuickHandle)
    _set(out, "quick", state)
    _set(handle, "quick", state)
    _set(handle, "seq", state.seq)
    return out, handle


def quick_state(handle: object, origin: Origin) -> QuickState | None:
    """Its state, where a plan of this origin has made it as it is."""
    state = getattr(handle, "quick", None) if type(handle) is QuickHandle else None
    return state if state is not None and state.origin is origin else None


def restored(handle: DispatchHandle) -> DispatchHandle:
    """See `base.Transport.restore`."""
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
    rows = torch.zeros(shape.numel() + 1, device=dst_rows.device)
    rows.scatter_(0, dst_rows, weights.flatten())
    return rows[:-1].view(shape)


def source_rows(handle: DispatchHandle, config: MoEConfig, where: StateMap) -> torch.Tensor:
    """int32 [R], a view of the routing."""
    state: DispatchState = handle.state
    return state.routing.part(where.source_rows, (config.group.size,), torch.int32)
