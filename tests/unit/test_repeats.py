"""Operations that repeat: when the plan of an earlier one is used, and that it does what the long way does."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ep_kernels import jit
from ep_kernels.collectives import Algorithm, CollectiveConfig, Collectives
from ep_kernels.collectives import collective_reference as reference
from ep_kernels.errors import AbortedError, ArgumentError
from ep_kernels.transports.collective_base import ReduceArgs
from ep_kernels.transports.nvlink import copy_schedule
from ep_kernels.transports.nvlink.collective_repeat import KernelPlan
from ep_kernels.transports.nvlink.copy_schedule import CopyPart, CopyPlaces, PushTemplate
from tests.cases import draw_seed
from tests.collectives.steps import same_bits
from tests.emulator.build import compiler
from tests.emulator.machine import Emulated, without_driver
from tests.gpu.loopback_collectives import BOTH, LoopbackCollectives, rows
from tests.groups import LonelyGroup


class Plan:
    """Begins an all-reduce, and counts; `is_quiet` False: says that somebody has to look."""

    def __init__(self, transport: Any, args: ReduceArgs) -> None:
        self._begin, self._args = transport.all_reduce, args
        self.num_begun, self.is_quiet = 0, True

    def begin(self, x: torch.Tensor, out: torch.Tensor) -> Any:
        if not self.is_quiet:
            return None
        self.num_begun += 1
        return self._begin(ReduceArgs(x.reshape(-1), out.reshape(-1), self._args.algorithm, self._args.num_sms))


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Collectives, list[Plan]]]:
    """Collectives of one rank, and the plans that were asked for."""
    with Collectives(CollectiveConfig(group=LonelyGroup(), fallback=False, pool_bytes=1 << 20)) as coll:
        made: list[Plan] = []

        def plan(args: ReduceArgs, op: object) -> Plan:
            made.append(Plan(coll._transport, args))
            return made[-1]

        monkeypatch.setattr(coll._transport, "plan_for", plan)
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
    ]  # fmt: skip
    for name, given, options in wrong:
        with pytest.raises(ArgumentError, match=f"^{name}: expected"):
            coll.all_reduce(given, **options)
    assert [plan.num_begun for plan in made] == [0, 0]


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


@pytest.mark.parametrize("active", [(True,) * 4, (True, True, False, True)])
def test_a_template_is_a_push_of_any_number(active: tuple[bool, ...]) -> None:
    places = CopyPlaces(1, active, tuple(1 << (20 + r) for r in range(4)), 256, 512, 64, 8, 16, 1 << 30)
    parts = [CopyPart(4096, 8192, 0, 320, 320), CopyPart(1 << 40, 70000, 0, 48, 64)]
    template = PushTemplate(places, parts, 77)
    for seq in (1, 2, 63, 64, 65, 77, 4096, 1 << 33):
        assert template.words(seq) == array("Q", chain.from_iterable(copy_schedule.push(places, seq, 77, parts)))


class Owner:
    """Of plans, on a stream that is none; a start writes down what it is given."""

    epoch = 0

    def __init__(self) -> None:
        self.is_quiet = True

    def undisturbed(self) -> Any:
        return SimpleNamespace(cuda_stream=7, device=torch.device("cpu")) if self.is_quiet else None


@pytest.mark.skipif(compiler() is None, reason="needs g++")
@pytest.mark.parametrize("algorithm", BOTH)
def test_a_planned_kernel_sums_what_it_is_given(monkeypatch: pytest.MonkeyPatch, algorithm: Algorithm) -> None:
    """On the emulator: three ranks' plans, made for other tensors."""
    without_driver(monkeypatch)
    loop, generator = LoopbackCollectives(3, Emulated()), torch.Generator().manual_seed(draw_seed())
    n, calls, plans = 300, [], []
    for engine in loop.engines:
        gone = torch.empty(n)
        (call,) = engine.all_reduce(gone, gone, None, algorithm, None)
        started: list[tuple[int, Any]] = []
        ready = SimpleNamespace(starter=lambda *_, started=started, **__: lambda *what: started.append(what))
        functions: Mapping[jit.Variant, Any] = {call.variant: ready}
        owner: Any = Owner()
        plans.append((KernelPlan(owner, functions, call, call.args, [0, 1, 2]), started, owner))
        calls.append([call])
    for _ in range(2):
        xs = list(rows(3, n, torch.float32, generator))
        outs = [torch.full((n,), float("nan")) for _ in xs]
        for (plan, started, _), x, out, (call,) in zip(plans, xs, outs, calls, strict=True):
            assert plan.begin(x, out) is not None
            assert started.pop() == (7, call.args)
        loop.run(calls)
        loop.check()
        for out, want in zip(outs, reference.all_reduce(xs), strict=True):
            same_bits(out, want, "sum")
    plans[0][2].is_quiet = False
    assert plans[0][0].begin(xs[0], outs[0]) is None
    assert plans[0][1] == []
