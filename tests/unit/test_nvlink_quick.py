"""Plain operations by one native call: the same records, outputs and handles as by the long way; and what makes them
take the long way. Launches go to a driver that keeps records (tests/emulator/silent.py)."""

from __future__ import annotations

import ctypes
import dataclasses
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from ep_kernels import ArgumentError, CapacityError, HandleError, MoECommunicator, ScaleFormat
from ep_kernels.errors import AbortedError, TransportError
from ep_kernels.kernels import abi
from ep_kernels.transports.nvlink import quick
from ep_kernels.transports.nvlink.routing_state import DispatchState, QuickState
from ep_kernels.types import DispatchHandle, DispatchOutput, Layout, Mode, Overflow
from tests.cases import RoutingCase
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
            if dtype is torch.uint8:  # of a dispatch: num_rows
                pools[key, shape, dtype].view(-1)[:4].view(torch.int32).fill_(ROWS)
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

    def call(self, record: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.comm._quick = self.quick if self.is_quick else None
        before, self.driver.record_bytes.value = self.driver.launches.value, ctypes.sizeof(record)
        result = function(*args, **kwargs)
        assert self.driver.launches.value == before + 1
        self.records.append(self.driver.record())
        self.comm._quick = self.quick
        return result

    def run(self, tokens: int, inputs: Any, home: bool, out: bool) -> list[Any]:
        comm = self.comm
        self.transport._engine.restart_slots()
        x, ids, weights, others = inputs
        first = self.call(abi.DispatchArgs, comm.dispatch, x, ids, weights)
        again = self.call(abi.DispatchArgs, comm.dispatch, x, None, None, previous_handle=first[1])
        third = self.call(abi.DispatchArgs, comm.dispatch, x, None, others, previous_handle=again[1])
        results = [first, again, third]
        for made, handle in (first, again, third, first):
            y = torch.empty(made.tokens.shape, dtype=comm.config.resolved_output_dtype)
            options: dict[str, Any] = {"topk_weights": weights} if home else {}
            z = torch.empty((tokens, WIDTH), dtype=y.dtype) if out else None
            results.append(self.call(abi.CombineArgs, comm.combine, y, handle, out=z, **options))
        return results


def told(result: Any) -> Any:
    """Of a result: everything that a caller sees, addresses included."""
    if isinstance(result, torch.Tensor):
        return result.dtype, tuple(result.shape), result.stride(), result.data_ptr()
    if isinstance(result, DispatchOutput):
        return [told(getattr(result, field.name)) for field in dataclasses.fields(result)]
    if isinstance(result, DispatchHandle):
        values = {f.name: getattr(result, f.name) for f in dataclasses.fields(result) if f.name != "state"}
        return told(list(values.values())), told(result.state)
    if isinstance(result, DispatchState):
        spans = [span[1:] for span in (result.routing, result.routing_id, result.carried)]
        return spans, told(result.flatten()), result.num_rows
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
        for tokens, home, out in ((5, False, False), (0, form == "home", True), (MOST, False, True)):
            ways = [Way(driver, comm, transport, is_quick) for is_quick in (True, False)]
            seen, inputs = [], (*given(comm.config, tokens), torch.zeros(tokens, TOPK))
            for way in ways:
                results = way.run(tokens, inputs, home, out)
                assert isinstance(results[0][1].state, QuickState) == way.is_quick
                for result in results[:3]:  # numbers of operations go on
                    object.__setattr__(result[1], "seq", 0)
                seen.append(told(results))
            assert seen[0] == seen[1]
            assert ways[0].records == ways[1].records


def long_way(driver: SilentDriver, comm: MoECommunicator, *args: Any, **kwargs: Any) -> bool:
    """Whether a dispatch takes it: then its state is not a plan's. It is launched once."""
    before = driver.launches.value
    made = comm.dispatch(*args, **kwargs)[1]
    assert driver.launches.value == before + 1
    return not isinstance(made.state, QuickState)


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
}


@pytest.mark.parametrize("bad", BAD)
def test_bad_arguments_of_dispatch_are_refused_before_anything_is_launched(driver: SilentDriver, bad: str) -> None:
    change, message = BAD[bad]
    with silent_rank(driver, CASE, mode=Mode.HT, layout=Layout.FLAT, exact_shapes=False) as (comm, transport):
        assert not long_way(driver, comm, *given(comm.config))
        before, slot = driver.launches.value, transport._engine.num_dispatches
        with pytest.raises(ArgumentError, match=message):
            comm.dispatch(*change(*given(comm.config)))
        assert (driver.launches.value, transport._engine.num_dispatches) == (before, slot)
        assert not long_way(driver, comm, *given(comm.config))


