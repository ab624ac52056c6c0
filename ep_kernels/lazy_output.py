"""What a dispatch delivered, made field by field: each tensor costs the host about a microsecond.

Fields are properties, which `torch.compile` can follow where an eager call's output goes into a compiled function.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ep_kernels.types import DispatchOutput


class LazyOutput(DispatchOutput):
    """A `DispatchOutput` whose fields are made when they are first read."""

    __slots__ = ("_field", "_made")

    def __new__(cls, *args: Any, **fields: Any) -> DispatchOutput:  # type: ignore[misc]
        """With fields, as `dataclasses.replace` calls it: one that has them."""
        return DispatchOutput(*args, **fields)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy has its fields."""
        return DispatchOutput, tuple(getattr(self, name) for name in DispatchOutput.__dataclass_fields__)


def _property(name: str) -> property:
    def read(self: Any) -> Any:
        made = self._made
        if name not in made:
            made[name] = self._field(name)
        return made[name]

    return property(read)


for _name in DispatchOutput.__dataclass_fields__:
    setattr(LazyOutput, _name, _property(_name))

_new, _set = object.__new__, object.__setattr__


def lazy_output(field: Callable[[str], Any]) -> DispatchOutput:
    """An output whose fields `field(name)` makes."""
    made: DispatchOutput = _new(LazyOutput)
    _set(made, "_field", field)
    _set(made, "_made", {})
    return made


def recycle(rows: torch.Tensor) -> None:
    """An operation has begun that writes to this buffer, in whatever mode. What autograd has saved of it is no longer
    what it was: backward then raises, as after an in-place operation, instead of computing other gradients."""
    torch.autograd.graph.increment_version(rows)


def written(out: object) -> None:
    """The same of the `out` of a call, whose arguments have not been checked."""
    if isinstance(out, torch.Tensor):
        recycle(out)
