"""How the parts of the world reach each other, and what can be cut: by network namespaces, or by proxies."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from tests.chaos.netns import Fabric, Host
from tests.chaos.proxy import Network, Proxy
from tests.services.control_world import lasting_port

NUM_CONTROLS, NUM_WORKERS = 3, 3
_PORT = 7400


class Line(Protocol):
    """What can be cut, and mended later."""

    def cut(self) -> None:
        """Nothing passes any more."""

    def mend(self) -> None:
        """It passes again."""


@dataclass(frozen=True, slots=True)
class Place:
    """Of one process.

    Attributes:
        listen: where it listens.
        advertised: how the others reach it.
        looked_at: where it is asked by who must not be hindered.
        enter: what its command begins with.
    """

    listen: str
    advertised: str
    looked_at: str
    enter: tuple[str, ...] = ()


class Ways(ABC):
    """Of `NUM_CONTROLS` control planes, some workers, clients, and the server of the lease at `api`.

    Attributes:
        kind: "namespaces" or "proxies".
        api_host: where the server of the lease must listen.
        controls, workers: their places.
    """

    kind: str
    api_host = "127.0.0.1"
    controls: list[Place]
    workers: list[Place]

    @abstractmethod
    def lease(self, number: int, port: int) -> str:
        """Where a control plane finds the server of the lease, which listens on `port`; once each."""

    @abstractmethod
    def to_control(self, number: int) -> list[Line]:
        """Between a control plane and its workers and clients."""

    @abstractmethod
    def to_lease(self, number: int) -> list[Line]:
        """Between a control plane and the lease."""

    @abstractmethod
    def to_worker(self, number: int) -> list[Line]:
        """Between clients and a worker."""

    @abstractmethod
    def reset(self, number: int) -> int:
        """End the connections between clients and a worker at once, new ones are taken; how many there were."""

    @abstractmethod
    def close(self) -> None:
        """Mend and end it all."""


class Proxied(Ways):
    """Every line is a proxy: what is cut is held back, and comes when it is mended. Needs no privilege."""

    kind = "proxies"

    def __init__(self, num_workers: int = NUM_WORKERS) -> None:
        self._network = Network()
        self._controls: list[Proxy] = []
        self._workers: list[Proxy] = []
        self._leases: dict[int, Proxy] = {}
        self.controls = [self._place(self._controls) for _ in range(NUM_CONTROLS)]
        self.workers = [self._place(self._workers) for _ in range(num_workers)]

    def _place(self, lines: list[Proxy]) -> Place:
        listen, advertised = (f"127.0.0.1:{lasting_port()}" for _ in range(2))
        lines.append(self._network.proxy(advertised, listen))
        return Place(listen, advertised, listen)

    def lease(self, number: int, port: int) -> str:
        address = f"127.0.0.1:{lasting_port()}"
        self._leases[number] = self._network.proxy(address, f"127.0.0.1:{port}")
        return address

    def to_control(self, number: int) -> list[Line]:
        return [self._controls[number]]

    def to_lease(self, number: int) -> list[Line]:
        return [self._leases[number]]

    def to_worker(self, number: int) -> list[Line]:
        return [self._workers[number]]

    def reset(self, number: int) -> int:
        return self._workers[number].reset()

    def close(self) -> None:
        for line in (*self._controls, *self._workers, *self._leases.values()):
            line.mend()
        self._network.close()


class Namespaced(Ways):
    """Every process in a network namespace of its own, clients and the server of the lease in this one's.

    Raises:
        NoNamespaces: the machine does not allow them.
    """

    kind = "namespaces"
    api_host = "0.0.0.0"

    def __init__(self, num_workers: int = NUM_WORKERS) -> None:
        self.fabric = Fabric()
        with contextlib.ExitStack() as undo:
            undo.callback(self.fabric.close)
            self._home = self.fabric.home(1)
            self._api = self.fabric.alias(self._home, 2)
            self.hosts = [self.fabric.host(f"control-{i}", 10 + i) for i in range(NUM_CONTROLS)]
            self.machines = [self.fabric.host(f"worker-{i}", 20 + i) for i in range(num_workers)]
            undo.pop_all()
        self.controls = [_place(host) for host in self.hosts]
        self.workers = [_place(host) for host in self.machines]

    def lease(self, number: int, port: int) -> str:
        return f"{self._api}:{port}"

    def to_control(self, number: int) -> list[Line]:
        here = self.hosts[number].address
        return [self._between(here, *(host.address for host in (self._home, *self.machines)))]

    def to_lease(self, number: int) -> list[Line]:
        return [self._between(self.hosts[number].address, self._api)]

    def to_worker(self, number: int) -> list[Line]:
        return [self._between(self.machines[number].address, self._home.address)]

    def from_controls(self, number: int) -> list[Line]:
        """Between a worker and every control plane."""
        return [self._between(self.machines[number].address, *(host.address for host in self.hosts))]

    def between_workers(self, one: int, other: int) -> list[Line]:
        """Between two workers."""
        return [self._between(self.machines[one].address, self.machines[other].address)]

    def one_way(self, host: Host, way: str) -> list[Line]:
        """All that comes from ("from") or goes to ("to") a host."""
        return [self.fabric.cut(f"{way} {host.address}")]

    def around(self, host: Host) -> list[Line]:
        """All of a host, both ways."""
        return [self.fabric.cut(f"from {host.address}", f"to {host.address}")]

    def plug(self, host: Host) -> list[Line]:
        """The line itself: it goes down."""
        return [_Plug(lambda: self.fabric.unplug(host), lambda: self.fabric.plug(host))]

    def reset(self, number: int) -> int:
        return self.fabric.reset(self._home, self.machines[number])

    def close(self) -> None:
        self.fabric.close()

    def _between(self, here: str, *there: str) -> Line:
        both = ((f"from {here} to {other}", f"from {other} to {here}") for other in there)
        return self.fabric.cut(*(rule for pair in both for rule in pair))


@dataclass(frozen=True, slots=True)
class _Plug:
    cut: Callable[[], None]
    mend: Callable[[], None]


def _place(host: Host) -> Place:
    return Place(f"0.0.0.0:{_PORT}", f"{host.address}:{_PORT}", f"{host.looked_at}:{_PORT}", host.enter)
