"""Dispatch and combine by the plans of `quick`: what a call of either costs beside its native call."""

from __future__ import annotations

import functools
import struct
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ep_kernels import jit
from ep_kernels.checks import resolve_mode, share_memory
from ep_kernels.kernels import abi
from ep_kernels.lazy_output import lazy_output, recycle
from ep_kernels.transports.base import Delivered
from ep_kernels.transports.nvlink.calls import plan
from ep_kernels.transports.nvlink.calls.engine import RECEIVE, Call, LaunchEngine, Operation
from ep_kernels.transports.nvlink.calls.outputs import part
from ep_kernels.transports.nvlink.calls.quick import (
    ROWS,
    STATE_BYTES,
    TOKENS,
    ExpectedTensor,
    OperationPlan,
    Surroundings,
)
from ep_kernels.transports.nvlink.calls.routing_state import Origin, QuickState, quick_handle, quick_state
from ep_kernels.transports.nvlink.gpu import launch
from ep_kernels.types import Mode

_ends = struct.Struct("=2q").unpack_from
"""T and rows, at the end of a state's words."""
_ENDS_AT = 32
_RUNS = ("num_tokens", "op")
"""The first of a record's numbers, and of its addresses."""


@dataclass(frozen=True, slots=True)
class _PlansOfMode:
    """Plans of one algorithm, in one launch or in two. `weighted`: combine with weights that are given to it."""

    fresh: OperationPlan
    again: OperationPlan
    combine: OperationPlan
    weighted: OperationPlan | None


class NumberReader(Protocol):
    """What the transport does where the host has to read from the device."""

    def settle(self) -> None:
        """Wait for the current stream and raise what failed on it."""

    def check_results(self) -> None:
        """See `base.Transport`."""

    def receive(self, call: Call, phases: int) -> None:
        """Launch what is left of an operation, and raise what is known to have failed."""


