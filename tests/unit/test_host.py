"""What a host says about its processes to a probe, with small HTTP servers in the place of real processes."""

from __future__ import annotations

import io
from collections.abc import Iterator

import pytest
from rich.console import Console

from crossdock.common.announce import Addresses
from crossdock.common.config import ControlConfig, HostConfig, WorkerConfig
from crossdock.common.http import HttpServer, page_of, serve_http
from crossdock.common.metrics import HostMetrics
from crossdock.common.settings import SecurityConfig
from crossdock.host import run as host
from crossdock.host.pages import readiness
from crossdock.host.run import exposed
from crossdock.host.supervisor import Progress, Watched
from crossdock.protocol.v1.control_pb2 import GroupView

GUARDED = SecurityConfig(cert_file="a", key_file="b", ca_file="c")
NAMES = ["control", "worker-0"]


class Answers:
    """A process whose readiness the test sets."""

    def __init__(self) -> None:
        self.ready = (True, "SERVING")
        self.http: HttpServer = serve_http("127.0.0.1:0", page_of(HostMetrics().registry), lambda: self.ready)

    @property
    def addresses(self) -> Addresses:
        return Addresses("unused:1", self.http.address)


@pytest.fixture
def processes() -> Iterator[tuple[Answers, Answers]]:
    made = Answers(), Answers()
    yield made
    for one in made:
        one.http.close()


def test_addresses_in_plain_text_that_other_hosts_reach_are_named() -> None:
    here, there = "127.0.0.1:7400", "0.0.0.0:7500"
    worker = WorkerConfig(model="/m", listen=there)
    assert exposed(HostConfig(worker=WorkerConfig(model="/m"))) == []
    assert exposed(HostConfig(worker=worker, control=ControlConfig(listen=here))) == [there]
    assert exposed(HostConfig(worker=worker, control=ControlConfig(listen="[::]:7400"))) == ["[::]:7400", there]
    guarded = WorkerConfig(model="/m", listen=there, security=GUARDED)
    assert exposed(HostConfig(worker=guarded, control=None)) == []


def test_a_host_is_ready_when_every_process_is(processes: tuple[Answers, Answers]) -> None:
    control, worker = processes
    where = {"control": control.addresses, "worker-0": worker.addresses}
    assert readiness(NAMES, where) == (True, "ready")


def test_an_unready_process_is_named_with_its_own_words(processes: tuple[Answers, Answers]) -> None:
    control, worker = processes
    worker.ready = (False, "joining: loading experts")
    where = {"control": control.addresses, "worker-0": worker.addresses}
    assert readiness(NAMES, where) == (False, "worker-0: joining: loading experts")


def test_a_process_that_does_not_listen_is_named(processes: tuple[Answers, Answers]) -> None:
    where = {"control": processes[0].addresses}
    assert readiness(NAMES, where) == (False, "worker-0: not listening")


def test_a_process_that_does_not_answer_is_named(processes: tuple[Answers, Answers]) -> None:
    control, worker = processes
    where = {"control": control.addresses, "worker-0": worker.addresses}
    worker.http.close()
    ready, reason = readiness(NAMES, where)
    assert not ready
    assert reason.startswith("worker-0: ")


def test_words_of_workers_are_no_markup() -> None:
    """Once a reason with "[/" in it ended `crossdock up`, and one with "[a]" lost that part."""
    said, out = "fault: [lost] [/b]", io.StringIO()

    class Group(Watched):
        start = stop = check = silent = None  # type: ignore[assignment]

        def wait_serving(self, timeout_s: float, progress: Progress | None = None) -> GroupView:
            assert progress is not None
            view = GroupView(version=1, world_size=1, reason=said)
            progress(view)
            return view

    for console in (Console(file=out, width=200), Console(file=out, width=200, force_terminal=True)):
        host._wait(Group("a:1", None), 1.0, console)
    assert said in out.getvalue()
