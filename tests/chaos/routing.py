"""What the router of tests/chaos/netns.py asks of the kernel: routes, rules, packets that are lost, connections that
are reset."""

from __future__ import annotations

import errno
import socket
import struct

from crossdock.demo.netlink import DUMP, NEW, REPLACE, Netlink, attribute

_NEW_ROUTE, _NEW_RULE, _DELETE_RULE, _NEW_QDISC, _NEW_FILTER = 24, 32, 33, 36, 44
_TO, _FROM, _PRIORITY, _GATEWAY, _SOURCE = 1, 2, 6, 5, 7
_MAIN_TABLE, _BY_BOOT, _UNICAST, _BLACKHOLE = 254, 3, 1, 6
_KIND, _OPTIONS = 1, 2
_CLSACT, _HANDLE, _EGRESS, _ALL_PROTOCOLS = 0xFFFFFFF1, 0xFFFF0000, 0xFFFFFFF3, 3
_NUM_OPS, _OPS, _FLAGS, _VERDICT_OF_PROGRAM = 4, 5, 8, 1
_LOAD, _AT_RANDOM, _IF_AT_LEAST, _RETURN, _SHOT, _GO_ON = 0x20, 0xFFFFF038, 0x35, 6, 2, 0xFFFFFFFF
_INSTRUCTION = "=HBBI"
"""Classic BPF, an instruction: code, jump if so, jump if not, number."""
_SOCK_DIAG, _BY_FAMILY, _DESTROY = 4, 20, 21
_CONNECTED = 0xFFF & ~(1 | 1 << 3 | 1 << 6 | 1 << 7 | 1 << 10)
"""States of a connection, but for half a connection, what waits after its end, what is closed, and listeners."""


def _packed(network: str) -> tuple[bytes, int]:
    host, _, length = network.partition("/")
    return socket.inet_aton(host), int(length or 32)


def route(line: Netlink, to: str, via: str, *, source: str = "", replace: bool = False) -> None:
    """A route to a network ("10.77.0.0/16") by a gateway; `source`: the address that this side then speaks by."""
    packed, length = _packed(to)
    body = struct.pack("=BBBBBBBBI", socket.AF_INET, length, 0, 0, _MAIN_TABLE, _BY_BOOT, 0, _UNICAST, 0)
    body += attribute(_TO, packed) + attribute(_GATEWAY, socket.inet_aton(via))
    if source:
        body += attribute(_SOURCE, socket.inet_aton(source))
    line.ask(f"route to {to}", _NEW_ROUTE, body, REPLACE if replace else NEW)


def drop(line: Netlink, number: int, *, source: str = "", to: str = "", goes: bool = True) -> None:
    """Rule `number`: packets from and to such addresses vanish; or, if not `goes`, no longer."""
    lengths = 32 * bool(to), 32 * bool(source)
    body = struct.pack("=BBBBBBBBI", socket.AF_INET, *lengths, 0, 0, 0, 0, _BLACKHOLE, 0)
    body += attribute(_PRIORITY, struct.pack("=I", number))
    for kind, address in ((_TO, to), (_FROM, source)):
        if address:
            body += attribute(kind, socket.inet_aton(address))
    line.ask(f"rule {number}", _NEW_RULE if goes else _DELETE_RULE, body, NEW if goes else 0)


def lose(line: Netlink, device: str, share: float) -> None:
    """This share of the packets that leave by a device vanishes, at random."""
    ops = (
        (_LOAD, 0, 0, _AT_RANDOM),
        (_IF_AT_LEAST, 1, 0, int(share * (1 << 32))),
        (_RETURN, 0, 0, _SHOT),
        (_RETURN, 0, 0, _GO_ON),
    )
    index = line.index(device)
    qdisc = struct.pack("=BxHiIII", 0, 0, index, _HANDLE, _CLSACT, 0) + attribute(_KIND, b"clsact\0")
    line.ask(f"queue of {device}", _NEW_QDISC, qdisc, NEW)
    told = attribute(_NUM_OPS, struct.pack("=H", len(ops)))
    told += attribute(_OPS, b"".join(struct.pack(_INSTRUCTION, *op) for op in ops))
    told += attribute(_FLAGS, struct.pack("=I", _VERDICT_OF_PROGRAM))
    filters = struct.pack("=BxHiIII", 0, 0, index, 0, _EGRESS, socket.htons(_ALL_PROTOCOLS))
    line.ask(f"filter of {device}", _NEW_FILTER, filters + attribute(_KIND, b"bpf\0") + attribute(_OPTIONS, told), NEW)


def reset(namespace: str, to: str) -> int:
    """Reset the TCP connections to an address; how many (a kernel without SOCK_DESTROY: none)."""
    packed = socket.inet_aton(to)
    found = 0
    with Netlink(namespace, _SOCK_DIAG) as line:
        for family, there in ((socket.AF_INET, packed), (socket.AF_INET6, bytes(10) + b"\xff\xff" + packed)):
            head = struct.pack("=BBBxI", family, socket.IPPROTO_TCP, 0, _CONNECTED)
            for answer in line.ask("connections", _BY_FAMILY, head + bytes(48), DUMP):
                name = answer[4:52]  # ports, here, there, device, cookie
                if name[20 : 20 + len(there)] == there:
                    found += _destroy(line, head + name)
    return found


def _destroy(line: Netlink, body: bytes) -> bool:
    try:
        line.ask("reset", _DESTROY, body)
    except OSError as error:
        if error.errno in (errno.EOPNOTSUPP, errno.ENOENT):
            return False
        raise
    return True
