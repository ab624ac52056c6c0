"""Traces of requests: a real group, a caller with OpenTelemetry's own SDK, spans received by a process over OTLP."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.request import ProxyHandler, Request, build_opener

import grpc
import pytest
import torch
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider

from crossdock.client import Client
from crossdock.common.settings import TracingConfig
from crossdock.protocol.v1 import expert_pb2, expert_pb2_grpc
from tests.services.cluster import ANSWER_S, TEST_S, Batch, Cluster, cluster
from tests.services.otlp import Span, receiver, spans_of, wait_for

pytestmark = pytest.mark.timeout(TEST_S)
M = 32
FORWARD = "crossdock.v1.ExpertService/Forward"


@dataclass(frozen=True)
class Traced:
    """A group that exports its spans, and the file with what was received."""

    cluster: Cluster
    path: Path

    def of(self, trace_id: str, number: int) -> list[Span]:
        """The spans of a trace, as soon as there are so many."""
        found = wait_for(self.path, lambda spans: sum(one.trace_id == trace_id for one in spans) >= number)
        return [one for one in found if one.trace_id == trace_id]


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Traced]:
    folder = tmp_path_factory.mktemp("traces")
    with receiver(folder / "spans") as address:
        tracing = TracingConfig(endpoint=f"http://{address}")
        for made in cluster(folder, num_workers=2, max_tokens_per_step=M, tracing=tracing):
            yield Traced(made, folder / "spans")


def one_request(group: Traced, batch: Batch, metadata: str = "", own: str = "") -> expert_pb2.ForwardResponse:
    """On a stream of its own, with a traceparent in its metadata, in its message, or in none."""
    with grpc.insecure_channel(group.cluster.address(0)) as channel:
        stub = expert_pb2_grpc.ExpertServiceStub(channel)
        message = batch.message(7, traceparent=own)
        carried = (("traceparent", metadata),) if metadata else ()
        return next(iter(stub.Forward(iter([message]), metadata=carried, timeout=ANSWER_S)))


def ids() -> tuple[str, str]:
    """A fresh trace id and span id."""
    return "".join(f"{byte:02x}" for byte in torch.randint(1, 256, (16,)).tolist()), f"{torch.seed() or 1:016x}"[:16]


def test_a_request_of_a_program_with_opentelemetry(group: Traced) -> None:
    """Two steps: each span within its parent, the first one below the caller's span."""
    tracer, batch = TracerProvider().get_tracer("caller"), Batch.random(M + 5)
    with Client(group.cluster.address(1)) as client, tracer.start_as_current_span("model"):
        caller = trace.get_current_span().get_span_context()
        client.forward(1, batch.x, batch.ids, batch.weights)
    spans = group.of(f"{caller.trace_id:032x}", 11)
    assert sorted(one.name for one in spans) == sorted(
        [FORWARD, "admit", "queue", *2 * ["step", "dispatch", "experts", "combine"]]
    )
    by_id = {one.span_id: one for one in spans}
    root = next(one for one in spans if one.name == FORWARD)
    assert root.parent == f"{caller.span_id:016x}"
    assert not root.failed
    expected = {"dispatch": "step", "experts": "step", "combine": "step"}
    for one in spans:
        if one is not root:
            above = by_id[one.parent]
            assert above.name == expected.get(one.name, FORWARD)
            assert above.start_ns <= one.start_ns <= one.end_ns <= above.end_ns, (one, above)
    steps = [one.attributes for one in spans if one.name == "step"]
    assert {one["crossdock.rank"] for one in steps} == {"1"}
    assert sum(int(one["crossdock.step.tokens"]) for one in steps) == M + 5
    assert root.attributes["rpc.grpc.status_code"] == "0"
    assert root.attributes["service.name"] == "crossdock-worker"
    assert root.attributes["service.instance.id"] in {"w0", "w1"}


def test_the_stream_names_the_caller_for_requests_that_do_not(group: Traced) -> None:
    (first, span), (second, other) = ids(), ids()
    assert not one_request(group, Batch.random(3), f"00-{first}-{span}-01").HasField("error")
    assert next(one for one in group.of(first, 7) if one.name == FORWARD).parent == span
    one_request(group, Batch.random(3), f"00-{first}-{span}-01", f"00-{second}-{other}-01")
    assert next(one for one in group.of(second, 7) if one.name == FORWARD).parent == other


def test_a_refused_request_says_why(group: Traced) -> None:
    trace_id, span = ids()
    assert one_request(group, Batch.random(3, layer=0), own=f"00-{trace_id}-{span}-01").HasField("error")
    (only,) = group.of(trace_id, 1)
    assert only.failed.startswith("layer: expected one of")
    assert only.attributes["rpc.grpc.status_code"] == "3"


def test_nothing_is_traced_that_its_caller_does_not_trace(group: Traced) -> None:
    """Not sampled, malformed, or without a context: the traced request after them was received, and they were not."""
    trace_id, span = ids()
    for text in (f"00-{trace_id}-{span}-00", f"00-{trace_id}-{'0' * 16}-01", f"00-{trace_id}-{span}-01 ", "x" * 4000):
        assert not one_request(group, Batch.random(2), own=text).HasField("error")
    assert not one_request(group, Batch.random(2)).HasField("error")
    last, span = ids()
    one_request(group, Batch.random(2), own=f"00-{last}-{span}-01")
    group.of(last, 7)
    known = {one.trace_id for one in spans_of(group.path)}
    one_request(group, Batch.random(2))
    assert trace_id not in known


def test_histograms_name_a_traced_request(group: Traced) -> None:
    """In the OpenMetrics format, which Prometheus asks for; the plain one has no place for it."""
    trace_id, span = ids()
    one_request(group, Batch.random(3), own=f"00-{trace_id}-{span}-01")
    root = next(one for one in group.of(trace_id, 7) if one.name == FORWARD)
    address = next(one.http_address for one in group.cluster.view.members if one.rank == 0)
    asked = Request(f"http://{address}/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"})
    with build_opener(ProxyHandler({})).open(asked, timeout=ANSWER_S) as response:
        lines = response.read().decode().splitlines()
    exemplar = f'# {{span_id="{root.span_id}",trace_id="{trace_id}"}}'
    named = {line.partition("_bucket")[0] for line in lines if exemplar in line}
    expected = {"request_duration_seconds", "queue_duration_seconds", "step_phase_duration_seconds"}
    assert named == {f"crossdock_{name}" for name in expected}
    assert exemplar not in group.cluster.page(0, "metrics")
