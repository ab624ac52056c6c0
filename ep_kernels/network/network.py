"""The network of a process: data port, proxy thread, and one channel for each communicator.

Knows bytes, ranks and immediates, and no rows. A channel lets a rank write into its mirrors at ranks of other hosts,
and reports to it what has arrived in the mirrors here (native/ring.hpp). A network outlives its channels: port and
thread stay over epochs. See docs/network-protocol.md.
"""

from __future__ import annotations

import ctypes
import logging
import os
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ep_kernels.errors import AbortedError, ArgumentError, ClosedError, PeerTimeout, TransportError
from ep_kernels.network import handshake, proxy
from ep_kernels.network.address import advertised
from ep_kernels.network.dialer import Dialer, Roles, unreached
from ep_kernels.network.greeting import NetworkTicket, patience_of, prepare
from ep_kernels.network.handshake import CONTROL_ROLE, WIRE, Greeting, KeyPair
from ep_kernels.network.listener import Listener, Registration
from ep_kernels.network.network_config import ACK_TIMEOUT, RETRIES, NetworkConfig

log = logging.getLogger(__name__)

_POLL_S = 0.001
"""Between two looks whether connections stand."""
STAYS = "what this rank has for it does not leave"
"""Why a wait for the own proxy has failed: its thread, or that rank, takes nothing."""
_NAP_S = 50e-6


class Network:
    """The network of one process and one configuration. `Network.of` shares it.

    Attributes:
        address, why: what peers dial, and how it was chosen.

    Raises:
        TransportError: the port cannot be listened on, the native library is missing, or there can be no thread.
    """

    _shared: ClassVar[dict[NetworkConfig, Network]] = {}
    _opening = threading.Lock()  # one after the other: one's port may be that of an idle one
    # Garbage collection while a thread holds it may close a channel on that thread, so a thread may take it twice; no
    # thread waits for another while it holds it.
    _lock = threading.RLock()

    def __init__(self, config: NetworkConfig) -> None:
        self.config, self.keys = config, KeyPair()
        self.lib = proxy.load()
        chosen = advertised(config)
        self.address, self.why = chosen.address, chosen.why
        self.listener = Listener(config.listen)
        self.channels: weakref.WeakSet[Channel] = weakref.WeakSet()
        self.in_use = 0
        cpus = (ctypes.c_int32 * len(config.cpus))(*config.cpus)
        self.proxy: int | None = self.lib.cn_open(config.spin_us * 1000, cpus, len(config.cpus))
        if not self.proxy:
            self.listener.close()
            raise TransportError("network: the proxy thread cannot be started")

    @classmethod
    def of(cls, config: NetworkConfig) -> Network:
        """The one of this process, made at first use and kept; an idle one of another configuration is closed first."""
        with cls._opening:
            with cls._lock:
                if found := cls._shared.get(config):
                    found.in_use += 1
                    return found
                idle = [one for one in cls._shared.values() if not one.in_use]
                for other in idle:
                    del cls._shared[other.config]
            for other in idle:
                other.close()
            made = cls(config)
            with cls._lock:
                made.in_use += 1
                cls._shared[config] = made
            return made

    def release(self) -> None:
        """One channel less. The network stays for the next epoch."""
        with self._lock:
            self.in_use -= 1

    def close(self) -> None:
        proxy, self.proxy = self.proxy, None
        if proxy:
            self.listener.close()
            self.lib.cn_shut(proxy)

    @classmethod
    def close_all_in_child(cls) -> None:
        """In a forked child: close its copies of descriptors, so that peers see the end of the parent's process."""
        cls._opening, cls._lock = threading.Lock(), threading.RLock()
        for one in cls._shared.values():
            proxy, one.proxy = one.proxy, None
            one.listener.close_in_child()
            for channel in list(one.channels):
                channel.close_in_child()
            if proxy:
                one.lib.cn_close_in_child(proxy)
        cls._shared.clear()


os.register_at_fork(after_in_child=Network.close_all_in_child)


@dataclass(frozen=True, slots=True)
class DeviceRing:
    """Ring into which kernels push: memory that a GPU must be able to reach.

    Attributes:
        ring, popped: addresses of the descriptors, and of the number of those that the proxy has taken.
        num_bytes: of the memory that holds both, from `ring` on.
        size: descriptors of the ring.
        stripe: bytes; no descriptor may cross a multiple of it.
    """

    ring: int
    popped: int
    num_bytes: int
    size: int
    stripe: int


