"""Traces: W3C trace contexts of requests, and their spans, which the OpenTelemetry SDK exports over OTLP.

    request                     parent: the caller's span
    ├── admit                   checks, until it is queued
    ├── queue                   until its first step takes it
    └── step                    one or more; ends when every rank has said that it succeeded
        ├── dispatch
        ├── experts
        └── combine

Off by default. OpenTelemetry, the extra `otlp`, is imported by `tracer_of` alone, if it is configured. Spans are made
when their request has ended, of times that were noted before.
"""

from __future__ import annotations

import random
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

import crossdock
from crossdock.common.helper_thread import HelperThread
from crossdock.common.settings import TracingConfig

TRACEPARENT = "traceparent"
"""Key of the metadata of a call."""
_FORM = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_MAX_CHARS = 512
_DELAY_MS = 1000.0
"""Spans of so long leave together."""
_MAX_OPEN = 1024
"""Traced requests at a time; further ones are not traced, so that callers cannot fill the queue of the telemetry."""
_EXPORT_S, _CLOSE_S = 5.0, 3.0
"""Time limit of one export, and of the last one at the end of the process."""

Attributes = Mapping[str, str | int]


class TracingError(Exception):
    """Traces are configured and cannot be exported."""


@dataclass(frozen=True, slots=True)
class TraceContext:
    """What a caller says about its span.

    Attributes:
        trace_id, span_id: 32 and 16 lower-case hexadecimal digits, not all zero.
        sampled: the caller records its span.
    """

    trace_id: str
    span_id: str
    sampled: bool


def parse_traceparent(text: str) -> TraceContext | None:
    """A W3C `traceparent`, or None of anything that is none: the specification then starts a new trace."""
    found = _FORM.fullmatch(text) if len(text) <= _MAX_CHARS else None
    if found is None:
        return None
    version, trace_id, span_id, flags, more = found.groups()
    if version == "ff" or (version == "00" and more) or not int(trace_id, 16) or not int(span_id, 16):
        return None
    return TraceContext(trace_id, span_id, bool(int(flags, 16) & 1))


def context_of_call(context: grpc.aio.ServicerContext[Any, Any]) -> TraceContext | None:
    """The trace context in the metadata of a call."""
    for key, value in context.invocation_metadata() or ():
        if key == TRACEPARENT and isinstance(value, str):
            return parse_traceparent(value)
    return None


def current_traceparent() -> str:
    """The traceparent of this program's current OpenTelemetry span; empty if there is none. Imports nothing."""
    api: Any = sys.modules.get("opentelemetry.trace")
    current = api.get_current_span().get_span_context() if api is not None else None
    if current is None or not current.is_valid:
        return ""
    return f"00-{current.trace_id:032x}-{current.span_id:016x}-{int(current.trace_flags):02x}"


@dataclass(frozen=True, slots=True)
class PendingSpan:
    """A span to be, of monotonic nanoseconds."""

    name: str
    start_ns: int
    end_ns: int
    attributes: Attributes = field(default_factory=dict)
    parts: Sequence[PendingSpan] = ()


class RequestTrace:
    """One traced request. `phases` may be added to by any thread until it has ended.

    Attributes:
        trace_id: 32 hexadecimal digits.
        exemplar: labels of an exemplar that names the request's span.
        release: makes room for another; called by `end`, or alone if there will be no spans.
    """

    def __init__(self, tracer: Any, span: Any, offset_ns: int, release: Callable[[], None]) -> None:
        self._tracer, self._span, self._offset_ns, self.release = tracer, span, offset_ns, release
        context = span.get_span_context()
        self.trace_id = f"{context.trace_id:032x}"
        self.exemplar = {"trace_id": self.trace_id, "span_id": f"{context.span_id:016x}"}
        self.phases: list[PendingSpan] = []

    def end(self, code: grpc.StatusCode, message: str, end_ns: int) -> None:
        """Make the spans; they are exported by a thread of the SDK."""
        from opentelemetry import trace

        self.release()
        for phase in self.phases:
            self._make(phase, self._span)
        self._span.set_attribute("rpc.grpc.status_code", code.value[0])
        if code is not grpc.StatusCode.OK:
            self._span.set_status(trace.StatusCode.ERROR, message[:_MAX_CHARS])
        self._span.end(end_ns + self._offset_ns)

    def _make(self, phase: PendingSpan, parent: Any) -> None:
        from opentelemetry import trace

        within, began_ns = trace.set_span_in_context(parent), phase.start_ns + self._offset_ns
        span = self._tracer.start_span(phase.name, within, attributes=phase.attributes, start_time=began_ns)
        for part in phase.parts:
            self._make(part, span)
        span.end(phase.end_ns + self._offset_ns)


class Tracer:
    """Begins traces of requests. Made by `tracer_of`.

    Args:
        ratio: share of the requests without a trace context that are traced.
    """

    def __init__(self, provider: Any, ratio: float) -> None:
        self._provider, self._ratio = provider, ratio
        self._tracer = provider.get_tracer("crossdock")
        self._room = threading.Semaphore(_MAX_OPEN)

    def begin(
        self, name: str, parent: TraceContext | None, start_ns: int, attributes: Attributes
    ) -> RequestTrace | None:
        """Begin the trace of a request that came at `start_ns` (monotonic). None: the request is not traced."""
        wanted = parent.sampled if parent is not None else random.random() < self._ratio
        if not wanted or not self._room.acquire(blocking=False):
            return None
        from opentelemetry import trace

        offset_ns = time.time_ns() - time.monotonic_ns()
        span = self._tracer.start_span(
            name, _within(parent), trace.SpanKind.SERVER, attributes, start_time=start_ns + offset_ns
        )
        return RequestTrace(self._tracer, span, offset_ns, self._room.release)

    def close(self) -> None:
        """Export what is left, as far as the collector takes it in time."""
        thread = HelperThread("traces", self._provider.shutdown)
        thread.start()
        thread.join(_CLOSE_S)


def _within(parent: TraceContext | None) -> Any:
    """The caller's span as a context of the SDK; an empty one without a caller, whatever is current here."""
    from opentelemetry import context, trace

    if parent is None:
        return context.Context()
    sampled = trace.TraceFlags(trace.TraceFlags.SAMPLED)
    remote = trace.SpanContext(int(parent.trace_id, 16), int(parent.span_id, 16), True, sampled)
    return trace.set_span_in_context(trace.NonRecordingSpan(remote), context.Context())


def tracer_of(config: TracingConfig | None, service: str, instance: str) -> Tracer | None:
    """The tracer of a process of this kind and name, or None if it is not configured. Raises TracingError."""
    if config is None:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ALWAYS_ON
    except ImportError as error:
        raise TracingError(f"tracing: expected the extra otlp (pip install 'crossdock[otlp]'), got {error}") from None
    plain = config.endpoint.startswith("http:")
    credentials = None if plain else grpc.ssl_channel_credentials(_authorities(config.ca_file))
    exporter = OTLPSpanExporter(config.endpoint, insecure=plain, credentials=credentials, timeout=_EXPORT_S)
    names = {"service.name": service, "service.version": crossdock.__version__, "service.instance.id": instance}
    provider = TracerProvider(ALWAYS_ON, Resource.create(names), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=_DELAY_MS))
    return Tracer(provider, config.ratio)


def _authorities(path: str) -> bytes | None:
    """PEM of the authorities; None: gRPC's own. Raises TracingError."""
    try:
        return Path(path).read_bytes() if path else None
    except OSError as error:
        raise TracingError(f"tracing.ca_file: expected a file of certificates, got {path}: {error.strerror}") from error
