"""Collectives as torch operators: what `torch.compile` sees instead of the methods of `Collectives`.

A compiled function calls `coll.all_reduce(x).wait()` as any other; while it is traced this records
`torch.ops.crossdock.*`, whose kernels call the same methods when the compiled code runs. Names, weak references and the
`order` stamp are as in `ep_kernels/ops.py`. Results are new tensors; an `out` is copied to; `wait` is part of the
operator, so a work of compiled code is done.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from ep_kernels import checks
from ep_kernels.collectives.work import Work
from ep_kernels.errors import ArgumentError, ClosedError

T = TypeVar("T")


@dataclass(frozen=True)
class CollectiveSite:
    """What tracing has to know of a Collectives object; every field that is read becomes a guard of compiled code.

    Attributes:
        name: in operators.
        order: int32 [1] on the device of the operations.
    """

    name: str
    order: torch.Tensor

    @classmethod
    def of(cls, number: int, device: str) -> CollectiveSite:
        """The description of the object with that id."""
        order = torch.zeros(1, dtype=torch.int32, device=device)
        order._dynamo_static_input_type = "unguarded"  # type: ignore[attr-defined]  # as in TraceSite
        return cls(f"crossdock-collectives-{number}", order)


class Operated(Protocol):
    """What operators need of a `Collectives`; all methods as there."""

    _site: CollectiveSite

    @property
    def size(self) -> int:
        """R."""

    def all_gather_coalesced(
        self, xs: Sequence[torch.Tensor], *, num_sms: int | None = None
    ) -> Work[list[torch.Tensor]]:
        """As there, like all that follow."""

    def reduce_scatter(self, x: torch.Tensor, *, op: str = "sum", num_sms: int | None = None) -> Work[torch.Tensor]:
        """x [R * n, ...] -> [n, ...]."""

    def all_reduce(self, x: torch.Tensor, *, op: str = "sum", num_sms: int | None = None) -> Work[torch.Tensor]:
        """x [...] -> [...]."""

    def all_gather_matmul(
        self, x: torch.Tensor, weights: Sequence[torch.Tensor], *, dim: int = 0, num_sms: int | None = None
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        """x [n, K] -> ([R * n, N_i] each, [R * n, K]); of columns ([n, N_i] each, [n, R * K])."""

    def matmul_reduce_scatter(
        self, x: torch.Tensor, w: torch.Tensor, *, dim: int = 0, chunks: int = 2, num_sms: int | None = None
    ) -> torch.Tensor:
        """x [T, K] -> [T / R, N], or [T, N / R]."""

    def matmul_all_reduce(
        self, x: torch.Tensor, w: torch.Tensor, *, chunks: int = 4, num_sms: int | None = None
    ) -> torch.Tensor:
        """x [T, K] -> [T, N]."""


_objects: weakref.WeakValueDictionary[str, Operated] = weakref.WeakValueDictionary()


def register(name: str, coll: Operated) -> None:
    """Let operators find it. Holds a weak reference."""
    _objects[name] = coll


def find(name: str) -> Operated:
    """Raises ClosedError where it is gone."""
    coll = _objects.get(name)
    if coll is None:
        raise ClosedError(f"{name}: no longer exists")
    return coll


# What the compiler traces.


def all_gather(
    coll: Operated, xs: Sequence[torch.Tensor], outs: Sequence[torch.Tensor] | None, num_sms: int | None
) -> list[torch.Tensor]:
    """As `Collectives.all_gather_coalesced`."""
    made = _called(coll, torch.ops.crossdock.all_gather, list(xs), num_sms)
    if outs is None:
        return made
    if len(outs) != len(made):
        raise ArgumentError("outs", f"a list or tuple of {len(made)} tensors", len(outs))
    return [_copied(result, out) for result, out in zip(made, outs, strict=True)]


def reduce_scatter(
    coll: Operated, x: torch.Tensor, out: torch.Tensor | None, op: str, num_sms: int | None
) -> torch.Tensor:
    return _placed(_called(coll, torch.ops.crossdock.reduce_scatter, x, op, num_sms), out)


def all_reduce(coll: Operated, x: torch.Tensor, out: torch.Tensor | None, op: str, num_sms: int | None) -> torch.Tensor:
    return _placed(_called(coll, torch.ops.crossdock.all_reduce, x, op, num_sms), out)


def all_gather_matmul(
    coll: Operated,
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    dim: int,
    out: torch.Tensor | None,
    num_sms: int | None,
) -> tuple[list[torch.Tensor], torch.Tensor]:
    whole, *ys = _called(coll, torch.ops.crossdock.all_gather_matmul, x, list(weights), dim, num_sms)
    return ys, _placed([whole], out)


def matmul_reduce_scatter(
    coll: Operated, x: torch.Tensor, w: torch.Tensor, dim: int, chunks: int, num_sms: int | None
) -> torch.Tensor:
    return _called(coll, torch.ops.crossdock.matmul_reduce_scatter, x, w, dim, chunks, num_sms)[0]


def matmul_all_reduce(
    coll: Operated, x: torch.Tensor, w: torch.Tensor, chunks: int, num_sms: int | None
) -> torch.Tensor:
    return _called(coll, torch.ops.crossdock.matmul_all_reduce, x, w, chunks, num_sms)[0]


def done(result: T) -> Work[T]:
    """The Work of an operation of compiled code."""
    return Work(result, _Done(), _nothing)


class _Done:
    def is_completed(self) -> bool:
        return True


def _nothing(done: _Done) -> None:
    pass


def _called(coll: Operated, operator: Any, *args: Any) -> list[torch.Tensor]:
    site = coll._site
    stamp, *rest = operator(site.order, site.name, *args)
    site.order.copy_(stamp)
    results: list[torch.Tensor] = rest
    return results


def _placed(results: Sequence[torch.Tensor], out: torch.Tensor | None) -> torch.Tensor:
    return results[0] if out is None else _copied(results[0], out)


def _copied(result: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    checks.traced_out(out, tuple(result.shape), result.dtype, result.device.type)
    return out.copy_(result)


# What runs.


def _all_gather(order: torch.Tensor, name: str, xs: Sequence[torch.Tensor], num_sms: int | None) -> list[torch.Tensor]:
    shards = [x.contiguous() for x in xs]
    return [torch.empty_like(order), *find(name).all_gather_coalesced(shards, num_sms=num_sms).wait()]


def _reduce_scatter(
    order: torch.Tensor, name: str, x: torch.Tensor, op: str, num_sms: int | None
) -> list[torch.Tensor]:
    return [torch.empty_like(order), find(name).reduce_scatter(x.contiguous(), op=op, num_sms=num_sms).wait()]


def _all_reduce(order: torch.Tensor, name: str, x: torch.Tensor, op: str, num_sms: int | None) -> list[torch.Tensor]:
    return [torch.empty_like(order), find(name).all_reduce(x.contiguous(), op=op, num_sms=num_sms).wait()]


def _all_gather_matmul(
    order: torch.Tensor, name: str, x: torch.Tensor, weights: Sequence[torch.Tensor], dim: int, num_sms: int | None
) -> list[torch.Tensor]:
    ys, whole = find(name).all_gather_matmul(x.contiguous(), weights, dim=dim, num_sms=num_sms)
    return [torch.empty_like(order), whole, *ys]


def _matmul_reduce_scatter(order: torch.Tensor, name: str, x: torch.Tensor, *rest: Any) -> list[torch.Tensor]:
    w, dim, chunks, num_sms = rest
    made = find(name).matmul_reduce_scatter(x.contiguous(), w, dim=dim, chunks=chunks, num_sms=num_sms)
    return [torch.empty_like(order), made]


def _matmul_all_reduce(order: torch.Tensor, name: str, x: torch.Tensor, *rest: Any) -> list[torch.Tensor]:
    w, chunks, num_sms = rest
    made = find(name).matmul_all_reduce(x.contiguous(), w, chunks=chunks, num_sms=num_sms)
    return [torch.empty_like(order), made]


# What tracing takes for it.


def _gathered(size: int, x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(size * x.shape[0], *x.shape[1:]) if x.dim() else x.new_empty(size)


def _fake_all_gather(
    order: torch.Tensor, name: str, xs: Sequence[torch.Tensor], num_sms: int | None
) -> list[torch.Tensor]:
    size = find(name).size
    return [torch.empty_like(order), *(_gathered(size, x) for x in xs)]


def _fake_reduce_scatter(order: torch.Tensor, name: str, x: torch.Tensor, *rest: Any) -> list[torch.Tensor]:
    return [torch.empty_like(order), x.new_empty(x.shape[0] // find(name).size, *x.shape[1:])]


def _fake_all_reduce(order: torch.Tensor, name: str, x: torch.Tensor, *rest: Any) -> list[torch.Tensor]:
    return [torch.empty_like(order), x.new_empty(x.shape)]


def _fake_all_gather_matmul(
    order: torch.Tensor, name: str, x: torch.Tensor, weights: Sequence[torch.Tensor], dim: int, *rest: Any
) -> list[torch.Tensor]:
    size = find(name).size
    whole = _gathered(size, x) if dim == 0 else x.new_empty(x.shape[0], size * x.shape[1])
    return [torch.empty_like(order), whole, *(x.new_empty(whole.shape[0], w.shape[1]) for w in weights)]


def _fake_matmul_reduce_scatter(
    order: torch.Tensor, name: str, x: torch.Tensor, w: torch.Tensor, dim: int, *rest: Any
) -> list[torch.Tensor]:
    size = find(name).size
    shape = (x.shape[0] // size, w.shape[1]) if dim == 0 else (x.shape[0], w.shape[1] // size)
    return [torch.empty_like(order), x.new_empty(shape)]


def _fake_matmul_all_reduce(
    order: torch.Tensor, name: str, x: torch.Tensor, w: torch.Tensor, *rest: Any
) -> list[torch.Tensor]:
    return [torch.empty_like(order), x.new_empty(x.shape[0], w.shape[1])]


_library: Any = torch.library.Library("crossdock", "FRAGMENT")  # type: ignore[no-untyped-call]
for _name, _arguments, _real, _fake in (
    ("all_gather", "Tensor[] xs, int? num_sms", _all_gather, _fake_all_gather),
    ("reduce_scatter", "Tensor x, str op, int? num_sms", _reduce_scatter, _fake_reduce_scatter),
    ("all_reduce", "Tensor x, str op, int? num_sms", _all_reduce, _fake_all_reduce),
    (
        "all_gather_matmul",
        "Tensor x, Tensor[] weights, int dim, int? num_sms",
        _all_gather_matmul,
        _fake_all_gather_matmul,
    ),
    (
        "matmul_reduce_scatter",
        "Tensor x, Tensor w, int dim, int chunks, int? num_sms",
        _matmul_reduce_scatter,
        _fake_matmul_reduce_scatter,
    ),
    ("matmul_all_reduce", "Tensor x, Tensor w, int chunks, int? num_sms", _matmul_all_reduce, _fake_matmul_all_reduce),
):
    _library.define(f"{_name}(Tensor order, str coll, {_arguments}) -> Tensor[]")
    _library.impl(_name, _real, "CompositeExplicitAutograd")
    torch.library.register_fake(f"crossdock::{_name}", _fake, lib=_library)
