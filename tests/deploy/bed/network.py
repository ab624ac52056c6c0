"""A network of the bed's own: addresses that exist nowhere else, and a default route that leads nowhere.

    with network.private():
        ...          this thread, and what it starts, is in it

It has no name and nobody else's: it ends with the last process in it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
from collections.abc import Iterator

NODE, PODS = "10.250.0.1", "10.251.0.0/24"
_NEW_NETWORK = 0x40000000
_OWN = "/proc/thread-self/ns/net"
_SETUP = f"""\
ip link set lo up
ip link add bed0 type veth peer name bed1
ip address add {NODE}/24 dev bed0
ip link set bed0 up
ip link set bed1 up
ip route add default via 10.250.0.2 dev bed0 onlink
sysctl -qw net.ipv4.ip_forward=1
sysctl -qw net.bridge.bridge-nf-call-iptables=1 || true
"""
"""A kubelet wants a default route; without the last line a pod that reaches itself through a Service hears nothing."""


def _call(name: str, *arguments: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


@contextlib.contextmanager
def private() -> Iterator[None]:
    """Move the calling thread into a new network, and back at the end. Raises OSError without the right to."""
    before = os.open(_OWN, os.O_RDONLY)
    try:
        _call("unshare", _NEW_NETWORK)
        try:
            subprocess.run(["sh", "-ec", _SETUP], check=True, capture_output=True, timeout=30)
            yield
        finally:
            _call("setns", before, _NEW_NETWORK)
    finally:
        os.close(before)
