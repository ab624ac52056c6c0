"""The grouped products compiled for Hopper without a GPU, by the launches that a worker makes; prints JSON.

The driver is a stand-in: what is launched is compiled for compute capability 9.0 and not run. A program of its own,
since Triton knows one driver.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from crossdock.worker.checkpoints.gating import Gating
from crossdock.worker.checkpoints.weights import MXFP4, MXFP8, NVFP4
from crossdock.worker.experts.grouped import products
from crossdock.worker.experts.grouped.kernels import grouped_product, quantise_rows
from tests.unit.grouped_cases import BLOCKS, INT4, drawn

HIDDEN, INNER, EXPERTS = 512, 256, 4


class Utils:
    """Of the driver."""

    def load_binary(self, *_: object) -> tuple[int, ...]:
        """module, function, registers, spills, most threads."""
        return 0, 0, 32, 0, 1024

    def get_device_properties(self, _: int) -> dict[str, int]:
        """Of an H100."""
        return {"max_shared_mem": 232448, "multiprocessor_count": 132, "max_num_regs": 65536, "warpSize": 32}


class Hopper:
    """A driver that launches nothing."""

    utils = Utils()

    def launcher_cls(self, *_: object) -> Any:
        """A launcher."""
        return lambda *_: None

    def get_current_device(self) -> int:
        """The only one."""
        return 0

    def get_current_stream(self, _: int) -> int:
        """The default one."""
        return 0

    def get_current_target(self) -> GPUTarget:
        """Compute capability 9.0."""
        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self) -> torch.device:
        """Where tensors are here."""
        return torch.device("cpu")


def stack_bytes(cubin: bytes) -> int:
    """Of local memory: what did not fit registers."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        shown = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return int(re.findall(r"STACK:(\d+)", shown)[0])


def compiled() -> list[Any]:
    """All kernels so far."""
    return [kernel for jit in (grouped_product, quantise_rows) for kernel in jit.device_caches[0][0].values()]


def launch(num_rows: int, every_tile: bool = False) -> None:
    """A product of each inner loop."""
    made = products.GroupedProducts(Gating(), 132, every_tile=every_tile)
    offsets, rows = torch.zeros(EXPERTS + 1, dtype=torch.int32), torch.zeros(num_rows, HIDDEN, dtype=torch.bfloat16)
    for number, (of_first, of_down) in enumerate(((BLOCKS, BLOCKS), (INT4, MXFP4), (NVFP4, MXFP8))):
        first = drawn(EXPERTS, of_first, 2 * INNER, HIDDEN, 2, False)
        weights = first, drawn(EXPERTS, of_down, HIDDEN, INNER, 1, False)
        made.forward(number, weights, rows, offsets, offsets[1:], torch.empty_like(rows))


if __name__ == "__main__":
    driver.set_active(Hopper())
    launch(1, every_tile=True)
    kernels = compiled()
    for num_rows in (2, 48, 64 * EXPERTS + 1):
        launch(num_rows)
    found = {
        "again": len(compiled()) - len(kernels),
        "wgmma": sorted({m for k in kernels for m in re.findall(r"wgmma.mma_async\S+", k.asm["ptx"])}),
        "stack": max(stack_bytes(kernel.asm["cubin"]) for kernel in kernels),
        "kernels": len(kernels),
    }
    print(json.dumps(found))
