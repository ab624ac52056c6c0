"""The engine over a real communicator: two ranks as threads of this process, so that one can be made to fail."""

from __future__ import annotations

import gc
import queue
import random
import selectors
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import grpc
import pytest
import torch
import torch.distributed as dist

from crossdock.common.metrics import WorkerMetrics
from crossdock.worker.experts.expert_tables import ExpertTables
from crossdock.worker.experts.placement import Placement, WeightsOf
from crossdock.worker.steps import engine as engine_module
from crossdock.worker.steps.engine import Engine
from crossdock.worker.steps.steps import Step
from crossdock.worker.steps.work import Done, Failure, Fault, Left, Refused, Slice, Work
from crossdock.worker.telemetry.worker_telemetry import WorkerTelemetry
from ep_kernels import Layout, Mode, MoECommunicator, MoEConfig, StoreGroup
from ep_kernels.transports.cpu.transport import CpuTransport
from tests.waiting import until

R, E, H, K, M = 2, 4, 16, 2, 8
WAIT_S = 120

pytestmark = pytest.mark.timeout(10 * WAIT_S)


class Scale:
    """Stands in for experts: expert e multiplies by e + 1. Raises, or blocks on an event, when told to."""

    def __init__(self, rank: int) -> None:
        self.first, self.error, self.gate = rank * E // R, "", threading.Event()
        self.gate.set()
        self.layers: list[int] = []

    def forward(
        self, layer: int, tokens: torch.Tensor, offsets: Any, counts: torch.Tensor, out: torch.Tensor, num_rows: int
    ) -> Any:
        assert int(counts.sum()) <= num_rows <= tokens.shape[0]
        self.layers.append(layer)
        assert self.gate.wait(WAIT_S)
        out.fill_(float("nan"))
        if self.error:
            raise RuntimeError(self.error)
        for slot, (start, count) in enumerate(zip(offsets[:-1].tolist(), counts.tolist(), strict=True)):
            out[start : start + count] = tokens[start : start + count] * (self.first + slot + 1)
        return out


@dataclass
class Rank:
    """One rank: engine, communicator, stand-in experts, and the thread that runs them."""

    number: int
    engine: Engine
    experts: Scale
    metrics: WorkerMetrics
    telemetry: WorkerTelemetry
    comm: MoECommunicator | None = None
    ended: queue.Queue[Fault | Left] = field(default_factory=queue.Queue)
    thread: threading.Thread | None = None


@pytest.fixture
def ranks() -> Iterator[list[Rank]]:
    store, made = dist.HashStore(), []
    for number in range(R):
        metrics = WorkerMetrics()
        telemetry = WorkerTelemetry(metrics, (H * 4, H * 4))
        made.append(Rank(number, Engine(M, telemetry), Scale(number), metrics, telemetry))

    def run(rank: Rank) -> None:
        group = StoreGroup(store, rank.number, R, epoch=3)
        rank.comm = MoECommunicator(
            MoEConfig(
                group=group,
                num_experts=E,
                hidden_size=H,
                topk=K,
                max_tokens_per_rank=M,
                mode=Mode.AUTO,
                layout=Layout.GROUPED,
                dtype=torch.float32,
                timeout_s=WAIT_S,
            )
        )
        rank.engine.open()
        rank.ended.put(rank.engine.run(rank.comm, rank.experts, 3))  # type: ignore[arg-type]

    for rank in made:
        rank.thread = threading.Thread(target=run, args=(rank,), daemon=True)
        rank.thread.start()
    until(lambda: all(rank.comm is not None for rank in made))  # or there is nothing to abort in the end
    yield made
    for rank in made:
        rank.experts.gate.set()
        if rank.comm is not None:
            rank.comm.abort("the test is over")
    for rank in made:
        assert rank.thread is not None
        rank.thread.join(WAIT_S)
        assert not rank.thread.is_alive()
        if rank.comm is not None:
            rank.comm.close()
        rank.telemetry.close()


