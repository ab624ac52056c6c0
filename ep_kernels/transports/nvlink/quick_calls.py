"""Dispatch and combine by the plans of `quick`: what a call of either costs beside its native call."""

from __future__ import annotations

import functools
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ep_kernels import jit
from ep_kernels.transports.base import Delivered
from ep_kernels.transports.nvlink import launch, plan
from ep_kernels.transports.nvlink.engine import LaunchEngine, Operation
from ep_kernels.transports.nvlink.quick import ROWS, TOKENS, ExpectedTensor, OperationPlan, Surroundings
from ep_kernels.transports.nvlink.routing_state import QuickState
from ep_kernels.types import DispatchHandle, Mode

_ends = struct.Struct("=2q").unpack_from
"""T and rows, at the end of a state's words."""
_ENDS_AT = 32
_RUNS = ("num_tokens", "op")
"""The first of a record's numbers, and of its addresses."""


@dataclass(frozen=True, slots=True)
class _PlansOfMode:
    """Of one algorithm. `home`: combine with weights that are given to it."""

    fresh: OperationPlan
    again: OperationPlan
    combine: OperationPlan
    home: OperationPlan | None


class NumberReader(Protocol):
    """What is asked of the transport where the host has to read."""

    def settle(self) -> None:
        """Wait for the current stream and raise what failed on it."""

    def check_results(self) -> None:
        """See `base.Transport`."""


