"""How one step's tensors reach the device and come home, and what its phases took there.

Requests live in host memory, steps on the device. On a CPU that is the same place. On a GPU a step is queued on a
stream of its own: rows are gathered in pinned memory and copied in, everything follows in stream order, the result is
copied home, and the host waits once, at the end.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch

from crossdock.worker import device as devices

PHASES = 3
"""dispatch (with the copy in), experts, combine (with the copy home, on a GPU)."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step brought home.

    Attributes:
        z: [T, H] in host memory.
        rows_per_expert: int32 [L] in host memory.
        phases_ns: nanoseconds of each phase, by the clock of the device.
    """

    z: torch.Tensor
    rows_per_expert: torch.Tensor
    phases_ns: tuple[int, int, int]


class DeviceStream(Protocol):
    """One step at a time, from the thread that entered last: running(bring, mark, mark, send_home, wait)."""

    device: torch.device

    def enter(self) -> None:
        """Steps are taken in this thread from now on. Raises DeviceLost."""

    def running(self) -> AbstractContextManager[object]:
        """Around everything of a step: work is queued here."""

    def bring(self, parts: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
        """Concatenate each list of host tensors into one tensor on the device. Starts the clock."""

    def mark(self) -> None:
        """A phase ends here."""

    def send_home(self, z: torch.Tensor, rows_per_expert: torch.Tensor) -> None:
        """Start the way home; the last phase ends with it."""

    def wait(self) -> StepResult:
        """What was sent home, when it is there. The step is over then."""


def stream_of(device: torch.device) -> DeviceStream:
    """The lane of a device. Raises DeviceLost."""
    return GpuStream(device) if device.type == "cuda" else CpuStream()


class CpuStream:
    """Everything is where it is needed."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self._marks_ns: list[int] = []
        self._home: tuple[torch.Tensor, torch.Tensor] | None = None

    def enter(self) -> None:
        """See `DeviceStream`."""

    def running(self) -> AbstractContextManager[object]:
        """See `DeviceStream`."""
        return nullcontext()

    def bring(self, parts: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
        """See `DeviceStream`. A single piece is not copied."""
        joined = [pieces[0] if len(pieces) == 1 else torch.cat(list(pieces)) for pieces in parts]
        self._marks_ns = [time.monotonic_ns()]
        return joined

    def mark(self) -> None:
        """See `DeviceStream`."""
        self._marks_ns.append(time.monotonic_ns())

    def send_home(self, z: torch.Tensor, rows_per_expert: torch.Tensor) -> None:
        """See `DeviceStream`."""
        self.mark()
        self._home = z, rows_per_expert.clone()

    def wait(self) -> StepResult:
        """See `DeviceStream`."""
        assert self._home is not None
        (z, rows_per_expert), self._home = self._home, None
        first, second, third, last = self._marks_ns
        return StepResult(z, rows_per_expert, (second - first, third - second, last - third))


_in_flight: list[torch.Tensor] = []
"""Pinned tensors of the step under way. They outlive whatever breaks it: to free pinned memory that a lost GPU still
holds ends the process (torch before 2.15 lets an exception out of a destructor), and it has to say first why."""


class GpuStream:
    """A stream and its clock, kept over epochs: torch caches device memory for each stream apart. Pinned memory comes
    from torch's cache too, which gives a block out again only when the copy that used it is through, so rows that are
    home may be kept for as long as their client needs to read them.

    Args:
        device: one GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.enter()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._marks = [torch.cuda.Event(enable_timing=True) for _ in range(PHASES + 1)]  # type: ignore[no-untyped-call]
        self._num_marks = 0
        self._home: tuple[torch.Tensor, torch.Tensor] | None = None

    def enter(self) -> None:
        """See `DeviceStream`."""
        devices.enter(self.device)

    def running(self) -> AbstractContextManager[object]:
        """See `DeviceStream`."""
        return torch.cuda.stream(self._stream)

    def bring(self, parts: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
        """See `DeviceStream`."""
        self._num_marks = 0
        self.mark()
        return [self._copy_in(pieces) for pieces in parts]

    def mark(self) -> None:
        """See `DeviceStream`."""
        self._marks[self._num_marks].record(self._stream)
        self._num_marks += 1

    def send_home(self, z: torch.Tensor, rows_per_expert: torch.Tensor) -> None:
        """See `DeviceStream`."""
        self._home = _copy_out(z), _copy_out(rows_per_expert)
        self.mark()

    def wait(self) -> StepResult:
        """See `DeviceStream`."""
        assert self._home is not None
        (z, rows_per_expert), self._home = self._home, None
        self._stream.synchronize()
        _in_flight.clear()
        first, second, third = (
            int(start.elapsed_time(end) * 1e6) for start, end in zip(self._marks, self._marks[1:], strict=False)
        )
        return StepResult(z, rows_per_expert, (first, second, third))

    def _copy_in(self, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        if not any(piece.shape[0] for piece in pieces):
            return pieces[0].to(self.device)
        num_rows, row = sum(piece.shape[0] for piece in pieces), pieces[0].shape[1:]
        staged = torch.empty((num_rows, *row), dtype=pieces[0].dtype, pin_memory=True)
        _in_flight.append(staged)
        return torch.cat(list(pieces), out=staged).to(self.device, non_blocking=True)


def _copy_out(tensor: torch.Tensor) -> torch.Tensor:
    home = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.numel() > 0)
    _in_flight.append(home)
    return home.copy_(tensor, non_blocking=True)
