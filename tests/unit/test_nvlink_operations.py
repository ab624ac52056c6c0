"""Plain operations by one native call: the same records, outputs and handles as by the long way; and what makes them
take the long way. Launches go to a driver that keeps records (tests/emulator/silent.py)."""

from __future__ import annotations

import copy
import ctypes
import dataclasses
import gc
import itertools
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ep_kernels import ArgumentError, CapacityError, HandleError, MoECommunicator, ScaleFormat
from ep_kernels.errors import AbortedError, TransportError
from ep_kernels.kernels import abi
from ep_kernels.transports.nvlink.calls import operation_plan
from ep_kernels.transports.nvlink.calls.engine import RECEIVE, SEND
from ep_kernels.transports.nvlink.calls.routing_state import StateParts
from ep_kernels.types import DispatchHandle, DispatchOutput, Layout, Mode, Overflow
from tests.cases import RoutingCase
from tests.compare import freed
from tests.emulator.silent import SilentDriver, silent_rank

WIDTH, EXPERTS, TOPK, MOST = 2304, 8, 3, 6
CASE = RoutingCase(EXPERTS, TOPK, WIDTH, (5, 2), "uniform", 1, max_tokens=MOST)
ROWS = 7
FORMS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp8": {"quantize": True},
    "packed": {"quantize": True, "scale_format": ScaleFormat.UE8M0_PACKED},
    "scaled": {"dtype": torch.uint8, "scale_columns": 9, "scale_dtype": torch.uint8},
    "home": {"exact_combine": True},
}


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> SilentDriver:
    """torch.compile lists torch's functions at its first use: before `silent_rank` replaces one, or no later test of
    this process can compile it."""
    torch.compile(lambda x: x + torch.zeros(1), backend="eager")(torch.ones(1))
    return SilentDriver(tmp_path_factory.mktemp("silent"))


@pytest.fixture(autouse=True)
def reset(driver: SilentDriver) -> Iterator[None]:
    yield
    for name in ("answer", "capturing", "busy"):
        getattr(driver, name).value = 0
    driver.context.value, driver.brought.value = None, ROWS


def given(config: Any, tokens: int = 5) -> tuple[Any, torch.Tensor, torch.Tensor]:
    x = torch.zeros(tokens, WIDTH, dtype=config.dtype)
    ids, weights = torch.zeros(tokens, TOPK, dtype=torch.int32), torch.ones(tokens, TOPK)
    if config.scale_columns:
        return (x, torch.zeros(tokens, config.scale_columns, dtype=config.scale_dtype)), ids, weights
    return x, ids, weights


def same_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch allocates is the same memory in every call that asks for as much; where a dispatch's numbers lie, the
    rows are ROWS."""
    pools: dict[Any, torch.Tensor] = {}
    empty: Callable[..., torch.Tensor] = torch.empty

    def taken(shape: Any, dtype: Any, key: str) -> torch.Tensor:
        shape = tuple(shape)
        if (key, shape, dtype) not in pools:
            pools[key, shape, dtype] = empty(shape, dtype=dtype).zero_()
            if dtype is torch.int32:  # of a dispatch: num_rows
                pools[key, shape, dtype].view(-1)[:1].fill_(ROWS)
        return pools[key, shape, dtype]

    monkeypatch.setattr(torch, "empty_like", lambda like: taken(like.shape, like.dtype, "room"))
    monkeypatch.setattr(torch, "empty", lambda shape, dtype, device=None: taken(shape, dtype, "room"))
    monkeypatch.setattr(torch.Tensor, "clone", lambda t: taken(t.shape, t.dtype, "copy").copy_(t))


class Way:
    """One of the two ways through a communicator, and the records of its launches."""

    def __init__(self, driver: SilentDriver, comm: MoECommunicator, transport: Any, is_quick: bool) -> None:
        self.driver, self.comm, self.transport = driver, comm, transport
        self.is_quick, self.quick = is_quick, comm._quick
        self.records: list[bytes] = []
        self.buffers: list[Any] = []

    def call(self, record: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.comm._quick = self.quick if self.is_quick else None
        before, self.driver.record_bytes.value = self.driver.launches.value, ctypes.sizeof(record)
        result = function(*args, **kwargs)
        assert self.driver.launches.value == before + 1
        self.records.append(self._comparable(record))
        self.comm._quick = self.quick
        return result

    def call_async(self, kind: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Both halves, a launch each."""
        request = self.call(kind, function, *args, **kwargs)
        if kind is abi.DispatchArgs and not self.comm.config.exact_shapes:
            self.buffers.append(told(request.buffers()))
        return self.call(kind, request.wait)

    def _comparable(self, kind: Any) -> bytes:
        """The copy of weights that an exact combine reads is the only thing that lies elsewhere; z is known at the end
        at the latest."""
        record = kind.from_buffer_copy(self.driver.record())
        if kind is abi.CombineArgs and self.comm.config.exact_combine:
            record.topk_weights = 0
        if kind is abi.CombineArgs and record.work.phases == SEND:
            record.z = 0
        return bytes(record)

    def run(self, tokens: int, inputs: Any, home: bool, out: bool, apart: bool, step: int | None) -> list[Any]:
        comm = self.comm
        together: tuple[Any, ...] = (self.call, comm.dispatch, comm.combine)
        call, dispatch, combine = (self.call_async, comm.dispatch_async, comm.combine_async) if apart else together
        self.transport._engine.restart_slots()
        x, ids, weights, others = inputs
        first = call(abi.DispatchArgs, dispatch, x, ids, weights, **({"step_tokens": step} if step else {}))
        again = call(abi.DispatchArgs, dispatch, x, None, None, previous_handle=first[1])
        third = call(abi.DispatchArgs, dispatch, x, None, others, previous_handle=again[1])
        results = [first, again, third]
        for made, handle in (first, again, third, first):
            y = torch.empty(made.tokens.shape, dtype=comm.config.resolved_output_dtype)
            options: dict[str, Any] = {"topk_weights": weights} if home else {}
            z = torch.empty((tokens, WIDTH), dtype=y.dtype) if out else None
            results.append(call(abi.CombineArgs, combine, y, handle, out=z, **options))
        return results


