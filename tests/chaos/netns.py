"""Network namespaces of our own: hosts that reach each other through a router, whose lines can be cut for real.

    become(module, argv)    this process again, in a namespace of its own, if the machine allows it
    Fabric()                a router in another one; `host(name, number)` joins a host to it

Each namespace belongs to a process and goes with it; nothing of the machine's own network is seen or touched. Needs
`unshare`, `nsenter`, `ip`, and root or user namespaces. A cut is a rule of the router that drops packets without a
word: connections neither close nor answer. Host `number` is 10.77.number.2, and 10.78.number.2, which cuts leave alone,
for those who look.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_TIMEOUT_S = 30.0
_UNSHARE = (["unshare", "--net"], ["unshare", "--user", "--map-root-user", "--net"])
_CUTS, _LOOKS = "10.77", "10.78"
_RANDOM, _SHOT, _GO_ON = 0xFFFFF038, 2, 0xFFFFFFFF
"""Classic BPF: where a random number is loaded from, and what drops a packet or lets it pass."""


class NoNamespaces(RuntimeError):
    """The machine does not allow them; the message says why."""


def become(module: str, arguments: Sequence[str]) -> str:
    """Become `python -m module arguments` in a network namespace of its own, whose loop-back device is up.

    Returns:
        why there can be none; it does not return where there can.
    """
    why = ""
    for unshare in _UNSHARE:
        try:
            _run(*unshare, "sh", "-c", "ip link set lo up && unshare --net true")
        except NoNamespaces as error:
            why = why or str(error)
            continue
        start = ["sh", "-c", 'ip link set lo up && exec "$@"', "sh", sys.executable, "-m", module, *arguments]
        sys.stdout.flush()
        os.execvp(unshare[0], [*unshare, *start])
    return why


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
        """File of its network namespace."""
        return self.enter[1].removeprefix("--net=")


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
        _ip(host.enter, f"addr add {address}/32 dev eth0")
        _ip(self._router, f"route add {address}/32 via {host.address}")
        return address

    def cut(self, *rules: str) -> Cut:
        """A cut by such rules ("from A to B", "to B"), whole at first."""
        return Cut(self, [f"pref {next(self._numbers)} {rule}" for rule in rules])

    def apply(self, verb: str, rules: Sequence[str]) -> None:
        """Add or delete rules that drop what they fit."""
        _ip(self._router, *(f"rule {verb} {rule} blackhole" for rule in rules))

    def unplug(self, host: Host) -> None:
        """Take the line down, both ways; the router says so to whoever sends there."""
        with self._lock:
            self._down[host.name] = self._down.get(host.name, 0) + 1
            _ip(self._router, f"link set dev {host.name} down")

    def plug(self, host: Host) -> None:
        """And up again, once for each `unplug`."""
        with self._lock:
            self._down[host.name] -= 1
            if not self._down[host.name]:
                _ip(self._router, f"link set dev {host.name} up")

    def reset(self, here: Host, there: Host) -> int:
        """Reset the connections between two hosts; how many (a kernel without SOCK_DESTROY: none)."""
        command = [*here.enter, "ss", "-K", "-H", "-t", "dst", there.address]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
        return len(answer.stdout.splitlines())

    def lose(self, host: Host, share: float) -> None:
        """From now on this share of the packets to a host vanishes, at random.

        Raises:
            NoNamespaces: the kernel or `tc` cannot.
        """
        passes = int(share * (1 << 32))
        random = f"4,32 0 0 {_RANDOM},37 1 0 {passes},6 0 0 {_SHOT},6 0 0 {_GO_ON}"
        _run(*self._router, "tc", "qdisc", "add", "dev", host.name, "clsact")
        _run(*self._router, "tc", *f"filter add dev {host.name} egress bpf da bytecode".split(), random)

    def rename(self, host: Host, number: int) -> str:
        """Another address for a host, which from now on speaks by it; the old one is still there."""
        address = self.alias(host, number)
        gateway = host.address.rpartition(".")[0] + ".1"
        _ip(host.enter, f"route replace {_CUTS}.0.0/16 via {gateway} src {address}")
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
        _ip(
            self._router,
            f"link add name {name} type veth peer name eth0 netns {pid}",
            f"addr add {_CUTS}.{number}.1/30 dev {name}",
            f"addr add {_LOOKS}.{number}.1/30 dev {name}",
            f"link set dev {name} up",
        )
        _ip(
            enter,
            "link set lo up",
            f"addr add {_CUTS}.{number}.2/30 dev eth0",
            f"addr add {_LOOKS}.{number}.2/30 dev eth0",
            "link set eth0 up",
            f"route add {_CUTS}.0.0/16 via {_CUTS}.{number}.1 src {_CUTS}.{number}.2",
            f"route add {_LOOKS}.0.0/16 via {_LOOKS}.{number}.1 src {_LOOKS}.{number}.2",
        )
        _run(*enter, "sh", "-c", "for file in /proc/sys/net/ipv4/conf/*/rp_filter; do echo 0 > $file; done")
        return Host(name, f"{_CUTS}.{number}.2", f"{_LOOKS}.{number}.2", enter)


@dataclass(frozen=True, slots=True)
class Cut:
    """Some rules of a fabric."""

    fabric: Fabric
    rules: list[str]

    def cut(self) -> None:
        """From now on what they fit vanishes, and nobody is told."""
        self.fabric.apply("add", self.rules)

    def mend(self) -> None:
        """It passes again."""
        self.fabric.apply("del", self.rules)


def _ip(enter: Sequence[str], *lines: str) -> None:
    _run(*enter, "ip", "-batch", "-", text="\n".join(lines) + "\n")


def _run(*command: str, text: str = "") -> None:
    """Raises NoNamespaces with the last words of a command that failed."""
    try:
        done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except OSError as error:
        raise NoNamespaces(f"{command[0]}: {error.strerror}") from None
    if done.returncode:
        words = done.stderr.strip() or f"exit status {done.returncode}"
        raise NoNamespaces(f"{Path(command[0]).name}: {words}")
