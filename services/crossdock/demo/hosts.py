"""The two hosts of `crossdock demo --hosts 2`: network namespaces that a cable joins, or two domains on loopback.

A namespace belongs to a process and goes with it, so nothing of the machine's own network is seen or touched. Needs
`unshare` and `nsenter`, and root or user namespaces. Both hosts are one kernel, so their domains are named: ranks of
two hosts would share memory otherwise.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from crossdock.common.config import ConfigFileError
from crossdock.demo import netlink
from crossdock.demo.netlink import Netlink

NUM_HOSTS = 2
_TIMEOUT_S = 30.0
_UNSHARE = (["unshare", "--net"], ["unshare", "--user", "--map-root-user", "--net"])
_ADDRESSES = ("10.77.0.1", "10.77.0.2")


@dataclass(frozen=True, slots=True)
class HostPlace:
    """Where the processes of one host run.

    Attributes:
        address: at which they listen.
        enter: what to put before their command line; empty: they run here.
        namespace: file of their network namespace; empty: this one.
    """

    address: str
    enter: tuple[str, ...] = ()
    namespace: str = ""


LOOPBACK = (HostPlace("127.0.0.1"), HostPlace("127.0.0.1"))
"""Two hosts without namespaces."""


def become(arguments: Sequence[str], module: str = "crossdock") -> str:
    """Become `python -m module ARGUMENTS` in a network namespace of its own. Other modules than ours are those of the
    working directory.

    Returns:
        why there can be none; it does not return where there can.
    """
    why = ""
    safe = ["-P"] if module == "crossdock" else []
    for unshare in _UNSHARE:
        start = [*unshare, sys.executable, "-P", "-m", netlink.__name__]
        try:
            _run([*start, "unshare", "--net", "nsenter", "--version"])
        except ConfigFileError as error:
            why = why or str(error)
            continue
        sys.stdout.flush()
        os.execvp(start[0], [*start, sys.executable, *safe, "-m", module, *arguments])
    return why


@contextlib.contextmanager
def namespaces() -> Iterator[tuple[HostPlace, HostPlace]]:
    """This process's namespace as one host, and a new one as the other, joined by a cable. Raises ConfigFileError."""
    try:
        holder = subprocess.Popen(["unshare", "--net", "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    except OSError as error:
        raise ConfigFileError(f"unshare: {error.strerror}") from None
    try:
        assert holder.stdin is not None
        assert holder.stdout is not None
        holder.stdin.write(b"\n")
        holder.stdin.flush()
        if holder.stdout.read(1) != b"\n":  # it answers once the namespace is there
            raise ConfigFileError("unshare --net: refused")
        namespace = f"/proc/{holder.pid}/ns/net"
        enter = ("nsenter", f"--net={namespace}", "--")
        here, there = _ADDRESSES
        try:
            with Netlink() as line, Netlink(namespace) as other:
                line.cable("cable", "eth0", holder.pid)
                for end, device, address in ((line, "cable", here), (other, "eth0", there)):
                    end.address(device, f"{address}/30")
                    end.up(device)
                other.up("lo")
        except OSError as error:
            raise ConfigFileError(f"network namespace: {error.strerror}") from None
        yield HostPlace(here), HostPlace(there, enter, namespace)
    finally:
        holder.kill()
        holder.communicate()


def _run(command: Sequence[str]) -> None:
    """Raises ConfigFileError with the last words of a command that failed."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except OSError as error:
        raise ConfigFileError(f"{command[0]}: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise ConfigFileError(f"{command[0]}: no end within {_TIMEOUT_S:g} s") from None
    if done.returncode:
        words = done.stderr.strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
        raise ConfigFileError(f"{command[0]}: {words[0]}")
