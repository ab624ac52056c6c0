"""The processes of one host: a control plane (perhaps) and its workers, started, kept running, and drained together.

    with Supervisor(ControlConfig(listen="127.0.0.1:0", world_size=4), workers, log_dir) as group:
        view = group.wait_serving(60)

Used by `crossdock up`, the demo and the tests. It decides nothing about membership: that is the control plane's work.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from pathlib import Path

import grpc
import msgspec

from crossdock.common.addresses import family_of, format_address, not_bound, reachable_from_here, split_address
from crossdock.common.announce import Addresses
from crossdock.common.call_errors import CallError, error_of
from crossdock.common.config import ControlConfig, WorkerConfig, dump
from crossdock.common.control_channel import BlockingControlPlaneChannel
from crossdock.common.metrics import HostMetrics
from crossdock.common.security import Security, security_of
from crossdock.common.small_files import write_text
from crossdock.common.transports import needs_gpu
from crossdock.host.child import EXITS_FOR_GOOD, Child, bound_log
from crossdock.protocol.v1.control_pb2 import SERVING, GroupState, GroupView, WatchRequest
from crossdock.protocol.v1.control_pb2_grpc import ControlPlaneStub

Progress = Callable[[GroupView], None]
"""Called with each group view while the group forms."""

CONTROL = "control"
"""Name of the control plane among the children."""

_POLL_S = 1.0
_REFUSED_S = 0.1
"""Pause after a Watch that was refused at once, as by a server that is no control plane."""


def usable_cpus(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Whole processors, at least 1.

    Args:
        proc, cgroups: where those file systems are mounted.
    """
    return max(1, min([len(os.sched_getaffinity(0)), *_quotas(proc, cgroups)]))


