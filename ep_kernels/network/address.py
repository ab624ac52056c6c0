"""Which address ranks of other hosts dial; each choice with its reason."""

from __future__ import annotations

import fcntl
import socket
import struct
from dataclasses import dataclass

from ep_kernels.errors import TransportError
from ep_kernels.network.network_config import NetworkConfig, split

_SIOCGIFADDR = 0x8915
_ANYWHERE = ("0.0.0.0", "::", "")
_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Advertised:
    """An address, and why this one."""

    address: str
    why: str


def advertised(config: NetworkConfig) -> Advertised:
    """The address of this host for its peers. Raises TransportError: a device without an address."""
    if config.advertise:
        return Advertised(split(f"{config.advertise}:0")[0], "network.advertise")
    if config.devices and config.carrier == "tcp":
        for device in config.devices:
            if address := address_of(device):
                return Advertised(address, f"address of {device}, from network.devices")
        raise TransportError(f"network.devices: expected an interface with an IPv4 address, got {config.devices}")
    host, _ = split(config.listen)
    if host not in _ANYWHERE:
        return Advertised(host, "network.listen")
    if address := _of_default_route():
        return Advertised(address, "address of the default route")
    for _, name in socket.if_nameindex():
        address = address_of(name)
        if address and address != _LOOPBACK:
            return Advertised(address, f"address of {name}; there is no default route")
    return Advertised(_LOOPBACK, "no interface but loopback has an address: this host alone")


def source_of(config: NetworkConfig) -> str:
    """The address from which this host dials: of the first of network.devices that has one; "": any."""
    devices = config.devices if config.carrier == "tcp" else ()
    return next(filter(None, map(address_of, devices)), "")


def address_of(device: str) -> str:
    """IPv4 address of an interface; "" if it has none, or there is none of this name."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            request = struct.pack("256s", device.encode()[:15])
            return socket.inet_ntoa(fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, request)[20:24])
        except OSError:
            return ""


def _of_default_route() -> str:
    """The source address towards a documentation address; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            any_socket.connect(("192.0.2.1", 9))
            return str(any_socket.getsockname()[0])
        except OSError:
            return ""
