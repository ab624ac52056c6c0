"""Several control planes as processes, an API server that lends them a lease, and workers that know all of them."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from crossdock.common import announce, rpc
from crossdock.common.call_errors import CallError
from crossdock.common.config import WorkerConfig
from crossdock.common.control_channel import call_leader, current_view
from crossdock.host.supervisor import Supervisor
from crossdock.protocol.v1.control_pb2 import SERVING, GroupView
from tests.services.cluster import FORM_S, STEP_S, Cluster, write_model
from tests.services.control_world import TIMEOUT_S, lasting_port, spawn, wait_announced
from tests.services.forked import forked_children
from tests.services.lease_api import LeaseApi

LEASE_S = 2
"""Of the election."""
_OPTIONS = ("world_size=2", "recover_s=12", "lease_s=6", "election.lease_s=4")
"""The group's lease is also how soon a worker turns from a control plane that is silent. A leader that cannot renew the
election's stops after two thirds of it: on a machine that stands still for a moment the lead may change at any time."""


class Replica:
    """One control plane; started again at the same address.

    Args:
        name: its identity.
        kubeconfig: of the server of the lease.
        overrides: more of its config.
        listen: where it listens; empty: on a port of its own here.
        enter: what its command begins with.
    """

    def __init__(
        self, name: str, kubeconfig: Path, *overrides: str, listen: str = "", enter: tuple[str, ...] = ()
    ) -> None:
        self.address, self._enter = listen or f"127.0.0.1:{lasting_port()}", enter
        self._overrides = (
            f"listen={self.address}",
            "election.lease_name=crossdock",
            f"election.kubeconfig={kubeconfig}",
            f"election.lease_s={LEASE_S}",
            f"election.identity={name}",
            "election.namespace=default",
            *overrides,
        )
        self.start()

    def start(self) -> None:
        """Start and wait until it listens."""
        self.process: subprocess.Popen[str] = spawn(*self._overrides, enter=self._enter)
        self.addresses: announce.Addresses = wait_announced(self.process)

    def send(self, number: int) -> None:
        """Send a signal."""
        os.kill(self.process.pid, number)

    def end(self, number: int = signal.SIGKILL) -> str:
        """Send a signal that ends it and wait for that; what it wrote to stderr."""
        if self.process.poll() is None:
            self.send(signal.SIGCONT)
            self.send(number)
        return self.process.communicate(timeout=TIMEOUT_S)[1]


class Replicas:
    """Three of them, and who leads."""

    def __init__(self, folder: Path, *overrides: str, number: int = 3) -> None:
        self.api = LeaseApi()
        self.all: list[Replica] = []
        self._kubeconfig, self._overrides = self.api.kubeconfig(folder), (*_OPTIONS, *overrides)
        for _ in range(number):
            self.add()

    def __enter__(self) -> Replicas:
        return self

    def add(self) -> Replica:
        """Start one more."""
        self.all.append(Replica(f"c{len(self.all)}", self._kubeconfig, *self._overrides))
        return self.all[-1]

    def __exit__(self, *_: object) -> None:
        for replica in self.all:
            replica.end()
        self.api.__exit__()

    @property
    def target(self) -> str:
        """All addresses."""
        return ",".join(replica.address for replica in self.all)

    def leader(self, beside: Replica | None = None) -> Replica:
        """Who answers as the leader, as soon as one does; never `beside`."""
        others = [replica for replica in self.all if replica is not beside and replica.process.poll() is None]

        def look() -> Replica | None:
            return next((replica for replica in others if leads(replica)), None)

        found = wait(look)
        assert found is not None
        return found

    def view(self) -> GroupView | None:
        """The leader's, by way of any of them; None: nobody leads just now."""
        try:
            return call_leader(self.target, None, lambda channel: current_view(channel, _SOON_S))
        except CallError:
            return None

    def serving(self) -> int:
        """The epoch that is served, as soon as the leader knows of it."""

        def look() -> int:
            view = self.view()
            return view.epoch if view is not None and view.state == SERVING else 0

        found = wait(look)
        assert isinstance(found, int)
        return found


_SOON_S = 10.0
"""Longest wait for one of several to answer: one that was stopped never does."""


def term_of(replica: Replica) -> int:
    """Of the reign in which it decides, by its own word; 0: it does not."""
    try:
        with rpc.channel(replica.address) as channel:
            return current_view(channel, _SOON_S).term
    except CallError:
        return 0


def leads(replica: Replica) -> bool:
    """Whether it decides, by its own word."""
    return bool(term_of(replica))


def wait(look: Callable[[], object], timeout_s: float = TIMEOUT_S) -> object:
    """What `look` gives, as soon as that is something."""
    deadline = time.monotonic() + timeout_s
    while not (found := look()):
        assert time.monotonic() < deadline, "nothing came"
        time.sleep(0.05)
    return found


def replicated_cluster(folder: Path, replicas: Replicas, **worker: object) -> Iterator[Cluster]:
    """Two workers whose control planes are `replicas`."""
    tensors = write_model(folder / "model")
    workers = [
        WorkerConfig(
            model=str(folder / "model"),
            local_rank=rank,
            uid=f"w{rank}",
            control=replicas.target,
            step_timeout_s=STEP_S,
            **worker,  # type: ignore[arg-type]
        )
        for rank in range(2)
    ]
    with forked_children(), Supervisor(None, workers, folder / "logs") as supervisor:
        yield Cluster(supervisor, tensors, supervisor.wait_serving(FORM_S))
