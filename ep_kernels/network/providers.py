"""What a provider finds on this host: its devices, whether it opens, and how long a message takes through it.

    ping(NetworkConfig(provider="tcp")).median_us

A ping is a loop-back: two ends of one process send bytes to each other by ring, proxy and provider, as two ranks do.
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
from ep_kernels.network import proxy
from ep_kernels.network.network import Channel, ChannelMemory, Network
from ep_kernels.network.network_config import NetworkConfig, split

_LIST_BYTES, _SIZE = 1 << 16, 4096
_CONNECT_S, _MESSAGE_S = 10.0, 5.0


@dataclass(frozen=True, slots=True)
class ProviderPort:
    """A port that a provider can use.

    Attributes:
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
    with closing(_opened(config)) as network, closing(_End(network, 0)) as end:
        return end.channel.about


@dataclass(frozen=True, slots=True)
class Ping:
    """What came of it.

    Attributes:
        provider, address: that were used.
        median_us, most_us: from the push at one end until the other end's immediate, microseconds.
    """

    provider: str
    address: str
    num_bytes: int
    median_us: float
    most_us: float


class Mark(ctypes.Structure):
    """`cd::Mark`."""

    _fields_ = (("count", ctypes.c_uint64), ("at_ns", ctypes.c_int64))


class _End:
    """One end: memory that is sent, a mirror of the other's, and what has arrived in it."""

    def __init__(self, network: Network, rank: int) -> None:
        self.rank, self.mark, self._network = rank, Mark(), network
        self.own = ctypes.create_string_buffer(_SIZE)
        self._mirrors = ctypes.create_string_buffer(2 * _SIZE)
        own, mirrors = ctypes.addressof(self.own), ctypes.addressof(self._mirrors)
        handler, context = network.lib.cn_mark_handler(), ctypes.addressof(self.mark)
        network.in_use += 1
        memory = ChannelMemory(own, _SIZE, mirrors, _SIZE, handler, context)
        self.channel = Channel(network, rank, 2, memory, _CONNECT_S)

    def close(self) -> None:
        self.channel.close()
        self.channel.free()

    def mirror(self, rank: int, num_bytes: int) -> bytes:
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
    with closing(_opened(config)) as network, closing(_End(network, 0)) as one, closing(_End(network, 1)) as two:
        _connect((one, two))
        took = [end.send(to, num_bytes) for _ in range(rounds) for end, to in ((one, two), (two, one))]
    counted = took[len(took) // 10 :]
    return Ping(config.provider, network.address, num_bytes, statistics.median(counted), max(counted))


def _opened(config: NetworkConfig) -> Network:
    """At any free port, so that it may be called beside a rank of the same config."""
    host, _ = split(config.listen)
    listen = f"[{host}]:0" if ":" in host else f"{host}:0"
    return Network(msgspec.structs.replace(config, listen=listen, advertise=""))


def _connect(ends: Sequence[_End]) -> None:
    one, two = ends
    with ThreadPoolExecutor(2) as pool:
        dials = [
            pool.submit(end.channel.connect, {other.rank: other.channel.ticket()}, _CONNECT_S)
            for end, other in ((one, two), (two, one))
        ]
        for dial in dials:
            dial.result()
