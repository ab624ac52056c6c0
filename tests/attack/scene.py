"""What is attacked: a control plane and three workers with default settings, plain or with mTLS, and their meters.

The servers listen on every interface: attackers come from 127.0.0.1 and the well-behaved client from ::1, so that the
limits per peer see two hosts.
"""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc.aio

from crossdock.cli import certs
from crossdock.common import rpc
from crossdock.common.addresses import split_address
from crossdock.common.call_errors import CallError
from crossdock.common.config import ControlConfig, WorkerConfig
from crossdock.common.control_channel import current_view
from crossdock.common.security import Security, load_security
from crossdock.common.settings import SecurityConfig
from crossdock.host.supervisor import Supervisor
from crossdock.protocol.v1.control_pb2 import SERVING, GroupView
from tests.services.cluster import write_model
from tests.services.control_world import lasting_port

NUM_WORKERS = 3
FORM_S, CALM_S = 120.0, 30.0
_PLAIN = SecurityConfig()
_UNLIMITED = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),
)


@dataclass(frozen=True, slots=True)
class Meter:
    """One process at one moment, and its peak since the last `Scene.reset_peaks`.

    Attributes:
        rss_mib, peak_mib: resident memory.
        fds: open file descriptors.
        threads: of the process.
    """

    rss_mib: float
    peak_mib: float
    fds: int
    threads: int


class Scene:
    """A serving group. Use in `with`.

    Args:
        folder: for model, certificates, logs.
        guarded: mTLS, with the files of `crossdock certs`; False: plain text.

    Attributes:
        name: "mtls" or "plain".
        witness_file: certificates of the well-behaved client; None: plain text.
    """

    def __init__(self, folder: Path, *, guarded: bool) -> None:
        self.folder, self.guarded, self.name = folder, guarded, "mtls" if guarded else "plain"
        self.tensors = write_model(folder / "model")
        self._certs = folder / "certs"
        self.witness_file: Path | None = None
        host = _PLAIN
        if guarded:
            certs.make_all(self._certs)
            for part in ("witness", "rogue"):
                names = ("crossdock-witness",) if part == "witness" else ("crossdock://worker/rogue",)
                certs.issue(self._certs, certs.CertificateRole(part, names, serves=False))
            self.witness_file = self._certs / "witness.yaml"
            host = load_security(self._certs / "host.yaml")
        control_port, worker_ports = lasting_port(), [lasting_port() for _ in range(NUM_WORKERS)]
        control = ControlConfig(
            listen=f"[::]:{control_port}",
            http_listen=f"[::]:{lasting_port()}",
            world_size=NUM_WORKERS,
            security=host,
        )
        workers = [
            WorkerConfig(
                model=str(folder / "model"),
                local_rank=rank,
                uid=f"w{rank}",
                listen=f"[::]:{port}",
                advertise=f"[::1]:{port}",
                http_listen=f"[::]:{lasting_port()}",
                security=host,
            )
            for rank, port in enumerate(worker_ports)
        ]
        self.logs = folder / "logs"
        self.supervisor = Supervisor(control, workers, self.logs)
        self._control_port, self._worker_ports = control_port, worker_ports

    def __enter__(self) -> Scene:
        self.supervisor.start()
        self.supervisor.wait_serving(FORM_S)
        return self

    def __exit__(self, *_: object) -> None:
        self.supervisor.stop()

    @property
    def target(self) -> str:
        """The control plane, as the well-behaved client reaches it."""
        return f"[::1]:{self._control_port}"

    @property
    def control(self) -> str:
        """The control plane, as attackers reach it."""
        return f"127.0.0.1:{self._control_port}"

    def worker(self, rank: int = 0) -> str:
        """gRPC address of a worker, as attackers reach it."""
        return f"127.0.0.1:{self._worker_ports[rank]}"

    def http(self, child: str) -> str:
        """HTTP address of "control" or "worker-N", as attackers reach it."""
        return f"127.0.0.1:{split_address(self.supervisor.addresses()[child].http_address)[1]}"

    def ports(self) -> dict[str, str]:
        """The four kinds of port."""
        return {
            "control": self.control,
            "worker": self.worker(),
            "control http": self.http("control"),
            "worker http": self.http("worker-0"),
        }

    def security(self, part: str = "client") -> Security | None:
        """What an attacker calls with: the files of a part; None where nothing is guarded."""
        return Security(load_security(self._certs / f"{part}.yaml")) if self.guarded else None

    def channel(self, address: str, number: int = 0, part: str = "client") -> grpc.aio.Channel:
        """A connection of its own for each `number`, with no limits at this end."""
        security = self.security(part)
        options = [*_UNLIMITED, ("crossdock.attack.connection", number)]
        if security is None:
            return grpc.aio.insecure_channel(address, options=options)
        credentials = security.channel_credentials()
        assert credentials is not None
        name = ("grpc.ssl_target_name_override", "localhost")
        return grpc.aio.secure_channel(address, credentials, options=[*options, name])

    def connect(self, address: str, timeout_s: float = 5.0) -> socket.socket:
        """A socket to a gRPC port, after the TLS handshake where there is one."""
        plain = socket.create_connection(split_address(address), timeout_s)
        if not self.guarded:
            return plain
        context = ssl.create_default_context(cafile=str(self._certs / "ca.pem"))
        context.load_cert_chain(self._certs / "client.pem", self._certs / "client.key")
        context.set_alpn_protocols(["h2"])
        return context.wrap_socket(plain, server_hostname="localhost")

    def view(self, timeout_s: float = 5.0) -> GroupView:
        """The group, as the well-behaved client sees it. Raises CallError."""
        guard = Security(load_security(self.witness_file)) if self.witness_file is not None else None
        with rpc.channel(self.target, security=guard, name="localhost" if guard else "") as channel:
            return current_view(channel, timeout_s)

    def calm(self, epoch: int = 0, within_s: float = CALM_S) -> bool:
        """Wait until the group serves, in this epoch or a later one; False: it did not. A group that has lost a worker
        serves, as far as the control plane knows, until it has missed it."""
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline:
            with contextlib.suppress(CallError):
                view = self.view()
                if view.state == SERVING and view.epoch >= epoch:
                    return True
            time.sleep(0.05)
        return False

    def pids(self) -> dict[str, int]:
        """Process ids by name."""
        return {child.name: child.pid for child in self.supervisor.children}

    def reset_peaks(self) -> None:
        """Peaks count from now on."""
        for pid in self.pids().values():
            with contextlib.suppress(OSError):
                Path(f"/proc/{pid}/clear_refs").write_text("5")

    def meters(self) -> dict[int, Meter]:
        """Every process, by its id."""
        found = {}
        for pid in self.pids().values():
            with contextlib.suppress(OSError):
                found[pid] = meter(pid)
        return found

    def log_bytes(self) -> int:
        """Of all logs together."""
        return sum(path.stat().st_size for path in self.logs.glob("*.log*"))


def meter(pid: int) -> Meter:
    """A process. Raises OSError where it is gone."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    kib = {name: int(status[name].split()[0]) for name in ("VmRSS", "VmHWM")}
    fds = len(os.listdir(f"/proc/{pid}/fd"))
    return Meter(kib["VmRSS"] / 1024, kib["VmHWM"] / 1024, fds, int(status["Threads"]))


@contextlib.contextmanager
def all_closed(sockets: list[socket.socket]) -> Iterator[None]:
    """Close them in the end."""
    try:
        yield
    finally:
        for each in sockets:
            each.close()