@dataclass(frozen=True, slots=True)
class ChannelMemory:
    """What a channel works on, by address.

    Attributes:
        own, own_bytes: the rank's region: what may be sent.
        landing, stride: the mirrors; rank r's starts at landing + r * stride and has stride bytes.
        handler, context: `cd::NetHandler` and its first argument; called on the proxy thread.
        box: bytes of the region for each rank: what goes to rank r lies from r * box on, and lands at the same place of
            its mirror, which has as many; both are there before `connect` names it. 0: what goes to any rank may lie
            anywhere.
        dma_bufs: [2, ranks] int32 by address, of a GPU's memory: descriptors of the dma-buf of what goes to each rank
            and of its mirror, read when it is joined; -1: it is registered by address. 0: all is host memory.
        device: number of that GPU, as CUDA counts them in this process.
    """

    own: int
    own_bytes: int
    landing: int
    stride: int
    handler: int
    context: int
    box: int = 0
    dma_bufs: int = 0
    device: int = 0

    def native(self, ranks: int, lanes: int) -> proxy.NetMemory:
        return proxy.NetMemory(
            own=self.own,
            own_bytes=self.own_bytes,
            landing=self.landing,
            stride=self.stride,
            box=self.box,
            dma_bufs=ctypes.cast(self.dma_bufs, ctypes.POINTER(ctypes.c_int32)),
            ranks=ranks,
            lanes=lanes,
            device=self.device,
        )