def told(result: Any) -> Any:
    """Of a result: everything that a caller sees, addresses included."""
    if isinstance(result, torch.Tensor):
        return result.dtype, tuple(result.shape), result.stride(), result.data_ptr()
    if isinstance(result, DispatchOutput):
        return [told(getattr(result, field.name)) for field in dataclasses.fields(result)]
    if isinstance(result, DispatchHandle):
        values = {f.name: getattr(result, f.name) for f in dataclasses.fields(result)}
        del values["state"], values["seq"]  # numbers of operations go on
        return told(list(values.values())), told(result.state)
    if isinstance(result, StateParts):
        spans = [(span.num_bytes, span.address) for span in (result.routing, result.routing_id, result.carried)]
        return spans, told(result.flatten()[:3]), told(result.topk_weights)[:3], result.num_rows
    return [told(each) for each in result] if isinstance(result, list | tuple) else result


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize("mode", [Mode.LL, Mode.HT, Mode.AUTO])
def test_both_ways_are_the_same(
    driver: SilentDriver, mode: Mode, layout: Layout, exact: bool, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if form == "home" and not layout.per_expert:
        pytest.skip("exact_combine is for per-expert layouts")
    with silent_rank(driver, CASE, mode=mode, layout=layout, exact_shapes=exact, **FORMS[form]) as (comm, transport):
        driver.brought.value = ROWS
        comm._reads_dropped = False
        same_memory(monkeypatch)
        cases = ((5, False, False), (0, form == "home", True), (MOST, False, True))
        asked = [(apart, *case, None) for apart, case in itertools.product((False, True), cases)]
        for apart, tokens, home, out, step in [*asked, (False, 3, False, False, 4), (False, 4, False, True, MOST)]:
            ways = [Way(driver, comm, transport, is_quick) for is_quick in (True, False)]
            seen, inputs = [], (*given(comm.config, tokens), torch.zeros(tokens, TOPK))
            for way in ways:
                before = transport.num_entered
                results = way.run(tokens, inputs, home, out, apart, step)
                assert (transport.num_entered == before) == way.is_quick or not tokens  # no memory to look at
                seen.append(told(results))
            assert seen[0] == seen[1]
            assert ways[0].records == ways[1].records
            assert ways[0].buffers == ways[1].buffers


def long_way(driver: SilentDriver, comm: MoECommunicator, *args: Any, **kwargs: Any) -> bool:
    """Whether a dispatch is not begun by one native call. It is launched once."""
    transport: Any = comm._transport
    before, entered = driver.launches.value, transport.num_entered
    comm.dispatch(*args, **kwargs)
    assert driver.launches.value == before + 1
    return bool(transport.num_entered > entered)


class Rows(torch.Tensor):
    """A subclass, which torch may treat in its own way."""


BAD: dict[str, tuple[Callable[..., Any], str]] = {
    "x a list": (lambda x, i, w: ([1.0], i, w), "x: expected a torch.Tensor, got list"),
    "x of one dimension": (lambda x, i, w: (x[0], i, w), r"x: expected shape \[T, 2304\]"),
    "x of another width": (lambda x, i, w: (x[:, :16].contiguous(), i, w), r"x: expected shape \[5, 2304\], got"),
    "x of another dtype": (lambda x, i, w: (x.float(), i, w), "x: expected torch.bfloat16, got torch.float32"),
    "x with gaps": (lambda x, i, w: (x.repeat(1, 2)[:, ::2], i, w), "x: expected a contiguous tensor, got strides"),
    "x too long": (lambda x, i, w: (x.repeat(2, 1), i, w), "x: expected at most max_tokens_per_rank = 6 rows, got 10"),
    "x without bytes": (lambda x, i, w: (x.to_sparse(), i, w), "x: expected a contiguous tensor"),
    "no ids": (lambda x, i, w: (x, None, w), "topk_ids: expected a torch.Tensor, got NoneType"),
    "ids of fewer tokens": (lambda x, i, w: (x, i[:4], w), r"topk_ids: expected shape \[5, 3\], got \[4, 3\]"),
    "ids of another dtype": (lambda x, i, w: (x, i.short(), w), "topk_ids: expected torch.int32 or torch.int64, got"),
    "ids transposed": (lambda x, i, w: (x, i.T.contiguous().T, w), "topk_ids: expected a contiguous tensor"),
    "no weights": (lambda x, i, w: (x, i, None), "topk_weights: expected a torch.Tensor, got NoneType"),
    "weights of another K": (lambda x, i, w: (x, i, w[:, :2].contiguous()), r"topk_weights: expected shape \[5, 3\]"),
    "weights of doubles": (
        lambda x, i, w: (x, i, w.double()),
        "topk_weights: expected torch.float32, got torch.float64",
    ),
    "x elsewhere": (lambda x, i, w: (x.to("meta"), i, w), "x: expected a tensor on cpu, got meta"),
    "x negated lazily": (lambda x, i, w: (torch._neg_view(x), i, w), "x: expected a resolved tensor, got one negated"),
    "x whose memory was freed": (
        lambda x, i, w: (freed(x), i, w),
        "x: expected a tensor with memory, got a Tensor without",
    ),
    "weights that are traced": (
        lambda x, i, w: (x, i, traced(w)),
        "topk_weights: expected a tensor with memory, got a Tensor without",
    ),
}
BAD_SCALES: dict[str, tuple[Callable[..., Any], str]] = {
    "no pair": (lambda x, i, w: (x[0], i, w), r"x: expected a pair \(x, scales\), since scale_columns > 0, got Tensor"),
    "no scales": (lambda x, i, w: ((x[0], None), i, w), "scales: expected a torch.Tensor, got NoneType"),
    "scales of other tokens": (
        lambda x, i, w: ((x[0], x[1][1:]), i, w),
        r"scales: expected shape \[5, 9\], got \[4, 9",
    ),
    "scales of floats": (lambda x, i, w: ((x[0], x[1].float()), i, w), "scales: expected torch.uint8, got torch.float"),
    "scales with gaps": (lambda x, i, w: ((x[0], x[1].repeat(1, 2)[:, ::2]), i, w), "scales: expected a contiguous"),
}
KINDS: dict[str, tuple[dict[str, Any], Any]] = {
    "flat": ({"mode": Mode.HT, "layout": Layout.FLAT, "exact_shapes": False}, BAD),
    "home": ({"mode": Mode.LL, "layout": Layout.EXPERT_MAJOR, "exact_combine": True}, BAD),
    "scaled": ({"mode": Mode.HT, "layout": Layout.FLAT, "exact_shapes": False, **FORMS["scaled"]}, BAD_SCALES),
}


def traced(tensor: torch.Tensor) -> torch.Tensor:
    """As it is while a function is made functional: a torch.Tensor by its type."""
    return torch._to_functional_tensor(tensor)


@pytest.mark.parametrize(("kind", "bad"), [(kind, bad) for kind, (_, table) in KINDS.items() for bad in table])
def test_bad_arguments_of_dispatch_are_refused_before_anything_is_launched(
    driver: SilentDriver, kind: str, bad: str
) -> None:
    """Also where good ones have just come: a plan is nobody's licence."""
    fields, table = KINDS[kind]
    change, message = table[bad]
    with silent_rank(driver, CASE, **fields) as (comm, transport):
        for begin in (comm.dispatch, comm.dispatch_async):
            assert not long_way(driver, comm, *given(comm.config))
            before, slot = driver.launches.value, transport._engine.num_dispatches
            with pytest.raises(ArgumentError, match=message):
                begin(*change(*given(comm.config)))
            assert (driver.launches.value, transport._engine.num_dispatches) == (before, slot)
        assert not long_way(driver, comm, *given(comm.config))


def test_a_step_runs_the_algorithm_of_its_largest_t(driver: SilentDriver) -> None:
    with silent_rank(driver, CASE, mode=Mode.AUTO, layout=Layout.FLAT, exact_shapes=False, ll_max_tokens=5) as (
        comm,
        _,
    ):
        x, ids, weights = given(comm.config, 2)
        for step, mode in ((2, Mode.LL), (5, Mode.LL), (6, Mode.HT), (None, Mode.HT)):
            out, handle = comm.dispatch(x, ids, weights, step_tokens=step)
            assert handle.mode is mode
            assert comm.combine(torch.zeros_like(out.tokens), handle).shape == x.shape


def test_steps_that_ranks_cannot_agree_on_are_refused(driver: SilentDriver) -> None:
    with silent_rank(driver, CASE, mode=Mode.HT, layout=Layout.FLAT, exact_shapes=False) as (comm, _):
        comm.dispatch(*given(comm.config))
        before = driver.launches.value
        for wrong in (4, MOST + 1, 5.0):
            with pytest.raises(ArgumentError, match=r"step_tokens: expected an int in 5\.\.6, got"):
                comm.dispatch(*given(comm.config), step_tokens=wrong)  # type: ignore[arg-type]
        assert driver.launches.value == before


BAD_Y: dict[str, tuple[Callable[..., Any], str]] = {
    "y a number": (lambda y, z: {"y": 1.0, "out": z}, "y: expected a torch.Tensor, got float"),
    "y of other rows": (lambda y, z: {"y": y[1:], "out": z}, r"y: expected shape \[12, 2304\], got \[11, 2304\]"),
    "y of another dtype": (lambda y, z: {"y": y.half(), "out": z}, "y: expected torch.bfloat16, got torch.float16"),
    "y negated lazily": (lambda y, z: {"y": torch._neg_view(y), "out": z}, "y: expected a resolved tensor"),
    "y with gaps": (lambda y, z: {"y": y.repeat(1, 2)[:, ::2], "out": z}, "y: expected a contiguous tensor"),
    "z of other tokens": (lambda y, z: {"y": y, "out": z[1:]}, r"out: expected shape \[5, 2304\], got \[4, 2304\]"),
    "z of another dtype": (lambda y, z: {"y": y, "out": z.float()}, "out: expected torch.bfloat16, got torch.float32"),
    "z in y": (lambda y, z: {"y": y, "out": y[3:8]}, "out: expected memory apart from y, got bytes in common"),
    "weights": (lambda y, z: {"y": y, "out": z, "topk_weights": 3}, "topk_weights: expected None unless exact_combine"),
}


@pytest.mark.parametrize("bad", BAD_Y)
def test_bad_arguments_of_combine_are_refused_before_anything_is_launched(driver: SilentDriver, bad: str) -> None:
    change, message = BAD_Y[bad]
    with silent_rank(driver, CASE, mode=Mode.HT, layout=Layout.FLAT, exact_shapes=False) as (comm, _):
        out, handle = comm.dispatch(*given(comm.config))
        y, z = torch.zeros_like(out.tokens), torch.empty(5, WIDTH, dtype=torch.bfloat16)
        assert comm.combine(y, handle, out=z) is z
        before = driver.launches.value
        for call in (comm.combine, comm.combine_async):
            with pytest.raises(ArgumentError, match=message):
                call(handle=handle, **change(y, z))
        with pytest.raises(ArgumentError, match="handle: expected a DispatchHandle, got str"):
            comm.combine(y, "handle")  # type: ignore[arg-type]
        with pytest.raises(HandleError, match="handle: made by another communicator"):
            comm.combine(y, dataclasses.replace(handle, owner=handle.owner + 1))
        with pytest.raises(HandleError, match="handle: made in epoch 7, the group is in epoch 0"):
            comm.combine(y, dataclasses.replace(handle, epoch=7))
        with pytest.raises(HandleError, match="previous_handle: made for 5 tokens, x has 4"):
            comm.dispatch(given(comm.config, 4)[0], None, None, previous_handle=handle)
        assert driver.launches.value == before


BAD_HOME: dict[str, tuple[Callable[..., Any], str]] = {
    "a number": (lambda w: 3, "topk_weights: expected a torch.Tensor, got int"),
    "of other tokens": (lambda w: w[1:], r"topk_weights: expected shape \[5, 3\], got \[4, 3\]"),
    "of halves": (lambda w: w.half(), "topk_weights: expected torch.float32, got torch.float16"),
    "with gaps": (lambda w: w.repeat(1, 2)[:, ::2], "topk_weights: expected a contiguous tensor"),
    "freed": (freed, "topk_weights: expected a tensor with memory"),
}


@pytest.mark.parametrize("bad", BAD_HOME)
def test_bad_weights_at_combine_are_refused_before_anything_is_launched(driver: SilentDriver, bad: str) -> None:
    change, message = BAD_HOME[bad]
    with silent_rank(driver, CASE, mode=Mode.LL, layout=Layout.EXPERT_MAJOR, exact_combine=True) as (comm, _):
        out, handle = comm.dispatch(*given(comm.config))
        y, before = torch.zeros_like(out.tokens), driver.launches.value
        for combine in (comm.combine, comm.combine_async):
            with pytest.raises(ArgumentError, match=message):
                combine(y, handle, topk_weights=change(torch.ones(5, TOPK)))
        assert driver.launches.value == before


@pytest.mark.parametrize("wrapped", ["vmap", "grad"])
def test_tensors_of_functorch_launch_nothing(driver: SilentDriver, wrapped: str) -> None:
    """They are torch.Tensor by their type, and have no memory."""
    with silent_rank(driver, CASE, mode=Mode.HT, layout=Layout.FLAT, exact_shapes=False) as (comm, _):
        x, ids, weights = given(comm.config)
        comm.dispatch(x, ids, weights)
        before = driver.launches.value

        def function(w: torch.Tensor) -> torch.Tensor:
            return comm.dispatch(x, ids, w)[0].tokens.float().sum()

        with pytest.raises(RuntimeError, match="doesn't have storage"):
            torch.func.vmap(function)(weights[None]) if wrapped == "vmap" else torch.func.grad(function)(weights)
        assert driver.launches.value == before
        assert not long_way(driver, comm, x, ids, weights)


def test_what_plain_calls_gave_goes_into_compiled_functions(driver: SilentDriver) -> None:
    with silent_rank(driver, CASE, mode=Mode.HT, layout=Layout.FLAT, exact_shapes=False) as (comm, _):
        x, ids, weights = given(comm.config)
        out, handle = comm.dispatch(x, ids, weights)
        y = torch.zeros_like(out.tokens)
        functions: dict[Callable[..., Any], tuple[Any, ...]] = {
            lambda x, handle: comm.dispatch(x, None, None, previous_handle=handle)[0].counts: (x, handle),
            lambda y, handle: comm.combine(y, handle) + 1: (y, handle),
            lambda out: out.counts + 1: (out,),
        }
        for function, arguments in functions.items():
            compiled = torch.compile(function, fullgraph=True, backend="eager")
            assert compiled(*arguments).shape == function(*arguments).shape


def test_copies_of_outputs_and_handles_have_their_fields(driver: SilentDriver) -> None:
    with silent_rank(driver, CASE, mode=Mode.HT, layout=Layout.FLAT, exact_shapes=False) as (comm, _):
        out, handle = comm.dispatch(*given(comm.config))
        for made in (copy.copy(out), dataclasses.replace(out)):
            assert (type(made), told(made)) == (DispatchOutput, told(out))
        for same in (copy.copy(handle), dataclasses.replace(handle)):
            assert (type(same), told(same), same.seq) == (DispatchHandle, told(handle), handle.seq)
            y = torch.zeros_like(out.tokens)
            assert comm.combine(y, same).shape == comm.combine(y, handle).shape
        with pytest.raises(AttributeError):
            out.tokens = torch.zeros(1)  # type: ignore[misc]


def test_a_trimmed_handle_takes_so_many_rows(driver: SilentDriver) -> None:
    """By both ways; the handle that it was made of stays as it is."""
    with silent_rank(driver, CASE, mode=Mode.HT, layout=Layout.FLAT, exact_shapes=False) as (comm, transport):
        x, ids, weights = given(comm.config)
        driver.record_bytes.value = ctypes.sizeof(abi.CombineArgs)
        out, handle = comm.dispatch(x, ids, weights)
        rows, records = out.tokens.shape[0], []
        for quick_calls in (comm._quick, None):
            comm._quick = quick_calls
            short = comm.trimmed(handle, 4)
            assert (short.rows_shape, handle.rows_shape, short.num_tokens) == ((4,), (rows,), 5)
            z, y = torch.empty(5, WIDTH, dtype=x.dtype), torch.zeros(4, WIDTH, dtype=x.dtype)
            transport._engine.num_combines = 0
            assert comm.combine(y, short, out=z) is z
            records.append(abi.CombineArgs.from_buffer_copy(driver.record()))
            records[-1].y = records[-1].z = 0
            with pytest.raises(ArgumentError, match=r"y: expected shape \[4, 2304\]"):
                comm.combine(out.tokens, short)
            assert comm.combine(torch.zeros_like(out.tokens), handle).shape == (5, WIDTH)
        assert bytes(records[0]) == bytes(records[1])
        for wrong in (-1, rows + 1):
            with pytest.raises(ArgumentError, match=rf"num_rows: expected 0\.\.{rows}, got {wrong}"):
                comm.trimmed(handle, wrong)
        comm._quick = transport._operations
        again = comm.dispatch(x, None, None, previous_handle=comm.trimmed(handle, 4))
        assert again[1].rows_shape == again[0].tokens.shape[:1] == (rows,)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (Layout.EXPERT_MAJOR, "layout: expected GROUPED or FLAT, got expert_major"),
        (Layout.GROUPED, "exact_shapes: expected False: a handle of exact shapes has its number of rows, got True"),
    ],
)
def test_other_handles_are_not_trimmed(driver: SilentDriver, layout: Layout, message: str) -> None:
    with silent_rank(driver, CASE, mode=Mode.LL, layout=layout) as (comm, _):
        handle = comm.dispatch(*given(comm.config))[1]
        with pytest.raises(ArgumentError, match=message):
            comm.trimmed(handle, 1)


