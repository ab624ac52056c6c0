"""Dispatch and combine of one rank: memory, plan and slot of a call, and what its caller gets.

A plain call is one native call, which looks at the arguments, too (`NvlinkOperations.dispatch`, `combine` and their
async forms; None where it is not plain). Any other has its arguments checked by the communicator, and the same plan's
record filled and launched (`begin_dispatch`, `begin_combine`).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ep_kernels import checks, jit
from ep_kernels.checks import resolve_mode, share_memory
from ep_kernels.kernels import abi
from ep_kernels.lazy_output import lazy_output, recycle
from ep_kernels.transports.base import CombineArgs, DispatchArgs
from ep_kernels.transports.nvlink.calls import plan
from ep_kernels.transports.nvlink.calls.engine import BOTH, RECEIVE, ROW_BYTES, SEND, LaunchEngine, aligned, pointer
from ep_kernels.transports.nvlink.calls.operation_plan import ROWS, TOKENS, ExpectedTensor, OperationPlan, Surroundings
from ep_kernels.transports.nvlink.calls.outputs import SlotMemory, part
from ep_kernels.transports.nvlink.calls.routing_state import DispatchState, Origin, StateParts, ends, with_rows
from ep_kernels.transports.nvlink.gpu import launch
from ep_kernels.types import DispatchHandle, DispatchOutput, Mode

_RUNS = ("num_tokens", "op")
"""The first of a record's numbers, and of its addresses."""
Delivered = tuple[DispatchOutput, DispatchHandle]


@dataclass(frozen=True, slots=True)
class _PlansOfMode:
    """Plans of one algorithm, in one launch or in two. `weighted`: combine with weights that are given to it."""

    fresh: OperationPlan
    again: OperationPlan
    combine: OperationPlan
    weighted: OperationPlan | None


class LaunchOwner(Protocol):
    """What the transport does where a native call alone does not serve."""

    def enter(self) -> int:
        """The CUstream to launch on, which then comes after the launch before."""

    def settle(self) -> None:
        """Wait for the current stream and raise what failed on it."""

    def check_results(self) -> None:
        """See `base.Transport`."""

    def raise_fault(self) -> None:
        """Raise what is known to have failed."""


