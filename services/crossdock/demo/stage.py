"""Where the demo plays: transport, workers, the device of the plain model; and the service there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import msgspec
import torch

from crossdock.common.config import ConfigFileError, ControlConfig, WorkerConfig
from crossdock.common.settings import SecurityConfig, WorkerNetworkConfig
from crossdock.common.transports import CPU_RANKS, cross_host_names, installed, needs_gpu
from crossdock.demo.hosts import NUM_HOSTS, HostPlace
from crossdock.host.supervisor import Supervisor

MAX_GPU_WORKERS = 8
"""Smallest number of experts of the demo's models."""

PLAIN = SecurityConfig()


Name = Literal["float32", "bfloat16"]
FORM_TIMEOUT_S = 180.0


@contextmanager
def serving(folder: Path, name: Name, where: Stage, places: Sequence[HostPlace]) -> Iterator[Supervisor]:
    """The processes of every host: a supervisor with the control plane and the first workers, one for each other host.
    Those of the others are stopped first: workers leave while there is a control plane."""
    free = f"{places[0].address}:0"
    control = ControlConfig(listen=free, http_listen=free, world_size=where.num_workers, security=where.security)
    first, *others = where.workers(str(folder), name, places)
    with ExitStack() as stack:
        group = stack.enter_context(Supervisor(control, first, folder / f"logs-{name}"))
        for number, workers in enumerate(others, start=1):
            joining = [msgspec.structs.replace(worker, control=group.control_address) for worker in workers]
            logs, enter = folder / f"logs-{name}-host-{number}", places[number].enter
            stack.enter_context(Supervisor(None, joining, logs, enter=enter))
        yield group


@dataclass(frozen=True, slots=True)
class Stage:
    """The stage of the demo.

    Attributes:
        device: where the plain model runs, and the one with remote experts: that of worker 0.
        security: certificates and tokens of every part.
        num_hosts: among which the workers are divided.
    """

    transport: str
    num_workers: int
    device: torch.device
    security: SecurityConfig = PLAIN
    num_hosts: int = 1

    @staticmethod
    def of(transport: str, num_workers: int | None, num_gpus: int) -> Stage:
        """The stage for a transport. Pure.

        Args:
            transport: folder name under `ep_kernels/transports`.
            num_workers: None: four on a CPU, one per GPU (at most eight) otherwise.
            num_gpus: CUDA devices that this process sees.

        Raises:
            ConfigFileError: no GPU, or more workers than GPUs or than the transport has ranks.
        """
        most = installed()[transport].max_ranks
        if num_workers is not None and num_workers > most:
            wanted = f"at most {most}, the most ranks of transport {transport}"
            raise ConfigFileError(f"--workers: expected {wanted}, got {num_workers}")
        if not needs_gpu(transport):
            return Stage(transport, num_workers or CPU_RANKS, torch.device("cpu"))
        if num_gpus == 0:
            raise ConfigFileError(f"--transport {transport}: expected a CUDA device for each worker, got none")
        if num_workers is not None and num_workers > num_gpus:
            raise ConfigFileError(f"--workers: expected at most one for each of {num_gpus} GPUs, got {num_workers}")
        return Stage(transport, num_workers or min(num_gpus, MAX_GPU_WORKERS), torch.device("cuda", 0))

    def worker(self, model: str, local_rank: int, dtype: str) -> WorkerConfig:
        """The config of one worker. Rows return in float32, on GPUs too: the demo's criterion for bfloat16 is that
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

    def on_hosts(self, num_hosts: int) -> Stage:
        """This stage with its workers divided among hosts. Raises ConfigFileError."""
        if num_hosts not in (1, NUM_HOSTS):
            raise ConfigFileError(f"--hosts: expected 1 or {NUM_HOSTS}, got {num_hosts}")
        joining = [name for name in cross_host_names() if not needs_gpu(name)]  # the hosts are parts of this machine
        if num_hosts > 1 and self.transport not in joining:
            joins = " or ".join(joining)
            raise ConfigFileError(f"--hosts {num_hosts}: expected --transport {joins}, got {self.transport}")
        if self.num_workers % num_hosts:
            raise ConfigFileError(f"--workers: expected a multiple of --hosts {num_hosts}, got {self.num_workers}")
        return replace(self, num_hosts=num_hosts)

    def workers(self, model: str, dtype: str, places: Sequence[HostPlace]) -> list[list[WorkerConfig]]:
        """The workers of each host; where there are several, `places` says where they listen."""
        each = self.num_workers // self.num_hosts
        plain = [self.worker(model, local_rank, dtype) for local_rank in range(each)]
        if self.num_hosts == 1:
            return [plain]
        return [
            [_placed(worker, f"host-{number}", place.address) for worker in plain]
            for number, place in enumerate(places)
        ]


def _placed(worker: WorkerConfig, host: str, address: str) -> WorkerConfig:
    free = f"{address}:0"
    network = WorkerNetworkConfig(listen=free, domain=host)
    uid = f"{host}/{worker.local_rank}"
    return msgspec.structs.replace(worker, uid=uid, listen=free, http_listen=free, network=network, torch_threads=1)


def num_gpus() -> int:
    """CUDA devices that torch can use in this process."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0