def test_no_call_is_launched_where_its_memory_is_fake(driver: SilentDriver) -> None:
    with silent_rank(driver, CASE, mode=Mode.HT, layout=Layout.FLAT, exact_shapes=False) as (comm, _):
        inputs, before = given(comm.config), driver.launches.value
        with (
            FakeTensorMode(allow_non_fake_inputs=True),
            pytest.raises(ArgumentError, match=r"under a mode that makes .*FakeTensor"),
        ):
            comm.dispatch(*inputs)
        assert driver.launches.value == before
        assert not long_way(driver, comm, *inputs)


def test_gradients_and_modes_change_nothing(driver: SilentDriver) -> None:
    with silent_rank(driver, CASE, mode=Mode.HT, layout=Layout.FLAT, exact_shapes=False) as (comm, _):
        x, ids, weights = given(comm.config)
        needs = weights.clone().requires_grad_()
        for w in (needs, needs * 1.0, weights):
            assert not long_way(driver, comm, x, ids, w)
        with torch.inference_mode():
            out, handle = comm.dispatch(torch.zeros_like(x), ids, weights)
        assert not comm.combine(torch.zeros_like(out.tokens).requires_grad_(), handle).requires_grad
        assert long_way(driver, comm, torch.nn.Parameter(x), ids, weights)  # as other subclasses: vLLM's, DTensor