class Channel:
    """One rank's use of the network, for one communicator. `connect`, `leave` and `close` from any thread.

    Args:
        timeout_s: deadline of the rank's waits; connections are no less patient (`greeting.patience_of`).

    Attributes:
        about: what the provider chose and why; "" if there was nothing to choose.
        aborted: the reason given to `abort`; None before.

    Raises:
        TransportError: the provider cannot be used here, and why; or memory is short.
    """

    def __init__(self, network: Network, rank: int, ranks: int, memory: ChannelMemory, timeout_s: float) -> None:
        self._network, self._rank, self._ranks = network, rank, ranks
        self._patience_s = patience_of(timeout_s)
        self._lib = network.lib
        self._traffic = (proxy.Traffic * ranks)()
        self._token, self._secret = secrets.randbits(63), secrets.token_bytes(handshake.SECRET_BYTES)
        self._lock = threading.Condition()
        # Of ranks that have dialled: what is not complete, by rank and key; what is, of ranks that are not admitted,
        # and its key. Whose key is whose is known from the first `expect` on.
        self._arrived: dict[tuple[int, bytes], Roles] = {}
        self._waiting: dict[int, tuple[bytes, Roles]] = {}
        self._key_of: dict[int, bytes] = {}
        self._admitted: set[int] = set()
        self._freed: int | None = None
        self.aborted: str | None = None
        self._given_up: frozenset[int] = frozenset()
        self._dialer = Dialer(network.config, network.keys, rank, self._ended)
        text = proxy.Text()
        self.pointer: int | None = self._lib.cn_channel(
            network.proxy,
            memory.native(ranks, network.config.lanes),
            _settings(network, rank, self._patience_s),
            memory.handler,
            memory.context,
            text,
        )
        if not self.pointer:
            network.release()
            raise TransportError(f"network: {str(text) or 'out of memory'}")
        self.about = str(text)
        if self.about:
            log.info("network of rank %d: %s", rank, self.about)
        if timeout_s <= network.config.retry_s:
            log.warning(
                "network of rank %d: timeout_s is %g, and %s repeats a packet for up to %.1f s: a broken link ends in "
                "the deadline, which names the rank and not the link",
                rank, timeout_s, network.config.carrier, network.config.retry_s,
            )  # fmt: skip
        network.channels.add(self)
        network.listener.open(self._token, Registration(self._secret, network.keys.pair, self._admit))

    @property
    def outbox(self) -> int:
        """Address of the `cd::Outbox`; good until the channel is freed."""
        assert self.pointer is not None
        return int(self._lib.cn_outbox(self.pointer))

    def for_device(self, stripe: int) -> DeviceRing:
        """Let kernels push, before any peer is there. No descriptor may cross a multiple of `stripe`, a power of two,
        or of a smaller one where the provider writes less at once."""
        found = (ctypes.c_uint64 * 5)()
        self._lib.cn_device(self.pointer, stripe, found)
        return DeviceRing(*found)

    def restart_ring(self) -> None:
        """No kernel runs, and kernels count descriptors from 0 again: what they have pushed is taken, the ring empty.
        Those that gave up may have left places in it empty, which the proxy would wait for."""
        self._call(None, self._lib.cn_device_restart)

    def ticket(self) -> NetworkTicket:
        network = self._network
        place = network.config.provider, network.address, network.listener.address[1]
        return NetworkTicket(*place, self._token, self._secret.hex(), network.keys.public.hex(), network.config.lanes)

    def connect(self, peers: Mapping[int, NetworkTicket], timeout_s: float, ended: Collection[int] = ()) -> None:
        """Connections with those ranks, where none stands: this rank dials the higher ones and is dialled by the lower.
        They stand, at both ends, when it returns. `ended`: ranks at whose end none stands; this end may not know.

        Raises:
            PeerTimeout: a rank that was not reached, did not come, or gave it up, and what to check; or was given up.
            TransportError: another provider or another version there.
            ClosedError, AbortedError: `close` or `abort` was called, meanwhile or before.
        """
        until = time.monotonic() + timeout_s
        for rank in ended:
            if rank > self._rank:  # a lower one dials, and that replaces what stands here
                self.leave(rank, 0)
        up = self.up()
        peers = {rank: ticket for rank, ticket in peers.items() if not up >> rank & 1}
        self.expect(peers)
        dialled = {rank: ticket for rank, ticket in peers.items() if rank > self._rank}
        if dialled:
            self._dialer.dial(dialled, until, self._join_dialled)
        self._await(peers, dialled, until, timeout_s)

    def expect(self, peers: Mapping[int, NetworkTicket]) -> None:
        """Admit these ranks when they dial, until `leave`; those that have dialled before are joined now. Others wait.
        Raises TransportError: another provider or another version there."""
        mine = self._network.config.provider
        for rank, ticket in peers.items():
            if ticket.wire != WIRE:
                raise TransportError(
                    f"network: version {ticket.wire} of what crosses hosts at rank {rank}, {WIRE} at this rank; "
                    "install one version on every rank"
                )
            if ticket.provider != mine:
                raise TransportError(f"network: provider {ticket.provider!r} of rank {rank}, {mine!r} of this rank")
        with self._lock:
            for rank, ticket in peers.items():
                self._admitted.add(rank)
                self._key_of[rank] = bytes.fromhex(ticket.key)
                if rank in self._waiting:
                    self._take(rank, *self._waiting.pop(rank))

    def _await(
        self, peers: Mapping[int, NetworkTicket], dialled: Collection[int], until: float, timeout_s: float
    ) -> None:
        """Until connections with those ranks stand. Raises as `connect`."""
        with self._lock:
            while (missing := self._missing(peers)) and time.monotonic() < until:
                self._go_on(missing)
                joined = self._call(0, self._lib.cn_joined)
                if lost := [rank for rank in missing if rank in dialled and not joined >> rank & 1]:
                    why = self.why(lost[0]) or "the log of that rank says why"
                    raise unreached(lost[0], timeout_s, f"it ended the connection before it had joined: {why}")
                self._lock.wait(_POLL_S)
            self._go_on(missing or peers)
        if missing and missing[0] in dialled:
            raise unreached(missing[0], timeout_s, "it took the connection and has not joined yet")
        if missing:
            where = f"{self._network.address}:{self._network.listener.address[1]}"
            raise unreached(
                missing[0],
                timeout_s,
                f"ranks {missing} did not connect to the data port of rank {self._rank}, {where}; open it between the "
                "hosts, or set network.advertise to an address they reach",
            )

    def abort(self, reason: str) -> None:
        """`connect` ends in AbortedError, now and later. Any thread."""
        with self._lock:
            self.aborted = self.aborted or reason
            self._lock.notify_all()

    def give_up(self, ranks: Collection[int]) -> None:
        """`connect` with one of these ends in PeerTimeout, now and later. Any thread."""
        with self._lock:
            self._given_up |= frozenset(ranks)
            self._lock.notify_all()

    def has_given_up(self, ranks: int) -> bool:
        """Whether one of these ranks (a bit each) is given up."""
        return any(ranks >> rank & 1 for rank in self._given_up)

    def leave(self, rank: int, epoch_tag: int) -> None:
        """Part from a rank that is left out of the group: say so to it, close its connections, and admit none until
        `connect` names it again. Raises TransportError where the proxy thread stands still."""
        self._call(None, self._leave, rank, epoch_tag)

    def _leave(self, pointer: int, rank: int, epoch_tag: int) -> None:
        self._admitted.discard(rank)
        if error := self._lib.cn_leave(pointer, rank, epoch_tag):
            raise TransportError(f"network: cannot part from rank {rank}: the proxy stands still, {os.strerror(error)}")

    def push(self, rank: int, offset: int, num_bytes: int, imm: int) -> bool:
        """Send those bytes of the own region, and the immediate behind them. False: the ring is full. Raises
        ArgumentError."""
        if not 0 <= rank < self._ranks:
            raise ArgumentError("rank", f"0..{self._ranks - 1}", rank)
        return bool(self._call(1, self._lib.cn_push, rank, offset, num_bytes, imm))

    def wake(self) -> None:
        """Kernels are about to push, which cannot wake the proxy: it sleeps no longer, and `spin_us` begins anew."""
        self._call(None, self._lib.cn_wake)

    def is_quiet(self, mask: int) -> bool:
        """Whether nothing of this rank's region is still to be sent to the ranks of `mask`."""
        return bool(self._call(1, self._lib.cn_quiet, mask))

    def up(self) -> int:
        """Bit per rank whose connections stand: both ends have joined."""
        return int(self._call(0, self._lib.cn_up))

    def why(self, rank: int) -> str:
        """Why the connections with a rank have ended, in the provider's words; "" if nothing is known."""
        text = proxy.Text()
        self._call(None, self._lib.cn_why, rank, text)
        return str(text)

    def traffic(self) -> list[proxy.Traffic]:
        """Traffic by rank since the channel was made; while the proxy stands still, as it was last."""
        self._call(None, self._lib.cn_traffic, self._traffic)
        return list((proxy.Traffic * self._ranks).from_buffer_copy(self._traffic))

    def close(self) -> None:
        """Part from all in order: what was sent arrives. No event comes any more. Never waits for a peer; idempotent.
        The outbox stays until `free`."""
        if self.pointer is None or self._network.proxy is None:
            return
        self._network.listener.shut(self._token)
        with self._lock:
            pointer, self.pointer = self.pointer, None
            unjoined = self._unjoined()
            self._arrived, self._waiting = {}, {}
            self._lock.notify_all()
        if pointer is None:  # another thread was faster
            return
        self._lib.cn_close(pointer)
        for connection in unjoined:
            connection.close()
        self._network.channels.discard(self)
        self._network.release()
        self._freed = pointer

    def free(self) -> None:
        """After `close`, once the outbox is unused."""
        freed, self._freed = self._freed, None
        if freed is not None:
            self._lib.cn_free(freed)

    def close_in_child(self) -> None:
        """In a forked child: nothing of this is used any more; close its copies of what is not joined."""
        self.pointer = None
        self._dialer.close_in_child()
        for connection in self._unjoined():
            connection.close()

    def _unjoined(self) -> list[socket.socket]:
        """Connections of ranks that have dialled, and that are not joined yet."""
        sets = [*self._arrived.values(), *(roles for _, roles in self._waiting.values())]
        return [connection for roles in sets for connection in roles.values()]

    def _call(self, otherwise: Any, call: Any, *args: Any) -> Any:
        """A call of the library; `otherwise` once closed. `close` and `free` of another thread wait for it."""
        if self.pointer is None:  # of a forked child, where the lock may be held for ever
            return otherwise
        with self._lock:
            return otherwise if self.pointer is None else call(self.pointer, *args)

    def _require_open(self) -> None:
        if self.pointer is None:
            raise ClosedError("network: closed while it connected")

    def _ended(self, rank: int) -> Exception | None:
        """What ends a connect with that rank, if anything does."""
        if self.pointer is None:
            return ClosedError("network: closed while it connected")
        if self.aborted is not None:
            return AbortedError(self.aborted)
        if rank in self._given_up:
            return PeerTimeout(
                peer=rank, op="connect", phase="connection", expected=1, seen=0, waited_s=0.0, given_up=True
            )
        return None

    def _go_on(self, ranks: Iterable[int]) -> None:
        self._require_open()
        if error := next(filter(None, map(self._ended, ranks)), None):
            raise error

    def _missing(self, peers: Mapping[int, NetworkTicket]) -> list[int]:
        up = self.up()
        return [rank for rank in peers if not up >> rank & 1]

    def _admit(self, hello: Greeting, connection: socket.socket) -> None:
        """A member's connection, on the listener's thread. Raises ValueError: it is another rank than it says, or
        brings more lanes than this rank has room for."""
        lanes = self._network.config.lanes
        if hello.lanes > lanes:
            raise ValueError(f"rank {hello.rank} brings {hello.lanes} lanes, this rank has {lanes} (network.lanes)")
        roles = {*range(hello.lanes), CONTROL_ROLE}
        if hello.peer != self._rank or not hello.rank < self._rank or hello.role not in roles:
            raise ValueError(f"a hello of rank {hello.rank} to rank {hello.peer} as {hello.role} of {hello.lanes}")
        with self._lock:
            self._require_open()
            if self._key_of.get(hello.rank, hello.key) != hello.key:
                raise ValueError(f"a hello as rank {hello.rank}, with another key than that rank's ticket has")
            here = self._arrived.setdefault((hello.rank, hello.key), {})
            if hello.role in here:  # the dialer makes all anew, in order
                here[hello.role].close()
            here[hello.role] = connection
            if set(here) == roles:
                self._take(hello.rank, hello.key, self._arrived.pop((hello.rank, hello.key)))

    def _take(self, rank: int, key: bytes, roles: Roles) -> None:
        """A complete set: joined, or kept until the rank is admitted; closed, if it is none of that rank's. Under the
        lock."""
        if rank not in self._admitted:
            _close(self._waiting.pop(rank, (b"", {}))[1])
            self._waiting[rank] = key, roles
        elif key == self._key_of[rank]:
            self._join(rank, roles)
        else:
            _close(roles)

    def _join(self, rank: int, roles: Roles) -> None:
        """Hand the connections of a rank to the proxy. Under the lock."""
        self._require_open()
        for role, connection in roles.items():
            prepare(connection, self._patience_s, control=role == CONTROL_ROLE)
        lanes = [roles[lane] for lane in range(len(roles) - 1)]
        fds = (ctypes.c_int32 * len(lanes))(*[lane.fileno() for lane in lanes])
        error = self._lib.cn_join(self.pointer, rank, roles[CONTROL_ROLE].fileno(), fds, len(lanes))
        if error:
            _close(roles)
            raise TransportError(f"network: rank {rank} cannot be joined: {self.why(rank) or os.strerror(error)}")
        for connection in roles.values():
            connection.detach()
        self._lock.notify_all()

    def _join_dialled(self, rank: int, roles: Roles) -> None:
        try:
            with self._lock:
                self._join(rank, roles)
        except BaseException:
            _close(roles)
            raise


