"""Operations that repeat: when the plan of an earlier one is used, and that it does what the long way does."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ep_kernels.collectives import Algorithm, CollectiveConfig, Collectives
from ep_kernels.collectives import collective_reference as reference
from ep_kernels.collectives.repeats import Repeats
from ep_kernels.errors import AbortedError, ArgumentError
from ep_kernels.transports.collective_base import ReduceArgs
from ep_kernels.transports.nvlink.copy_engines.collective_work import CopyPlan, KernelPlan
from ep_kernels.transports.nvlink.copy_engines.repeat_records import DISTURBED, KernelRepeat
from ep_kernels.transports.nvlink.gpu import launch
from ep_kernels.transports.nvlink.gpu.launch import Quiet
from tests.cases import draw_seed
from tests.collectives.steps import same_bits
from tests.compare import freed
from tests.emulator.machine import Emulated, without_driver
from tests.gpu.loopback_collectives import BOTH, LoopbackCollectives, rows
from tests.groups import LonelyGroup
from tests.tools import needs


class Planner:
    """Plans by what `made` collects."""

    def __init__(self, transport: Any, made: list[Plan]) -> None:
        self._transport, self._made = transport, made

    def pool(self) -> range:
        begin = self._transport._pool_address
        return range(begin, begin + self._transport._pool.num_bytes)

    def plan_for(self, args: Any, op: object) -> Any:
        self._made.append(Plan(self._transport, args))
        return self._made[-1]


class Plan:
    """Begins an all-reduce, and counts; `is_quiet` False: says that somebody has to look."""

    def __init__(self, transport: Any, args: ReduceArgs) -> None:
        self._begin, self._args = transport.all_reduce, args
        self.num_begun, self.is_quiet = 0, True

    def begin(self, x: torch.Tensor, out: torch.Tensor, x_at: int, out_at: int) -> Any:
        assert (x_at, out_at) == (x.data_ptr(), out.data_ptr())
        if not self.is_quiet:
            return None
        self.num_begun += 1
        return self._begin(ReduceArgs(x.reshape(-1), out.reshape(-1), self._args.algorithm, self._args.num_sms))


@pytest.fixture
def planned() -> Iterator[tuple[Collectives, list[Plan]]]:
    """Collectives of one rank, and the plans that were asked for."""
    with Collectives(CollectiveConfig(group=LonelyGroup(), fallback=False, pool_bytes=1 << 20)) as coll:
        made: list[Plan] = []
        coll._repeats = Repeats(coll.size, Planner(coll._transport, made))
        yield coll, made


def test_the_second_of_two_like_operations_has_a_plan(planned: tuple[Collectives, list[Plan]]) -> None:
    coll, made = planned
    for number in range(5):
        x = torch.randn(3, 5)
        assert torch.equal(coll.all_reduce(x).wait(), x)
        assert len(made) == 1
        assert made[0].num_begun == number
    x, out = torch.randn(3, 5), torch.empty(3, 5)
    for _ in range(2):
        assert torch.equal(coll.all_reduce(x, out=out).wait(), x)
        assert coll.all_reduce(x, out=x).wait().data_ptr() == x.data_ptr()
    assert [plan.num_begun for plan in made] == [4, 1, 1], "apart, with out, in place"


def test_no_other_operation_has_the_plan_that_was_missing(planned: tuple[Collectives, list[Plan]]) -> None:
    """A gather that was refused, or that has no plan, leaves none to what comes next: it looks up none of its own."""
    coll, made = planned
    x = torch.randn(3, 5)
    with pytest.raises(ArgumentError, match=r"^out: expected"):
        coll.all_gather(x, out=torch.empty(4, 5))
    assert torch.equal(coll.all_gather_matmul(x, [torch.eye(5)])[1], x)
    assert torch.equal(coll.all_gather_coalesced([x]).wait()[0], x)
    assert not made
    with pytest.raises(ArgumentError, match=r"^out: expected"):
        coll.all_gather(x, out=torch.empty(4, 5))


CHANGES: dict[str, Callable[[torch.Tensor, Collectives], tuple[Any, dict[str, Any]]]] = {
    "shape": lambda x, coll: (x[:2], {}),
    "dtype": lambda x, coll: (x.half(), {}),
    "num_sms": lambda x, coll: (x, {"num_sms": 3}),
    "registered": lambda x, coll: (coll.empty(x.shape, x.dtype).copy_(x), {}),
    "out": lambda x, coll: (x, {"out": torch.empty_like(x)}),
    "gradient": lambda x, coll: (x.clone().requires_grad_(), {}),
}


@pytest.mark.parametrize("what", CHANGES)
def test_other_arguments_take_the_long_way(planned: tuple[Collectives, list[Plan]], what: str) -> None:
    coll, made = planned
    x = torch.randn(4, 6)
    coll.all_reduce(x).wait()
    other, options = CHANGES[what](x, coll)
    assert torch.equal(coll.all_reduce(other, **options).wait(), other)
    assert [plan.num_begun for plan in made] == [0] * len(made)
    assert len(made) == (1 if what == "gradient" else 2)


def test_bad_arguments_are_refused_whatever_has_been_planned(planned: tuple[Collectives, list[Plan]]) -> None:
    coll, made = planned
    x = torch.randn(4, 4)
    coll.all_reduce(x).wait()
    coll.all_reduce(x, out=torch.empty_like(x)).wait()
    wide = torch.empty(40)
    wrong: list[tuple[str, Any, dict[str, Any]]] = [
        ("x", x.T, {}), ("x", None, {}), ("x", x.to_sparse(), {}), ("x", x.to("meta"), {}),
        ("out", x, {"out": torch.empty(4, 3)}), ("out", x, {"out": x.half()}), ("num_sms", x, {"num_sms": 1.5}),
        ("op", x, {"op": "most"}), ("out", wide[:16].view(4, 4), {"out": wide[8:24].view(4, 4)}),
        ("x", torch._neg_view(x), {}), ("out", x, {"out": torch._neg_view(x.clone())}),
        ("x", freed(x.clone()), {}), ("out", x, {"out": freed(x.clone())}),
    ]  # fmt: skip
    for name, given, options in wrong:
        with pytest.raises(ArgumentError, match=f"^{name}: expected"):
            coll.all_reduce(given, **options)
    assert [plan.num_begun for plan in made] == [0, 0]


def test_conjugated_tensors_are_refused_whatever_has_been_gathered() -> None:
    x = torch.randn(3, dtype=torch.complex64)
    with Collectives(CollectiveConfig(group=LonelyGroup(), fallback=False, pool_bytes=1 << 20)) as coll:
        for _ in range(2):
            assert torch.equal(coll.all_gather(x).wait(), x)
            with pytest.raises(ArgumentError, match=r"x: expected a resolved tensor, got a lazy .* resolve_conj"):
                coll.all_gather(x.conj())
            with pytest.raises(ArgumentError, match="out: expected a resolved tensor"):
                coll.all_gather(x, out=torch.empty_like(x).conj())


def test_who_has_to_look_takes_the_long_way(planned: tuple[Collectives, list[Plan]]) -> None:
    coll, made = planned
    x = torch.randn(7)
    coll.all_reduce(x).wait()
    made[0].is_quiet = False
    assert torch.equal(coll.all_reduce(x).wait(), x)
    assert len(made) == 1, "it is still good"
    made[0].is_quiet = True
    coll.all_reduce(x).wait()
    assert made[0].num_begun == 1
    coll.set_active([True], 1)
    coll.all_reduce(x).wait()
    assert len(made) == 2, "plans are those of an epoch"
    coll.abort("enough")
    with pytest.raises(AbortedError):
        coll.all_reduce(x)
    assert [plan.num_begun for plan in made] == [1, 0]


class Owner:
    """Of plans, on a stream that is none."""

    epoch = 0

    def __init__(self) -> None:
        self.is_quiet, self.num_captured, self.told = True, 0, list[tuple[int, int]]()

    def undisturbed(self) -> Any:
        return SimpleNamespace(cuda_stream=7, device=torch.device("cpu")) if self.is_quiet else None

    def used(self, x: torch.Tensor, out: torch.Tensor) -> None:
        self.told.append((x.data_ptr(), out.data_ptr()))

    def untroubled(self) -> int | None:
        return 7 if self.is_quiet else None

    def note_capture(self) -> None:
        self.num_captured += 1


class Library:
    """Takes the place of the native library: writes down what is launched."""

    def __init__(self) -> None:
        self.started: list[tuple[int, ...]] = []
        self.answer = 0

    def cd_repeat_kernel(self, address: int, stream: int, x: int, out: int) -> int:
        record = KernelRepeat.from_address(address)
        if self.answer != DISTURBED:
            for at, value in ((record.x, x), (record.out, out)):
                ctypes.c_uint64.from_address(at).value = value
            self.started.append((record.prepared, stream, record.argument))
        return self.answer


@needs("g++")
@pytest.mark.parametrize("algorithm", BOTH)
def test_a_planned_kernel_sums_what_it_is_given(monkeypatch: pytest.MonkeyPatch, algorithm: Algorithm) -> None:
    """On the emulator: three ranks' plans, made for other tensors."""
    without_driver(monkeypatch)
    loop, generator = LoopbackCollectives(3, Emulated()), torch.Generator().manual_seed(draw_seed())
    n, calls, plans = 300, [], []
    for engine in loop.engines:
        gone = torch.empty(n)
        (call,) = engine.all_reduce(gone, gone, None, algorithm, None)
        library, owner = Library(), Owner()
        kernel = SimpleNamespace(prepared=lambda *_, prepared=launch.Prepared(), **__: prepared, library=library)
        plans.append((KernelPlan(owner, kernel, call, call.args, [0, 1, 2], Quiet([])), kernel, owner))
        calls.append([call])
    for _ in range(2):
        xs = list(rows(3, n, torch.float32, generator))
        outs = [torch.full((n,), float("nan")) for _ in xs]
        for (plan, kernel, owner), x, out, (call,) in zip(plans, xs, outs, calls, strict=True):
            assert plan.begin(x, out, x.data_ptr(), out.data_ptr()) is not None
            assert owner.told.pop() == (x.data_ptr(), out.data_ptr()), "for streams of other launches"
            assert kernel.library.started.pop() == (ctypes.addressof(kernel.prepared()), 7, ctypes.addressof(call.args))
        loop.run(calls)
        loop.check()
        for out, want in zip(outs, reference.all_reduce(xs), strict=True):
            same_bits(out, want, "sum")
    plan, kernel, owner = plans[0]
    library = kernel.library
    library.answer = -1
    assert plan.begin(xs[0], outs[0], 1, 2) is not None
    assert owner.num_captured == 1
    library.started.clear()
    owner.told.clear()
    library.answer = DISTURBED
    assert plan.begin(xs[0], outs[0], 1, 2) is None
    owner.is_quiet = False
    library.answer = 0
    assert plan.begin(xs[0], outs[0], 1, 2) is None
    assert (library.started, owner.told) == ([], [])


def test_a_planned_copy_keeps_memory_and_no_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP's buffers are used again when the tensor that FSDP had is gone, long before the host sees the copies end."""
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: False, raising=False)
    kept, owner = list[Any](), Owner()

    def push_again(template: Any, keep: Any, behind: int) -> int:
        kept.append((keep, behind))
        return len(kept)

    engines: Any = SimpleNamespace(arrivals=lambda: [1], push_again=push_again)
    template: Any = SimpleNamespace(kind=SimpleNamespace(arrivals=()))
    plan, memory = CopyPlan(owner, engines, lambda: template, 0), torch.zeros(8)
    out = memory.view(8)
    lent = weakref.ref(out)
    assert plan.begin(out[:4], out, 0, 0) is not None
    del out
    assert lent() is None
    assert kept[0][0].data_ptr() == memory.data_ptr()
    assert kept[0][1] == 7
    owner.is_quiet = False
    assert plan.begin(memory[:4], memory, 0, 0) is None
    assert len(kept) == 1