def _quotas(proc: Path, cgroups: Path) -> list[int]:
    """Processors that each `cpu.max` from the process's own cgroup up to the root allows, rounded down."""
    path = ""
    with contextlib.suppress(OSError):
        lines = (proc / "self/cgroup").read_text().splitlines()
        path = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), "")
    quotas = []
    for folder in (cgroups / path, *(cgroups / path).parents):
        with contextlib.suppress(OSError, ValueError):
            quota_us, period_us = map(int, (folder / "cpu.max").read_text().split())  # "max" is no limit
            quotas.append(quota_us // period_us)
        if folder == cgroups:
            break
    return quotas


class SupervisorError(RuntimeError):
    """The group cannot come up, or did not within the deadline; the message says which process and its last words."""


class HopelessError(SupervisorError):
    """A process ended and is not restarted, because its configuration or its model can never work."""


class Watched(ABC):
    """What `crossdock up` keeps running, seen through its control plane.

    Args:
        control_address: where this host reaches the control plane.
        security: what it is asked with; None: plain text.
    """

    def __init__(self, control_address: str, security: Security | None) -> None:
        self.control_address, self.security = control_address, security

    @abstractmethod
    def start(self) -> None:
        """Start everything; returns at once, see `wait_serving`."""

    @abstractmethod
    def stop(self, timeout_s: float = 40.0) -> None:
        """Drain what runs, then end it; what is left after `timeout_s` is killed. Idempotent."""

    @abstractmethod
    def check(self) -> None:
        """Raises SupervisorError with the last log lines of a process that is not restarted."""

    @abstractmethod
    def silent(self) -> str:
        """The last words of the parts that do not listen, one line before each; "" if there are none."""

    def follow(self, view: GroupView) -> None:
        """Start workers where the group is to have more than there are, and end those that it left out."""

    def views(self, look_s: float = _POLL_S) -> Generator[GroupView, None, None]:
        """The group as it is now, then every change, for ever; the view comes again at least every `look_s` seconds.

        Raises:
            SupervisorError: a process ended and is not restarted.
        """
        with BlockingControlPlaneChannel(self.control_address, self.security) as channel:
            while True:
                self.check()
                problem = yield from _views(ControlPlaneStub(channel.grpc_channel), look_s, self.follow)
                if problem is not None:
                    channel.fail_over(problem)

    def wait_serving(self, timeout_s: float, progress: Progress | None = None) -> GroupView:
        """Wait until the control plane says SERVING; the view that said so.

        Raises:
            SupervisorError: a process ended and is not restarted, or the deadline passed; with the last view.
        """
        deadline = time.monotonic() + timeout_s
        with contextlib.closing(self.views()) as views:
            for view in views:
                if progress is not None:
                    progress(view)
                if view.state == SERVING:
                    return view
                if time.monotonic() > deadline:
                    break
        words = describe(view) if view.version else "no answer from the control plane"
        raise SupervisorError(f"group: expected SERVING within {timeout_s:g} s, got {words}{self.silent()}")


class Supervisor(Watched):
    """Keeps one control plane and the workers of this host running.

    A child that dies is started again after 0.5 s, doubling to 30 s while it keeps dying young. One that never listened
    is given up after exit status 2 (bad configuration, bad model) or five deaths.

    Args:
        control: the control plane to run here. A port 0 is replaced by a free one, the same over restarts. None: join
            the one that runs at the workers' own `control` address.
        workers: one config per worker; their `control` is set to the control plane that runs here.
        log_dir: gets `<name>.log` and `<name>.yaml` of each process; made if missing.
        log_to_stderr: the processes log to this process's stderr instead of to files.
        log_max_bytes: size at which a log file is copied to `<name>.log.1` and emptied; 0: never.
        enter: what to put before each command line, like `nsenter ... --`; it must become the command, not start it.
        num_workers: how many of `workers` run at first. The others are started and ended so that as many run as the
            group is to have (`crossdock scale`), as long as somebody reads `views`. None: all run, always.

    Raises:
        SecurityError: the workers' certificates cannot be used; the group is watched with them too.
    """

    def __init__(
        self,
        control: ControlConfig | None,
        workers: Sequence[WorkerConfig],
        log_dir: Path,
        *,
        log_to_stderr: bool = False,
        log_max_bytes: int = 0,
        enter: Sequence[str] = (),
        num_workers: int | None = None,
    ) -> None:
        # Checks.
        if not workers:
            raise ValueError("workers: expected at least one, got none")
        if len({worker.local_rank for worker in workers}) < len(workers):  # each would end the other, as the newer one
            got = [worker.local_rank for worker in workers]
            raise ValueError(f"workers: expected a local_rank of its own for each, got {got}")
        # Processors, log folder, restarts that were counted.
        workers = share_cpus(workers, usable_cpus())
        self.metrics = HostMetrics()
        self._counted_restarts: dict[str, int] = {}
        self._log_dir, self._log_to_stderr, self._log_max_bytes = log_dir, log_to_stderr, log_max_bytes
        self._enter = list(enter)
        log_dir.mkdir(parents=True, exist_ok=True)
        self._control: Child | None = None
        self._ports: list[socket.socket] = []
        self._listens: dict[str, str] = {}
        # The control plane: ports that stay, so that workers find a restarted one.
        if control is not None:
            fixed = msgspec.structs.replace(
                control, listen=self._fix_port(control.listen), http_listen=self._fix_port(control.http_listen)
            )
            self._listens = {"control.listen": fixed.listen, "control.http_listen": fixed.http_listen}
            address = reachable_from_here(fixed.listen)
            workers = [msgspec.structs.replace(worker, control=address) for worker in workers]
            self._control = self._child(CONTROL, "control", fixed)
        # The workers.
        super().__init__(workers[0].control, security_of(workers[0].security))
        self._configs = {worker.local_rank: worker for worker in workers}
        self._scales = num_workers is not None
        self._workers = {w.local_rank: self._worker(w.local_rank) for w in workers[:num_workers]}
        self._joining: set[int] = set()
        self._ending: list[Child] = []

    def __enter__(self) -> Supervisor:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def children(self) -> list[Child]:
        """Every process kept here, the control plane first."""
        return [*([self._control] if self._control else []), *self._workers.values()]

    @property
    def names(self) -> list[str]:
        """Names of the children that are to be ready: not of workers that were started for a group that is scaled."""
        joining = {self._workers[rank] for rank in self._joining}
        return [child.name for child in self.children if child not in joining]

    @property
    def control_pid(self) -> int:
        """Process id of the control plane that runs here."""
        if self._control is None:
            raise SupervisorError("control_pid: expected a control plane on this host, got none")
        return self._control.pid

    def worker_pids(self) -> list[int]:
        """Process id of each worker's latest process, by local rank."""
        return [worker.pid for worker in self._workers.values()]

    def addresses(self) -> dict[str, Addresses]:
        """Addresses of the listening processes, by name: "control", "worker-0", ..."""
        found = ((child.name, child.addresses) for child in self.children)  # a child's own thread clears them
        return {name: _reachable(where) for name, where in found if where}

    def start(self) -> None:
        """Start every process; returns at once, see `wait_serving`. Raises HopelessError, and starts none, where
        something listens already: if that is a control plane, our workers would take the seats of its own."""
        for field, listen in self._listens.items():
            _check_free(field, listen)
        for child in self.children:
            child.start()

    def follow(self, view: GroupView) -> None:
        inside = {int(rank) for _, _, rank in (m.worker.uid.rpartition("/") for m in view.members) if rank.isdecimal()}
        wanted = view.wanted.workers
        if not self._scales or not view.epoch or not wanted:
            return
        # More: the lowest numbers that are free.
        ending = {child.name for child in self._ending}
        free = [rank for rank in self._configs if rank not in self._workers and f"worker-{rank}" not in ending]
        for rank in free[: max(0, wanted - len(self._workers))]:
            self._workers[rank] = self._worker(rank)
            self._joining.add(rank)
            self._workers[rank].start()
        self._joining -= inside if view.world_size == wanted and view.state == SERVING else set()
        # Fewer: those that are members no more, once the others serve without them.
        if view.state == SERVING and view.world_size == wanted == len(view.members):
            for rank in sorted(self._workers.keys() - inside, reverse=True)[: max(0, len(self._workers) - wanted)]:
                child = self._workers.pop(rank)
                self._joining.discard(rank)
                child.terminate()
                self._ending.append(child)

    def check(self) -> None:
        for child in [child for child in self._ending if child.join(0)]:
            self._ending.remove(child)
            self.metrics.process_up.remove(child.name)
        for child in self.children:
            if child.log_path is not None:
                bound_log(child.log_path, self._log_max_bytes)
            if child.hopeless:
                kind = HopelessError if child.exit_status in EXITS_FOR_GOOD else SupervisorError
                raise kind(f"{child.hopeless}:\n{child.tail()}")

    def silent(self) -> str:
        quiet = [child for child in self.children if child.log_path and child.addresses is None]
        return "".join(f"\n{child.name}, last lines of {child.log_path}:\n{child.tail()}" for child in quiet)

    def stop(self, timeout_s: float = 40.0) -> None:
        """SIGTERM the workers, which drain and leave; then the control plane; SIGKILL what is left. Idempotent."""
        deadline = time.monotonic() + timeout_s
        for generation in ([*self._workers.values(), *self._ending], [self._control] if self._control else []):
            for child in generation:
                child.terminate()
            for child in generation:
                if not child.join(deadline - time.monotonic()):
                    child.kill()
                    child.join(_POLL_S)
        for port in self._ports:
            port.close()

    def _fix_port(self, listen: str) -> str:
        """Replace port 0 by a free one, so that workers find a restarted control plane again.

        The port stays reserved until `stop`, even while the control plane is down: a socket is bound to
        it that never listens, and SO_REUSEADDR, which servers set too, lets our own child listen there.
        """
        host, port = split_address(listen)
        if port == 0:
            held = socket.socket(family_of(host))
            self._ports.append(held)
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            held.bind((host, 0))
            port = held.getsockname()[1]
        return format_address(host, port)

    def _worker(self, local_rank: int) -> Child:
        return self._child(f"worker-{local_rank}", "worker", self._configs[local_rank])

    def _child(self, name: str, verb: str, config: ControlConfig | WorkerConfig) -> Child:
        path = self._log_dir / f"{name}.yaml"
        write_text(path, dump(config))
        program = [sys.executable, "-P", "-m", "crossdock", verb]  # -P: nothing is imported from where `up` was called
        program += ["--config", str(path), "--parent-pid", str(os.getpid())]
        self.metrics.process_up.labels(process=name).set(0)
        self.metrics.process_restarts_total.labels(process=name)  # exported as 0 from the start
        log_path = None if self._log_to_stderr else self._log_dir / f"{name}.log"
        return Child(name, [*self._enter, *program], log_path, self._note)

    def _note(self, child: Child) -> None:
        self.metrics.process_up.labels(process=child.name).set(child.addresses is not None)
        restarts = child.restarts - self._counted_restarts.get(child.name, 0)
        self._counted_restarts[child.name] = child.restarts
        self.metrics.process_restarts_total.labels(process=child.name).inc(restarts)


def share_cpus(workers: Sequence[WorkerConfig], num_cpus: int) -> list[WorkerConfig]:
    """The configs with `torch_threads` filled in where it is null: a worker's share of the processors, less one for its
    event loop. Threads of a product spin: without a processor for each, throughput falls to a tenth."""
    share = max(1, num_cpus // len(workers) - 1)
    return [
        msgspec.structs.replace(worker, torch_threads=1 if needs_gpu(worker.transport) else share)
        if worker.torch_threads is None
        else worker
        for worker in workers
    ]


def _check_free(field: str, listen: str) -> None:
    host, port = split_address(listen)
    with socket.socket(family_of(host)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise HopelessError(f"{field}: {not_bound(listen, error)}") from None


def _reachable(where: Addresses) -> Addresses:
    here = reachable_from_here
    return Addresses(here(where.address), here(where.http_address), where.https)


def describe(view: GroupView) -> str:
    """A group view in a few words; an empty view (version 0) means no answer."""
    ready = sum(member.ready for member in view.members)
    words = f"{GroupState.Name(view.state)}, {len(view.members)}/{view.world_size} registered, {ready} ready"
    return f"{words} ({view.reason})" if view.reason else words


def _views(
    stub: ControlPlaneStub, look_s: float, follow: Callable[[GroupView], None]
) -> Generator[GroupView, None, CallError | None]:
    """The group as it is now, then what changes within `look_s`; an empty view (version 0) without an answer.
    Returns the error then."""
    call = stub.Watch(WatchRequest(), timeout=look_s, wait_for_ready=True)
    answered = False
    try:
        for view in call:
            answered = True
            follow(view)
            yield view
    except grpc.RpcError as error:
        if not answered:
            yield GroupView()
        problem = error_of(error)
        if problem.code is not grpc.StatusCode.DEADLINE_EXCEEDED:
            time.sleep(_REFUSED_S)
        return None if answered else problem
    finally:
        call.cancel()
    return None
