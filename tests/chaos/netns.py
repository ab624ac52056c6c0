"""Network namespaces of our own: hosts that reach each other through a router, whose lines can be cut for real.

    Fabric()    a router in another one; `host(name, number)` joins a host to it

Each namespace belongs to a process and goes with it; nothing of the machine's own network is seen or touched. Needs
`unshare` and `nsenter`, and root or user namespaces. A cut is a rule of the router that drops packets without a
word: connections neither close nor answer. Host `number` is 10.77.number.2, and 10.78.number.2, which cuts leave alone,
for those who look.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from crossdock.demo.netlink import Netlink
from tests.chaos import routing

_TIMEOUT_S = 30.0
_CUTS, _LOOKS = "10.77", "10.78"


class NoNamespaces(RuntimeError):
    """The machine does not allow them; the message says why."""


@dataclass(frozen=True, slots=True)
class Host:
    """One end of the router's lines.

    Attributes:
        name: of its line.
        address, looked_at: where it is reached, and by those whom no cut stops.
        enter: what to put before a command that is to run there; empty: this process's own.
    """

    name: str
    address: str
    looked_at: str
    enter: tuple[str, ...] = ()

    @property
    def namespace(self) -> str:
        """File of its network namespace; empty: this process's own."""
        return _namespace(self.enter)


