"""What is harmed: three control planes that share a lease, three workers, and the lines to them, each a proxy."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from crossdock.common import rpc
from crossdock.common.config import WorkerConfig
from crossdock.supervisor import Supervisor, current_view
from crossdock.v1.control_pb2 import SERVING, GroupView
from tests.chaos.proxy import Network, Proxy
from tests.services.cluster import write_model
from tests.services.control_world import lasting_port
from tests.services.lease_api import LeaseApi
from tests.services.replicas import Replica

NUM_CONTROLS, NUM_WORKERS = 3, 3
LEASE_S, FORM_S = 1.5, 120.0
_LOOK_S = 0.5


class World:
    """Use in `with`.

    Attributes:
        api: the server of the lease.
        controls, control_lines, lease_lines: control planes, and the ways to them and from them to the lease.
        worker_lines: the ways to the workers.
        target: what clients are given.
        tensors: of the model.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.api, self.network = folder, LeaseApi(), Network()
        self.tensors = write_model(folder / "model")
        self.controls: list[Replica] = []
        self.control_lines: list[Proxy] = []
        self.lease_lines: list[Proxy] = []
        addresses = [self._add_control(number) for number in range(NUM_CONTROLS)]
        self.target = ",".join(addresses)
        self.worker_lines: list[Proxy] = []
        workers = [self._add_worker(number) for number in range(NUM_WORKERS)]
        self.supervisor = Supervisor(None, workers, folder / "logs")

    def __enter__(self) -> World:
        self.supervisor.start()
        self.supervisor.wait_serving(FORM_S)
        return self

    def __exit__(self, *_: object) -> None:
        for line in (*self.control_lines, *self.lease_lines, *self.worker_lines):
            line.mend()
        with contextlib.suppress(ProcessLookupError):
            for pid in self.supervisor.worker_pids():
                os.kill(pid, signal.SIGCONT)
        self.supervisor.stop()
        for replica in self.controls:
            replica.end()
        self.api.__exit__()
        self.network.close()

    def _add_control(self, number: int) -> str:
        advertised, lease_line = (f"127.0.0.1:{lasting_port()}" for _ in range(2))
        self.lease_lines.append(self.network.proxy(lease_line, f"127.0.0.1:{self.api.server_port}"))
        kubeconfig = self.api.kubeconfig(self.folder, lease_line)
        settings = (f"world_size={NUM_WORKERS}", "recover_s=5", f"lease_s={LEASE_S}", f"advertise={advertised}")
        logs = f"log.file={self.folder / f'control-{number}.log'}"
        self.controls.append(Replica(f"c{number}", kubeconfig, *settings, logs))
        self.control_lines.append(self.network.proxy(advertised, self.controls[-1].address))
        return advertised

    def _add_worker(self, number: int) -> WorkerConfig:
        listen, advertised = (f"127.0.0.1:{lasting_port()}" for _ in range(2))
        self.worker_lines.append(self.network.proxy(advertised, listen))
        return WorkerConfig(
            model=str(self.folder / "model"),
            control=self.target,
            uid=f"w{number}",
            local_rank=number,
            listen=listen,
            advertise=advertised,
            max_tokens_per_step=64,
            step_timeout_s=2.0,
            drain_timeout_s=5.0,
        )

    def leader(self) -> int | None:
        """Number of the control plane that decides, asked directly; None: nobody just now."""
        for number, replica in enumerate(self.controls):
            view = look(replica.address)
            if view is not None and view.term:
                return number
        return None

    def wait_leader(self, beside: int, timeout_s: float) -> int | None:
        """Number of a leader other than `beside`; None: nobody began to lead in time."""
        deadline = time.monotonic() + timeout_s
        while (number := self.leader()) in {None, beside} and time.monotonic() < deadline:
            time.sleep(0.02)
        return number if number != beside else None

    def whole(self) -> GroupView | None:
        """The view of the leader, by the way that clients take, if it serves."""
        number = self.leader()
        if number is None:
            return None
        view = look(self.target.split(",")[number])
        return view if view is not None and view.state == SERVING else None

    def settle(self, timeout_s: float) -> GroupView | None:
        """Wait until somebody leads and the group serves; None: it did not."""
        return until(self.whole, timeout_s)


def look(address: str) -> GroupView | None:
    """What a control plane says now; None: nothing, or that it stands by."""
    try:
        with rpc.channel(address) as channel:
            return current_view(channel, _LOOK_S)
    except rpc.CallError:
        return None


def until(look_: Callable[[], GroupView | None], timeout_s: float) -> GroupView | None:
    """What `look_` gives, as soon as that is something; None: it gave nothing in time."""
    deadline = time.monotonic() + timeout_s
    while (found := look_()) is None and time.monotonic() < deadline:
        time.sleep(0.1)
    return found
