"""What is written straight to fd 2: gRPC's lines become few events and a count, all else comes out as it was."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Counter

from crossdock.cli import certs
from crossdock.common import log
from crossdock.common.addresses import split_address
from crossdock.common.config import LogConfig
from crossdock.common.grpc_core_log import CoreLogRelay
from crossdock.common.http import ask_http
from crossdock.common.stderr_filter import split
from tests.services.control_world import TIMEOUT_S, Clock, ControlProcess
from tests.tools import needs

GARBAGE = 300
CORE = "I1124 16:59:35.250013   11811 ssl_transport_security.cc:2563] Handshake failed with error SSL_ERROR_SSL"
FATAL = "F1124 16:59:35.250013   11811 call.cc:7] Check failed: refs > 0"
OURS = re.compile(r"\d{4}-\d\d-\d\dT\S+Z (info|warning|error) ")

HEAD = """
import ctypes, os, time
from crossdock.common import log
from crossdock.common.config import LogConfig
from crossdock.common.grpc_core_log import grpc_core_log
from crossdock.common.metrics import ControlMetrics
log.setup(LogConfig())
metrics = ControlMetrics()
holding = ctypes.PyDLL(None)  # calls that keep the interpreter's lock
"""


def said(body: str) -> tuple[int, str]:
    """Exit status and stderr of a process that takes gRPC's lines."""
    code = HEAD + "with grpc_core_log(metrics.grpc_core_log_lines_total):\n    " + body.strip().replace("\n", "\n    ")
    done = subprocess.run([sys.executable, "-c", code], check=False, stderr=subprocess.PIPE, timeout=TIMEOUT_S)
    return done.returncode, done.stderr.decode()


@needs("openssl")
def test_failed_handshakes_are_few_lines_of_our_format_and_a_count(tmp_path: Path) -> None:
    certs.make_all(tmp_path)
    files = (("cert_file", "control.pem"), ("key_file", "control.key"), ("ca_file", "ca.pem"))
    began = time.monotonic()
    with ControlProcess(*(f"security.{field}={tmp_path / name}" for field, name in files)) as control:
        for _ in range(GARBAGE):
            with socket.create_connection(split_address(control.addresses.address), TIMEOUT_S) as raw:
                raw.sendall(b"GET / HTTP/1.1\r\n\r\n")
                while raw.recv(1000):
                    pass
        while (counted := handshakes(control.addresses.http_address)) < GARBAGE:
            assert time.monotonic() - began < TIMEOUT_S, counted
        status, errors = control.terminate()
    assert status == 0
    lines = errors.splitlines()
    assert all(OURS.match(line) for line in lines), errors
    about_it = [line for line in lines if "gRPC core" in line]
    assert 1 <= len(about_it) <= 2 + time.monotonic() - began, errors
    assert "source=ssl_transport_security.cc:" in about_it[0]
    assert "listening" in errors
    assert "stopping" in errors


def handshakes(http: str) -> float:
    text = ask_http(http, "/metrics", TIMEOUT_S)[1]
    found = re.search(
        r'^crossdock_grpc_core_log_lines_total\{group="default",topic="handshake"\} (\S+)', text, re.MULTILINE
    )
    return float(found[1]) if found else 0.0


def test_the_last_words_of_a_process_that_aborts_come_out() -> None:
    status, errors = said(f"""
os.write(2, {(CORE + chr(10) + "double free" + chr(10)).encode()!r})
os.write(2, {(FATAL + chr(10) + "half a li").encode()!r})
holding.abort()
""")
    assert status == -6, errors
    # A line of gRPC's that the dead process could not take any more comes out as it was.
    assert [line for line in errors.splitlines() if line != CORE] == ["double free", FATAL, "half a li"]


def test_a_full_pipe_stops_nobody_who_holds_the_interpreters_lock() -> None:
    status, errors = said(f"""
text = {(CORE + chr(10)).encode()!r} * 20000
holding.write(2, text, len(text))
log.get("crossdock.x").info("went on")
""")
    assert status == 0
    assert "went on" in errors
    assert all(OURS.match(line) for line in errors.splitlines())


def test_without_its_filter_fd_2_is_what_it_was() -> None:
    status, errors = said("""
import signal
from pathlib import Path
child, = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
pipe = os.readlink("/proc/self/fd/2")
os.kill(int(child), signal.SIGKILL)
until = time.monotonic() + 30
while os.readlink("/proc/self/fd/2") == pipe and time.monotonic() < until:
    time.sleep(0.01)
os.write(2, b"as ever\\n")
""")
    assert status == 0
    assert "as ever" in errors.splitlines()
    assert "no longer relayed ended=-9" in errors


def test_without_its_reader_fd_2_is_what_it_was() -> None:
    """Otherwise later writes go into a pipe whose filter ends at the next line of gRPC's core."""
    status, errors = said(f"""
from crossdock.common.grpc_core_log import CoreLogRelay
CoreLogRelay.record = lambda self, line: 1 / 0
pipe = os.readlink("/proc/self/fd/2")
os.write(2, b"{CORE}\\n")
until = time.monotonic() + 30
while os.readlink("/proc/self/fd/2") == pipe and time.monotonic() < until:
    time.sleep(0.01)
assert os.readlink("/proc/self/fd/2") != pipe
os.write(2, b"as ever\\n")
""")
    assert status == 0, errors
    assert "as ever" in errors.splitlines()


def test_one_line_a_second_and_how_many_were_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    log.setup(LogConfig())
    clock, counter = Clock(), Counter("lines", "Lines.", ["topic"], registry=CollectorRegistry())
    relay = CoreLogRelay(counter, clock)
    for _ in range(3):
        relay.record(CORE)
    relay.record("E0000 00:00:1764003372.123456   12 fork_posix.cc:71] Other threads are calling into gRPC")
    relay.rest()
    assert capsys.readouterr().err.count("\n") == 1
    clock.now += 1.0
    relay.rest()
    assert capsys.readouterr().err.rstrip().endswith("gRPC core suppressed=3")
    relay.rest()
    assert capsys.readouterr().err == ""
    counts = {s.labels["topic"]: s.value for s in next(iter(counter.collect())).samples if s.name == "lines_total"}
    assert counts == {"handshake": 3, "other": 1}


def test_lines_are_told_apart_however_they_arrive() -> None:
    text = f"{CORE}\nprogress 1%\rprogress 2%\nIt is\nI1124 of mine\n{FATAL}\n{CORE}\n".encode()
    for size in (1, 7, 64, len(text)):
        core, rest, waiting, inside = b"", b"", b"", False
        for at in range(0, len(text), size):
            pieces, waiting, inside = split(waiting + text[at : at + size], inside)
            core += b"".join(piece for is_core, piece in pieces if is_core)
            rest += b"".join(piece for is_core, piece in pieces if not is_core)
        assert waiting == b""
        assert core == f"{CORE}\n{CORE}\n".encode()
        assert rest == f"progress 1%\rprogress 2%\nIt is\nI1124 of mine\n{FATAL}\n".encode()


def test_the_start_of_another_line_is_not_held_back() -> None:
    assert split(b"loading ", inside=False) == ([(False, b"loading ")], b"", True)
    assert split(b"Input: ", inside=True) == ([(False, b"Input: ")], b"", True)
