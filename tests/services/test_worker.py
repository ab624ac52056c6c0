"""The worker service: real gRPC, one control plane and four worker processes for the whole file."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc

from crossdock.common import rpc
from crossdock.common.call_errors import ResourceExhausted, code_number
from crossdock.protocol import wire
from crossdock.protocol.v1 import expert_pb2, expert_pb2_grpc
from tests.services.cluster import ANSWER_S, LAYERS, TEST_S, Batch, Caller, Cluster, E, H, K, check, cluster, rows
from tests.waiting import until

pytestmark = pytest.mark.timeout(TEST_S)
M = 64
CLIENT_BYTES, TOTAL_BYTES, MESSAGE_BYTES = 64 << 10, 3 << 20, 2 << 20

OK, INVALID, PRECONDITION = 0, code_number(grpc.StatusCode.INVALID_ARGUMENT), 9


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    yield from cluster(
        tmp_path_factory.mktemp("worker"),
        max_tokens_per_step=M,
        max_queued_bytes_per_client=CLIENT_BYTES,
        max_queued_bytes=TOTAL_BYTES,
        max_message_bytes=MESSAGE_BYTES,
    )


@pytest.fixture
def caller(group: Cluster) -> Iterator[Caller]:
    with group.caller(0) as caller:
        yield caller


@pytest.mark.parametrize("num_tokens", [1, 7, M, M + 1, 5 * M + 3])
@pytest.mark.parametrize("layer", range(1, LAYERS))
def test_forward_is_the_dense_layer(group: Cluster, caller: Caller, num_tokens: int, layer: int) -> None:
    batch = Batch.random(num_tokens, layer)
    answer = caller.forward(batch)
    check(answer, batch, group.tensors)
    assert answer.timing.steps >= -(-num_tokens // M)
    assert min(answer.timing.dispatch_ns, answer.timing.experts_ns, answer.timing.combine_ns) > 0


def test_no_tokens(caller: Caller) -> None:
    assert rows(caller.forward(Batch.random(0))).shape == (0, H)


def test_no_experts_gives_zeros(caller: Caller) -> None:
    batch = Batch.random(5)
    batch.ids.fill_(-1)
    assert torch.equal(rows(caller.forward(batch)), torch.zeros(5, H))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_may_be_int32_or_int64(group: Cluster, caller: Caller, dtype: torch.dtype) -> None:
    batch = Batch.random(9)
    check(caller.forward(Batch(1, batch.x, batch.ids.to(dtype), batch.weights)), batch, group.tensors)


def test_many_clients_on_all_ranks(group: Cluster) -> None:
    callers = [group.caller(rank) for rank in range(4) for _ in range(3)]
    batches = [Batch.random(int(torch.randint(1, 2 * M, ())), 1 + i % (LAYERS - 1)) for i in range(120)]
    try:
        answers = [caller.ask(batch) for caller, batch in zip(itertools.cycle(callers), batches, strict=False)]
        for answer, batch in zip(answers, batches, strict=True):
            check(answer.result(ANSWER_S), batch, group.tensors)
    finally:
        for caller in callers:
            caller.hang_up()


def test_the_same_bits_in_every_run(caller: Caller) -> None:
    batch = Batch.random(33)
    first = rows(caller.forward(batch))
    assert all(torch.equal(rows(caller.forward(batch)), first) for _ in range(5))


def spoiled(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], expert_pb2.ForwardRequest]:
    """A good request with one tensor changed before it is packed."""

    def make() -> expert_pb2.ForwardRequest:
        batch = Batch.random(4)
        message = batch.message(77)
        tensor = {"x": batch.x, "topk_ids": batch.ids.int(), "topk_weights": batch.weights}[name]
        getattr(message, name).CopyFrom(wire.encode(change(tensor)))
        return message

    return make


def edited(edit: Callable[[expert_pb2.ForwardRequest], object]) -> Callable[[], expert_pb2.ForwardRequest]:
    """A good request, changed as a message."""

    def make() -> expert_pb2.ForwardRequest:
        message = Batch.random(4).message(77)
        edit(message)
        return message

    return make


def with_value(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor[2, 1] = value
        return tensor

    return change


@pytest.mark.parametrize(
    ("make", "code", "words"),
    [
        (spoiled("x", lambda x: x[:, :-1]), INVALID, f"x: expected shape [T, {H}]"),
        (spoiled("x", lambda x: x.bfloat16()), INVALID, "x: expected dtype one of ['float32']"),
        (spoiled("x", lambda x: x[0]), INVALID, "x: expected 2 dimensions"),
        (spoiled("x", lambda x: x[:3]), INVALID, f"topk_ids: expected shape [3, {K}]"),
        (spoiled("topk_ids", lambda ids: ids[:, :1]), INVALID, f"topk_ids: expected shape [4, {K}]"),
        (spoiled("topk_ids", lambda ids: ids.float()), INVALID, "topk_ids: expected dtype"),
        (spoiled("topk_ids", with_value(E)), INVALID, f"topk_ids: expected -1..{E - 1}, got {E}"),
        (spoiled("topk_ids", with_value(-2)), INVALID, f"topk_ids: expected -1..{E - 1}, got -2"),
        (spoiled("topk_weights", lambda w: w.double().to(torch.int64)), INVALID, "topk_weights: expected dtype"),
        (spoiled("topk_weights", lambda w: w[:3]), INVALID, f"topk_weights: expected shape [4, {K}]"),
        (spoiled("topk_weights", with_value(float("nan"))), INVALID, "topk_weights: expected finite"),
        (spoiled("topk_weights", with_value(float("-inf"))), INVALID, "topk_weights: expected finite"),
        (edited(lambda m: setattr(m, "layer", 0)), INVALID, f"layer: expected one of 1..{LAYERS - 1}, got 0"),
        (edited(lambda m: setattr(m, "layer", 1 << 31)), INVALID, "layer: expected one of"),
        (edited(lambda m: setattr(m, "model", "another")), PRECONDITION, "model: expected"),
        (edited(lambda m: m.ClearField("x")), INVALID, "x: expected"),
        (edited(lambda m: setattr(m.x, "data", m.x.data[:-1])), INVALID, "x: expected"),
        (edited(lambda m: setattr(m.x, "dtype", "object")), INVALID, "x: expected"),
        (edited(lambda m: m.x.shape.__setitem__(0, -4)), INVALID, "x: expected dimensions"),
        (edited(lambda m: m.x.shape.__setitem__(0, 1 << 62)), INVALID, "x: expected dimensions"),
    ],
    ids=lambda value: value.replace(" ", "-")[:40] if isinstance(value, str) else "",
)
def test_bad_requests_are_refused_at_the_door(
    group: Cluster, caller: Caller, make: Callable[[], expert_pb2.ForwardRequest], code: int, words: str
) -> None:
    error = caller.send(make()).result(ANSWER_S).error
    assert (error.code, error.message[: len(words)]) == (code, words)
    batch = Batch.random(3)
    check(caller.forward(batch), batch, group.tensors)


def test_an_id_in_flight_is_not_given_twice(group: Cluster, caller: Caller) -> None:
    batch = Batch.random(3)
    replies: list[expert_pb2.ForwardResponse] = []
    stub = expert_pb2_grpc.ExpertServiceStub(rpc.channel(group.address(0)))
    replies = list(stub.Forward(iter([batch.message(5)] * 2), timeout=ANSWER_S))
    assert {reply.id for reply in replies} == {5}
    assert sorted(reply.error.code for reply in replies) in ([OK, INVALID], [OK, OK])
    assert any(reply.HasField("y") for reply in replies)


@pytest.mark.parametrize("hostile", [b"\xff" * 64, b"\x1a\xff\xff\xff\xff\x0f", bytes(range(256)) * 16])
def test_bytes_that_are_no_message_end_their_stream_only(group: Cluster, caller: Caller, hostile: bytes) -> None:
    with grpc.insecure_channel(group.address(0)) as channel:
        method = channel.stream_stream("/crossdock.v1.ExpertService/Forward")
        with pytest.raises(grpc.RpcError) as caught:
            list(method(iter([hostile]), timeout=ANSWER_S))
    assert caught.value.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.INTERNAL)
    batch = Batch.random(3)
    check(caller.forward(batch), batch, group.tensors)


def test_a_message_over_the_limit_ends_its_stream_only(group: Cluster, caller: Caller) -> None:
    with group.caller(0) as greedy, pytest.raises(ResourceExhausted):
        greedy.forward(Batch.random(MESSAGE_BYTES // H // 4 + 1))
    batch = Batch.random(3)
    check(caller.forward(batch), batch, group.tensors)


def test_a_stream_ends_when_all_its_answers_are_in(group: Cluster) -> None:
    stub = expert_pb2_grpc.ExpertServiceStub(rpc.channel(group.address(0)))
    batches = [Batch.random(5) for _ in range(8)]
    replies = list(stub.Forward((batch.message(i) for i, batch in enumerate(batches)), timeout=ANSWER_S))
    assert sorted(reply.id for reply in replies) == list(range(8))
    for reply in replies:
        check(reply, batches[reply.id], group.tensors)


class Flood:
    """Keeps a worker busy from another stream until it is left, so that requests elsewhere have to queue."""

    def __init__(self, group: Cluster, rank: int) -> None:
        self._caller, self._stop = group.caller(rank), threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(ANSWER_S)
        self._caller.hang_up()

    def _run(self) -> None:
        batch, inflight = Batch.random(M), []
        while not self._stop.is_set():
            inflight.append(self._caller.ask(batch))
            if len(inflight) > 3:
                inflight.pop(0).result(ANSWER_S)


def test_deadlines(group: Cluster, caller: Caller) -> None:
    """A request that cannot be served in time is answered at its deadline, not when its turn comes."""
    long = Batch.random(50 * M)
    with group.stopped(1):
        error = caller.forward(long, timeout_ms=1).error
    assert error.code == code_number(grpc.StatusCode.DEADLINE_EXCEEDED)
    assert "0.001 s" in error.message or "in the queue" in error.message, "which of the two saw it first"
    batch = Batch.random(3)
    check(caller.forward(batch, timeout_ms=ANSWER_S * 1000), batch, group.tensors)


def test_the_deadline_of_a_stream_ends_it(group: Cluster, caller: Caller) -> None:
    stub = expert_pb2_grpc.ExpertServiceStub(rpc.channel(group.address(0)))
    hold = threading.Event()

    def requests() -> Iterator[expert_pb2.ForwardRequest]:
        yield Batch.random(50 * M).message(1)
        hold.wait(ANSWER_S)

    with pytest.raises(grpc.RpcError) as caught:
        list(stub.Forward(requests(), timeout=0.05))
    hold.set()
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    batch = Batch.random(3)
    check(caller.forward(batch), batch, group.tensors)


def test_cancel(group: Cluster, caller: Caller) -> None:
    with group.stopped(1):
        answer = caller.send(Batch.random(50 * M).message(1_000_001))
        caller.cancel(1_000_001)
        assert answer.result(ANSWER_S).error.code == code_number(grpc.StatusCode.CANCELLED)
    caller.cancel(424242)  # of nothing: no answer, no harm
    batch = Batch.random(3)
    check(caller.forward(batch), batch, group.tensors)


def test_hanging_up_gives_everything_back(group: Cluster, caller: Caller) -> None:
    for _ in range(5):
        with group.caller(0) as rude:
            for _ in range(10):
                rude.ask(Batch.random(M))
    until(lambda: group.metric(0, "queued_bytes") == 0)
    until(lambda: group.metric(0, "queued_requests") == 0)
    batch = Batch.random(3)
    check(caller.forward(batch), batch, group.tensors)


def test_backpressure_stops_one_client_and_not_another(group: Cluster, caller: Caller) -> None:
    """A client that sends without end never holds more than its share plus one request, and others are served."""
    batch = Batch.random(M)
    request_bytes = 2 * batch.x.nbytes + batch.weights.nbytes + 4 * batch.ids.numel()
    with group.caller(0) as greedy:
        answers = [greedy.ask(batch) for _ in range(60)]
        most = 0.0
        while not all(answer.done() for answer in answers):
            most = max(most, group.metric(0, "queued_bytes"))
            small = Batch.random(2)
            check(caller.forward(small), small, group.tensors)
        for answer in answers:
            check(answer.result(), batch, group.tensors)
    assert most <= CLIENT_BYTES + 2 * request_bytes


def test_the_total_limit_refuses_with_resource_exhausted(group: Cluster) -> None:
    batch = Batch.random(TOTAL_BYTES // H // 8)  # x alone is half of the limit, and counts twice
    with group.caller(0) as caller:
        error = caller.forward(batch).error
        assert error.code == code_number(grpc.StatusCode.RESOURCE_EXHAUSTED)
        assert str(TOTAL_BYTES) in error.message
        small = Batch.random(3)
        check(caller.forward(small), small, group.tensors)


def test_a_small_client_is_served_beside_a_flood(group: Cluster, caller: Caller) -> None:
    with Flood(group, 0), Flood(group, 0), Flood(group, 2):
        for _ in range(20):
            batch = Batch.random(2, layer=2)
            check(caller.forward(batch), batch, group.tensors)


def test_describe(group: Cluster) -> None:
    for rank in range(4):
        with rpc.channel(group.address(rank)) as channel:
            about = expert_pb2_grpc.ExpertServiceStub(channel).Describe(expert_pb2.DescribeRequest(), timeout=ANSWER_S)
        assert (about.rank, about.world_size, about.epoch, about.serving) == (rank, 4, group.view.epoch, True)
        assert (about.family, list(about.moe_layers), about.num_experts) == ("qwen3_moe", [1, 2], E)
        assert (about.hidden_size, about.topk, about.dtype, about.max_tokens_per_step) == (H, K, "float32", M)
        assert about.model == group.view.model


def test_health_and_readiness(group: Cluster) -> None:
    for member in group.view.members:
        with rpc.channel(member.address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            answer = stub.Check(health_pb2.HealthCheckRequest(service="crossdock.v1.ExpertService"), timeout=ANSWER_S)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        assert group.page(member.rank, "readyz").startswith(f"serving: rank {member.rank} of 4")


def test_metrics_count(group: Cluster, caller: Caller) -> None:
    rows(caller.forward(Batch.random(1)))  # steps for whoever has hung up are over now
    time.sleep(0.5)  # and counted: answers are a tenth of a second after the first of them
    tokens, steps = group.metric(0, "tokens_total"), group.metric(3, "steps_total")
    rows(caller.forward(Batch.random(2 * M)))
    until(lambda: group.metric(0, "tokens_total") == tokens + 2 * M)
    until(lambda: group.metric(3, "steps_total") >= steps + 2)
    assert group.metric(0, "expert_weights_bytes") > 0
    assert group.metric(0, "serving") == 1


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


def test_a_trace_of_all_ranks(group: Cluster, caller: Caller, tmp_path: Path) -> None:
    """Their clocks are one clock here: the estimates must say so, as far as they claim to know."""
    for _ in range(5):
        check(caller.forward(batch := Batch.random(40)), batch, group.tensors)
    time.sleep(1.5)  # operations are collected a few times a second; while idle, once
    out = tmp_path / "trace.json"
    command = [sys.executable, "-m", "crossdock", "trace", "--target", group.supervisor.control_address, "--json"]
    done = subprocess.run([*command, "--out", str(out)], capture_output=True, text=True, timeout=ANSWER_S, check=True)
    said = json.loads(done.stdout)
    assert set(said["operations"]) == {str(member.rank) for member in group.view.members}
    assert all(number >= 15 for number in said["operations"].values())
    for clock in said["clocks"].values():
        assert abs(clock["offset_ns"]) <= clock["error_ns"] + 1
    found = json.loads(out.read_text())["traceEvents"]
    assert {one["cat"] for one in found if one["ph"] == "X"} == {"exchange", "dispatch", "experts", "combine"}


def test_an_idle_group_uses_no_cpu(group: Cluster) -> None:
    """Not in any three seconds if a thread spins; in some of them if none does, whatever the tests before have left."""
    pids, deadline = [*group.supervisor.worker_pids(), group.supervisor.control_pid], time.monotonic() + ANSWER_S
    used = [1.0]
    while max(used) >= 0.02:
        assert time.monotonic() < deadline, used
        before, began = [cpu_seconds(pid) for pid in pids], time.monotonic()
        threading.Event().wait(3.0)
        took_s = time.monotonic() - began
        used = [(cpu_seconds(pid) - then) / took_s for pid, then in zip(pids, before, strict=True)]