class NvlinkOperations:
    """See `base.QuickCalls`.

    Args:
        raises: whether the host reads the numbers of every dispatch; else only where shapes follow from them.
    """

    def __init__(
        self, engine: LaunchEngine, around: Surroundings, functions: Mapping[jit.Variant, Any], owner: LaunchOwner,
        epoch: int, raises: bool,
    ) -> None:  # fmt: skip
        config = engine.config
        self._engine, self._around, self._functions = engine, around, functions
        self._order = around.order
        self._owner = weakref.proxy(owner)  # it holds this object
        self._origin = Origin(0, epoch, engine.addresses, config.topk, config.exact_combine, engine.outputs)
        self._raises = raises
        self._outputs = engine.outputs
        self._fixed = self._outputs.rows
        self._exact = config.exact_shapes and self._outputs.compact
        self._scaled, self._weighs = config.scale_columns > 0, config.exact_combine
        self._wakes = config.network is not None
        self._allocates_scales, self._lends_scales = engine.sizes.scale_columns > 0, self._outputs.in_region
        self._slots = engine.sizes.shape.dispatch_slots, engine.sizes.shape.combine_slots
        self._narrow = self._prepared(jit.NARROW, plan.narrow_launch(config))
        self._made: dict[tuple[str, tuple[Any, ...]], OperationPlan] = {}
        self._blank = engine.blanks[1]
        width, dtype = config.hidden_size, config.resolved_output_dtype
        word = torch.empty((), dtype=dtype, device=around.device)
        self._op = torch.empty(abi.OP_WORDS, dtype=torch.int64, device=around.device)
        self._room = functools.lru_cache(512)(lambda tokens: word.expand(tokens, width))
        """Of z, by T. Taking after it is the cheapest allocation."""

    def offer(self, number: int, mode: Mode, ll_max_tokens: int) -> None:
        """Make what plain calls need.

        Args:
            mode: that of a dispatch which says nothing of its step.
        """
        self._origin = self._origin._replace(number=number)
        self._mode, self._ll_max_tokens = mode, ll_max_tokens
        modes = self._engine.dispatch_operations
        self._plans = {each: self._planned(each, False) for each in modes}
        self._split = {each: self._planned(each, True) for each in modes}
        self._usual, self._usual_split = self._plans[mode], self._split[mode]

    # Plans.

    def _planned(self, mode: Mode, split: bool) -> _PlansOfMode:
        reads, trims = self._raises or self._exact, self._exact
        return _PlansOfMode(
            self._plan("dispatch", mode, split, False, reads, trims),
            self._plan("dispatch", mode, split, True, self._raises, trims),
            self._plan("combine", mode, split, False, False, True),
            self._plan("combine", mode, split, True, False, True) if self._weighs else None,
        )

    def _plan(self, op: str, *kind: Any) -> OperationPlan:
        """Made once."""
        if (op, kind) not in self._made:
            self._made[op, kind] = (self._dispatch_plan if op == "dispatch" else self._combine_plan)(*kind)
        return self._made[op, kind]

    def _prepared(self, variant: jit.Variant, how: plan.Launch) -> launch.Prepared:
        prepared: launch.Prepared = self._functions[variant].prepared(
            how.num_blocks, variant.num_threads, cooperative=how.cooperative, overlapped=how.overlapped
        )
        return prepared

    def _dispatch_plan(self, mode: Mode, split: bool, again: bool, reads: bool, trims: bool) -> OperationPlan:
        """`again`: with the routing of a former dispatch; `reads`: the host waits for the numbers; `trims`: shapes
        follow from them, or from the former ones."""
        engine, config, sizes = self._engine, self._engine.config, self._engine.sizes
        addresses, operation = engine.addresses, engine.dispatch_operations[mode]
        most = sizes.shape.ll_tokens if plan.algorithm(config, mode) is Mode.LL else config.max_tokens_per_rank
        at, strides = (addresses.routing_at, addresses.carried_at), self._outputs.strides(trims)

        def routing(a: Any) -> tuple[int, int, int]:
            carried = a["block"] + at[1]
            return (a["routing"], a["routing_id"], carried) if again else (a["block"] + at[0], carried, carried)

        def kept(a: Any) -> int:
            return a["block"] + addresses.kept_at if self._weighs else a["topk_weights"]  # type: ignore[no-any-return]

        return OperationPlan(
            self._around,
            self._prepared(operation.variant, operation.launch),
            abi.DispatchArgs(
                world=engine.tables.world, work=operation.launch.work(BOTH), scale_row_stride=strides.row,
                scale_column_stride=strides.column, scale_group_stride=strides.group, power_of_two=engine.power_of_two,
                cached=again,
            ),
            _RUNS,
            self._dispatch_tensors(again),
            lambda a: addresses.dispatch(
                a["block"], *routing(a), a["x"], a["x_scales"], a["topk_ids"], a["topk_weights"], a["scales"]
            ),
            most,
            -1 if trims else self._fixed[0],
            state=lambda a: (*routing(a), kept(a)),
            takes_state=again,
            reads=reads,
            split=split,
            not_captured=reads or trims,
            routed=config.topk,
            narrowed=(self._narrow, lambda a: a["block"] + addresses.ids_at),
            copied=(lambda a: (a["topk_weights"], kept(a))) if self._weighs else None,
        )  # fmt: skip

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

    def _combine_plan(self, mode: Mode, split: bool, weighted: bool, returns: bool, applies: bool) -> OperationPlan:
        """`weighted`: with weights of the call; `returns`: weights of rows go to the source; `applies`: rows are
        weighted."""
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
        if returns:
            tensors["row_weights"] = ExpectedTensor(torch.float32, lead)
            tensors["z_weights"] = ExpectedTensor(torch.float32, (TOKENS, config.topk))
        return OperationPlan(
            self._around,
            self._prepared(operation.variant, operation.launch),
            abi.CombineArgs(
                world=engine.tables.world, work=operation.launch.work(BOTH),
                pipelines=plan.combine_stages(config).record(), apply_weights=applies, mode=is_ht,
                positional=engine.positional,
            ),
            _RUNS,
            tensors,
            lambda a: engine.addresses.combine(
                a.get("op", engine.op_address), a["routing"], a["routing_id"], a["carried"], a["y"],
                a.get("row_weights", 0), a["given" if weighted else "weights"], a["z"], a.get("z_weights", 0),
            ),
            config.max_tokens_per_rank,
            -1,
            takes_state=True,
            split=split,
        )  # fmt: skip

    @property
    def was_captured(self) -> bool:
        """Whether a CUDA graph took one of their launches."""
        return any(plan.was_captured for plan in self._made.values())

    # Plain calls: one native call each.

    def dispatch(
        self, x: Any, topk_ids: Any, topk_weights: Any, previous: Any, step_tokens: int | None = None
    ) -> Delivered | None:
        mode = self._mode if step_tokens is None else self._mode_of(x, step_tokens)
        begun = None if mode is None else self._begin(False, mode, x, topk_ids, topk_weights, previous)
        return None if begun is None else self.delivered(*begun)

    def dispatch_async(self, x: Any, topk_ids: Any, topk_weights: Any, previous: Any) -> NvlinkDispatch | None:
        begun = self._begin(True, self._mode, x, topk_ids, topk_weights, previous)
        return None if begun is None else NvlinkDispatch(self, *begun)

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

    def _state_of(self, handle: Any) -> DispatchState | None:
        """Of a handle whose operations may be plain; None of others."""
        state = handle.state if type(handle) is DispatchHandle else None
        if type(state) is not DispatchState or (self._exact and state.num_rows is None):
            return None
        at = self._origin
        return state if state.origin is at and handle.owner == at.number and handle.epoch == at.epoch else None

    def _begin(
        self, split: bool, mode: Mode, x: Any, ids: Any, weights: Any, previous: Any
    ) -> tuple[OperationPlan, DispatchState, SlotMemory] | None:
        engine, former, again, x_scales, scales = self._engine, None, None, None, None
        # The plan and the call's memory: fresh, or with an earlier routing.
        if previous is None:
            by = self._of(split, mode).fresh
            block = torch.empty_like(self._blank)
        else:
            former = self._state_of(previous)
            if former is None or (previous.rows_shape != self._fixed and not self._exact):  # trimmed: rows are not its
                return None
            mode, ids, weights = previous.mode, previous.topk_ids, previous.topk_weights if weights is None else weights
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
            scales = self._outputs.scales(slot, self._exact)[0]
        # One native call: checks, record, launch.
        words = by.call(slot, again, x, ids, weights, block, x_scales, scales)
        if type(words) is not bytes:
            self._judge(words)
            return None
        # From here on the operation counts.
        engine.num_dispatches = begun + 1
        rows = self._outputs.slot_rows(slot)
        recycle(rows)
        own = None if self._lends_scales else scales
        state = DispatchState(self._origin, begun + 1, mode, words, block, former, own, ids, weights)
        if self._order.event is not None:
            self._order.leave((x, x_scales, state))
        return by, state, (rows, scales)

    def delivered(self, by: OperationPlan, state: DispatchState, places: SlotMemory) -> Delivered:
        """What the caller gets."""
        state.tokens, rows = ends(state.words)
        if by.numbers is not None:
            rows, state.num_dropped = self._read(rows, state.block, by.numbers)
        state.delivered = rows
        state.num_rows, shape = (rows, (rows,)) if by.trims else (None, self._fixed)
        at = state.origin
        handle = DispatchHandle(
            at.number, state.seq, state.tokens, state.mode, at.epoch, state, shape, state.topk_ids, state.given
        )
        return lazy_output(functools.partial(state.of_output, places)), handle

    def _read(self, rows: int, block: torch.Tensor, numbers: torch.Tensor) -> tuple[int, int]:
        """(rows, dropped). Raises what the operation has met."""
        if rows < 0:  # the kernel has not said, and may never
            self._owner.settle()
            at = self._engine.addresses.num_rows_at
            numbers.copy_(part(block, at, (2,), torch.int32))
            rows = int(numbers[0])
        self._owner.check_results()
        return rows, int(numbers[1])

    def buffers(self, of: DispatchState, places: SlotMemory) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        outputs, (rows, scales) = self._outputs, places
        return rows.view(rows.shape), outputs.all_scales(scales), outputs.number(of.block, "counts")

    def combine(self, y: Any, handle: Any, out: Any, topk_weights: Any) -> torch.Tensor | None:
        state = self._state_of(handle)
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
            self._order.leave((y, z, topk_weights, state))
        return z

    def combine_async(self, y: Any, handle: Any, out: Any, topk_weights: Any) -> NvlinkCombine | None:
        state = self._state_of(handle)
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
        used = y, z, op, *given, state
        if self._order.event is not None:
            self._order.leave(used)
        return NvlinkCombine(self, by, words, used, z)

    def _judge(self, status: int | None) -> None:
        """Raise the error with which the driver refused the launch; None: nothing has begun."""
        if status is not None:
            raise launch.refused(launch.LAUNCH, status, self._around.library)

    # Checked calls: memory, record, launch.

    def fill_dispatch(self, args: DispatchArgs) -> NvlinkDispatch:
        """Of which nothing is launched."""
        engine, previous, tokens = self._engine, args.previous, args.x.shape[0]
        assert args.mode is Mode.HT or tokens <= engine.sizes.shape.ll_tokens, "lines have no room for it"
        former: StateParts | None = None if previous is None else previous.state
        known = None if former is None else former.num_rows
        # Shapes: known, to be read, or fixed, as in a graph of what the host has not read.
        captured = torch.cuda.is_current_stream_capturing()
        trims = self._exact and (known is not None or not captured)
        reads = not captured and (self._raises or (trims and known is None))
        by = self._plan("dispatch", args.mode, not args.at_once, former is not None, reads, trims)
        again = None
        if former is not None:
            again = with_rows(former.words, self._fixed[0] if not trims else -1 if known is None else known)
        # Memory.
        x, slot = aligned(args.x), engine.num_dispatches % self._slots[0]
        block = checks.made(torch.empty_like(engine.blanks[former is None]))
        rows, scales = self._outputs.slot_rows(slot), self._outputs.scales(slot, trims)[0]
        ids, weights = args.topk_ids, args.topk_weights
        # The record.
        words = by.fill(slot, again, tokens, *map(pointer, (x, ids, weights, block, args.scales, scales)))
        seq = engine.num_dispatches + 1
        own = None if self._lends_scales else scales
        state = DispatchState(self._origin, seq, args.mode, words, block, former, own, ids, weights)
        if self._weighs:
            state.tokens = tokens
            state.topk_weights.copy_(weights)
        return NvlinkDispatch(self, by, state, (rows, scales), (x, args.scales))

    def begin_dispatch(self, args: DispatchArgs) -> NvlinkDispatch:
        """Both phases, or the first of two."""
        pending = self.fill_dispatch(args)
        state = pending.state
        done = self._launch(pending.plan, state.words, BOTH if args.at_once else SEND)
        # From here on the operation counts.
        self._engine.num_dispatches = state.seq
        recycle(pending.places[0])
        self._order.leave((*pending.used, state))
        if args.at_once:
            state.words, pending.is_left = done, False
        return pending

    def fill_combine(self, args: CombineArgs) -> NvlinkCombine:
        """Of which nothing is launched."""
        handle, state, given, numbers = args.handle, args.handle.state, args.topk_weights, args.row_weights
        if given is not None and not args.at_once:
            given = given.clone()
        returns, tokens = numbers is not None, handle.num_tokens
        by = self._plan("combine", handle.mode, not args.at_once, given is not None, returns, args.apply_weights)
        # Memory.
        y, z, weights = aligned(args.y), args.out, None
        if z is None or z.data_ptr() % ROW_BYTES:
            z = checks.made(torch.empty_like(self._room(tokens)))
        tensors = [y, z] if args.at_once else [y, z, torch.empty_like(self._op)]
        if given is not None:
            tensors.append(given)
        if numbers is not None:
            weights = torch.empty((tokens, self._engine.config.topk), dtype=torch.float32, device=z.device)
            tensors += [numbers, weights]
        # The record.
        slot = self._engine.num_combines % self._slots[1]
        words = by.fill(slot, state.words, tokens, *map(pointer, tensors))
        return NvlinkCombine(self, by, words, (*tensors, state), z, args.out, weights)

    def begin_combine(self, args: CombineArgs) -> NvlinkCombine:
        """Both phases, or the first of two."""
        pending = self.fill_combine(args)
        self._launch(pending.plan, pending.words, BOTH if args.at_once else SEND)
        self._engine.num_combines += 1
        self._order.leave(pending.used)
        if args.at_once:
            pending.words = b""
            self._owner.raise_fault()
        return pending

    def _launch(self, by: OperationPlan, words: bytes, phases: int) -> bytes:
        """On the current stream, after the launch before. The state."""
        done: Any = by.launch(words, phases, self._owner.enter())
        if type(done) is not bytes:
            self._judge(done)
        return done  # type: ignore[no-any-return]

    def receive(self, by: OperationPlan, words: bytes, used: Any) -> bytes:
        """The second phase; the state."""
        done = None if self._wakes else by.launch(words, RECEIVE, None)
        if done is None:  # another stream, for one, or a fault
            done = self._launch(by, words, RECEIVE)
            self._order.leave(used)
            self._owner.raise_fault()
        elif type(done) is not bytes:
            self._judge(done)
        elif self._order.event is not None:
            self._order.leave(used)
        return done