class Fabric:
    """The router and its lines.

    Raises:
        NoNamespaces: the machine does not allow them.
    """

    def __init__(self) -> None:
        self._holders: list[subprocess.Popen[bytes]] = []
        self._lock, self._down = threading.Lock(), dict[str, int]()
        self._numbers = itertools.count(1000)
        try:
            self._router = self._hold()
            files = "/proc/sys/net/ipv4/ip_forward", "/proc/sys/net/ipv4/conf/*/rp_filter"
            forward = f"echo 1 > {files[0]} && for file in {files[1]}; do echo 0 > $file; done"
            _run(*self._router, "sh", "-c", forward)
            tried = self.cut(f"to {self.host('tried', 254).address}")
            tried.cut()
            tried.mend()
        except BaseException:
            self.close()
            raise

    def home(self, number: int) -> Host:
        """This process as a host; for one that lives in a namespace of its own (`become`)."""
        return self._join("home", number, (), os.getpid())

    def host(self, name: str, number: int) -> Host:
        """Another host; `number` 1 to 253, once each."""
        enter = self._hold()
        return self._join(name, number, enter, self._holders[-1].pid)

    def alias(self, host: Host, number: int) -> str:
        """A second address of a host, on its one line; cuts tell the two apart."""
        address = f"{_CUTS}.{number}.2"
        with _netlink(host.enter) as there, _netlink(self._router) as router:
            there.address("eth0", f"{address}/32")
            routing.route(router, f"{address}/32", host.address)
        return address

    def cut(self, *rules: str) -> Cut:
        """A cut by such rules ("from A to B", "to B"), whole at first."""
        return Cut(self, {next(self._numbers): rule.split() for rule in rules})

    def apply(self, rules: Mapping[int, Sequence[str]], *, goes: bool) -> None:
        """Add or delete rules that drop what they fit."""
        with _netlink(self._router) as router:
            for number, words in rules.items():
                ends = dict(zip(words[::2], words[1::2], strict=True))
                routing.drop(router, number, source=ends.get("from", ""), to=ends.get("to", ""), goes=goes)

    def unplug(self, host: Host) -> None:
        """Take the line down, both ways; the router says so to whoever sends there."""
        with self._lock:
            self._down[host.name] = self._down.get(host.name, 0) + 1
            with _netlink(self._router) as router:
                router.up(host.name, is_up=False)

    def plug(self, host: Host) -> None:
        """And up again, once for each `unplug`."""
        with self._lock:
            self._down[host.name] -= 1
            if not self._down[host.name]:
                with _netlink(self._router) as router:
                    router.up(host.name)

    def reset(self, here: Host, there: Host) -> int:
        """Reset the connections between two hosts; how many (a kernel without SOCK_DESTROY: none)."""
        return routing.reset(here.namespace, there.address)

    def lose(self, host: Host, share: float) -> None:
        """From now on this share of the packets to a host vanishes, at random.

        Raises:
            NoNamespaces: the kernel cannot.
        """
        with _netlink(self._router) as router:
            routing.lose(router, host.name, share)

    def rename(self, host: Host, number: int) -> str:
        """Another address for a host, which from now on speaks by it; the old one is still there."""
        address = self.alias(host, number)
        gateway = host.address.rpartition(".")[0] + ".1"
        with _netlink(host.enter) as there:
            routing.route(there, f"{_CUTS}.0.0/16", gateway, source=address, replace=True)
        return address

    def close(self) -> None:
        """End it all. Idempotent."""
        for holder in self._holders:
            holder.kill()
            with contextlib.suppress(BrokenPipeError):
                holder.communicate()
        self._holders.clear()

    def _hold(self) -> tuple[str, ...]:
        """A new namespace, of a process that ends with this one; what to put before a command."""
        try:
            holder = subprocess.Popen(["unshare", "--net", "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        except OSError as error:
            raise NoNamespaces(f"unshare: {error.strerror}") from None
        self._holders.append(holder)
        assert holder.stdin is not None
        assert holder.stdout is not None
        try:
            holder.stdin.write(b"\n")
            holder.stdin.flush()
            is_there = holder.stdout.read(1) == b"\n"
        except BrokenPipeError:
            is_there = False
        if not is_there:
            raise NoNamespaces("unshare --net: refused")
        return ("nsenter", f"--net=/proc/{holder.pid}/ns/net", "--")

    def _join(self, name: str, number: int, enter: tuple[str, ...], pid: int) -> Host:
        with _netlink(self._router) as router, _netlink(enter) as there:
            router.cable(name, "eth0", pid)
            there.up("lo")
            for line, device, last in ((router, name, 1), (there, "eth0", 2)):
                for network in (_CUTS, _LOOKS):
                    line.address(device, f"{network}.{number}.{last}/30")
                line.up(device)
            for network in (_CUTS, _LOOKS):
                ours = f"{network}.{number}"
                routing.route(there, f"{network}.0.0/16", f"{ours}.1", source=f"{ours}.2")
        _run(*enter, "sh", "-c", "for file in /proc/sys/net/ipv4/conf/*/rp_filter; do echo 0 > $file; done")
        return Host(name, f"{_CUTS}.{number}.2", f"{_LOOKS}.{number}.2", enter)


@dataclass(frozen=True, slots=True)
class Cut:
    """Some rules of a fabric."""

    fabric: Fabric
    rules: dict[int, list[str]]

    def cut(self) -> None:
        """From now on what they fit vanishes, and nobody is told."""
        self.fabric.apply(self.rules, goes=True)

    def mend(self) -> None:
        """It passes again."""
        self.fabric.apply(self.rules, goes=False)


def _namespace(enter: Sequence[str]) -> str:
    return enter[1].removeprefix("--net=") if enter else ""


@contextlib.contextmanager
def _netlink(enter: Sequence[str]) -> Iterator[Netlink]:
    """A line to the kernel where such a command would run. Raises NoNamespaces with what it refused."""
    try:
        with Netlink(_namespace(enter)) as line:
            yield line
    except OSError as error:
        raise NoNamespaces(error.strerror) from None


def _run(*command: str) -> None:
    """Raises NoNamespaces with the last words of a command that failed."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except OSError as error:
        raise NoNamespaces(f"{command[0]}: {error.strerror}") from None
    if done.returncode:
        words = done.stderr.strip() or f"exit status {done.returncode}"
        raise NoNamespaces(f"{Path(command[0]).name}: {words}")
