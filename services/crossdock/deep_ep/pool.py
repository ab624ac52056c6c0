"""The communicators of one Buffer: one per shape, made at its first use, the least used given up. Collective."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from crossdock.common import log
from crossdock.common.config import FrameworkConfig
from crossdock.common.transports import of_device
from crossdock.deep_ep import exporter
from crossdock.deep_ep.agreement import Agreement
from crossdock.deep_ep.guard import guard
from ep_kernels import ArgumentError, ClosedError, MoECommunicator, MoEConfig, TorchGroup
from ep_kernels.network import NetworkConfig, nics

_log = log.get(__name__)
IN_FLIGHT = 2
"""As in DeepEP: two low-latency dispatches may be open at a time (dual-batch overlap)."""
MOST = 16
"""Communicators of one Buffer. Each has a region, on a GPU of its memory, and a few descriptors for each rank."""


@dataclass(slots=True, eq=False)
class PooledCommunicator:
    """A communicator in the pool.

    Attributes:
        key: of the calls that it serves.
        number: of the step in which it was made, the same on all ranks.
        used: step of its last dispatch.
        numbers: of rows or tokens, as its calls need them: made with it, behind which other streams are ordered.
    """

    key: Hashable
    number: int
    comm: MoECommunicator
    used: int
    numbers: torch.Tensor = field(init=False)


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
        self._places: dict[Hashable, PooledCommunicator] = {}
        self._captured: list[MoECommunicator] = []
        self.shortcuts: dict[Any, Any] = {}
        """What users keep about places by call; empty after a change of them."""
        self._closed = False
        self._lock = threading.Lock()
        self._recoveries = 0
        places = self._places
        self._agreement = Agreement(self.group, settings.timeout_s, lambda reason: _abort(places, reason))

    def experts_per_rank(self, num_experts: int) -> int:
        """L. ArgumentError unless the experts divide by the ranks, as DeepEP's numbering wants."""
        if num_experts < 1 or num_experts % self.size:
            raise ArgumentError("num_experts", f"a multiple of the group's {self.size} ranks", num_experts)
        return num_experts // self.size

    def get(self, key: Hashable) -> PooledCommunicator | None:
        return self._places.get(key)

    def shapes(self) -> list[Hashable]:
        return list(self._places)

    def begin(self, place: PooledCommunicator, call: Any) -> None:
        """The call (a NamedTuple of its parameters) begins an operation on this communicator, which all ranks begin."""
        self._agreement.begin(call)
        place.used = self._agreement.step

    def failed(self, error: BaseException) -> None:
        self._agreement.failed(error)

    @contextlib.contextmanager
    def step(self, place: PooledCommunicator, call: Any) -> Iterator[MoECommunicator]:
        """`begin`, and `failed` if that is how it ends."""
        self.begin(place, call)
        try:
            yield place.comm
        except BaseException as error:
            self.failed(error)
            raise

    def make(
        self, key: Hashable, call: Any, like: torch.Tensor, max_tokens: int | Callable[[int], int], num_tokens: int = 0,
        **fields: Any,
    ) -> PooledCommunicator:  # fmt: skip
        """Make the key's communicator, for tensors like this one. Collective. Handles of one that is replaced or given
        up for it stay valid: they hold it. So do graphs that were captured: such a one is not given up.

        Args:
            call: parameters of the call, a NamedTuple; ConfigError on all ranks where one differs.
            max_tokens: M, or what gives it for the largest `num_tokens` of any rank.
        """
        if self._closed:
            raise ClosedError("the Buffer was destroyed")
        if like.is_cuda and torch.cuda.is_current_stream_capturing():
            raise ArgumentError("x", "a shape that has been dispatched before the graph is captured", list(like.shape))
        wishes = self._agreement.ask(call, num_tokens, self._free())
        self._make_room(key, [n for n in wishes[0].free if all(n in wish.free for wish in wishes)])
        most = max_tokens if isinstance(max_tokens, int) else max_tokens(max(wish.num_tokens for wish in wishes))
        comm = MoECommunicator(self._config(like, max_tokens_per_rank=most, **fields))
        place = PooledCommunicator(key, self._agreement.step, comm, self._agreement.step)
        with self._lock:
            self._places[key] = place
        exporter.watch(comm, self._settings)
        if self._settings.exit_on_fault:
            guard().watch(comm)
        return place

    def _config(self, like: torch.Tensor, **fields: Any) -> MoEConfig:
        settings = self._settings
        return MoEConfig(
            group=self.group, transport=settings.transport or of_device(like.device.type).name,
            timeout_s=settings.timeout_s, memory_handle=settings.memory_handle,
            kernel_cache_dir=settings.kernel_cache_dir or None, max_in_flight=IN_FLIGHT,
            network=self._network_of(like.device), **fields,
        )  # fmt: skip

    def _free(self) -> list[int]:
        """Numbers of those that no graph of this rank needs, the least used first."""
        places = sorted(self._places.values(), key=lambda place: place.used)
        return [place.number for place in places if not place.comm.is_captured]

    def _make_room(self, key: Hashable, free: list[int]) -> None:
        """For a communicator of this key. `free`: numbers of those that no rank needs, the least used first."""
        self.shortcuts.clear()
        replaced = self._places.get(key)
        if replaced is not None and replaced.number not in free:
            with self._lock:
                self._captured.append(self._places.pop(key).comm)
        by_number = {place.number: place for place in self._places.values()}
        chosen = [by_number[n] for n in free if n in by_number]
        chosen.sort(key=lambda place: place is not replaced)
        for place in chosen[: max(len(self._places) + 1 - MOST, int(replaced in chosen))]:
            with self._lock:
                del self._places[place.key]
            exporter.leave(place.comm, self._settings)

    def _network_of(self, device: torch.device) -> NetworkConfig | None:
        """The network of this rank, the same for every communicator: they share its port and its thread."""
        if self._settings.network is None or self._network is not None:
            return self._network
        config = NetworkConfig(**self._settings.network.of_worker(self.rank).data_plane_fields())
        gpu = f"GPU-{torch.cuda.get_device_properties(device).uuid}" if device.type == "cuda" else ""
        self._network, choice = nics.resolved(config, gpu, self.rank)
        if choice is not None:
            gid = f"; {choice.gid_why}" if choice.gid_why else ""
            _log.info(f"crossdock: rank {self.rank}: network device {choice.nic.name}: {choice.why}{gid}")
        return self._network

    def communicators(self) -> list[MoECommunicator]:
        """All that may be used, oldest first."""
        places = sorted(self._places.values(), key=lambda place: place.number)
        return [*self._captured, *(place.comm for place in places)]

    def recover(self) -> None:
        """Make all communicators usable again after a fault that all ranks have survived. Collective."""
        self._recoveries += 1  # an attempt that fails on one rank counts on all
        for comm in self.communicators():
            comm.set_active([True] * self.size, comm.epoch + 1)
        self._agreement.restart(self._recoveries)

    def close(self) -> None:
        """Free everything, after the launched operations have finished. Idempotent."""
        self._agreement.close()
        with self._lock:
            self._closed = True
            made = self.communicators()
            self._places.clear()
            self._captured.clear()
            self.shortcuts.clear()
        for comm in reversed(made):
            exporter.leave(comm, self._settings)
            comm.close()


def _abort(places: dict[Hashable, PooledCommunicator], reason: str) -> None:
    for place in list(places.values()):
        place.comm.abort(reason)