class NvlinkDispatch:
    """See `base.PendingDispatch`.

    Attributes:
        plan, state, places: of it; `state.words` has the record, too, until it is launched whole.
        used: tensors that it reads, beside the state's.
        is_left: whether the second phase is.
    """

    def __init__(
        self, calls: NvlinkOperations, plan: OperationPlan, state: DispatchState, places: SlotMemory,
        used: tuple[Any, ...] = (),
    ) -> None:  # fmt: skip
        self._calls, self.plan, self.state, self.places, self.used = calls, plan, state, places, used
        self.is_left = True
        self._result: Delivered | None = None

    def wait(self) -> Delivered:
        if self._result is None:
            is_left, self.is_left = self.is_left, False
            if is_left:
                self.state.words = self._calls.receive(self.plan, self.state.words, (self.state,))
            self._result = self._calls.delivered(self.plan, self.state, self.places)
        return self._result

    def buffers(self) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        return self._calls.buffers(self.state, self.places)


class NvlinkCombine:
    """See `base.PendingCombine`.

    Attributes:
        words: its record; b"" once all is launched.
        z, out: where the kernel writes, and where the caller wants it, or None.
        weights: those that are returned, or None.
    """

    def __init__(
        self, calls: NvlinkOperations, plan: OperationPlan, words: bytes, used: Sequence[Any], z: torch.Tensor,
        out: torch.Tensor | None = None, weights: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        self._calls, self.plan, self.words, self.used = calls, plan, words, used
        self.z, self.out, self.weights = z, out, weights

    def wait(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        words, self.words = self.words, b""
        if words:
            self._calls.receive(self.plan, words, self.used)
        if self.out is not None and self.z is not self.out:
            self.z = self.out.copy_(self.z)
        return self.z, self.weights
