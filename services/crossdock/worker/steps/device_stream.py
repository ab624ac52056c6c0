"""Copies of one step to the device and back, and the duration of its phases.

Requests are in host memory, steps run on the device. On a CPU both are the same. On a GPU a step is queued on its own
stream: rows are gathered in pinned memory and copied in, everything follows in stream order, the result is copied out,
and the host waits once, at the end.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch

from crossdock.worker.experts import device as devices
from crossdock.worker.experts.kept_rows import KeptRows

PHASES = 3
"""dispatch (with the copy in), experts, combine (with the copy out, on a GPU)."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """Result of a step.

    Attributes:
        z: [T, H] in host memory.
        rows_per_expert: int32 [L] in host memory; of a CPU: valid until the next step.
        phases_ns: nanoseconds of each phase, by the device's clock.
    """

    z: torch.Tensor
    rows_per_expert: torch.Tensor
    phases_ns: tuple[int, int, int]


class DeviceStream(Protocol):
    """Runs one step at a time, on the thread that entered last: running(copy_in, mark, mark, copy_out, wait)."""

    device: torch.device

    def enter(self) -> None:
        """Use the current thread for all further steps. Raises DeviceLost."""

    def running(self) -> AbstractContextManager[object]:
        """Context of a step: work is queued on this stream."""

    def copy_in(self, parts: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
        """Concatenate each list of host tensors into one tensor on the device. Starts the clock."""

    def mark(self) -> None:
        """Mark the end of a phase."""

    def output(self, num_tokens: int, columns: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Where to write z [T, H], valid until the next step; None: anywhere."""

    def copy_out(self, z: torch.Tensor, rows_per_expert: torch.Tensor) -> None:
        """Start the copy to the host, which ends the last phase."""

    def wait(self) -> StepResult:
        """Wait for the result, which ends the step."""


def stream_of(device: torch.device) -> DeviceStream:
    return GpuStream(device) if device.type == "cuda" else CpuStream()


_NOTHING = nullcontext()


class CpuStream(DeviceStream):
    """Nothing to copy: host and device are the same."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self._marks_ns: list[int] = []
        self._result: tuple[torch.Tensor, torch.Tensor] | None = None
        self._rows = KeptRows(self.device)

    def enter(self) -> None:
        """Any thread will do."""

    def running(self) -> AbstractContextManager[object]:
        return _NOTHING

    def copy_in(self, parts: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
        """A single piece is not copied."""
        joined = [pieces[0] if len(pieces) == 1 else torch.cat(list(pieces)) for pieces in parts]
        self._marks_ns = [time.monotonic_ns()]
        return joined

    def mark(self) -> None:
        self._marks_ns.append(time.monotonic_ns())

    def output(self, num_tokens: int, columns: int, dtype: torch.dtype) -> torch.Tensor | None:
        return self._rows.take(num_tokens, columns, dtype)

    def copy_out(self, z: torch.Tensor, rows_per_expert: torch.Tensor) -> None:
        self.mark()
        self._result = z, rows_per_expert

    def wait(self) -> StepResult:
        assert self._result is not None
        (z, rows_per_expert), self._result = self._result, None
        first, second, third, last = self._marks_ns
        return StepResult(z, rows_per_expert, (second - first, third - second, last - third))


_in_flight: list[torch.Tensor] = []
"""Pinned tensors of the current step. They outlive a failed step: freeing pinned memory that a lost GPU still holds
ends the process (torch before 2.15 throws from a destructor) before the error is reported."""


class GpuStream(DeviceStream):
    """A CUDA stream and its events, kept over epochs, since torch caches device memory per stream. Pinned memory comes
    from torch's cache, which reuses a block only after its copy has finished, so result rows may be kept until their
    client has read them.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.enter()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._marks = [torch.cuda.Event(enable_timing=True) for _ in range(PHASES + 1)]  # type: ignore[no-untyped-call]
        self._num_marks = 0
        self._result: tuple[torch.Tensor, torch.Tensor] | None = None

    def enter(self) -> None:
        devices.enter(self.device)

    def running(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream)

    def copy_in(self, parts: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
        self._num_marks = 0
        self.mark()
        return [self._stage_in(pieces) for pieces in parts]

    def mark(self) -> None:
        self._marks[self._num_marks].record(self._stream)
        self._num_marks += 1

    def output(self, num_tokens: int, columns: int, dtype: torch.dtype) -> torch.Tensor | None:
        return None

    def copy_out(self, z: torch.Tensor, rows_per_expert: torch.Tensor) -> None:
        self._result = _to_host(z), _to_host(rows_per_expert)
        self.mark()

    def wait(self) -> StepResult:
        assert self._result is not None
        (z, rows_per_expert), self._result = self._result, None
        self._stream.synchronize()
        _in_flight.clear()
        first, second, third = (
            int(start.elapsed_time(end) * 1e6) for start, end in zip(self._marks, self._marks[1:], strict=False)
        )
        return StepResult(z, rows_per_expert, (first, second, third))

    def _stage_in(self, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        if not any(piece.shape[0] for piece in pieces):
            return pieces[0].to(self.device)
        num_rows, row = sum(piece.shape[0] for piece in pieces), pieces[0].shape[1:]
        staged = torch.empty((num_rows, *row), dtype=pieces[0].dtype, pin_memory=True, device="cpu")
        _in_flight.append(staged)
        return torch.cat(list(pieces), out=staged).to(self.device, non_blocking=True)


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.numel() > 0, device="cpu")
    _in_flight.append(host)
    return host.copy_(tensor, non_blocking=True)
