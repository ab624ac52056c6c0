"""Metrics, the HTTP face, and log lines that never stop a service."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import itertools
import logging
import random
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from socketserver import ThreadingMixIn

import pytest

from crossdock.common import http as http_module
from crossdock.common import liveness
from crossdock.common import log as logs
from crossdock.common.addresses import split_address
from crossdock.common.config import LogConfig
from crossdock.common.http import HttpServer, page_of, serve_http
from crossdock.common.metrics import STEP_BUCKETS, ControlMetrics, FrameworkMetrics, HostMetrics, WorkerMetrics
from crossdock.common.rpc import ListenError
from tests.no_descriptors import processor_s

ALL = [WorkerMetrics, ControlMetrics, HostMetrics, FrameworkMetrics]
Kind = type[WorkerMetrics | ControlMetrics | HostMetrics | FrameworkMetrics]


def get(address: str, path: str, method: str = "GET") -> tuple[int, str]:
    host, port = split_address(address)
    connection = http.client.HTTPConnection(host, port, timeout=5)
    try:
        connection.request(method, path)
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


class State:
    ready = False


@pytest.fixture
def server() -> Iterator[HttpServer]:
    made = serve_http("127.0.0.1:0", page_of(WorkerMetrics().registry), lambda: (State.ready, "because"))
    yield made
    made.close()


@pytest.mark.parametrize("kind", ALL)
def test_each_metric_says_its_unit_and_meaning(kind: Kind) -> None:
    for metric in kind().declarations():
        assert metric.name.startswith("crossdock_")
        assert metric.unit
        assert len(metric.help) > 10
        assert metric.name.endswith("_total") == (metric.kind == "counter"), metric.name
        if metric.unit in ("seconds", "bytes"):
            assert metric.name.removesuffix("_total").endswith(metric.unit), metric.name


@pytest.mark.parametrize("kind", ALL)
def test_what_is_declared_is_what_the_registry_holds(kind: Kind) -> None:
    made = kind()
    families = {family.name for family in made.registry.collect() if not family.name.startswith("process_")}
    assert families == {metric.name.removesuffix("_total") for metric in made.declarations()}


def test_two_sets_of_metrics_do_not_meet() -> None:
    first, second = WorkerMetrics(), WorkerMetrics()
    first.tokens_total.inc(3)
    assert second.registry.get_sample_value("crossdock_tokens_total") == 0


def test_buckets_are_printed_as_they_are_written() -> None:
    metrics = WorkerMetrics()
    labels = {"op": "dispatch", "mode": "ll", "phase": "total", "transport": "cpu"}
    metrics.operation_duration_seconds.labels(**labels).observe(2.5e-6)
    assert (
        metrics.registry.get_sample_value("crossdock_operation_duration_seconds_bucket", {**labels, "le": "2e-06"}) == 0
    )
    assert (
        metrics.registry.get_sample_value("crossdock_operation_duration_seconds_bucket", {**labels, "le": "3e-06"}) == 1
    )
    assert all(len(str(bound)) <= 7 for bound in STEP_BUCKETS)
    assert STEP_BUCKETS[0] == 1e-6
    assert all(before < after <= 1.5 * before * (1 + 1e-9) for before, after in itertools.pairwise(STEP_BUCKETS))


def test_many_values_at_once_are_counted_as_one_by_one() -> None:
    one, many = WorkerMetrics(), WorkerMetrics()
    values = [10 ** random.uniform(-7, 2) for _ in range(500)] + list(STEP_BUCKETS)
    for value in values:
        one.step_phase_duration_seconds.labels("experts").observe(value)
    many.step_phase_duration_seconds.labels("experts").observe_many(values)
    many.step_phase_duration_seconds.labels("experts").observe_many([])
    name = "crossdock_step_phase_duration_seconds"
    for bound in (*map(str, STEP_BUCKETS), "+Inf"):
        label = {"phase": "experts", "le": bound}
        expected = one.registry.get_sample_value(f"{name}_bucket", label)
        assert many.registry.get_sample_value(f"{name}_bucket", label) == expected, bound
    sums = [made.registry.get_sample_value(f"{name}_sum", {"phase": "experts"}) for made in (one, many)]
    assert sums[0] == pytest.approx(sums[1])


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this host has no IPv6")
@pytest.mark.parametrize("everywhere", ["0.0.0.0", "[::]"])
def test_every_interface_is_every_family(everywhere: str) -> None:
    made = serve_http(f"{everywhere}:0", page_of(WorkerMetrics().registry), lambda: (True, ""))
    host, _, port = made.address.rpartition(":")
    assert host == everywhere
    assert [get(f"{loopback}:{port}", "/livez")[0] for loopback in ("127.0.0.1", "[::1]")] == [200, 200]
    made.close()


def test_every_interface_of_a_host_without_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    made = serve_http("[::]:0", page_of(WorkerMetrics().registry), lambda: (True, ""))
    assert get(f"127.0.0.1:{split_address(made.address)[1]}", "/livez")[0] == 200
    made.close()


def test_listening_asks_no_name_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getfqdn", lambda *_: pytest.fail("looked up a name"))
    serve_http("127.0.0.1:0", page_of(WorkerMetrics().registry), lambda: (True, "")).close()


def test_the_three_paths(server: HttpServer) -> None:
    assert get(server.address, "/livez") == (200, "ok\n")
    State.ready = False
    assert get(server.address, "/readyz") == (503, "because\n")
    State.ready = True
    assert get(server.address, "/readyz?verbose") == (200, "because\n")
    status, text = get(server.address, "/metrics")
    assert status == 200
    assert "crossdock_tokens_total" in text


def test_other_paths_and_methods_are_refused(server: HttpServer) -> None:
    assert get(server.address, "/")[0] == 404
    assert get(server.address, "/metrics", "POST")[0] == 501


def test_load_balancers_may_ask_for_the_status_alone(server: HttpServer) -> None:
    State.ready = False
    assert get(server.address, "/readyz", "HEAD") == (503, "")
    assert get(server.address, "/metrics", "HEAD") == (200, "")
    assert get(server.address, "/nowhere", "HEAD") == (404, "")


def test_livez_tells_what_is_dead() -> None:
    trouble = ""
    made = serve_http("127.0.0.1:0", page_of(WorkerMetrics().registry), lambda: (True, ""), trouble=lambda: trouble)
    try:
        assert get(made.address, "/livez") == (200, "ok\n")
        trouble = "telemetry: ended"
        assert get(made.address, "/livez") == (503, "telemetry: ended\n")
    finally:
        made.close()


async def test_a_loop_that_is_blocked_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "BEAT_S", 0.01)
    monkeypatch.setattr(liveness, "STALLED_S", 0.2)
    alive = liveness.Liveness()
    made = serve_http("127.0.0.1:0", page_of(WorkerMetrics().registry), lambda: (True, ""), trouble=alive.trouble)
    try:
        assert (await asyncio.to_thread(get, made.address, "/livez"))[0] == 200
        time.sleep(0.5)  # blocks the loop
        status, text = get(made.address, "/livez")
        assert (status, text[:32]) == (503, "the event loop has been blocked ")
        await asyncio.sleep(0.1)
        assert alive.trouble() == ""
        alive.expect("telemetry", lambda: False)
        assert alive.trouble() == "telemetry: ended"
    finally:
        alive.close()
        made.close()


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[HttpServer]:
    monkeypatch.setattr(http_module, "_MAX_CONNECTIONS", 4)
    monkeypatch.setattr(http_module, "_REQUEST_S", 2.0)
    made = serve_http("127.0.0.1:0", page_of(WorkerMetrics().registry), lambda: (True, ""))
    yield made
    made.close()


def slow(address: str, host: str = "127.0.0.1", begun: bytes = b"GET /metrics HT") -> socket.socket:
    """A connection from an address of this host, and the beginning of a request."""
    connection = socket.create_connection(split_address(address), 10.0, (host, 0))
    connection.sendall(begun)
    return connection


def test_slow_callers_do_not_shut_others_out(small: HttpServer) -> None:
    before = threading.active_count()
    held = [slow(small.address) for _ in range(20)]
    assert get(small.address, "/livez")[0] == 200
    assert held[0].recv(1) == b"", "the oldest is closed for a new one"
    assert threading.active_count() - before < 20
    for each in held:
        each.close()


def test_callers_of_one_host_do_not_end_a_request_of_another(small: HttpServer) -> None:
    probe = slow(small.address, "127.0.0.2", b"GET /livez HT")
    held = [slow(small.address) for _ in range(20)]
    assert held[15].recv(1) == b"", "the oldest of their own host"
    probe.sendall(b"TP/1.0\r\n\r\n")
    assert probe.makefile("rb").readline() == b"HTTP/1.0 200 OK\r\n"
    for each in (probe, *held):
        each.close()


def test_callers_of_one_host_do_not_take_every_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_module, "_MAX_THREADS", 4)
    monkeypatch.setattr(http_module, "_MAX_HOST_THREADS", 3)
    asked, go_on = threading.Semaphore(0), threading.Event()

    def ready() -> tuple[bool, str]:
        asked.release()
        return go_on.wait(60), ""

    made = serve_http("127.0.0.1:0", page_of(WorkerMetrics().registry), ready)
    waiting = [slow(made.address, begun=b"GET /readyz HTTP/1.0\r\n\r\n") for _ in range(3)]
    try:
        assert all(asked.acquire(timeout=60) for _ in waiting)
        for host, status in (("127.0.0.1", b"503"), ("127.0.0.2", b"200")):
            with slow(made.address, host, b"GET /livez HTTP/1.0\r\n\r\n") as probe:
                assert probe.makefile("rb").readline().split()[1] == status
    finally:
        go_on.set()
        for each in waiting:
            each.close()
        made.close()


def test_connections_for_which_there_was_no_thread_are_not_counted_for_ever(
    small: HttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: object, request: object, client: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(ThreadingMixIn, "process_request", full)
        for _ in range(3):
            with slow(small.address) as refused:
                assert refused.recv(1) == b""
    assert (small._server._host_threads, small._server._open) == ({}, {})
    assert get(small.address, "/livez")[0] == 200


def test_a_caller_that_sends_a_byte_at_a_time_has_no_more_time(small: HttpServer) -> None:
    begun = time.monotonic()
    with slow(small.address) as trickle, contextlib.suppress(OSError):
        while time.monotonic() - begun < 30:
            trickle.settimeout(0.1)
            trickle.sendall(b"a")
            with contextlib.suppress(TimeoutError):
                if not trickle.recv(1):
                    break
    assert time.monotonic() - begun < 10


def test_many_connections_at_once_wait_for_no_retry(server: HttpServer) -> None:
    with socket.create_connection(split_address(server.address)):
        backlog = server._server.request_queue_size
    assert backlog >= 128


def test_a_broken_readiness_check_does_not_stop_the_server() -> None:
    def broken() -> tuple[bool, str]:
        raise RuntimeError("no")

    made = serve_http("127.0.0.1:0", page_of(WorkerMetrics().registry), broken)
    try:
        with pytest.raises((http.client.HTTPException, OSError)):
            get(made.address, "/readyz")
        assert get(made.address, "/livez")[0] == 200
    finally:
        made.close()


def test_a_silent_client_does_not_block_the_others(server: HttpServer) -> None:
    with socket.create_connection(split_address(server.address)) as silent:
        silent.sendall(b"GET /met")
        assert get(server.address, "/livez")[0] == 200


def test_without_free_descriptors_the_server_waits_and_accepts_later(server: HttpServer) -> None:
    """It would take a processor, and the interpreter's lock, from the steps of its process."""
    with socket.socket() as caller:
        assert processor_s(server._thread, lambda: caller.connect(split_address(server.address))) < 0.1
        caller.settimeout(10)
        caller.sendall(b"GET /livez HTTP/1.0\r\n\r\n")
        assert caller.recv(100).startswith(b"HTTP/1.0 200")