def test_nothing_is_kept_of_what_was_given(driver: SilentDriver) -> None:
    """Neither of good calls nor of refused ones."""
    with silent_rank(driver, CASE, mode=Mode.LL, layout=Layout.EXPERT_MAJOR, exact_combine=True) as (comm, _):
        inputs = given(comm.config)
        y = torch.zeros_like(comm.dispatch(*inputs)[0].tokens)
        objects = (*inputs, y, None)
        counts: list[list[int]] = []
        for _ in range(2):
            for _ in range(500):
                handle = comm.dispatch(*inputs)[1]
                comm.combine(y, handle, topk_weights=inputs[2])
                comm.combine_async(y, handle, topk_weights=inputs[2]).wait()
                with pytest.raises(ArgumentError):
                    comm.dispatch(inputs[0], inputs[1][1:], inputs[2])
            del handle
            gc.collect()
            counts.append([sys.getrefcount(each) for each in objects])
        assert all(abs(b - a) < 50 for a, b in zip(*counts, strict=True)), counts


def test_threads_do_not_mix_their_records(driver: SilentDriver) -> None:
    """The driver is called without the interpreter's lock, so each call has a record of its own."""
    with silent_rank(driver, CASE, mode=Mode.HT, layout=Layout.FLAT, exact_shapes=False) as (comm, transport):
        x, ids, weights = given(comm.config)
        call = comm._quick._plans[Mode.HT].fresh.call  # type: ignore[union-attr]
        failed: list[str] = []

        def many(tokens: int) -> None:
            block = torch.empty_like(transport._engine.blanks[1])
            for _ in range(3000):
                words = call(0, None, x[:tokens], ids[:tokens], weights[:tokens], block, None, None)
                if struct.unpack_from("=2q", words, 32)[0] != tokens:
                    failed.append(f"{tokens}: {words!r}")

        threads = [threading.Thread(target=many, args=(tokens,)) for tokens in range(1, 5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failed


def test_what_is_legal_but_not_plain_takes_the_long_way(driver: SilentDriver) -> None:
    with silent_rank(driver, CASE, mode=Mode.HT, layout=Layout.FLAT, exact_shapes=False) as (comm, transport):
        x, ids, weights = given(comm.config)
        shifted = torch.zeros(5 * WIDTH + 1, dtype=torch.bfloat16)[1:].view(5, WIDTH)
        assert shifted.data_ptr() % 16
        assert not long_way(driver, comm, x, ids.long(), weights)
        assert long_way(driver, comm, shifted, ids, weights)
        assert long_way(driver, comm, x.as_subclass(Rows), ids, weights)
        assert not long_way(driver, comm, x, ids, weights, step_tokens=5)
        driver.context.value = 0x1000  # another thread, or another device
        assert long_way(driver, comm, x, ids, weights)
        driver.context.value = None
        transport._streams.current.value = -1
        assert long_way(driver, comm, x, ids, weights)
        transport._streams.current.value = 0
        assert not long_way(driver, comm, x.requires_grad_(), ids, weights)
        out, handle = comm.dispatch(shifted, ids, weights)  # and what it leaves is taken up again
        assert comm.combine(torch.zeros_like(out.tokens), handle).shape == (5, WIDTH)
        assert not long_way(driver, comm, x, None, None, previous_handle=handle)


def addresses(kept: Any) -> Iterator[int]:
    """Of tensors, and of what states keep."""
    for each in kept:
        if isinstance(each, StateParts):
            yield from addresses(each.memory)
        elif each is not None:
            yield each.data_ptr()


@pytest.mark.parametrize("apart", [False, True])
def test_behind_a_second_stream_each_launch_leaves_what_it_used(driver: SilentDriver, apart: bool) -> None:
    """An engine that has captured graphs has used two streams: its eager steps are plain, and their memory is kept."""
    with silent_rank(driver, CASE, mode=Mode.HT, layout=Layout.FLAT, exact_shapes=False, max_in_flight=2) as (comm, at):
        left: list[set[int]] = []
        order = at._streams
        order.event, order.leave = object(), lambda kept: left.append(set(addresses(kept)))

        def called(function: Callable[..., Any], *args: Any, **named: Any) -> tuple[Any, set[int]]:
            """The result, and what each launch of the operation left behind, which must be by plans."""
            left.clear()
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(at, "enter", lambda: pytest.fail("the long way"))
                result = function(*args, **named)
                result = result.wait() if apart else result
            assert len(left) == 1 + apart
            return result, set.union(*left)

        x, ids, weights = given(comm.config)
        dispatch, combine = (comm.dispatch_async, comm.combine_async) if apart else (comm.dispatch, comm.combine)
        (out, first), kept = called(dispatch, x, ids, weights)
        assert kept >= {x.data_ptr(), ids.data_ptr(), weights.data_ptr(), first.state.block.data_ptr()}
        (_, again), kept = called(dispatch, x, None, None, previous_handle=first)
        assert kept >= {x.data_ptr(), again.state.block.data_ptr(), first.state.block.data_ptr()}
        y = torch.zeros_like(out.tokens)
        z, kept = called(combine, y, again)
        assert kept >= {y.data_ptr(), z.data_ptr(), again.state.block.data_ptr(), first.state.block.data_ptr()}


def test_validation_and_other_transports_have_no_plans(driver: SilentDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    with silent_rank(driver, CASE, mode=Mode.HT, layout=Layout.FLAT, exact_shapes=False, validate=True) as (comm, _):
        assert long_way(driver, comm, *given(comm.config))
    monkeypatch.delattr(torch.Tensor, "__dlpack_c_exchange_api__")
    operation_plan._maker.cache_clear()
    try:
        with silent_rank(driver, CASE, mode=Mode.HT, layout=Layout.FLAT, exact_shapes=False) as (comm, _):
            assert long_way(driver, comm, *given(comm.config))
    finally:
        operation_plan._maker.cache_clear()


def test_a_fault_is_raised_and_nothing_launched(driver: SilentDriver) -> None:
    with silent_rank(driver, CASE, mode=Mode.LL, layout=Layout.EXPERT_MAJOR) as (comm, transport):
        out, handle = comm.dispatch(*given(comm.config))
        before = driver.launches.value
        transport._tables.host.abort("it was told to")
        for _ in range(2):
            with pytest.raises(AbortedError, match="it was told to"):
                comm.combine(torch.zeros_like(out.tokens), handle)
            with pytest.raises(AbortedError, match="it was told to"):
                comm.dispatch(*given(comm.config))
        assert driver.launches.value == before


def test_a_peer_that_has_gone_on_ends_plain_operations(driver: SilentDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    word = ctypes.c_uint64(3)
    monkeypatch.setattr("tests.emulator.silent._Mailbox.watched", lambda _: [(ctypes.addressof(word), 3)])
    with silent_rank(driver, CASE, mode=Mode.LL, layout=Layout.EXPERT_MAJOR) as (comm, _):
        assert not long_way(driver, comm, *given(comm.config))
        word.value = 4
        assert long_way(driver, comm, *given(comm.config))


def test_a_refused_launch_speaks_the_drivers_words(driver: SilentDriver) -> None:
    with silent_rank(driver, CASE, mode=Mode.LL, layout=Layout.EXPERT_MAJOR) as (comm, _):
        driver.answer.value = 719
        with pytest.raises(TransportError, match="cuLaunchKernelEx: CUDA_ERROR_LAUNCH_FAILED: it broke"):
            comm.dispatch(*given(comm.config))
        driver.answer.value = 0
        with pytest.raises(TransportError, match="it broke"):  # until set_active
            comm.dispatch(*given(comm.config))


def test_captured_launches_are_remembered_and_reading_ones_are_not_plain(driver: SilentDriver) -> None:
    with silent_rank(driver, CASE, mode=Mode.LL, layout=Layout.EXPERT_MAJOR) as (comm, transport):
        comm.dispatch(*given(comm.config))
        assert not transport._operations.was_captured
        driver.capturing.value = 1
        assert not long_way(driver, comm, *given(comm.config))
        assert transport._operations.was_captured
        transport._note_captures()
        assert transport._captured
    with silent_rank(driver, CASE, mode=Mode.HT, layout=Layout.FLAT) as (comm, transport):
        before = driver.launches.value
        assert comm._quick is not None
        assert comm._quick.dispatch(*given(comm.config), None) is None
        assert driver.launches.value == before


DROPPED = 3


@pytest.mark.parametrize("comes", [True, False])
def test_numbers_are_waited_for_once(driver: SilentDriver, comes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where they never come: then the stream is waited for, and what broke is raised, or the numbers read."""
    settled = []
    with silent_rank(driver, CASE, mode=Mode.HT, layout=Layout.FLAT) as (comm, transport):
        monkeypatch.setattr(transport, "settle", lambda: settled.append(1))
        driver.brought.value = ROWS if comes else -1
        same_memory(monkeypatch)
        out, handle = comm.dispatch(*given(comm.config))
        assert (out.tokens.shape, handle.rows_shape, len(settled)) == ((ROWS, WIDTH), (ROWS,), 0 if comes else 1)
        assert comm.combine(torch.zeros(ROWS, WIDTH, dtype=torch.bfloat16), handle).shape == (5, WIDTH)


def test_a_fault_while_numbers_are_waited_for(driver: SilentDriver) -> None:
    with silent_rank(driver, CASE, mode=Mode.HT, layout=Layout.FLAT) as (comm, transport):
        driver.brought.value, driver.busy.value = -1, 1  # the stream never ends
        timer = threading.Timer(0.2, lambda: transport._tables.host.abort("meanwhile"))
        timer.start()
        with pytest.raises(AbortedError, match="meanwhile"):
            comm.dispatch(*given(comm.config))
        timer.join()


def test_dropped_rows_are_raised_with_output_and_handle(driver: SilentDriver) -> None:
    fields: dict[str, Any] = {"max_recv_rows": 4, "overflow": Overflow.RAISE, "exact_shapes": False}
    with silent_rank(driver, CASE, mode=Mode.HT, layout=Layout.FLAT, **fields) as (comm, _):
        driver.brought.value = ROWS | DROPPED << 32
        with pytest.raises(CapacityError) as raised:
            comm.dispatch(*given(comm.config))
        assert raised.value.num_dropped == DROPPED
        driver.brought.value = ROWS
        assert not long_way(driver, comm, *given(comm.config))


@pytest.mark.parametrize("exact", [True, False])
def test_what_is_left_takes_the_long_way_where_something_came_between(
    driver: SilentDriver, exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another stream, say: the second launch has the record of the first, whatever was begun meanwhile."""
    fields: dict[str, Any] = {"mode": Mode.HT, "layout": Layout.FLAT, "exact_shapes": exact, "max_in_flight": 2}
    with silent_rank(driver, CASE, **fields) as (comm, transport):
        driver.brought.value = ROWS
        same_memory(monkeypatch)
        driver.record_bytes.value = ctypes.sizeof(abi.DispatchArgs)
        first = comm.dispatch_async(*given(comm.config))
        sent = abi.DispatchArgs.from_buffer_copy(driver.record())
        second = comm.dispatch_async(*given(comm.config, 2))
        transport._streams.current.value = -1
        out, handle = first.wait()
        received = abi.DispatchArgs.from_buffer_copy(driver.record())
        assert (sent.work.phases, received.work.phases) == (SEND, RECEIVE)
        received.work.phases = SEND
        assert bytes(sent) == bytes(received)
        assert first.wait()[1] is handle
        assert (handle.num_tokens, out.tokens.shape[0]) == (5, ROWS if exact else transport._engine.outputs.rows[0])
        transport._streams.current.value = 0
        assert second.wait()[1].num_tokens == 2
        driver.record_bytes.value = ctypes.sizeof(abi.CombineArgs)
        request = comm.combine_async(torch.zeros(out.tokens.shape, dtype=torch.bfloat16), handle)
        transport._streams.current.value = -1
        z, done = request.wait(), driver.launches.value
        received = abi.CombineArgs.from_buffer_copy(driver.record())
        assert (received.work.phases, received.z, received.num_tokens) == (RECEIVE, z.data_ptr(), 5)
        assert (request.wait() is z, driver.launches.value) == (True, done)


def test_requests_are_counted(driver: SilentDriver) -> None:
    """Whatever way they take."""
    with silent_rank(driver, CASE, mode=Mode.HT, layout=Layout.FLAT, exact_shapes=False, max_in_flight=1) as (comm, _):
        request = comm.dispatch_async(*given(comm.config))
        for begin in (comm.dispatch, comm.dispatch_async):
            with pytest.raises(HandleError, match="dispatch: expected every request waited for before max_in_flight"):
                begin(*given(comm.config))
        handle = request.wait()[1]
        assert comm.is_current(handle)
        comm.dispatch(*given(comm.config))
        assert not comm.is_current(handle)


def test_wide_ids_are_narrowed_in_the_memory_of_the_dispatch(driver: SilentDriver) -> None:
    """By a kernel before it; a dispatch that uses the routing again does the same."""
    with silent_rank(driver, CASE, mode=Mode.HT, layout=Layout.FLAT, exact_shapes=False) as (comm, _):
        x, ids, weights = given(comm.config)
        ids = torch.randint(-1, EXPERTS, ids.shape)
        driver.record_bytes.value, before = ctypes.sizeof(abi.DispatchArgs), driver.narrowed.value
        for tokens, previous in ((5, False), (5, True), (0, False)):
            former = comm.dispatch(x, ids, weights)[1] if previous else None
            _, handle = comm.dispatch(x[:tokens], ids[:tokens], weights[:tokens], previous_handle=former)
            at = abi.DispatchArgs.from_buffer_copy(driver.record()).topk_ids
            block = handle.state.block.view(torch.uint8)
            seen = block[at - block.data_ptr() :][: tokens * TOPK * 4].view(torch.int32).view(tokens, TOPK)
            assert torch.equal(seen.long(), ids[:tokens])
        assert driver.narrowed.value == before + 3
        assert not long_way(driver, comm, x, ids.int(), weights)
        assert driver.narrowed.value == before + 3


@pytest.mark.parametrize("wide", [True, False])
def test_an_exact_combine_keeps_the_weights_of_the_dispatch(driver: SilentDriver, wide: bool) -> None:
    """Callers may overwrite theirs. The kernel that narrows ids copies them; else a copy behind the launch does."""
    with silent_rank(driver, CASE, mode=Mode.LL, layout=Layout.EXPERT_MAJOR, exact_combine=True) as (comm, _):
        x, ids, weights = given(comm.config)
        weights.copy_(torch.rand(5, TOPK))
        before = driver.copies.value, driver.narrowed.value
        out, handle = comm.dispatch(x, ids.long() if wide else ids, weights)
        assert (driver.copies.value - before[0], driver.narrowed.value - before[1]) == (not wide, wide)
        kept, given_weights = handle.state.topk_weights, weights.clone()
        weights.zero_()
        assert torch.equal(kept, given_weights)
        driver.record_bytes.value = ctypes.sizeof(abi.CombineArgs)
        comm.combine(torch.zeros_like(out.tokens), handle)
        assert abi.CombineArgs.from_buffer_copy(driver.record()).topk_weights == kept.data_ptr()
        comm.combine(torch.zeros_like(out.tokens), handle, topk_weights=weights)
        assert abi.CombineArgs.from_buffer_copy(driver.record()).topk_weights == weights.data_ptr()


def test_python_and_cpp_agree(driver: SilentDriver) -> None:
    assert driver.library.cd_operation_plan_bytes() == operation_plan.PLAN_BYTES
