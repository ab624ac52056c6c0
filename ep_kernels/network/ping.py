"""A loop-back ping: two ends of one process send bytes to each other by ring, proxy and provider, as two ranks do.

    ping(NetworkConfig(provider="tcp")).median_us

Nothing of a group is needed, so it tells whether a provider works on this host before a rank starts.
"""

from __future__ import annotations

import ctypes
import secrets
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass

import msgspec

from ep_kernels.errors import PeerTimeout, TransportError
from ep_kernels.network.channel_memory import ChannelMemory
from ep_kernels.network.network import Channel, Network
from ep_kernels.network.network_config import NetworkConfig, split

_SIZE = 4096
_CONNECT_S, _MESSAGE_S = 10.0, 5.0


@dataclass(frozen=True, slots=True)
class Ping:
    """What came of it.

    Attributes:
        provider, address: that were used.
        num_bytes: of each message.
        median_us, most_us: from the push at one end until the other end's immediate, microseconds.
    """

    provider: str
    address: str
    num_bytes: int
    median_us: float
    most_us: float


class _Mark(ctypes.Structure):
    """`Mark` of native/bench.cpp."""

    _fields_ = (("count", ctypes.c_uint64), ("at_ns", ctypes.c_int64))


class _End:
    """One end: memory that is sent, a mirror of the other's, and what has arrived in it."""

    def __init__(self, network: Network, rank: int) -> None:
        self.rank, self.mark, self._network = rank, _Mark(), network
        self.own = ctypes.create_string_buffer(_SIZE)
        self._mirrors = ctypes.create_string_buffer(2 * _SIZE)
        own, mirrors = ctypes.addressof(self.own), ctypes.addressof(self._mirrors)
        handler, context = network.lib.cn_bench_handler(), ctypes.addressof(self.mark)
        network.in_use += 1
        memory = ChannelMemory(own, _SIZE, mirrors, _SIZE, handler, context)
        self.channel = Channel(network, rank, 2, memory, _CONNECT_S)

    def close(self) -> None:
        self.channel.close()
        self.channel.free()

    def mirror(self, rank: int, num_bytes: int) -> bytes:
        """The first bytes of the mirror of that rank."""
        return self._mirrors.raw[rank * _SIZE : rank * _SIZE + num_bytes]

    def send(self, to: _End, num_bytes: int) -> float:
        """Random bytes, and whether they arrive as they were; microseconds. Raises PeerTimeout, TransportError."""
        sent = secrets.token_bytes(num_bytes)
        ctypes.memmove(self.own, sent, num_bytes)
        before, begun = to.mark.count, time.monotonic_ns()
        self.channel.push(to.rank, 0, num_bytes, 0)
        while to.mark.count == before:
            if time.monotonic_ns() - begun > _MESSAGE_S * 1e9:
                raise PeerTimeout(
                    peer=to.rank, op="ping", phase="message", expected=1, seen=0, waited_s=_MESSAGE_S,
                    end="the provider took the message and did not deliver it",
                )  # fmt: skip
        if (got := to.mirror(self.rank, num_bytes)) != sent:
            raise TransportError(f"network: sent {sent[:8].hex()}..., {got[:8].hex()}... arrived")
        return float(to.mark.at_ns - begun) / 1e3


def ping(config: NetworkConfig, rounds: int = 200, num_bytes: int = 256) -> Ping:
    """Send messages to and fro on this host.

    Args:
        config: of the network. Its data port is any free one and its address this host's own, so that it may be called
            beside a rank of the same config.
        rounds: messages in each direction; the first tenth does not count.
        num_bytes: of each, at most 4096.

    Raises:
        TransportError: the provider cannot be opened, or bytes arrive changed.
        PeerTimeout: the two ends do not reach each other, or a message does not arrive.
    """
    if not 0 < num_bytes <= _SIZE:
        raise ValueError(f"num_bytes: expected 1 to {_SIZE}, got {num_bytes}")
    host, _ = split(config.listen)
    listen = f"[{host}]:0" if ":" in host else f"{host}:0"
    network = Network(msgspec.structs.replace(config, listen=listen, advertise=""))
    with closing(network), closing(_End(network, 0)) as one, closing(_End(network, 1)) as two:
        _connect((one, two))
        took = [end.send(to, num_bytes) for _ in range(rounds) for end, to in ((one, two), (two, one))]
    counted = took[len(took) // 10 :]
    return Ping(config.provider, network.address, num_bytes, statistics.median(counted), max(counted))


def _connect(ends: Sequence[_End]) -> None:
    one, two = ends
    with ThreadPoolExecutor(2) as pool:
        dials = [
            pool.submit(end.channel.connect, {other.rank: other.channel.ticket()}, _CONNECT_S)
            for end, other in ((one, two), (two, one))
        ]
        for dial in dials:
            dial.result()
