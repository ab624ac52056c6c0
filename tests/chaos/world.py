"""What is harmed: three control planes that share a lease, and three workers."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from crossdock.common import rpc
from crossdock.common.addresses import split_address
from crossdock.common.call_errors import CallError
from crossdock.common.config import WorkerConfig
from crossdock.common.control_channel import ask_leader, current_view
from crossdock.common.settings import WorkerNetworkConfig
from crossdock.host.supervisor import Supervisor
from crossdock.protocol.v1.control_pb2 import SERVING, GroupView, ScaleRequest
from tests.chaos.ways import Place, Ways
from tests.services.cluster import write_model
from tests.services.lease_api import LeaseApi
from tests.services.replicas import Replica

LEASE_S, FORM_S = 1.5, 120.0
_LOOK_S = 0.5


class Placed(Supervisor):
    """One whose workers start where `enters` leads: what the command of each begins with."""

    def __init__(self, workers: Sequence[WorkerConfig], log_dir: Path, enters: Sequence[tuple[str, ...]]) -> None:
        super().__init__(None, workers, log_dir)
        for child, enter in zip(self.children, enters, strict=True):
            child._command = [*enter, *child._command]


class World:
    """Use in `with`.

    Args:
        folder: for the model, configs and logs.
        ways: how all reach each other; closed with this.
        num_hosts: among which the workers are divided: those of one share memory, the others have a network.
        provider: of that network.
        two_hops: combines return one row per token and host, whatever their size.

    Attributes:
        ways: these.
        api: the server of the lease.
        controls: the control planes.
        target: what clients are given.
        tensors: of the model.
    """

    def __init__(
        self, folder: Path, ways: Ways, num_hosts: int = 1, provider: str = "tcp", two_hops: bool = False
    ) -> None:
        self.num_hosts, self._provider, self._two_hops = num_hosts, provider, two_hops
        self.folder, self.ways, self.api = folder, ways, LeaseApi(ways.api_host)
        self.tensors = write_model(folder / "model")
        self.target = ",".join(place.advertised for place in ways.controls)
        self.controls = [self._control(number, place) for number, place in enumerate(ways.controls)]
        workers = [self._worker(number, place) for number, place in enumerate(ways.workers)]
        self.supervisor = Placed(workers, folder / "logs", [place.enter for place in ways.workers])

    def __enter__(self) -> World:
        self.supervisor.start()
        self.supervisor.wait_serving(FORM_S)
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            for pid in self.supervisor.worker_pids():
                os.kill(pid, signal.SIGCONT)
        self.supervisor.stop()
        for replica in self.controls:
            replica.end()
        self.api.__exit__()
        self.ways.close()

    def _control(self, number: int, place: Place) -> Replica:
        kubeconfig = self.api.kubeconfig(self.folder, self.ways.lease(number, self.api.server_port))
        settings = (
            f"world_size={len(self.ways.workers)}",
            "recover_s=5",
            f"lease_s={LEASE_S}",
            f"advertise={place.advertised}",
            f"log.file={self.folder / f'control-{number}.log'}",
        )
        return Replica(f"c{number}", kubeconfig, *settings, listen=place.listen, enter=place.enter)

    def _worker(self, number: int, place: Place) -> WorkerConfig:
        return WorkerConfig(
            model=str(self.folder / "model"),
            control=self.target,
            uid=f"w{number}",
            local_rank=number,
            listen=place.listen,
            advertise=place.advertised,
            max_tokens_per_step=64,
            step_timeout_s=2.0,
            drain_timeout_s=5.0,
            network=self._network(number, place),
            combine_order="domain" if self._two_hops else "rank",
            two_hop_tokens=0 if self._two_hops else None,
        )

    def _network(self, number: int, place: Place) -> WorkerNetworkConfig | None:
        if self.num_hosts == 1:
            return None
        host, _ = split_address(place.advertised)
        domain = f"host {number % self.num_hosts}"
        return WorkerNetworkConfig(advertise=host, domain=domain, provider=self._provider, seed=number)

    def leader(self) -> int | None:
        """Number of the control plane that decides, asked directly; None: nobody just now."""
        for number, place in enumerate(self.ways.controls):
            view = look(place.looked_at)
            if view is not None and view.term:
                return number
        return None

    def scale(self, size: int) -> bool:
        """Ask whoever leads for so many workers; False: nobody answers, or the group has not formed yet."""
        number = self.leader()
        if number is None:
            return False
        try:
            ask_leader(self.ways.controls[number].looked_at, None, "Scale", ScaleRequest(workers=size), _LOOK_S)
        except CallError:
            return False
        return True

    def wait_leader(self, beside: int, timeout_s: float) -> int | None:
        """Number of a leader other than `beside`; None: nobody began to lead in time."""
        deadline = time.monotonic() + timeout_s
        while (number := self.leader()) in {None, beside} and time.monotonic() < deadline:
            time.sleep(0.02)
        return number if number != beside else None

    def epoch(self) -> int:
        """The group's epoch, as whoever leads says; 0: nobody does."""
        number = self.leader()
        view = None if number is None else look(self.ways.controls[number].looked_at)
        return view.epoch if view is not None else 0

    def wait_epoch(self, epoch: int, timeout_s: float) -> None:
        """Wait for this epoch or a later one, or until the time is over."""
        deadline = time.monotonic() + timeout_s
        while self.epoch() < epoch and time.monotonic() < deadline:
            time.sleep(0.1)

    def whole(self) -> GroupView | None:
        """The view of the leader, by the way that clients take, if it serves."""
        number = self.leader()
        if number is None:
            return None
        view = look(self.target.split(",")[number])
        serves = view is not None and view.state == SERVING and view.world_size == view.wanted.workers
        return view if serves else None

    def settle(self, timeout_s: float) -> GroupView | None:
        """Wait until somebody leads and the group serves; None: it did not."""
        return until(self.whole, timeout_s)


def look(address: str) -> GroupView | None:
    """What a control plane says now; None: nothing, or that it stands by."""
    try:
        with rpc.channel(address) as channel:
            return current_view(channel, _LOOK_S)
    except CallError:
        return None


def until(look_: Callable[[], GroupView | None], timeout_s: float) -> GroupView | None:
    """What `look_` gives, as soon as that is something; None: it gave nothing in time."""
    deadline = time.monotonic() + timeout_s
    while (found := look_()) is None and time.monotonic() < deadline:
        time.sleep(0.1)
    return found
