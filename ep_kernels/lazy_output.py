"""What a dispatch delivered, made field by field: each tensor costs the host about a microsecond."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ep_kernels.types import DispatchOutput, Layout

_FIELDS = frozenset(DispatchOutput.__dataclass_fields__)


class LazyOutput(DispatchOutput):
    """A `DispatchOutput` whose fields are made when they are first read."""

    __slots__ = ("_field",)

    def __getattr__(self, name: str) -> Any:
        if name not in _FIELDS:
            raise AttributeError(name)
        value = self._field(name)
        object.__setattr__(self, name, value)
        return value


def lazy_output(layout: Layout, field: Callable[[str], torch.Tensor | None]) -> DispatchOutput:
    """An output of that layout whose other fields `field(name)` makes."""
    made: DispatchOutput = object.__new__(LazyOutput)
    object.__setattr__(made, "layout", layout)
    object.__setattr__(made, "_field", field)
    return made
