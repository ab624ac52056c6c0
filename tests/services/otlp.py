"""Spans received over OTLP: a receiver as a process of its own, and what a collector wrote.

    python -m tests.services.otlp FILE        (prints its address; writes a line of OTLP/JSON for each export)

The lines are those of the collector's file exporter (tests/observability runs that one).
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.json_format import MessageToDict
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

_RECEIVE_S = 60.0


@dataclass(frozen=True)
class Span:
    """One received span; `attributes` are those of its resource, too."""

    name: str
    trace_id: str
    span_id: str
    parent: str
    start_ns: int
    end_ns: int
    failed: str
    attributes: dict[str, str]


def spans_of(path: Path) -> list[Span]:
    """All spans in a file of OTLP/JSON lines; a line that is being written is left out."""
    found = []
    for line in path.read_text().split("\n")[:-1] if path.exists() else ():
        for group in json.loads(line).get("resourceSpans", ()):
            common = _attributes(group["resource"])
            for scope in group["scopeSpans"]:
                found += [_span(one, common) for one in scope["spans"]]
    return found


def _span(one: dict[str, Any], common: dict[str, str]) -> Span:
    status = one.get("status", {})
    failed = status.get("message", "") if status.get("code") in {2, "STATUS_CODE_ERROR"} else ""
    times = int(one["startTimeUnixNano"]), int(one["endTimeUnixNano"])
    parent = one.get("parentSpanId", "")
    return Span(one["name"], one["traceId"], one["spanId"], parent, *times, failed, common | _attributes(one))


def _attributes(one: dict[str, Any]) -> dict[str, str]:
    return {each["key"]: str(next(iter(each["value"].values()))) for each in one.get("attributes", ())}


def wait_for(path: Path, wanted: Callable[[list[Span]], bool]) -> list[Span]:
    """The spans as soon as they are as wanted."""
    deadline = time.monotonic() + _RECEIVE_S
    while not wanted(spans := spans_of(path)):
        assert time.monotonic() < deadline, spans
        time.sleep(0.05)
    return spans


@contextlib.contextmanager
def receiver(path: Path) -> Iterator[str]:
    """A receiver in a process of its own, which writes to `path`; gives its address."""
    command = [sys.executable, "-m", "tests.services.otlp", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.terminate()


class _Service(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, threading.Lock()

    def Export(self, request: Any, context: Any) -> Any:  # noqa: N802  (named in trace_service.proto)
        """Write what came, ids in hexadecimal as OTLP/JSON has them."""
        message = MessageToDict(request)
        for made, group in zip(message["resourceSpans"], request.resource_spans, strict=True):
            for made_scope, scope in zip(made["scopeSpans"], group.scope_spans, strict=True):
                for span, sent in zip(made_scope["spans"], scope.spans, strict=True):
                    ids = ("traceId", sent.trace_id), ("spanId", sent.span_id), ("parentSpanId", sent.parent_span_id)
                    span |= {key: value.hex() for key, value in ids}
        with self._lock, self._path.open("a") as file:
            file.write(json.dumps(message) + "\n")
        return trace_service_pb2.ExportTraceServiceResponse()


def main() -> None:
    """Serve until terminated."""
    server = grpc.server(ThreadPoolExecutor(4))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(_Service(Path(sys.argv[1])), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    print(f"127.0.0.1:{port}", flush=True)
    server.wait_for_termination()


if __name__ == "__main__":
    main()