BAD_Y: dict[str, tuple[Callable[..., Any], str]] = {
    "y a number": (lambda y, z: {"y": 1.0, "out": z}, "y: expected a torch.Tensor, got float"),
    "y of other rows": (lambda y, z: {"y": y[1:], "out": z}, r"y: expected shape \[12, 2304\], got \[11, 2304\]"),
    "y of another dtype": (lambda y, z: {"y": y.half(), "out": z}, "y: expected torch.bfloat16, got torch.float16"),
    "y with gaps": (lambda y, z: {"y": y.repeat(1, 2)[:, ::2], "out": z}, "y: expected a contiguous tensor"),
    "z of other tokens": (lambda y, z: {"y": y, "out": z[1:]}, r"out: expected shape \[5, 2304\], got \[4, 2304\]"),
    "z of another dtype": (lambda y, z: {"y": y, "out": z.float()}, "out: expected torch.bfloat16, got torch.float32"),
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
        with pytest.raises(ArgumentError, match=message):
            comm.combine(handle=handle, **change(y, z))
        with pytest.raises(ArgumentError, match="handle: expected a DispatchHandle, got str"):
            comm.combine(y, "handle")  # type: ignore[arg-type]
        with pytest.raises(HandleError, match="handle: made by another communicator"):
            comm.combine(y, dataclasses.replace(handle, owner=handle.owner + 1))
        with pytest.raises(HandleError, match="handle: made in epoch 7, the group is in epoch 0"):
            comm.combine(y, dataclasses.replace(handle, epoch=7))
        with pytest.raises(HandleError, match="previous_handle: made for 5 tokens, x has 4"):
            comm.dispatch(given(comm.config, 4)[0], None, None, previous_handle=handle)
        assert driver.launches.value == before


def test_what_is_legal_but_not_plain_takes_the_long_way(driver: SilentDriver) -> None:
    with silent_rank(driver, CASE, mode=Mode.HT, layout=Layout.FLAT, exact_shapes=False) as (comm, transport):
        x, ids, weights = given(comm.config)
        shifted = torch.zeros(5 * WIDTH + 1, dtype=torch.bfloat16)[1:].view(5, WIDTH)
        assert shifted.data_ptr() % 16
        assert long_way(driver, comm, x, ids.long(), weights)
        assert long_way(driver, comm, shifted, ids, weights)
        assert long_way(driver, comm, x.as_subclass(Rows), ids, weights)
        assert long_way(driver, comm, x, ids, weights, step_tokens=5)
        driver.context.value = 0x1000  # another thread, or another device
        assert long_way(driver, comm, x, ids, weights)
        driver.context.value = None
        transport._streams.alone.value = -1
        assert long_way(driver, comm, x, ids, weights)
        transport._streams.alone.value = 0
        assert not long_way(driver, comm, x.requires_grad_(), ids, weights)
        out, handle = comm.dispatch(x, ids.long(), weights)  # and what it leaves is taken up again
        assert comm.combine(torch.zeros_like(out.tokens), handle).shape == (5, WIDTH)
        assert long_way(driver, comm, x, None, None, previous_handle=handle)


def test_validation_and_other_transports_have_no_plans(driver: SilentDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    with silent_rank(driver, CASE, mode=Mode.HT, layout=Layout.FLAT, exact_shapes=False, validate=True) as (comm, _):
        assert long_way(driver, comm, *given(comm.config))
    monkeypatch.delattr(torch.Tensor, "__dlpack_c_exchange_api__")
    quick._maker.cache_clear()
    try:
        with silent_rank(driver, CASE, mode=Mode.HT, layout=Layout.FLAT, exact_shapes=False) as (comm, _):
            assert comm._quick is None
            assert long_way(driver, comm, *given(comm.config))
    finally:
        quick._maker.cache_clear()


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
        assert not transport._quick.was_captured
        driver.capturing.value = 1
        assert not long_way(driver, comm, *given(comm.config))
        assert transport._quick.was_captured
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
        assert isinstance(handle.state, QuickState)
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
        assert isinstance(raised.value.handle.state, QuickState)
        driver.brought.value = ROWS
        assert not long_way(driver, comm, *given(comm.config))


def test_python_and_cpp_agree(driver: SilentDriver) -> None:
    assert driver.library.cd_quick_plan_bytes() == quick.PLAN_BYTES
