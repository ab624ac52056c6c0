"""Addresses as text: host:port, with brackets around an IPv6 host."""

from __future__ import annotations

import errno
import ipaddress
import re
import socket

MAX_PORT = 65535
EVERY_INTERFACE = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Hosts that stand for all of this one's interfaces; how this host itself reaches them."""


class AddressError(ValueError):
    """Not host:port."""


def split_address(address: str) -> tuple[str, int]:
    """Host and port of "host:port", "[::1]:port" or "[host]:port". Raises AddressError for anything else."""
    host, separator, port = address.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        host = ""
    if not separator or not host or not re.fullmatch("[0-9]{1,5}", port) or int(port) > MAX_PORT:
        raise AddressError(f"expected host:port with a port in 0..{MAX_PORT}, got {address!r}")
    return host, int(port)


def split_targets(targets: str) -> tuple[str, ...]:
    """The addresses of "host:port,host:port". Raises AddressError if one of them is none."""
    found = tuple(target.strip() for target in targets.split(","))
    for target in found:
        split_address(target)
    return found


def format_address(host: str, port: int) -> str:
    """The inverse of `split_address`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def not_bound(listen: str, error: OSError) -> str:
    """Why a server cannot listen on host:port, in words."""
    where = "of this host" if error.errno == errno.EADDRNOTAVAIL else "where nothing listens yet"
    return f"expected an address {where}, got {listen}: {error.strerror or error}"


def family_of(host: str) -> socket.AddressFamily:
    """Address family of a socket that binds or connects to this host; names are of IPv4."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def bound_to(host: str) -> str:
    """What a socket binds to for that host: every interface is that of both address families, as of gRPC."""
    if host not in EVERY_INTERFACE:
        return host
    return "::" if socket.has_dualstack_ipv6() else "0.0.0.0"


def reachable_from_here(address: str) -> str:
    """The address under which this host reaches a server that listens on `address`, which may be every interface."""
    host, port = split_address(address)
    return format_address(EVERY_INTERFACE.get(host, host), port)


def is_loopback(address: str) -> bool:
    """Whether only this host reaches a server at `address`. Other names than localhost, and text that is no address,
    count as reachable from elsewhere."""
    try:
        return ipaddress.ip_address(split_address(address)[0]).is_loopback
    except ValueError:
        return address.rpartition(":")[0] == "localhost"


def count_up(address: str, steps: int) -> str:
    """The address `steps` ports on; port 0 stays "any free one", and "" stays none."""
    if not address:
        return ""
    host, port = split_address(address)
    return format_address(host, port + steps if port else 0)


def is_host(text: str) -> bool:
    """Whether the text is a name or an address alone, brackets around IPv6 or not."""
    if re.fullmatch(r"[A-Za-z0-9._-]+", text):
        return True
    try:
        return ipaddress.ip_address(text.removeprefix("[").removesuffix("]")).version == 6
    except ValueError:
        return False