class NvlinkQuickCalls:
    """See `base.QuickCalls`.

    Args:
        engine: of the rank, attached.
        around: of the rank.
        functions: its kernels, by variant.
        reader: the transport.
        number, epoch: of handles.
        mode: that of a dispatch which says nothing of its step.
        ll_max_tokens: AUTO's crossover.
        reads: whether the host reads the numbers of every dispatch; else only where shapes follow from them.
    """

    def __init__(
        self, engine: LaunchEngine, around: Surroundings, functions: Mapping[jit.Variant, Any], reader: NumberReader,
        number: int, epoch: int, mode: Mode, ll_max_tokens: int, reads: bool,
    ) -> None:  # fmt: skip
        config = engine.config
        self._engine, self._around, self._functions = engine, around, functions
        self._order = around.order
        self._reader = weakref.proxy(reader)  # it holds this object
        self._origin = Origin(number, epoch, engine.addresses, config.topk, config.exact_combine, engine.outputs)
        self._mode, self._ll_max_tokens, self._reads = mode, ll_max_tokens, reads
        self._outputs = engine.outputs
        self._fixed = self._outputs.rows
        self._exact = config.exact_shapes and self._outputs.compact
        self._scaled, self._weighs = config.scale_columns > 0, config.exact_combine
        self._allocates_scales = engine.sizes.scale_columns > 0
        self._slots = engine.sizes.shape.dispatch_slots, engine.sizes.shape.combine_slots
        self._strides = self._outputs.strides(config.exact_shapes)
        self._narrow = self._prepared(jit.NARROW, plan.narrow_launch(config))
        modes = engine.dispatch_operations
        self._plans = {each: self._planned(each, False) for each in modes}
        self._split = {each: self._planned(each, True) for each in modes}
        self._usual, self._usual_split = self._plans[mode], self._split[mode]
        self._blank = engine.blanks[1]
        width, dtype = config.hidden_size, config.resolved_output_dtype
        word = torch.empty((), dtype=dtype, device=around.device)
        self._op = torch.empty(abi.OP_WORDS, dtype=torch.int64, device=around.device)
        self._room = functools.lru_cache(512)(lambda tokens: word.expand(tokens, width))
        """Of z, by T. Taking after it is the cheapest allocation."""

    # Plans.

    def _planned(self, mode: Mode, split: bool) -> _PlansOfMode:
        return _PlansOfMode(
            self._dispatch_plan(mode, False, split),
            self._dispatch_plan(mode, True, split),
            self._combine_plan(mode, False, split),
            self._combine_plan(mode, True, split) if self._weighs else None,
        )

    def _prepared(self, variant: jit.Variant, to: plan.Launch) -> launch.Prepared:
        prepared: launch.Prepared = self._functions[variant].prepared(
            to.num_blocks, variant.num_threads, cooperative=to.cooperative, overlapped=to.overlapped
        )
        return prepared

    def _dispatch_plan(self, mode: Mode, again: bool, split: bool) -> OperationPlan:
        engine, config, sizes = self._engine, self._engine.config, self._engine.sizes
        addresses, operation = engine.addresses, engine.dispatch_operations[mode]
        most = sizes.shape.ll_tokens if plan.algorithm(config, mode) is Mode.LL else config.max_tokens_per_rank
        read = self._reads or (self._exact and not again)
        at = addresses.routing_at, addresses.carried_at

        def routing(a: Any) -> tuple[int, int, int]:
            carried = a["block"] + at[1]
            return (a["routing"], a["routing_id"], carried) if again else (a["block"] + at[0], carried, carried)

        def kept(a: Any) -> int:
            return a["block"] + addresses.kept_at if self._weighs else a["topk_weights"]  # type: ignore[no-any-return]

        return OperationPlan(
            self._around,
            self._prepared(operation.variant, operation.launch),
            operation.records.record((0, 0, *self._strides, engine.power_of_two, again), (0,) * 21),
            _RUNS,
            self._dispatch_tensors(again),
            lambda a: addresses.dispatch(
                a["block"], *routing(a), a["x"], a["x_scales"], a["topk_ids"], a["topk_weights"], a["scales"]
            ),
            most,
            -1 if self._exact else self._fixed[0],
            state=lambda a: (*routing(a), kept(a)),
            takes_state=again,
            reads=read,
            split=split,
            not_captured=read or self._exact,
            routed=config.topk,
            narrowed=(self._narrow, lambda a: a["block"] + addresses.ids_at),
            copied=(lambda a: (a["topk_weights"], kept(a))) if self._weighs else None,
        )

    def _dispatch_tensors(self, again: bool) -> dict[str, ExpectedTensor]:
        config, engine = self._engine.config, self._engine
        shape, columns, routed = self._outputs.scales_shape, config.scale_columns, (TOKENS, config.topk)
        none = ExpectedTensor(torch.uint8, (), optional=True)
        return {
            "x": ExpectedTensor(config.dtype, (TOKENS, config.hidden_size), aligned=True),
            "topk_ids": ExpectedTensor(torch.int32, routed, may_be_wide=True),
            "topk_weights": ExpectedTensor(torch.float32, routed),
            "block": ExpectedTensor(torch.int32, tuple(engine.blanks[not again].shape)),
            "x_scales": ExpectedTensor(config.scale_dtype, (TOKENS, columns)) if columns else none,
            "scales": ExpectedTensor(engine.sizes.scale_dtype, shape) if shape else none,
        }

    def _combine_plan(self, mode: Mode, weighted: bool, split: bool) -> OperationPlan:
        engine, config = self._engine, self._engine.config
        operation, width = engine.combine_operations[mode], (config.hidden_size,)
        is_ht = plan.algorithm(config, mode) is Mode.HT
        lead = (ROWS,) if self._outputs.compact else self._fixed
        z = ExpectedTensor(config.resolved_output_dtype, (TOKENS, *width), aligned=True)
        tensors = {"y": ExpectedTensor(config.resolved_output_dtype, (*lead, *width), aligned=True), "z": z}
        if split:  # of its own: until it is received, another may begin
            tensors["op"] = ExpectedTensor(torch.int64, (abi.OP_WORDS,))
        if weighted:
            tensors["given"] = ExpectedTensor(torch.float32, (TOKENS, config.topk))
        return OperationPlan(
            self._around,
            self._prepared(operation.variant, operation.launch),
            operation.records.record((0, 0, True, is_ht, engine.positional), (0,) * 12),
            _RUNS,
            tensors,
            lambda a: engine.addresses.combine(
                a.get("op", engine.op_address), a["routing"], a["routing_id"], a["carried"], a["y"], 0,
                a["given" if weighted else "weights"], a["z"],
            ),
            config.max_tokens_per_rank,
            -1,
            takes_state=True,
            split=split,
        )  # fmt: skip

    @property
    def was_captured(self) -> bool:
        """Whether a CUDA graph took one of their launches."""
        sets = (*self._plans.values(), *self._split.values())
        plans = [plan for each in sets for plan in (each.fresh, each.again, each.combine, each.weighted)]
        return any(plan.was_captured for plan in plans if plan is not None)

    # Calls.

    def dispatch(
        self, x: Any, topk_ids: Any, topk_weights: Any, previous: Any, step_tokens: int | None = None
    ) -> Delivered | None:
        mode = self._mode if step_tokens is None else self._mode_of(x, step_tokens)
        begun = None if mode is None else self._begin(False, mode, x, topk_ids, topk_weights, previous)
        return None if begun is None else self._delivered(*begun)

    def dispatch_async(self, x: Any, topk_ids: Any, topk_weights: Any, previous: Any) -> QuickDispatch | None:
        begun = self._begin(True, self._mode, x, topk_ids, topk_weights, previous)
        return None if begun is None else QuickDispatch(self, *begun)

    def _mode_of(self, x: Any, step_tokens: int) -> Mode | None:
        """The algorithm of that step; None where its largest T cannot be so, or x is not plain."""
        rows = x[0] if type(x) is tuple and x else x
        if type(step_tokens) is not int or type(rows) is not torch.Tensor or not rows.ndim:
            return None
        config = self._engine.config
        if not rows.shape[0] <= step_tokens <= config.max_tokens_per_rank:
            return None
        return resolve_mode(config, step_tokens, self._ll_max_tokens)

    def _of(self, split: bool, mode: Mode) -> _PlansOfMode:
        if mode is self._mode:  # an enum takes its time to be found in a dictionary
            return self._usual_split if split else self._usual
        return (self._split if split else self._plans)[mode]

    def _begin(
        self, split: bool, mode: Mode, x: Any, ids: Any, weights: Any, previous: Any
    ) -> tuple[OperationPlan, QuickState] | None:
        engine, former, again, x_scales, scales = self._engine, None, None, None, None
        # The plan and the call's memory: fresh, or with an earlier routing.
        if previous is None:
            by = self._of(split, mode).fresh
            block = torch.empty_like(self._blank)
        else:
            former = quick_state(previous, self._origin)
            if former is None or (former.shape != self._fixed and not self._exact):  # trimmed: rows are not its
                return None
            mode, ids, weights = former.mode, former.topk_ids, former.given if weights is None else weights
            by, again = self._of(split, mode).again, former.words
            block = torch.empty_like(engine.blanks[0])
        # Arguments as the native call takes them.
        if self._scaled:
            if type(x) is not tuple or len(x) != 2:
                return None
            x, x_scales = x
        if type(x) is torch.Tensor and x.is_neg():  # DLPack, by which the native call looks, does not say
            return None
        # Slot of this operation.
        begun = engine.num_dispatches
        slot = begun % self._slots[0]
        if self._allocates_scales:
            scales = self._outputs.scales(slot, engine.config.exact_shapes)[0]
        # One native call: checks, record, launch. Not begun: the caller takes the long way.
        words = by.call(slot, again, x, ids, weights, block, x_scales, scales)
        if type(words) is not bytes:
            self._judge(words)
            return None
        # From here on the operation counts.
        engine.num_dispatches = begun + 1
        rows = self._outputs.slot_rows(slot)
        recycle(rows)
        state = QuickState(self._origin, begun + 1, mode, words, block, former, rows, scales, ids, weights)
        if self._order.event is not None:
            self._leave(state, x, x_scales)
        return by, state

    def _leave(self, state: QuickState, *tensors: torch.Tensor | None) -> None:
        """Behind a launch for that dispatch, which used these tensors, too: see `StreamOrder.leave`."""
        former = state.former
        kept = (
            *tensors,
            state.block,
            state.scales,
            state.topk_ids,
            state.given,
            None if former is None else former.block,
        )
        self._order.leave(kept)

    def _delivered(self, by: OperationPlan, state: QuickState) -> Delivered:
        state.tokens, rows = _ends(state.words, _ENDS_AT)
        dropped = 0
        if by.numbers is not None:
            rows, dropped = self._read(rows, state.block, by.numbers)
        state.delivered = rows
        state.num_rows, state.shape = (rows, (rows,)) if self._exact else (None, self._fixed)
        return lazy_output(state.of_output), quick_handle(state), dropped

    def _read(self, rows: int, block: torch.Tensor, numbers: torch.Tensor) -> tuple[int, int]:
        """(rows, dropped). Raises what the operation has met."""
        if rows < 0:  # the kernel has not said, and may never
            self._reader.settle()
            at = self._engine.addresses.num_rows_at
            numbers.copy_(part(block, at, (2,), torch.int32))
            rows = int(numbers[0])
        self._reader.check_results()
        return rows, int(numbers[1])

    def receive_dispatch(self, by: OperationPlan, state: QuickState) -> Delivered:
        """What is left of it."""
        left = state.words
        words = by.receive(left)
        if type(words) is bytes:
            if self._order.event is not None:
                self._leave(state)
        else:
            operation = self._engine.dispatch_operations[state.mode]
            self._judge(words)
            self._receive(operation, abi.DispatchArgs, left, state)
            words = left[:STATE_BYTES]
            if by.numbers is not None:  # nobody has waited for them
                words = words[:_ENDS_AT] + struct.pack("=2q", _ends(words, _ENDS_AT)[0], -1)
        state.words = words
        return self._delivered(by, state)

    def _receive(self, operation: Operation, kind: Any, words: bytes, keep: Any) -> None:
        """The last launch, the long way."""
        record = kind.from_buffer_copy(words, STATE_BYTES)
        call = Call(operation.variant, operation.launch, record, [keep], RECEIVE, operation)
        self._reader.receive(call, RECEIVE)

    def buffers(self, of: QuickState) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        outputs = self._outputs
        return of.rows.view(of.rows.shape), outputs.all_scales(of.scales), outputs.number(of.block, "counts")

    def combine(self, y: Any, handle: Any, out: Any, topk_weights: Any) -> torch.Tensor | None:
        state = quick_state(handle, self._origin)
        if state is None or (type(y) is torch.Tensor and y.is_neg()) or (out is not None and share_memory(y, out)):
            return None
        engine, plans = self._engine, self._of(False, state.mode)
        z = torch.empty_like(self._room(state.tokens)) if out is None else out
        begun = engine.num_combines
        slot = begun % self._slots[1]
        if topk_weights is None:
            done = plans.combine.call(slot, state.words, y, z)
        elif plans.weighted is not None:
            done = plans.weighted.call(slot, state.words, y, z, topk_weights)
        else:
            return None
        if done != 0:
            self._judge(done)
            return None
        engine.num_combines = begun + 1
        if self._order.event is not None:
            self._leave(state, y, z, topk_weights)
        return z

    def combine_async(self, y: Any, handle: Any, out: Any, topk_weights: Any) -> QuickCombine | None:
        state = quick_state(handle, self._origin)
        if state is None or (type(y) is torch.Tensor and y.is_neg()) or (out is not None and share_memory(y, out)):
            return None
        engine, plans = self._engine, self._of(True, state.mode)
        by, given = plans.combine, tuple[torch.Tensor, ...]()
        if topk_weights is not None:
            if plans.weighted is None or type(topk_weights) is not torch.Tensor:
                return None
            if topk_weights.data_ptr() == 0 or not topk_weights.is_contiguous():
                return None
            by, given = plans.weighted, (topk_weights.clone(),)  # the caller may overwrite its own before `wait`
        z = torch.empty_like(self._room(state.tokens)) if out is None else out
        op, begun = torch.empty_like(self._op), engine.num_combines
        words = by.call(begun % self._slots[1], state.words, y, z, op, *given)
        if type(words) is not bytes:
            self._judge(words)
            return None
        engine.num_combines = begun + 1
        used = y, z, op, *given
        if self._order.event is not None:
            self._leave(state, *used)
        return QuickCombine(self, by, state, words, used)

    def receive_combine(self, by: OperationPlan, state: QuickState, words: bytes, used: Sequence[torch.Tensor]) -> None:
        """What is left of it."""
        done = by.receive(words)
        if type(done) is not bytes:
            self._judge(done)
            self._receive(self._engine.combine_operations[state.mode], abi.CombineArgs, words, (state, used))
        elif self._order.event is not None:
            self._leave(state, *used)

    def _judge(self, status: int | None) -> None:
        """Raise the error with which the driver refused the launch; None: nothing has begun."""
        if status is not None:
            raise launch.refused(launch.LAUNCH, status, self._around.library)


class QuickDispatch:
    """A dispatch whose rows are on their way. `wait` and `buffers`: see `base.PendingDispatch`; but what `wait` gives
    is complete."""

    def __init__(self, calls: NvlinkQuickCalls, by: OperationPlan, begun: QuickState) -> None:
        self._calls, self._by, self._begun = calls, by, begun
        self._result: Delivered | None = None

    def wait(self) -> Delivered:
        if self._result is None:
            self._result = self._calls.receive_dispatch(self._by, self._begun)
        return self._result

    def buffers(self) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        return self._calls.buffers(self._begun)


class QuickCombine:
    """See `base.PendingCombine`; z is known from the start."""

    def __init__(
        self, calls: NvlinkQuickCalls, by: OperationPlan, state: QuickState, words: bytes, used: Sequence[torch.Tensor]
    ) -> None:
        self._calls, self._left, self._z = calls, (by, state, words, used), used[1]
        self._done = False

    def wait(self, out: torch.Tensor | None = None) -> tuple[torch.Tensor, None]:
        if not self._done:
            self._calls.receive_combine(*self._left)
            self._done = True
        return self._z, None
