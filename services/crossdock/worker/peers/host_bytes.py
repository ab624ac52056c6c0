"""Bytes of a tensor in memory of the host, piece by piece: where they are on a CPU; of a GPU by way of a pinned buffer
and a stream of its own, so that no step waits for it, nor takes multiprocessors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from crossdock.worker.checkpoints.weight_memory import PIECE_BYTES
from crossdock.worker.experts import device as devices


class HostBytes:
    """Of tensors on one device. One thread.

    Raises:
        DeviceLost: the GPU does not work any more.
    """

    def __init__(self, device: torch.device) -> None:
        self._stage: torch.Tensor | None = None
        self._stream: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        if device.type != "cpu":
            devices.enter(device)
            self._stage = torch.empty(PIECE_BYTES, dtype=torch.uint8, device="cpu")
            with contextlib.suppress(RuntimeError):  # the host has none to pin: slower
                self._stage = self._stage.pin_memory()
            self._stream = torch.cuda.stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]

    def out_of(self, tensor: torch.Tensor) -> Iterator[torch.Tensor]:
        """Its pieces, uint8 on the host; each lives until the next one."""
        for piece in _pieces(tensor):
            if self._stage is None:
                yield piece
                continue
            staged = self._stage[: piece.numel()]
            with self._stream:
                staged.copy_(piece)  # waits for the copy alone
            yield staged

    def into(self, tensor: torch.Tensor) -> Iterator[torch.Tensor]:
        """Room for each of its pieces, to be filled before the next one is asked for."""
        for piece in _pieces(tensor):
            if self._stage is None:
                yield piece
                continue
            staged = self._stage[: piece.numel()]
            yield staged
            with self._stream:
                piece.copy_(staged)


def _pieces(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.split(tensor.view(-1).view(torch.uint8), PIECE_BYTES)