def test_a_port_in_use_is_named(server: HttpServer) -> None:
    with pytest.raises(ListenError, match=server.address):
        serve_http(server.address, page_of(WorkerMetrics().registry), lambda: (True, ""))


def test_closing_frees_the_port(server: HttpServer) -> None:
    made = serve_http("127.0.0.1:0", page_of(WorkerMetrics().registry), lambda: (True, ""))
    made.close()
    serve_http(made.address, page_of(WorkerMetrics().registry), lambda: (True, "")).close()


@pytest.fixture
def quiet_after() -> Iterator[None]:
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    yield
    for handler in [handler for handler in root.handlers if handler not in before]:
        root.removeHandler(handler)
        handler.close()
    root.setLevel(level)


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines()


@pytest.mark.usefixtures("quiet_after")
def test_one_event_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    logs.setup(LogConfig(file=str(path)), host="a")
    log = logs.get("crossdock.test")
    logs.bind(rank=2)
    log.info("hello\nworld", text="two words\nand a break", seconds=0.123456789, nothing="")
    log.debug("not at this level")
    logs.bind(rank=None)
    try:
        raise ValueError("bad")
    except ValueError as error:
        log.exception("caught", error=error)
    logging.getLogger("other").warning("foreign %s", "text")
    first, second, third = lines(path)
    assert first.endswith(r'hello\nworld text="two words\nand a break" seconds=0.123457 nothing="" host=a rank=2')
    assert 'error="ValueError: bad"' in second
    assert "Traceback" in second
    assert "rank=" not in second
    assert "foreign text" in third


