"""Two processes that put themselves into network namespaces of their own, joined by one cable. No program is needed,
but the right to do so."""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
from typing import Any

_CLONE_NEWNET = 0x40000000
_NEW_LINK, _CREATE_AND_ACKNOWLEDGE = 16, 0x1 | 0x4 | 0x200 | 0x400
_NAME, _LINK_INFO, _NAMESPACE_OF_PID = 3, 18, 19
_KIND, _DATA, _PEER = 1, 2, 1
_SET_FLAGS, _SET_ADDRESS, _SET_MASK, _UP = 0x8914, 0x8916, 0x891C, 0x41
_CABLE = "cd0"


def join(rank: int, store: Any) -> str:
    """Into a namespace of this rank (0 or 1), with a cable to the other one's; this rank's address. Raises OSError
    where that is not allowed."""
    libc = ctypes.CDLL(None, use_errno=True)
    moved = libc.unshare(_CLONE_NEWNET) == 0
    reason = os.strerror(ctypes.get_errno())
    store.set(f"moved-{rank}", str(os.getpid() if moved else 0))
    pids = [int(store.get(f"moved-{other}")) for other in range(2)]
    if 0 in pids:
        raise OSError(f"unshare: {reason}")
    if rank == 0:
        try:
            _plug(pids[1])
        finally:
            store.set("plugged", "1")
    store.wait(["plugged"])
    address = f"10.79.0.{rank + 1}"
    _set_up("lo")
    _set_up(_CABLE, address)
    return address


def _plug(pid: int) -> None:
    """A cable whose other end is in the namespace of that process."""
    link = struct.pack("=BxHiII", 0, 0, 0, 0, 0)
    name = _attribute(_NAME, _CABLE.encode() + b"\0")
    peer = _attribute(_PEER, link + name + _attribute(_NAMESPACE_OF_PID, struct.pack("=I", pid)))
    info = _attribute(_KIND, b"veth") + _attribute(_DATA, peer)
    body = link + name + _attribute(_LINK_INFO, info)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as line:
        line.send(struct.pack("=IHHII", 16 + len(body), _NEW_LINK, _CREATE_AND_ACKNOWLEDGE, 1, 0) + body)
        error = struct.unpack_from("=i", line.recv(4096), 16)[0]
    if error:
        raise OSError(-error, f"a veth pair: {os.strerror(-error)}")


def _attribute(kind: int, payload: bytes) -> bytes:
    length = 4 + len(payload)
    return struct.pack("=HH", length, kind) + payload + b"\0" * (-length % 4)


def _set_up(device: str, address: str = "") -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for request, text in ((_SET_ADDRESS, address), (_SET_MASK, "255.255.255.0")) if address else ():
            place = struct.pack("=HH4s8x", socket.AF_INET, 0, socket.inet_aton(text))
            fcntl.ioctl(any_socket, request, struct.pack("16s16s", device.encode(), place))
        fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack("16sH14x", device.encode(), _UP))