class Asked:
    """A request and the one answer that it must get."""

    def __init__(self, num_tokens: int, layer: int = 0, client: str = "c", timeout_s: float = WAIT_S) -> None:
        self.answers: queue.Queue[Done | Failure] = queue.Queue()
        now_ns = time.monotonic_ns()
        self.work = Work(
            client=client,
            layer=layer,
            x=torch.randn(num_tokens, H),
            topk_ids=torch.randint(-1, E, (num_tokens, K), dtype=torch.int32),
            topk_weights=torch.rand(num_tokens, K),
            deadline_ns=now_ns + int(timeout_s * 1e9),
            arrived_ns=now_ns,
            reply=self.answers.put,
        )

    def to_all(self) -> Asked:
        """Ask experts of every rank: one that gets no rows is not asked to compute."""
        self.work.topk_ids[:] = torch.tensor([0, E - 1], dtype=torch.int32)
        return self

    def answer(self) -> Done | Failure:
        answer = self.answers.get(timeout=WAIT_S)
        assert self.answers.empty(), "answered twice"
        return answer

    def check(self, equal_nan: bool = False) -> None:
        answer = self.answer()
        assert isinstance(answer, Done), answer
        factors = (self.work.topk_weights * (self.work.topk_ids + 1)).sum(1, keepdim=True)
        torch.testing.assert_close(answer.y, self.work.x * factors, equal_nan=equal_nan)

    def failure(self) -> Failure:
        answer = self.answer()
        assert isinstance(answer, Failure)
        return answer


def submit(rank: Rank, asked: Asked) -> Asked:
    """Give a request to a rank as soon as its engine is open."""
    deadline = time.monotonic() + WAIT_S
    while True:
        try:
            rank.engine.submit(asked.work)
            return asked
        except Refused:
            assert time.monotonic() < deadline
            threading.Event().wait(0.005)


def test_a_request_that_is_being_read_calls_the_others(ranks: list[Rank]) -> None:
    """They enter an exchange, and so does this rank, whether or not the request turns out to be one."""

    def entered() -> list[int]:
        transports = [cast(CpuTransport, rank.comm._transport) for rank in ranks if rank.comm is not None]
        return [each.native().next[3] for each in transports]

    until(lambda: all(rank.engine._sleeping for rank in ranks))
    before = entered()
    assert before[0] == before[1]
    ranks[0].engine.expect()
    until(lambda: min(entered()) > before[0])
    until(lambda: all(rank.engine._sleeping for rank in ranks))
    asked = Asked(3)
    ranks[0].engine.expect()
    ranks[0].engine.submit(asked.work)
    assert isinstance(asked.answers.get(timeout=WAIT_S), Done)