def _close(roles: Roles) -> None:
    for connection in roles.values():
        connection.close()


def _settings(network: Network, rank: int, patience_s: float) -> proxy.NetSettings:
    config = network.config
    return proxy.NetSettings(
        provider=config.carrier.encode(),
        devices=",".join(config.devices).encode(),
        address=network.address.encode()[:63],
        lanes=config.lanes,
        shuffled=config.is_shuffled,
        gid_index=config.gid_index,
        traffic_class=config.traffic_class,
        service_level=config.service_level,
        mtu=config.mtu,
        ack_timeout=ACK_TIMEOUT,
        retries=RETRIES,
        seed=config.seed + rank,
        drop_after=config.drop_after,
        patience_ns=int(patience_s * 1e9),
    )


def settled(is_quiet: Callable[[int], bool], ranks: int, timeout_s: float, is_over: Callable[[], bool]) -> int:
    """Wait until nothing is still to be sent to these ranks (a bit each), at most so long, and not once `is_over`.
    Those for which something is, at the deadline."""
    until = time.monotonic() + timeout_s
    while not is_quiet(ranks):
        if is_over():
            return 0
        if time.monotonic() > until:
            return sum(1 << rank for rank in range(ranks.bit_length()) if ranks >> rank & 1 and not is_quiet(1 << rank))
        time.sleep(_NAP_S)
    return 0


def require(unsent: int, op: str, timeout_s: float) -> None:
    """Raise PeerTimeout where `settled` has found a rank that takes nothing."""
    if unsent:
        peer = (unsent & -unsent).bit_length() - 1
        raise PeerTimeout(peer=peer, op=op, phase="credit", expected=0, seen=0, waited_s=timeout_s, end=STAYS)
