"""A machine for `tests.gpu.loopback` that is none: kernels run on the CPU, tensors lie in its memory."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import Any

import pytest
import torch

from ep_kernels.network import NetworkConfig
from ep_kernels.transports.nvlink.calls.engine import Call
from ep_kernels.transports.nvlink.memory import samples
from ep_kernels.transports.nvlink.network.boxes import Boxes, PinnedBoxes
from tests.emulator.build import build


class Emulated:
    """See `tests.gpu.loopback.Machine`."""

    device = torch.device("cpu")

    def __init__(self, num_sms: int = 6) -> None:
        self.num_sms = num_sms

    def boxes(self, network: NetworkConfig, rank: int) -> Boxes:
        """See `Machine`."""
        return PinnedBoxes(self.register, self.unregister)

    def register(self, address: int, num_bytes: int) -> None:
        """See `Machine`: all memory is the machine's."""

    def unregister(self, address: int) -> None:
        """See `Machine`."""

    def run(self, call: Call, num_blocks: int, records: torch.Tensor, blocks_per_rank: int) -> None:
        """See `Machine`."""
        library = build(replace(call.variant, loopback=True))
        library.emulated_launch(
            ctypes.c_uint(num_blocks), ctypes.c_uint(call.variant.num_threads), ctypes.c_uint(call.launch.shared_bytes),
            ctypes.c_void_p(records.data_ptr()), ctypes.c_int(blocks_per_rank),
        )  # fmt: skip


def without_driver(patch: pytest.MonkeyPatch) -> None:
    """What the engine asks of torch and the driver where there is no GPU: memory that need not be pinned, copies that
    are there at once."""
    zeros: Any = torch.zeros

    def plain(*shape: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return zeros(*shape, **options)  # type: ignore[no-any-return]

    patch.setattr(torch, "zeros", plain)
    patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    patch.setattr(samples, "DeviceCopy", lambda num_words: torch.Tensor.clone)
