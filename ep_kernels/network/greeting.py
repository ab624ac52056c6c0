"""Connections to a data port: tickets, the dialer's side of the handshake, options of a socket."""

from __future__ import annotations

import contextlib
import math
import socket
import struct
import time
from typing import Annotated

import msgspec

from ep_kernels.network import handshake
from ep_kernels.network.handshake import KEY_BYTES, Greeting
from ep_kernels.network.network_config import MAX_LANES

LEAST_PATIENCE_S = 10.0
_PROBES = 5
"""Of keepalive, in the second half of a connection's patience."""
NEAR_US, NEAR_BYTES = 20, 256 << 10
"""A peer is near if the round trip to it takes at most so long, as on the same machine; size of the send buffer of a
data connection to such a peer (the kernel doubles it). With more on the way, bytes leave the caches before they are
received. 512 KiB in 20 us are 26 GB/s, more than a proxy copies; for longer lines, which need more, the kernel chooses.
"""
_TCP_INFO, _MIN_RTT_AT = 232, 148
"""Size of Linux's `struct tcp_info`, and where its `tcpi_min_rtt` is, microseconds."""


class NetworkTicket(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How ranks of other hosts reach a channel. For members of the group only: it holds the secret.

    Attributes:
        address, port: of the data port.
        token: names the channel there.
        secret: hexadecimal; proves membership.
        key: hexadecimal; the public key of its process, by which nobody else can be taken for it.
        lanes: most data connections; of two ranks the smaller number is used.
        wire: `handshake.WIRE`.
    """

    provider: str
    address: str
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    token: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
    secret: Annotated[str, msgspec.Meta(pattern=f"^[0-9a-f]{{{2 * handshake.SECRET_BYTES}}}$")]
    key: Annotated[str, msgspec.Meta(pattern=f"^[0-9a-f]{{{2 * KEY_BYTES}}}$")]
    lanes: Annotated[int, msgspec.Meta(ge=1, le=MAX_LANES)]
    wire: int = handshake.WIRE


def seconds_left(until: float) -> float:
    """Seconds until then, for a socket: never 0, which would mean not to wait at all."""
    return max(0.001, until - time.monotonic())


def patience_of(timeout_s: float) -> float:
    """Seconds after which a host that answers nothing counts as lost: the deadline of the rank's waits or more, so that
    one that comes back in time has lost nothing. As long, what was sent before an end may take to be read."""
    return max(LEAST_PATIENCE_S, timeout_s)


def greet(connection: socket.socket, hello: Greeting, ticket: NetworkTicket, pair: bytes, until: float) -> None:
    """The dialer's side of the handshake, over at `until` (time.monotonic()). `pair`: what it shares with the owner of
    the ticket. Raises OSError, ValueError."""
    secret, raw = bytes.fromhex(ticket.secret), hello.encode()
    connection.sendall(raw)
    challenge = _exactly(connection, handshake.CHALLENGE_BYTES, until)
    connection.sendall(handshake.membership(secret, raw, challenge) + handshake.ownership(pair, raw, challenge))
    answer = _exactly(connection, handshake.MAC_BYTES, until)
    if not handshake.is_proof(answer, handshake.answer(pair, raw, challenge)):
        raise ValueError("the listener does not own the key of the ticket")


def _exactly(connection: socket.socket, num_bytes: int, until: float) -> bytes:
    received = bytearray()
    while len(received) < num_bytes:
        connection.settimeout(seconds_left(until))
        chunk = connection.recv(num_bytes - len(received))
        if not chunk:
            raise ValueError("it closed the connection")
        received += chunk
    return bytes(received)


def prepare(connection: socket.socket, patience_s: float, *, control: bool) -> None:
    """Options of a connection whose handshake is done. `patience_s`: `patience_of` the rank's deadline."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with contextlib.suppress(OSError):  # a kernel without one of them
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, math.ceil(patience_s * 1e3))
        if not control and _is_near(connection):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, NEAR_BYTES)
    if control:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, math.ceil(patience_s / 2))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, math.ceil(patience_s / 2 / _PROBES))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)


def _is_near(connection: socket.socket) -> bool:
    raw = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO)
    if len(raw) < _MIN_RTT_AT + 4:  # a kernel before 4.6
        return False
    (min_rtt_us,) = struct.unpack_from("=I", raw, _MIN_RTT_AT)
    return bool(min_rtt_us <= NEAR_US)
