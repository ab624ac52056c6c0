"""Launches of a Triton kernel that repeat: its compiled form is kept, so a launch binds no arguments by name and looks
nothing up. That took longer than the kernels of a few rows."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import torch

_ALIGNED = 16
"""Bytes, as Triton compiles for: it reads more at once where a tensor begins at a multiple."""


class Launcher:
    """Launches of one kernel. One thread at a time.

    Args:
        function: `triton.jit`'s.
    """

    def __init__(self, function: Any) -> None:
        self._function, self._compiled = function, dict[Hashable, Any]()

    def __call__(
        self, programs: int, args: tuple[Any, ...], constants: Mapping[str, Hashable], options: Mapping[str, int]
    ) -> None:
        """Launch on the current stream.

        Args:
            programs: of the grid.
            args: in the kernel's order; of tensor descriptors, the types and blocks follow from the constants.
            constants: its constexpr arguments, which follow `args`, in the kernel's order.
            options: of the compiler.
        """
        key = (*map(_kind, args), *constants.values(), *options.values())
        compiled = self._compiled.get(key)
        if compiled is None:
            self._compiled[key] = self._function[(programs,)](*args, **constants, **options)
        else:
            compiled[(programs, 1, 1)](*args, *constants.values())


def _kind(arg: Any) -> Hashable:
    """What Triton compiles an argument for."""
    if isinstance(arg, torch.Tensor):
        return arg.dtype, arg.data_ptr() % _ALIGNED == 0
    if isinstance(arg, int):
        return arg == 1, arg % _ALIGNED == 0, arg >> 31
    return arg is None