@pytest.mark.usefixtures("quiet_after")
@pytest.mark.parametrize("bad", ["\x1b[2J", "\x9b31m", "\x7f", "\u2028", "\u202e", "\x0b", "\x00"])
def test_no_control_of_a_terminal_comes_through(bad: str, tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    logs.setup(LogConfig(file=str(path)))
    logs.get("crossdock.test").info(f"a{bad}b", field=f"c{bad}d é")
    logging.getLogger("grpc").warning("peer said %s", bad)
    text = path.read_bytes().decode()
    assert text.count("\n") == 2
    assert text.replace("\n", "").isprintable()
    assert "é" in text


def test_half_of_a_pair_is_printed_as_an_escape() -> None:
    assert logs.printable("a\ud800b") == r"a\ud800b"


@pytest.mark.usefixtures("quiet_after")
def test_a_log_file_is_renamed_at_its_size_and_so_many_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    logs.setup(LogConfig(file=str(path), max_file_bytes=500, old_files=2))
    for number in range(40):
        logs.get("crossdock.test").info("event", number=number)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["x.log", "x.log.1", "x.log.2"]
    assert all(one.stat().st_size <= 500 for one in tmp_path.iterdir())
    assert "number=39" in path.read_text()


@pytest.mark.usefixtures("quiet_after")
def test_a_log_file_that_another_program_renamed_is_opened_anew(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    logs.setup(LogConfig(file=str(path), max_file_bytes=0))
    logs.get("crossdock.test").info("first")
    path.rename(tmp_path / "x.log.old")
    logs.get("crossdock.test").info("second")
    assert "first" in (tmp_path / "x.log.old").read_text()
    assert "second" in path.read_text()


@pytest.mark.usefixtures("quiet_after")
def test_a_full_disk_is_said_once_and_stops_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    logs.setup(LogConfig(file="/dev/full"))
    log = logs.get("crossdock.test")
    for number in range(3):
        log.info("event", number=number)
    said = capsys.readouterr().err
    assert [f"number={n}" in said for n in range(3)] == [True] * 3
    assert said.count("log lines are being lost") == 1


@pytest.mark.usefixtures("quiet_after")
def test_a_log_file_that_cannot_be_opened_is_left_out(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    logs.setup(LogConfig(file=str(tmp_path / "no" / "such" / "folder.log")))
    logs.get("crossdock.test").info("still here")
    said = capsys.readouterr().err
    assert "log file left out" in said
    assert "still here" in said


@pytest.mark.usefixtures("quiet_after")
def test_setup_twice_writes_each_line_once(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    for _ in range(2):
        logs.setup(LogConfig(file=str(path)))
    threads = [threading.Thread(target=lambda: logs.get("crossdock.t").info("event")) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(lines(path)) == 8
