"""The communicators of one Buffer: one per shape, made at its first use. Collective."""

from __future__ import annotations

import threading
from collections.abc import Hashable
from typing import Any

import torch

from crossdock.common import log
from crossdock.common.config import FrameworkConfig
from crossdock.common.transports import of_device
from crossdock.deep_ep.exporter import watch
from crossdock.deep_ep.guard import guard
from ep_kernels import ArgumentError, ClosedError, MoECommunicator, MoEConfig, TorchGroup
from ep_kernels.network import NetworkConfig, nics

_log = log.get(__name__)
IN_FLIGHT = 2
"""As in DeepEP: two low-latency dispatches may be open at a time (dual-batch overlap)."""


class Pool:
    """Makes communicators of one group and closes them.

    Args:
        group: a torch.distributed.ProcessGroup (gloo or nccl).
        settings: deadline, kernel cache, transport, network.
    """

    def __init__(self, group: Any, settings: FrameworkConfig) -> None:
        self.group = TorchGroup(group)
        self.rank, self.size = self.group.rank, self.group.size
        self._settings = settings
        self._network: NetworkConfig | None = None
        self._made: dict[Hashable, MoECommunicator] = {}
        self._all: list[MoECommunicator] = []
        self._closed = False
        self._lock = threading.Lock()

    def experts_per_rank(self, num_experts: int) -> int:
        """L. ArgumentError unless the experts divide by the ranks, as DeepEP's numbering wants."""
        if num_experts < 1 or num_experts % self.size:
            raise ArgumentError("num_experts", f"a multiple of the group's {self.size} ranks", num_experts)
        return num_experts // self.size

    def get(self, key: Hashable) -> MoECommunicator | None:
        """The communicator that was last made for this key."""
        return self._made.get(key)

    def make(self, key: Hashable, like: torch.Tensor, **fields: Any) -> MoECommunicator:
        """Make the key's communicator, for tensors like this one. A replaced one stays usable: handles refer to it,
        and captured graphs, which reference counts do not show. Collective."""
        if self._closed:
            raise ClosedError("the Buffer was destroyed")
        if like.is_cuda and torch.cuda.is_current_stream_capturing():
            raise ArgumentError("x", "a shape that has been dispatched before the graph is captured", list(like.shape))
        settings = self._settings
        config = MoEConfig(
            group=self.group, transport=settings.transport or of_device(like.device.type).name,
            timeout_s=settings.timeout_s, kernel_cache_dir=settings.kernel_cache_dir or None,
            max_in_flight=IN_FLIGHT, network=self._network_of(like.device), **fields,
        )  # fmt: skip
        comm = MoECommunicator(config)
        with self._lock:
            self._made[key] = comm
            self._all.append(comm)
        watch(comm, settings)
        if settings.exit_on_fault:
            guard().watch(comm)
        return comm

    def _network_of(self, device: torch.device) -> NetworkConfig | None:
        """The network of this rank, the same for every communicator: they share its port and its thread."""
        if self._settings.network is None or self._network is not None:
            return self._network
        config = NetworkConfig(**self._settings.network.of_worker(self.rank).data_plane_fields())
        gpu = f"GPU-{torch.cuda.get_device_properties(device).uuid}" if device.type == "cuda" else ""
        self._network, choice = nics.resolved(config, gpu, self.rank)
        if choice is not None:
            _log.info("network device", device=choice.nic.name, why=choice.why, gid_why=choice.gid_why)
        return self._network

    def communicators(self) -> list[MoECommunicator]:
        """All that were made, oldest first."""
        return list(self._all)

    def close(self) -> None:
        """Free everything, after the launched operations have finished. Idempotent."""
        with self._lock:
            self._closed = True
            made, self._all = self._all, []
            self._made.clear()
        for comm in reversed(made):
            comm.close()
