"""What any rank keeps beside its region, whatever its operations: counters, who is active, latency records, the page of
host memory; and the fields of `World` that point to them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from ep_kernels.config import Group
from ep_kernels.kernels import abi
from ep_kernels.telemetry import Samples
from ep_kernels.transports.nvlink.memory import samples
from ep_kernels.transports.nvlink.memory.host_page import HostPage

_STATE_WORDS = ctypes.sizeof(abi.State) // 8
_WORD = {name: getattr(abi.State, name).offset // 8 for name, _ in abi.State._fields_}


class RankTables:
    """Device memory that only this rank's kernels use.

    Attributes:
        host: page of host memory that kernels write to.
        state: int64 words of an `abi.State`.
        world: `abi.World` that points to all of it, as far as it is known here; kernels take a copy with each launch.

    Args:
        group: whose rank.
        timeout_s: deadline of every wait on the device, seconds.
        device: CUDA device.
    """

    def __init__(self, group: Group, timeout_s: float, device: torch.device) -> None:
        size = group.size
        self.host = HostPage(size)
        self.state = torch.zeros(_STATE_WORDS, dtype=torch.int64, device=device)
        head = self.state[_WORD["sample_head"] :][:1]
        self._ring = samples.SampleRing(size, head, samples.DeviceCopy(samples.CHUNK * (abi.SAMPLE_WORDS + size)))
        self._active = torch.ones(size, dtype=torch.uint8, device=device)
        self.world: Any = abi.World(
            rank=group.rank, size=size, timeout_ns=int(timeout_s * 1e9), active=self._active.data_ptr(),
            state=self.state.data_ptr(), host=self.host.address, gone=self.host.gone_address,
            samples=self._ring.records.data_ptr(),
        )  # fmt: skip

    def _set(self, **fields: Any) -> None:
        """Further fields of `world`."""
        for name, value in fields.items():
            setattr(self.world, name, value)

    def set_peers(self, addresses: Sequence[int]) -> None:
        """Base address of every rank's region, as this process maps it."""
        self.world.peers[: len(addresses)] = list(addresses)

    def set_network(self, record: Any) -> None:
        """How ranks of other hosts are reached: an `abi.Network`."""
        words = torch.frombuffer(bytearray(bytes(record)), dtype=torch.int64)
        self.state[_WORD["network"] :].copy_(words)

    def set_active(self, mask: Sequence[bool]) -> None:
        """Wait no more for ranks whose mask is False. In place: graphs captured before go on."""
        self._active.copy_(torch.tensor([int(m) for m in mask], dtype=torch.uint8, device="cpu"))

    def sequence(self) -> tuple[int, int, int]:
        """(dispatch, combine, barrier) operations so far. Synchronises."""
        names = ("dispatch_seq", "combine_seq", "barrier_seq")
        words = self.state.tolist()
        dispatch, combine, barrier = (words[_WORD[name]] for name in names)
        return dispatch, combine, barrier

    def samples(self) -> Samples:
        """Latency records since the last call, oldest first. Any thread; waits for no kernel."""
        return self._ring.take(self.host.clock_offset_ns)

    def peek(self, words: torch.Tensor) -> torch.Tensor | None:
        """See `base.Transport`."""
        return self._ring.peek(words)

    @property
    def aborted(self) -> torch.Tensor:
        """int64 [1]: index into abi.STOPS, 0 while all is well."""
        return self.state[_WORD["aborted"] :][:1]

    def stop(self) -> None:
        """Kernels of this rank that are launched from now on, by graphs for instance, return at once."""
        self.state[_WORD["aborted"]] = abi.STOPS.index("ABORTED")

    def restart(self, dispatch: int, combine: int, barrier: int) -> None:
        """Forget what was under way; count on from here. Latency records go on being numbered as they were."""
        words = torch.zeros(_STATE_WORDS, dtype=torch.int64, device="cpu")
        words[_WORD["sample_head"]] = self.state[_WORD["sample_head"]]
        words[_WORD["dispatch_seq"]] = words[_WORD["counted_dispatch_seq"]] = dispatch  # see Engine.restart_flags
        words[_WORD["combine_seq"]] = combine
        words[_WORD["barrier_seq"]] = barrier
        words[_WORD["network"] :] = self.state[_WORD["network"] :]
        words[_WORD["network"] + abi.Network.seen.offset // words.itemsize :] = 0
        self.state.copy_(words)
        self._ring.skip()
        self.host.clear()
