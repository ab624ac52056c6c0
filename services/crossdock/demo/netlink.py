"""Links, addresses and more of a network namespace, asked of the kernel (rtnetlink), so that no `ip` is needed.

`python -m crossdock.demo.netlink COMMAND...`, in a fresh namespace, becomes the command there, once the loop-back
device is up and a cable could be made.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
import sys
from collections.abc import Iterator
from typing import Self

_CLONE_NEWNET = 0x40000000
_REQUEST, _ACKNOWLEDGE, DUMP, REPLACE, NEW = 0x1, 0x4, 0x300, 0x500, 0x600
"""Flags of requests; NEW: it must not be there, REPLACE: it may."""
_HEADER = struct.Struct("=IHHII")  # length, kind, flags, number, port
_ERROR, _DONE = 2, 3
_NEW_LINK, _DELETE_LINK, _GET_LINK, _NEW_ADDRESS = 16, 17, 18, 20
_LINK_NAME, _LINK_INFO, _LINK_NAMESPACE_OF_PID = 3, 18, 19
_INFO_KIND, _INFO_DATA, _VETH_PEER = 1, 2, 1
_ADDRESS, _LOCAL = 1, 2
_UP = 1


@contextlib.contextmanager
def _inside(namespace: str) -> Iterator[None]:
    """This thread in another namespace, until the end of the block."""
    if not namespace:
        yield
        return
    with open("/proc/thread-self/ns/net", "rb") as home, open(namespace, "rb") as there:
        _set_namespace(there.fileno())
        try:
            yield
        finally:
            _set_namespace(home.fileno())


def _set_namespace(descriptor: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), f"setns: {os.strerror(ctypes.get_errno())}")


def attribute(kind: int, payload: bytes) -> bytes:
    length = 4 + len(payload)
    return struct.pack("=HH", length, kind) + payload + b"\0" * (-length % 4)


def _named(name: str) -> bytes:
    return attribute(_LINK_NAME, name.encode() + b"\0")


def _link(index: int = 0, flags: int = 0, changed: int = 0) -> bytes:
    """The head of messages about links: struct ifinfomsg."""
    return struct.pack("=BxHiII", 0, 0, index, flags, changed)


class Netlink:
    """A line to the kernel. Every method raises OSError with what the kernel refused.

    Args:
        namespace: file of the network namespace that is asked about; empty: the caller's.
        family: of netlink; rtnetlink unless given.
    """

    def __init__(self, namespace: str = "", family: int = 0) -> None:
        with _inside(namespace):
            self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, family)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def ask(self, what: str, kind: int, body: bytes, flags: int = 0) -> list[bytes]:
        """Send a request; what the kernel answers, a payload for each message.

        Args:
            what: names the request in errors.
            kind, body: of the message.
            flags: beside those of every request: NEW, REPLACE or DUMP.
        """
        head = _HEADER.pack(_HEADER.size + len(body), kind, _REQUEST | _ACKNOWLEDGE | flags, 1, 0)
        self._socket.send(head + body)
        answers: list[bytes] = []
        while True:
            data = self._socket.recv(1 << 16)
            while data:
                length, kind, *_ = _HEADER.unpack_from(data)
                payload, data = data[_HEADER.size : length], data[(length + 3) & ~3 :]
                if kind in (_ERROR, _DONE):
                    status = -struct.unpack_from("=i", payload)[0]
                    if status:
                        raise OSError(status, f"{what}: {os.strerror(status)}")
                    return answers
                answers.append(payload)

    def index(self, name: str) -> int:
        (answer,) = self.ask(f"device {name}", _GET_LINK, _link() + _named(name))
        return int(struct.unpack_from("=i", answer, 4)[0])

    def cable(self, name: str, other: str, pid: int) -> None:
        """A pair of devices: `name` here, `other` in the namespace of a process."""
        peer = _link() + _named(other) + attribute(_LINK_NAMESPACE_OF_PID, struct.pack("=I", pid))
        veth = attribute(_INFO_KIND, b"veth") + attribute(_INFO_DATA, attribute(_VETH_PEER, peer))
        self.ask(f"veth pair {name}, {other}", _NEW_LINK, _link() + _named(name) + attribute(_LINK_INFO, veth), NEW)

    def remove(self, name: str) -> None:
        self.ask(f"remove {name}", _DELETE_LINK, _link(self.index(name)))

    def up(self, name: str, *, is_up: bool = True) -> None:
        self.ask(f"switch {name}", _NEW_LINK, _link(self.index(name), _UP * is_up, _UP))

    def address(self, name: str, address: str) -> None:
        """Give a device an IPv4 address, like "10.0.0.1/30"."""
        host, _, length = address.partition("/")
        packed = socket.inet_aton(host)
        head = struct.pack("=BBBBi", socket.AF_INET, int(length), 0, 0, self.index(name))
        body = head + attribute(_LOCAL, packed) + attribute(_ADDRESS, packed)
        self.ask(f"address {address} of {name}", _NEW_ADDRESS, body, NEW)


def main() -> None:
    """Become the command line's command."""
    try:
        with Netlink() as line:
            line.up("lo")
            line.cable("tried", "other", os.getpid())
            line.remove("tried")
        os.execvp(sys.argv[1], sys.argv[1:])
    except OSError as error:
        sys.exit(f"network namespace: {error.strerror}")


if __name__ == "__main__":
    main()