@pytest.mark.parametrize("way", ["a socket", "another thread"])
def test_a_request_that_comes_while_a_rank_falls_asleep_is_served(
    ranks: list[Rank], monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """Between its last look and its sleep, too: a lost wake-up would cost the longest sleep."""
    monkeypatch.setattr(engine_module, "_IDLE_S", 10.0 * WAIT_S)
    monkeypatch.setattr(engine_module, "_NO_POLL_S", 0.002)  # it looks often
    sockets, (ours, theirs), asked = ranks[0].engine._request_sockets, socket.socketpair(), list[Asked]()
    theirs.setblocking(False)

    def read() -> None:
        theirs.recv(1)
        ranks[0].engine.expect()
        ranks[0].engine.submit(asked[-1].work)

    def read_while_armed() -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(sockets, selectors.EVENT_READ)
            while theirs.fileno() >= 0:
                if selector.select(0.1):
                    sockets.poll_selected()

    sockets.add(theirs, read)
    reader = threading.Thread(target=read_while_armed, daemon=True)
    reader.start()
    submit(ranks[1], Asked(1)).check()
    draw = random.Random(0)
    for _ in range(300):
        time.sleep(draw.choice((0.0, draw.uniform(0.0, 0.003), draw.uniform(0.0009, 0.0015))))
        asked.append(Asked(draw.randint(1, 3)).to_all())
        if way == "a socket":
            ours.send(b".")
        else:
            ranks[0].engine.submit(asked[-1].work)
        asked[-1].check()
    sockets.remove(theirs)
    theirs.close()
    ours.close()
    reader.join(WAIT_S)


def test_an_idle_rank_looks_for_a_small_part_of_the_time(ranks: list[Rank]) -> None:
    submit(ranks[0], Asked(1)).check()
    began_s, used_s = time.monotonic(), time.process_time()
    while time.monotonic() - began_s < 0.6:
        time.sleep(0.05)
        ranks[0].engine.wake()  # each time it could look again
    assert time.process_time() - used_s < 0.3 * 0.6, "both ranks, and all other threads of this process"


def test_requests_of_both_ranks_are_answered(ranks: list[Rank]) -> None:
    asked = [submit(ranks[i % R], Asked(1 + i % 5, layer=i % 3, client=f"c{i % 4}")) for i in range(60)]
    for each in asked:
        each.check()


def test_a_rank_without_requests_takes_part(ranks: list[Rank]) -> None:
    for _ in range(3):
        submit(ranks[1], Asked(3)).check()
    assert ranks[0].metrics.registry.get_sample_value("crossdock_tokens_total") == 0


def in_order(order: list[str], asked: Asked) -> Callable[[Done | Failure], None]:
    """A reply that notes whose it is."""

    def reply(answer: Done | Failure) -> None:
        order.append(str(asked.work.client))
        asked.answers.put(answer)

    return reply


def test_long_requests_are_cut_and_short_ones_pass_them(ranks: list[Rank]) -> None:
    order: list[str] = []
    long, short = Asked(10 * M + 3, client="long"), Asked(1, client="short")
    for asked in (long, short):
        asked.work.reply = in_order(order, asked)
    ranks[0].experts.gate.clear()
    submit(ranks[0], long)
    submit(ranks[0], short)
    ranks[0].experts.gate.set()
    short.check()
    long.check()
    assert order == ["short", "long"]
    answer = long.work.timing
    assert answer.steps >= 11
    assert answer.queue_ns > 0


@pytest.mark.parametrize("pinned", ["", "old", "new"])
def test_a_layer_that_switches_before_the_step_serves_no_request_that_expects_the_former_weights(
    monkeypatch: pytest.MonkeyPatch, pinned: str
) -> None:
    telemetry = WorkerTelemetry(WorkerMetrics(), (H * 4, H * 4))
    engine, asked, taken = Engine(M, telemetry), Asked(3), list[Work]()
    asked.work.model = pinned
    tables = ExpertTables(Placement(1, R, {0: tuple(range(E))}), E, 0, None, mask=None, fingerprint="old")
    monkeypatch.setattr(engine, "_tables", tables)
    engine.open()
    engine.submit(asked.work)
    tables._weights[0] = WeightsOf(1, "", "new")

    class Stepping:
        def step(self, layer: int, max_tokens: int, slices: list[Slice]) -> None:
            taken.extend(piece.work for piece in slices)

    engine._step(cast(Any, Stepping()), Step(0, M))
    telemetry.close()
    if pinned == "old":
        failure = asked.failure()
        assert failure.code is grpc.StatusCode.FAILED_PRECONDITION
        assert failure.message == "model: expected new, which layer 0 has, got old"
        assert not taken
    else:
        assert taken == [asked.work]
        assert asked.work.model == "new"


def test_no_tokens_no_step(ranks: list[Rank]) -> None:
    answer = submit(ranks[0], Asked(0)).answer()
    assert isinstance(answer, Done)
    assert answer.y.shape == (0, H)
    assert ranks[0].experts.layers == []


def test_failing_experts_fail_the_step_on_all_ranks_and_nobody_hangs(ranks: list[Rank]) -> None:
    for rank in ranks:
        rank.experts.gate.clear()
    first = submit(ranks[0], Asked(M).to_all())
    until(lambda: bool(ranks[0].experts.layers or ranks[1].experts.layers))
    ranks[1].experts.error = "out of memory"
    both = [submit(rank, Asked(M, layer=1).to_all()) for rank in ranks]
    for rank in ranks:
        rank.experts.gate.set()
    first.answer()
    for each in both:
        failure = each.failure()
        assert failure.code is grpc.StatusCode.INTERNAL
        assert "rank [1] failed" in failure.message
    ranks[1].experts.error = ""
    for rank in ranks:
        submit(rank, Asked(3, layer=2)).check()


def test_a_request_that_owes_nothing_to_a_rank_that_fails_is_answered(ranks: list[Rank]) -> None:
    for rank in ranks:
        rank.experts.gate.clear()
    first = submit(ranks[0], Asked(M).to_all())
    until(lambda: bool(ranks[0].experts.layers or ranks[1].experts.layers))
    ranks[1].experts.error = "on fire"
    own = Asked(M, layer=1)
    own.work.topk_ids[:] = torch.tensor([0, E // R - 1], dtype=torch.int32)
    submit(ranks[0], own)
    of_both = submit(ranks[1], Asked(M, layer=1).to_all())
    for rank in ranks:
        rank.experts.gate.set()
    first.answer()
    own.check()
    assert of_both.failure().code is grpc.StatusCode.INTERNAL


def test_what_an_expert_computes_may_be_nan(ranks: list[Rank]) -> None:
    """NaN is how a rank that fails is noticed; nobody has failed here."""
    asked = Asked(4).to_all()
    asked.work.x[2] = torch.nan
    ranks[0].engine.submit(asked.work)
    asked.check(equal_nan=True)
    again = Asked(4).to_all()
    ranks[1].engine.submit(again.work)
    again.check()


def test_a_withdrawn_request_is_answered_at_once_and_not_twice(ranks: list[Rank]) -> None:
    for rank in ranks:
        rank.experts.gate.clear()
    running, queued = submit(ranks[0], Asked(M).to_all()), submit(ranks[0], Asked(M))
    until(lambda: bool(ranks[0].experts.layers or ranks[1].experts.layers))
    gone = Failure(grpc.StatusCode.CANCELLED, "gone")
    for each in (running, queued):
        ranks[0].engine.withdraw(each.work, gone)
        assert each.failure() is gone
    for rank in ranks:
        rank.experts.gate.set()
    submit(ranks[0], Asked(1)).check()
    assert running.answers.empty()


def test_expired_requests_cost_no_step(ranks: list[Rank]) -> None:
    for rank in ranks:
        rank.experts.gate.clear()
    first = submit(ranks[0], Asked(2, layer=0).to_all())
    until(lambda: bool(ranks[0].experts.layers or ranks[1].experts.layers))
    late = submit(ranks[0], Asked(2, layer=9, timeout_s=0.01))
    until(lambda: time.monotonic_ns() > late.work.deadline_ns)
    for rank in ranks:
        rank.experts.gate.set()
    first.check()
    assert late.failure().code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert all(9 not in rank.experts.layers for rank in ranks)


def test_closing_answers_what_is_queued_and_what_runs(ranks: list[Rank]) -> None:
    for rank in ranks:
        rank.experts.gate.clear()
    asked = [submit(ranks[0], Asked(M, layer=layer).to_all()) for layer in range(4)]
    until(lambda: bool(ranks[0].experts.layers or ranks[1].experts.layers))
    gone = Failure(grpc.StatusCode.UNAVAILABLE, "re-forming", (1,), 4)
    ranks[0].engine.close(gone)
    assert [each.failure() for each in asked] == [gone] * 4
    with pytest.raises(Refused) as refused:
        ranks[0].engine.submit(Asked(1).work)
    assert refused.value.failure is gone


def test_abort_ends_the_engine_and_says_why(ranks: list[Rank]) -> None:
    submit(ranks[0], Asked(1)).check()
    assert ranks[0].comm is not None
    ranks[0].comm.abort("epoch 4: rank 1 lost")
    ended = ranks[0].ended.get(timeout=WAIT_S)
    assert isinstance(ended, Fault)
    assert "rank 1 lost" in ended.reason
    with pytest.raises(Refused, match="epoch 3 ended"):
        ranks[0].engine.submit(Asked(1).work)


def test_an_epoch_that_a_fault_ended_keeps_no_communicator(ranks: list[Rank]) -> None:
    comm, thread = ranks[0].comm, ranks[0].thread
    assert comm is not None
    assert thread is not None
    gc.disable()
    try:
        comm.abort("epoch 4: rank 1 lost")
        assert isinstance(ranks[0].ended.get(timeout=WAIT_S), Fault)
        thread.join(WAIT_S)
        comm.close()
        left, ranks[0].comm = weakref.ref(comm), None
        del comm
        deadline = time.monotonic() + 5
        while left() is not None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert left() is None, "regions and descriptors stay until a collection"
    finally:
        gc.enable()


def test_a_drained_rank_leaves_between_two_steps(ranks: list[Rank]) -> None:
    asked = [submit(rank, Asked(5 * M, client=f"c{i}")) for i in range(3) for rank in ranks]
    ranks[0].engine.drain()
    with pytest.raises(Refused, match="draining"):
        ranks[0].engine.submit(Asked(1).work)
    assert ranks[0].engine.wait_empty(WAIT_S)
    ranks[0].engine.leave()
    assert [rank.ended.get(timeout=WAIT_S) for rank in ranks] == [Left((0,))] * 2
    for each in asked[::2]:
        each.check()
    for each in asked[1::2]:
        answer = each.answer()
        assert isinstance(answer, Done) or (answer.code, answer.lost_ranks) == (grpc.StatusCode.UNAVAILABLE, (0,))


def test_steps_are_counted(ranks: list[Rank]) -> None:
    submit(ranks[0], Asked(2 * M).to_all()).check()

    def value(rank: Rank, name: str, **labels: str) -> float:
        return rank.metrics.registry.get_sample_value(f"crossdock_{name}", labels) or 0

    until(lambda: value(ranks[0], "steps_total") >= 2)
    assert value(ranks[0], "step_phase_duration_seconds_count", phase="experts") >= 2
    until(
        lambda: (
            value(
                ranks[0], "operation_duration_seconds_count", op="dispatch", mode="ht", phase="total", transport="cpu"
            )
            + value(
                ranks[0], "operation_duration_seconds_count", op="dispatch", mode="ll", phase="total", transport="cpu"
            )
            >= 2
        )
    )


def test_a_rank_without_experts_takes_part() -> None:
    """More ranks than experts: a rank has nothing to compute, but its clients are served."""
    store, answers = dist.HashStore(), []

    def run(rank: int, engine: Engine) -> None:
        config = MoEConfig(
            group=StoreGroup(store, rank, R),
            num_experts=1,
            hidden_size=H,
            topk=1,
            max_tokens_per_rank=M,
            mode=Mode.AUTO,
            layout=Layout.GROUPED,
            dtype=torch.float32,
            timeout_s=WAIT_S,
        )
        with MoECommunicator(config) as comm:
            answers.append(engine.run(comm, Scale(0) if rank == 0 else None, 1))  # type: ignore[arg-type]

    telemetries = [WorkerTelemetry(WorkerMetrics(), (H * 4, H * 4)) for _ in range(R)]
    engines = [Engine(M, telemetry) for telemetry in telemetries]
    threads = [threading.Thread(target=run, args=each, daemon=True) for each in enumerate(engines)]
    for engine, thread in zip(engines, threads, strict=True):
        engine.open()
        thread.start()
    asked = Asked(2 * M)
    asked.work.topk_ids = torch.randint(-1, 1, (2 * M, 1), dtype=torch.int32)
    asked.work.topk_weights = torch.rand(2 * M, 1)
    engines[1].submit(asked.work)
    asked.check()
    engines[0].drain()
    engines[0].leave()
    for thread in threads:
        thread.join(WAIT_S)
    for telemetry in telemetries:
        telemetry.close()
    assert answers == [Left((0,))] * R


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_come_home_in_float32_and_are_rounded_once(dtype: torch.dtype) -> None:
    config = MoEConfig(
        group=StoreGroup(dist.HashStore(), 0, 1),
        num_experts=E,
        hidden_size=H,
        topk=K,
        max_tokens_per_rank=M,
        mode=Mode.AUTO,
        layout=Layout.GROUPED,
        dtype=dtype,
        output_dtype=torch.float32,
        timeout_s=WAIT_S,
    )

    class Widening(Scale):
        """Experts that compute in float32, as those of a CPU do."""

        def forward(self, layer: int, tokens: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            assert tokens.dtype is dtype
            return super().forward(layer, tokens.float(), *args, **kwargs)

    telemetry = WorkerTelemetry(WorkerMetrics(), (H * 2, H * 4))
    engine = Engine(M, telemetry)
    engine.open()
    asked = Asked(2 * M + 1)
    x = asked.work.x = asked.work.x.to(dtype)
    engine.submit(asked.work)
    with MoECommunicator(config) as comm:
        thread = threading.Thread(target=engine.run, args=(comm, Widening(0), 1), daemon=True)
        thread.start()
        answer = asked.answer()
        engine.drain()
        engine.leave()
        thread.join(WAIT_S)
    telemetry.close()
    assert isinstance(answer, Done)
    ids, weights = asked.work.topk_ids, asked.work.topk_weights
    factors = torch.where(ids < 0, 0, (ids + 1) * 1.0)
    first, second = ((x.float() * factors[:, k : k + 1]) * weights[:, k : k + 1] for k in range(K))
    assert torch.equal(answer.y, (first + second).to(dtype))