class NvlinkQuickCalls:
    """See `base.QuickCalls`.

    Args:
        engine: of the rank, attached.
        around: of the rank.
        functions: its kernels, by variant.
        reader: the transport.
        number, epoch: of handles.
        mode: that of a dispatch which says nothing of its step.
        reads: whether the host reads the numbers of every dispatch; else only where shapes follow from them.
    """

    def __init__(
        self, engine: LaunchEngine, around: Surroundings, functions: Mapping[jit.Variant, Any], reader: NumberReader,
        number: int, epoch: int, mode: Mode, reads: bool,
    ) -> None:  # fmt: skip
        config = engine.config
        self._engine, self._around, self._functions = engine, around, functions
        self._reader, self._number, self._epoch = reader, number, epoch
        self._mode, self._reads = mode, reads
        self._outputs = engine.outputs
        self._fixed = self._outputs.rows
        self._exact = config.exact_shapes and self._outputs.compact
        self._scaled, self._weighs = config.scale_columns > 0, config.exact_combine
        self._allocates_scales = engine.sizes.scale_columns > 0
        self._slots = engine.sizes.shape.dispatch_slots, engine.sizes.shape.combine_slots
        self._strides = self._outputs.strides(config.exact_shapes)
        self._plans = {mode: self._planned(mode) for mode in engine.dispatch_operations}
        self._fresh = self._plans[mode].fresh
        width, dtype = config.hidden_size, config.resolved_output_dtype
        word = torch.empty((), dtype=dtype, device=around.device)
        self._room = functools.lru_cache(512)(lambda tokens: word.expand(tokens, width))
        """Of z, by T. Taking after it is the cheapest allocation."""

    # Plans.

    def _planned(self, mode: Mode) -> _PlansOfMode:
        home = self._combine_plan(mode, True) if self._weighs else None
        return _PlansOfMode(
            self._dispatch_plan(mode, False), self._dispatch_plan(mode, True), self._combine_plan(mode, False), home
        )

    def _prepared(self, operation: Operation) -> launch.Prepared:
        to = operation.launch
        prepared: launch.Prepared = self._functions[operation.variant].prepared(
            to.num_blocks, operation.variant.num_threads, cooperative=to.cooperative, overlapped=to.overlapped
        )
        return prepared

    def _dispatch_plan(self, mode: Mode, again: bool) -> OperationPlan:
        engine, config, sizes = self._engine, self._engine.config, self._engine.sizes
        addresses, operation = engine.addresses, engine.dispatch_operations[mode]
        most = sizes.shape.ll_tokens if plan.algorithm(config, mode) is Mode.LL else config.max_tokens_per_rank
        read = self._reads or (self._exact and not again)
        at = addresses.routing_at, addresses.carried_at

        def routing(a: Any) -> tuple[int, int, int]:
            carried = a["block"] + at[1]
            return (a["routing"], a["routing_id"], carried) if again else (a["block"] + at[0], carried, carried)

        return OperationPlan(
            self._around,
            self._prepared(operation),
            operation.records.record((0, 0, *self._strides, engine.power_of_two, again), (0,) * 21),
            _RUNS,
            self._dispatch_tensors(again),
            lambda a: addresses.dispatch(
                a["block"], *routing(a), a["x"], a["x_scales"], a["topk_ids"], a["topk_weights"], a["scales"]
            ),
            most,
            -1 if self._exact else self._fixed[0],
            state=lambda a: (*routing(a), a["kept"]),
            takes_state=again,
            numbers_from=(lambda a: a["block"] + engine.addresses.num_rows_at) if read else None,
            not_captured=read or self._exact,
        )

    def _dispatch_tensors(self, again: bool) -> dict[str, ExpectedTensor]:
        config, engine = self._engine.config, self._engine
        shape, columns, routed = self._outputs.scales_shape, config.scale_columns, (TOKENS, config.topk)
        none = ExpectedTensor(torch.uint8, (), optional=True)
        return {
            "x": ExpectedTensor(config.dtype, (TOKENS, config.hidden_size), aligned=True),
            "topk_ids": ExpectedTensor(torch.int32, routed),
            "topk_weights": ExpectedTensor(torch.float32, routed),
            "block": ExpectedTensor(torch.uint8, tuple(engine.blanks[not again].shape)),
            "kept": ExpectedTensor(torch.float32, routed),
            "x_scales": ExpectedTensor(config.scale_dtype, (TOKENS, columns)) if columns else none,
            "scales": ExpectedTensor(engine.sizes.scale_dtype, shape) if shape else none,
        }

    def _combine_plan(self, mode: Mode, home: bool) -> OperationPlan:
        engine, config = self._engine, self._engine.config
        operation, width = engine.combine_operations[mode], (config.hidden_size,)
        is_ht = plan.algorithm(config, mode) is Mode.HT
        lead = (ROWS,) if self._outputs.compact else self._fixed
        z = ExpectedTensor(config.resolved_output_dtype, (TOKENS, *width), aligned=True)
        tensors = {"y": ExpectedTensor(config.resolved_output_dtype, (*lead, *width), aligned=True), "z": z}
        if home:
            tensors["given"] = ExpectedTensor(torch.float32, (TOKENS, config.topk))
        return OperationPlan(
            self._around,
            self._prepared(operation),
            operation.records.record((0, 0, True, is_ht, engine.positional), (0,) * 12),
            _RUNS,
            tensors,
            lambda a: engine.addresses.combine(
                engine.op_address, a["routing"], a["routing_id"], a["carried"], a["y"], 0,
                a["given" if home else "weights"], a["z"],
            ),
            config.max_tokens_per_rank,
            -1,
            takes_state=True,
        )  # fmt: skip

    @property
    def was_captured(self) -> bool:
        """Whether a CUDA graph took one of their launches."""
        plans = [p for each in self._plans.values() for p in (each.fresh, each.again, each.combine, each.home)]
        return any(p.was_captured for p in plans if p is not None)

    # Calls.

    def dispatch(self, x: Any, topk_ids: Any, topk_weights: Any, previous: Any) -> Delivered | None:
        """See `base.QuickCalls`."""
        if previous is None:
            return self._dispatch(self._fresh, self._mode, None, x, topk_ids, topk_weights)
        if not self._is_own(previous):
            return None
        weights = previous.topk_weights if topk_weights is None else topk_weights
        again = self._plans[previous.mode].again
        return self._dispatch(again, previous.mode, previous.state, x, previous.topk_ids, weights)

    def _is_own(self, handle: Any) -> bool:
        return (
            type(handle) is DispatchHandle
            and handle.owner == self._number
            and handle.epoch == self._epoch
            and type(handle.state) is QuickState
        )

    def _dispatch(
        self, by: OperationPlan, mode: Mode, former: QuickState | None, x: Any, ids: Any, weights: Any
    ) -> Delivered | None:
        engine, outputs, x_scales, scales, kept = self._engine, self._outputs, None, None, weights
        if self._scaled:
            if type(x) is not tuple or len(x) != 2:
                return None
            x, x_scales = x
        begun = engine.num_dispatches
        slot = begun % self._slots[0]
        if self._weighs:
            if type(weights) is not torch.Tensor:
                return None
            kept = weights.clone()
        if self._allocates_scales:
            scales = outputs.scales(slot, engine.config.exact_shapes)[0]
        block = torch.empty_like(engine.blanks[former is None])
        words = by.call(slot, former and former.words, x, ids, weights, block, kept, x_scales, scales)
        if type(words) is not bytes:
            self._judge(words)
            return None
        engine.num_dispatches = begun + 1
        tokens, rows = _ends(words, _ENDS_AT)
        dropped = 0
        if by.numbers is not None:
            rows, dropped = self._read(rows, by, block)
        state = QuickState(words, block, former, engine.addresses, kept, rows if self._exact else None)
        out = outputs.output(block, slot, scales, tokens, rows)
        shape = (rows,) if self._exact else self._fixed
        made = DispatchHandle(self._number, begun + 1, tokens, mode, self._epoch, state, shape, ids, weights)
        return out, made, dropped

    def _read(self, rows: int, by: OperationPlan, block: torch.Tensor) -> tuple[int, int]:
        """(rows, dropped). Raises what the operation has met."""
        assert by.numbers is not None
        at = self._engine.addresses.num_rows_at
        if rows < 0:  # the kernel has not said, and may never
            self._reader.settle()
            by.numbers.copy_(block[at : at + 8].view(torch.int32))
            rows = int(by.numbers[0])
        self._reader.check_results()
        return rows, int(by.numbers[1])

    def combine(self, y: Any, handle: Any, out: Any, topk_weights: Any) -> torch.Tensor | None:
        """See `base.QuickCalls`."""
        if not self._is_own(handle):
            return None
        engine, plans = self._engine, self._plans[handle.mode]
        z = torch.empty_like(self._room(handle.num_tokens)) if out is None else out
        begun = engine.num_combines
        slot = begun % self._slots[1]
        if topk_weights is None:
            done = plans.combine.call(slot, handle.state.words, y, z)
        elif plans.home is not None:
            done = plans.home.call(slot, handle.state.words, y, z, topk_weights)
        else:
            return None
        if done != 0:
            self._judge(done)
            return None
        engine.num_combines = begun + 1
        return z

    def _judge(self, status: int | None) -> None:
        """Nothing has begun (None), or the driver has refused it, which is raised."""
        if status is not None:
            raise launch.refused(launch.LAUNCH, status, self._around.library)
