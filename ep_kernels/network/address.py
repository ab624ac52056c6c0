"""Which address ranks of other hosts dial; each choice with its reason. Of a family that the data port takes: IPv4
before IPv6."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from dataclasses import dataclass
from pathlib import Path
from socket import AF_INET, AF_INET6

from ep_kernels.errors import TransportError
from ep_kernels.network.network_config import NetworkConfig, split

_SIOCGIFADDR = 0x8915
_IF_INET6 = Path("/proc/net/if_inet6")
_GLOBAL, _HOST = "00", "10"
"""Scopes there of addresses that may be dialled: everywhere, on this host."""
_UNUSABLE, _TEMPORARY = 0x08 | 0x20 | 0x40, 0x01
"""Flags there: of an address that is a duplicate, deprecated or not yet its own; that is replaced after a while."""
_NOWHERE = {AF_INET: "192.0.2.1", AF_INET6: "2001:db8::1"}
"""Addresses for documentation: connecting a UDP socket to one sends nothing, and shows the default route."""


@dataclass(frozen=True, slots=True)
class Advertised:
    """An address, and why this one."""

    address: str
    why: str


def advertised(config: NetworkConfig) -> Advertised:
    """The address of this host for its peers. Raises TransportError: a device without an address."""
    if config.advertise:
        return Advertised(split(f"{config.advertise}:0")[0], "network.advertise")
    host, _ = split(config.listen)
    families = _families_of(host)
    if config.devices and config.carrier == "tcp":
        for device in config.devices:
            if address := _first(device, families):
                return Advertised(address, f"address of {device}, from network.devices")
        words = " or ".join("IPv4" if family is AF_INET else "IPv6" for family in families)
        raise TransportError(f"network.devices: expected an interface with an {words} address, got {config.devices}")
    if not is_everywhere(host):
        return Advertised(host, "network.listen")
    for family in families:
        if address := _of_default_route(family):
            return Advertised(address, "address of the default route")
    for _, name in socket.if_nameindex():
        address = _first(name, families)
        if address and not ipaddress.ip_address(address).is_loopback:
            return Advertised(address, f"address of {name}; there is no default route")
    loopback = "127.0.0.1" if AF_INET in families else "::1"
    return Advertised(loopback, "no interface but loopback has an address: this host alone")


def is_everywhere(host: str) -> bool:
    """Whether a port that listens there is one of every interface."""
    return host in ("0.0.0.0", "::")


def takes_both(host: str) -> bool:
    """Whether a port that listens there takes IPv4 and IPv6."""
    return host == "::" and socket.has_dualstack_ipv6()


def source_of(config: NetworkConfig, family: int) -> str:
    """The address from which this host dials one of that family: of the first of network.devices that has one; "":
    any."""
    devices = config.devices if config.carrier == "tcp" else ()
    return next(filter(None, (address_of(device, family) for device in devices)), "")


def address_of(device: str, family: int) -> str:
    """Address of an interface; "" if it has none of that family, or there is none of this name."""
    if family == AF_INET6:
        return _address6_of(device)
    with socket.socket(AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            request = struct.pack("256s", device.encode()[:15])
            return socket.inet_ntoa(fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, request)[20:24])
        except OSError:
            return ""


def _address6_of(device: str) -> str:
    """As `address_of`: not link-local, and a lasting one before a temporary one."""
    lines = _IF_INET6.read_text().splitlines() if _IF_INET6.exists() else []
    found = []
    for raw, _, _, scope, flags, name in map(str.split, lines):
        if name == device and scope in (_GLOBAL, _HOST) and not int(flags, 16) & _UNUSABLE:
            found.append((int(flags, 16) & _TEMPORARY, str(ipaddress.IPv6Address(bytes.fromhex(raw)))))
    return min(found, default=(0, ""))[1]


def _first(device: str, families: tuple[int, ...]) -> str:
    return next(filter(None, (address_of(device, family) for family in families)), "")


def _families_of(host: str) -> tuple[int, ...]:
    """Of the addresses at which a port that listens there is reached."""
    if host == "::":
        return (AF_INET, AF_INET6) if takes_both(host) else (AF_INET6,)
    if ":" in host:
        return (AF_INET6,)
    return (AF_INET,)


def _of_default_route(family: int) -> str:
    """The source address towards a documentation address; nothing is sent."""
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as any_socket:
            any_socket.connect((_NOWHERE[family], 9))  # type: ignore[index]
            return str(any_socket.getsockname()[0])
    except OSError:
        return ""
