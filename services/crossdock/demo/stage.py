"""Where the demo plays: which transport, how many workers, and on which device the plain model runs."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from crossdock.common.config import ConfigFileError, WorkerConfig
from crossdock.common.settings import SecurityConfig
from crossdock.common.transports import CPU_RANKS, needs_gpu

MAX_GPU_WORKERS = 8
"""Smallest number of experts of the demo's models."""

PLAIN = SecurityConfig()


@dataclass(frozen=True, slots=True)
class Stage:
    """The stage of the demo.

    Attributes:
        transport: of the workers.
        num_workers: how many.
        device: where the plain model runs, and the one with remote experts: that of worker 0.
        security: certificates and tokens of every part.
    """

    transport: str
    num_workers: int
    device: torch.device
    security: SecurityConfig = PLAIN

    @staticmethod
    def of(transport: str, num_workers: int | None, num_gpus: int) -> Stage:
        """The stage for a transport. Pure.

        Args:
            transport: folder name under `ep_kernels/transports`.
            num_workers: None: four on a CPU, one per GPU (at most eight) otherwise.
            num_gpus: CUDA devices that this process sees.

        Raises:
            ConfigFileError: no GPU, or more workers than GPUs.
        """
        if not needs_gpu(transport):
            return Stage(transport, num_workers or CPU_RANKS, torch.device("cpu"))
        if num_gpus == 0:
            raise ConfigFileError(f"--transport {transport}: expected a CUDA device for each worker, got none")
        if num_workers is not None and num_workers > num_gpus:
            raise ConfigFileError(f"--workers: expected at most one for each of {num_gpus} GPUs, got {num_workers}")
        return Stage(transport, num_workers or min(num_gpus, MAX_GPU_WORKERS), torch.device("cuda", 0))

    def worker(self, model: str, local_rank: int, dtype: str) -> WorkerConfig:
        """The config of one worker. Rows come home in float32, on GPUs too: the demo's criterion for bfloat16 is that
        the service adds no rounding to what the plain model has, and a rank's partial sum rounded to bfloat16 is one.
        """
        return WorkerConfig(
            model=model,
            local_rank=local_rank,
            transport=self.transport,
            dtype=dtype,  # type: ignore[arg-type]
            combine_dtype="float32",
            security=self.security,
        )


def num_gpus() -> int:
    """CUDA devices that torch can use in this process."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0
