"""Trace contexts are checked before use; OpenTelemetry is imported only where traces are configured."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import grpc
import msgspec
import pytest
from opentelemetry.sdk.trace import TracerProvider

from crossdock.common import tracing
from crossdock.common.settings import TracingConfig
from crossdock.common.tracing import TraceContext, TracingError, current_traceparent, parse_traceparent, tracer_of

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.mark.parametrize(("flags", "sampled"), [("00", False), ("01", True), ("03", True), ("02", False)])
def test_a_trace_context(flags: str, sampled: bool) -> None:
    assert parse_traceparent(f"00-{TRACE}-{SPAN}-{flags}") == TraceContext(TRACE, SPAN, sampled)


def test_a_later_version_may_say_more() -> None:
    assert parse_traceparent(f"01-{TRACE}-{SPAN}-01-more") == TraceContext(TRACE, SPAN, True)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "00",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{TRACE[1:]}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-1",
        f"00-{TRACE}-{SPAN}-01\n",
        f"01-{TRACE}-{SPAN}-01-" + "m" * 1000,
        f"0٣-{TRACE}-{SPAN}-01",
    ],
)
def test_what_is_no_trace_context(text: str) -> None:
    assert parse_traceparent(text) is None


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"endpoint": "collector:4317"}, "expected http://HOST:PORT or https://HOST:PORT"),
        ({"endpoint": "http://collector"}, "tracing.endpoint: expected host:port"),
        ({"endpoint": "http://collector:4317/v1/traces"}, "tracing.endpoint: expected host:port"),
        ({"endpoint": "http://collector:1", "ca_file": "ca.pem"}, "tracing.ca_file: expected an endpoint of https"),
        ({"endpoint": "http://collector:1", "ratio": 1.5}, "<= 1"),
    ],
)
def test_a_wrong_config_says_what_it_expected(fields: dict[str, object], expected: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=expected):
        msgspec.convert(fields, TracingConfig)


def test_without_the_extra_the_config_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(TracingError, match=r"expected the extra otlp \(pip install 'crossdock\[otlp\]'\)"):
        tracer_of(TracingConfig(endpoint="http://127.0.0.1:1"), "worker", "w0")


def test_authorities_that_cannot_be_read(tmp_path: Path) -> None:
    config = TracingConfig(endpoint="https://127.0.0.1:1", ca_file=str(tmp_path / "none.pem"))
    with pytest.raises(TracingError, match=r"tracing\.ca_file: expected a file of certificates"):
        tracer_of(config, "worker", "w0")


def test_a_program_without_traces_imports_nothing() -> None:
    """Nor does one that merely asks for the current context. Only this module may import it: tests/house."""
    script = (
        "import sys; from crossdock.common import tracing as t; assert t.tracer_of(None, 'a', 'b') is None;"
        "assert t.current_traceparent() == ''; print([n for n in sys.modules if n.startswith('opentelemetry')])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_so_many_requests_are_traced_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """An ended one, or one that is released, makes room."""
    monkeypatch.setattr(tracing, "_MAX_OPEN", 2)
    tracer = tracing.Tracer(TracerProvider(), 1.0)
    first, second, third = (tracer.begin("request", None, 0, {}) for _ in range(3))
    assert first is not None
    assert second is not None
    assert third is None
    first.end(grpc.StatusCode.OK, "", 1)
    second.release()
    assert [tracer.begin("request", None, 0, {}) is not None for _ in range(3)] == [True, True, False]
    assert tracer.begin("request", TraceContext(TRACE, SPAN, False), 0, {}) is None


def test_no_span_is_no_context() -> None:
    assert current_traceparent() == ""
