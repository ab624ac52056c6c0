"""What a provider finds on this host: its devices, whether it opens, and how long a message takes through it."""

from __future__ import annotations

import ctypes
import statistics
import threading
from dataclasses import dataclass

from ep_kernels.errors import TransportError
from ep_kernels.network import proxy
from ep_kernels.network.channel_memory import ChannelMemory
from ep_kernels.network.network import Channel, Network
from ep_kernels.network.network_config import NetworkConfig

_LIST_BYTES = 1 << 16
_SIZE, _MESSAGE_BYTES, _WAIT_S = 1 << 16, 8, 10.0


@dataclass(frozen=True, slots=True)
class ProviderPort:
    """A port that a provider can use.

    Attributes:
        name: as network.devices takes it.
        state: "active", or why it cannot be used.
        link: "InfiniBand" or "Ethernet"; for libfabric, its provider.
        gid_index, gid: what would be chosen, and `why`; -1 and "" if there is none.
    """

    name: str
    state: str
    link: str
    gid_index: int
    gid: str
    why: str


def devices(provider: str) -> list[ProviderPort]:
    """Every port that `verbs` or `libfabric` finds. Raises TransportError: its library is missing, and the cure."""
    lines, text = ctypes.create_string_buffer(_LIST_BYTES), proxy.Text()
    if not proxy.load().cn_devices(provider.encode(), lines, _LIST_BYTES, text):
        raise TransportError(f"network: {text}")
    return [_device(line) for line in lines.value.decode(errors="replace").splitlines()]


def _device(line: str) -> ProviderPort:
    name, port, state, link, index, gid, why = line.split("\t")
    return ProviderPort(f"{name}:{port}" if int(port) else name, state, link, int(index), gid, why)


def check(config: NetworkConfig) -> str:
    """Open the provider as a rank would, with little memory. What it chose and why; "" for tcp.

    Raises:
        TransportError: it cannot be used here, and the cure.
    """
    with _Loop(config) as loop:
        return loop.one.about


def ping(config: NetworkConfig, rounds: int = 100) -> float:
    """Median time of a message of 8 bytes through ring, proxy and provider of this host to itself, microseconds.

    Raises:
        TransportError: the provider cannot be used here, and the cure; or nothing came in 10 s, and what is known.
    """
    with _Loop(config) as loop:
        return loop.ping(rounds)


class Mark(ctypes.Structure):
    """`Mark` of native/bench.cpp."""

    _fields_ = (("count", ctypes.c_uint64), ("at_ns", ctypes.c_int64))


class _Loop:
    """Two channels of one process."""

    def __init__(self, config: NetworkConfig) -> None:
        self.network = Network(config)
        self._memory = [(ctypes.create_string_buffer(_SIZE), ctypes.create_string_buffer(2 * _SIZE)) for _ in range(2)]
        self._marks = [Mark(), Mark()]
        made: list[Channel] = []
        try:
            for rank in range(2):
                made.append(Channel(self.network, rank, 2, self._of(rank), _WAIT_S))
        except TransportError:
            for channel in made:
                channel.close()
                channel.free()
            self.network.close()
            raise
        self.one, self.two = made

    def _of(self, rank: int) -> ChannelMemory:
        own, landing = map(ctypes.addressof, self._memory[rank])
        handler = self.network.lib.cn_bench_handler()
        return ChannelMemory(own, _SIZE, landing, _SIZE, handler, ctypes.addressof(self._marks[rank]))

    def __enter__(self) -> _Loop:
        return self

    def __exit__(self, *_: object) -> None:
        for channel in (self.one, self.two):
            channel.close()
            channel.free()
        self.network.close()

    def ping(self, rounds: int) -> float:
        """See `ping`."""
        dialled = threading.Thread(target=self.two.connect, args=({0: self.one.ticket()}, _WAIT_S))
        dialled.start()
        self.one.connect({1: self.two.ticket()}, _WAIT_S)
        dialled.join()
        took = (ctypes.c_int64 * rounds)()
        error = self.network.lib.cn_bench_mail(
            self.one.pointer, ctypes.byref(self._marks[1]), 1, _MESSAGE_BYTES, rounds, took
        )
        if error:
            why = self.one.why(1) or self.two.why(0) or "no error is known"
            raise TransportError(f"network: a message of this host to itself did not arrive in {_WAIT_S:g} s: {why}")
        return float(statistics.median(took)) / 1e3
