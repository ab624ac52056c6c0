"""The clients against workers of this process: routing of rows, errors, retries, deadlines, cancellation, threads."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.testing._internal.two_tensor import TwoTensor

from crossdock import client as public
from crossdock.client import AsyncClient, Client, client, connection, dialling, directory, shares
from crossdock.client import errors as tree
from crossdock.client.client import RetryBudget
from crossdock.common import control_channel, rpc
from crossdock.protocol import wire
from crossdock.protocol.v1 import control_pb2, expert_pb2
from tests.chaos.proxy import Network
from tests.compare import freed
from tests.services.control_world import TIMEOUT_S, lasting_port
from tests.services.fakes import Answer, FakeControl, FakeWorker, echo, refuse, view_of
from tests.waiting import until

SOON_S = (0.4, 4.0, 40.0)
"""Deadlines that shall pass, each tried if a machine was too busy to come far enough before the one before it."""
DESCRIPTION = expert_pb2.DescribeResponse(model="f00d", family="mixtral", hidden_size=8, topk=2, num_experts=4)


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that is only slow to say that it is there is not given up."""
    monkeypatch.setattr(connection, "ALIVE_S", TIMEOUT_S)


@pytest.fixture
def workers() -> Iterator[list[FakeWorker]]:
    made = [FakeWorker(DESCRIPTION, echo) for _ in range(4)]
    yield made
    for worker in made:
        worker.kill()


@pytest.fixture
def control(workers: list[FakeWorker]) -> Iterator[FakeControl]:
    made = FakeControl(view_of(workers))
    yield made
    made.kill()


def _batch(num_tokens: int, hidden: int = 8) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.randn(num_tokens, hidden), torch.randint(0, 4, (num_tokens, 2)), torch.rand(num_tokens, 2)


@settings(deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(1, 5000), st.integers(1, 9), st.integers(0, 1000), st.integers(1, 999), st.integers(1, 300))
def test_split_and_cut_cover_every_row_once(tokens: int, workers: int, first: int, most: int, least: int) -> None:
    parts = client.split(tokens, workers, first, least, tokens)
    sizes = [share.stop - share.start for share in parts]
    assert len({share.worker for share in parts}) == len(parts) == max(1, min(workers, tokens // least))
    assert {share.worker for share in parts} <= set(range(workers))
    assert len(parts) == 1 or min(sizes) >= least
    assert max(sizes) - min(sizes) <= 1
    pieces = [piece for share in parts for piece in shares.cut(share, most)]
    assert [row for piece in pieces for row in range(piece.start, piece.stop)] == list(range(tokens))
    assert all(0 < piece.stop - piece.start <= most for piece in pieces)
    in_turns = client.split(tokens, workers, first, least, most)
    assert sorted(in_turns, key=lambda piece: piece.start) == pieces
    turns = [[piece.worker for piece in in_turns].count(worker) for worker in {share.worker for share in parts}]
    assert len({piece.worker for piece in in_turns[: len(parts)]}) == len(parts) <= len(in_turns)
    assert max(turns) - min(turns) <= 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_worker_by_its_own_address(workers: list[FakeWorker], dtype: torch.dtype) -> None:
    x, ids, weights = _batch(5)
    with Client(workers[2].address) as service:
        assert torch.equal(service.forward(3, x.to(dtype), ids, weights), x.to(dtype) + 3)
        assert service.describe().model == "f00d"
    (request,) = workers[2].seen
    assert request.layer == 3
    assert torch.equal(wire.decode(request.topk_ids, name="i", dtypes=[torch.int32], ndim=2), ids.int())
    assert torch.equal(wire.decode(request.topk_weights, name="w", dtypes=[torch.float32], ndim=2), weights)


def test_a_big_batch_is_spread_and_a_small_one_is_not(control: FakeControl, workers: list[FakeWorker]) -> None:
    with Client(control.address) as service:
        x, ids, weights = _batch(303)
        assert torch.equal(service.forward(1, x, ids, weights), x + 1)
        assert sorted(worker.num_tokens for worker in workers) == [75, 76, 76, 76]
        x, ids, weights = _batch(3)
        for _ in range(4):
            assert torch.equal(service.forward(1, x, ids, weights), x + 1)
        assert sum(worker.num_tokens for worker in workers) == 303 + 12
        assert [len(worker.seen) for worker in workers] == [2, 2, 2, 2]
    assert [worker.num_streams for worker in workers] == [1, 1, 1, 1]


def test_a_huge_share_travels_in_pieces() -> None:
    worker = FakeWorker(DESCRIPTION, echo, max_request_bytes=(8 * 4 + 2 * 4 + 2 * 4) * 10)  # x, ids and weights
    x, ids, weights = _batch(25)
    with Client(worker.address) as service:
        assert torch.equal(service.forward(2, x, ids, weights), x + 2)
        with pytest.raises(public.InvalidRequest, match=r"x: expected rows of at most 480 bytes for .*, got 2016"):
            service.forward(1, *_batch(1, 500))
    assert [request.x.shape[0] for request in worker.seen] == [8, 8, 9]
    assert worker.num_streams == 1
    worker.kill()


def test_no_tokens_need_no_worker() -> None:
    x, ids, weights = _batch(0)
    with Client("127.0.0.1:1") as service:
        assert service.forward(0, x, ids, weights).shape == (0, 8)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x, ids, weights: (x[0], ids, weights), "x: expected 2 dimensions, got 1"),
        (lambda x, ids, weights: (x.double(), ids, weights), r"x: expected dtype one of .* got torch\.float64"),
        (lambda x, ids, weights: (x, ids.float(), weights), "topk_ids: expected dtype"),
        (lambda x, ids, weights: (x, ids, weights.long()), "topk_weights: expected dtype"),
        (lambda x, ids, weights: (x, ids[:4], weights), r"topk_ids: expected \[5, 2\], got \[4, 2\]"),
        (lambda x, ids, weights: (x, ids, weights[:, :1]), r"topk_weights: expected \[5, 2\], got \[5, 1\]"),
        (lambda x, ids, weights: (None, ids, weights), "x: expected a torch.Tensor with memory, got NoneType"),
        (lambda x, ids, weights: (x.to("meta"), ids, weights), "x: expected a torch.Tensor with memory, got"),
        (lambda x, ids, weights: (x, ids.to_sparse(), weights), "topk_ids: expected a torch.Tensor with memory, got"),
        (
            lambda x, ids, weights: (TwoTensor(x, x), ids, weights),
            "x: expected .* with memory, got a TwoTensor, .* cpu",
        ),
        (lambda x, ids, weights: (freed(x), ids, weights), "x: expected a torch.Tensor with memory, got a Tensor"),
    ],
)
def test_wrong_arguments_are_refused_here(change: Callable[..., Any], words: str) -> None:
    with Client("127.0.0.1:1") as service, pytest.raises(public.InvalidRequest, match=words):
        service.forward(0, *change(*_batch(5)))


@pytest.mark.parametrize("layer", [-1, 1 << 32, 1.5, "1", None])
@pytest.mark.parametrize("num_tokens", [0, 5])
def test_a_wrong_layer_is_refused_here(layer: Any, num_tokens: int) -> None:
    with Client("127.0.0.1:1") as service, pytest.raises(public.InvalidRequest, match=r"layer: expected an int in 0"):
        service.forward(layer, *_batch(num_tokens))


@pytest.mark.parametrize("timeout_s", [float("nan"), None, "5"])
def test_a_timeout_that_is_no_number_is_refused_here(timeout_s: Any) -> None:
    with Client("127.0.0.1:1") as service:
        with pytest.raises(public.InvalidRequest, match=r"timeout_s: expected seconds, got"):
            service.forward(0, *_batch(5), timeout_s=timeout_s)
        with pytest.raises(public.InvalidRequest, match=r"timeout_s: expected seconds, got"):
            service.describe(timeout_s)


def test_any_long_timeout_is_as_long_as_can_be(workers: list[FakeWorker]) -> None:
    x, ids, weights = _batch(5)
    with Client(workers[0].address) as service:
        for timeout_s in (float("inf"), 1e12):
            assert torch.equal(service.forward(1, x, ids, weights, timeout_s=timeout_s), x + 1)
            assert service.describe(timeout_s).model == "f00d"
    assert all(900_000_000 < request.timeout_ms <= 1_000_000_000 for request in workers[0].seen)


@pytest.mark.parametrize("way", ["columns", "negated", "elsewhere by default"])
def test_rows_of_any_memory_format(workers: list[FakeWorker], way: str) -> None:
    """What the answer is written into is contiguous whatever x is."""
    x, ids, weights = _batch(5)
    x = x.t().contiguous().t() if way == "columns" else torch._neg_view(x) if way == "negated" else x
    default = torch.device("meta") if way == "elsewhere by default" else contextlib.nullcontext()
    with Client(workers[0].address) as service, default:
        assert torch.equal(service.forward(1, x, ids, weights), x + 1)


def test_all_clients_of_threads_share_one_loop(workers: list[FakeWorker]) -> None:
    def loops() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name == "crossdock-client"]

    x, ids, weights = _batch(5)
    with Client(workers[0].address) as first:
        with Client(workers[1].address) as second:
            assert torch.equal(second.forward(1, x, ids, weights), x + 1)
            assert len(loops()) == 1
        assert torch.equal(first.forward(2, x, ids, weights), x + 2)
    assert not loops()


def test_a_group_without_a_ready_worker_is_unavailable_however_often_it_is_asked(
    control: FakeControl, workers: list[FakeWorker]
) -> None:
    with Client(control.address) as service:
        service.forward(1, *_batch(5))
        control.say(view_of([], epoch=2))
        until(lambda: service._requests._directory.now == directory.ServingWorkers(2, ()))  # type: ignore[union-attr]
        for _ in range(2):
            with pytest.raises(public.ClientError, match="no ready worker"):
                service.forward(1, *_batch(5), timeout_s=0.3)


def test_calls_stay_in_their_thread_and_what_fails_is_sent_again(
    control: FakeControl, workers: list[FakeWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows that were refused alone, at the next worker."""
    x, ids, weights = _batch(300)
    with Client(control.address) as service:
        for _ in range(4):
            assert torch.equal(service.forward(1, x, ids, weights), x + 1)
        by_loop: list[object] = []
        monkeypatch.setattr(client.Requests, "_dialled", lambda *args: by_loop.append(args))
        seen = [len(worker.seen) for worker in workers]
        workers[1].behave = refuse(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
        assert torch.equal(service.forward(1, x, ids, weights), x + 1)
        assert [len(worker.seen) - before for worker, before in zip(workers, seen, strict=True)] == [1, 1, 2, 1]
        workers[1].behave = refuse(grpc.StatusCode.INVALID_ARGUMENT, "bad")
        with pytest.raises(public.InvalidRequest, match="bad"):
            service.forward(1, x, ids, weights)
        workers[1].behave = lambda _: None
        with pytest.raises(public.DeadlineExceeded, match=r"no answer within 0\.\d+ s"):
            service.forward(1, x, ids, weights, timeout_s=0.3)
        workers[1].cancelled.get(timeout=TIMEOUT_S)
        assert not by_loop


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.UNAVAILABLE, public.Unavailable),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, public.Overloaded),
        (grpc.StatusCode.DEADLINE_EXCEEDED, public.DeadlineExceeded),
        (grpc.StatusCode.INVALID_ARGUMENT, public.InvalidRequest),
        (grpc.StatusCode.FAILED_PRECONDITION, public.ModelMismatch),
        (grpc.StatusCode.INTERNAL, public.ClientError),
    ],
)
def test_answers_become_errors(workers: list[FakeWorker], code: grpc.StatusCode, kind: type[Exception]) -> None:
    workers[0].behave = refuse(code, "the reason", lost_ranks=[3, 1], epoch=7)
    with Client(workers[0].address, retry=False) as service:
        with pytest.raises(public.ClientError, match="the reason") as caught:
            service.forward(0, *_batch(5))
        assert type(caught.value) is kind
        if isinstance(caught.value, public.Unavailable):
            assert (caught.value.lost_ranks, caught.value.epoch) == ((1, 3), 7)
        workers[0].behave = echo
        assert service.forward(0, *_batch(5)).shape == (5, 8)
    assert workers[0].num_streams == 1


def test_every_public_error_is_in_the_tree() -> None:
    for name in public.__all__:
        item = getattr(public, name)
        if isinstance(item, type) and issubclass(item, Exception):
            assert issubclass(item, public.ClientError)
            assert name in (tree.__doc__ or "")


def test_unavailable_is_tried_again(control: FakeControl, workers: list[FakeWorker]) -> None:
    for worker in workers:
        worker.behave = _first(refuse(grpc.StatusCode.UNAVAILABLE, "re-forming", [2], 4), then=echo)
    x, ids, weights = _batch(300)
    with Client(control.address) as service:
        assert torch.equal(service.forward(1, x, ids, weights, timeout_s=TIMEOUT_S), x + 1)


def test_only_the_refused_share_is_sent_again_and_to_another_worker(workers: list[FakeWorker]) -> None:
    """One of eight workers has no room: the rows of seven shares are computed once, and those of the eighth, too."""
    more = [FakeWorker(DESCRIPTION, echo) for _ in range(4)]
    everybody = [*workers, *more]
    control = FakeControl(view_of(everybody))
    workers[2].behave = refuse(grpc.StatusCode.RESOURCE_EXHAUSTED, "queue: full")
    x, ids, weights = _batch(800)
    try:
        with Client(control.address) as service:
            assert torch.equal(service.forward(1, x, ids, weights, timeout_s=TIMEOUT_S), x + 1)
        assert workers[2].num_tokens == 100
        assert sum(worker.num_tokens for worker in everybody if worker is not workers[2]) == 800
    finally:
        control.kill()
        for worker in more:
            worker.kill()


def test_a_client_that_is_refused_again_and_again_asks_seldom(workers: list[FakeWorker]) -> None:
    workers[0].behave = refuse(grpc.StatusCode.RESOURCE_EXHAUSTED, "queue: full")
    with Client(workers[0].address, min_tokens_per_worker=1) as service:
        service._requests._budget = RetryBudget(most=2.0, per_s=0.0)
        for _ in range(3):
            with pytest.raises((public.Overloaded, public.DeadlineExceeded)):
                service.forward(0, *_batch(5), timeout_s=1.0)
    assert len(workers[0].seen) <= 3 + 2, "each once, and two tokens"


def test_the_retry_budget_fills_with_answers_and_with_time() -> None:
    now = [0.0]
    budget = RetryBudget(ratio=0.25, most=2.0, per_s=0.5, clock=lambda: now[0])
    assert [budget.take() for _ in range(3)] == [True, True, False]
    for _ in range(4):
        budget.answered()
    assert [budget.take() for _ in range(2)] == [True, False]
    now[0] = 2.0
    assert [budget.take() for _ in range(2)] == [True, False]
    now[0] = 100.0
    assert [budget.take() for _ in range(3)] == [True, True, False]


def test_unavailable_to_the_end_is_told_as_such(workers: list[FakeWorker]) -> None:
    workers[0].behave = refuse(grpc.StatusCode.UNAVAILABLE, "re-forming", [2], 4)
    with Client(workers[0].address) as service:
        for timeout_s in SOON_S:
            workers[0].seen.clear()
            with pytest.raises((public.Unavailable, public.DeadlineExceeded)) as caught:
                service.forward(0, *_batch(5), timeout_s=timeout_s)
            if len(workers[0].seen) > 1:
                break
    assert "re-forming" in str(caught.value)
    assert len(workers[0].seen) > 1


def _first(behave: Callable[..., Any], then: Callable[..., Any]) -> Callable[..., Any]:
    calls = iter([behave])

    def each(request: expert_pb2.ForwardRequest) -> Any:
        return next(calls, then)(request)

    return each


def test_a_killed_worker_is_named(
    control: FakeControl, workers: list[FakeWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "AVOID_S", 0.0)
    arrived = threading.Event()
    workers[2].behave = lambda request: arrived.set()  # type: ignore[assignment, return-value]
    with Client(control.address, retry=False, min_tokens_per_worker=1) as service, ThreadPoolExecutor(1) as pool:
        future = pool.submit(service.forward, 0, *_batch(40), timeout_s=TIMEOUT_S)
        assert arrived.wait(TIMEOUT_S)
        workers[2].kill()
        with pytest.raises(public.Unavailable, match=r"rank 2 \(127\.0\.0\.1:") as caught:
            future.result(TIMEOUT_S)
        assert (caught.value.lost_ranks, caught.value.epoch) == ((2,), 1)
        with pytest.raises(public.Unavailable, match="rank 2"):
            service.forward(0, *_batch(40), timeout_s=TIMEOUT_S)


def test_a_worker_that_broke_off_is_left_out_for_a_while(
    control: FakeControl, workers: list[FakeWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "AVOID_S", 10 * TIMEOUT_S)
    x, ids, weights = _batch(40)
    with Client(control.address, retry=False, min_tokens_per_worker=1) as service:
        service.forward(0, x, ids, weights, timeout_s=TIMEOUT_S)
        workers[2].kill()
        for _ in range(3):
            try:
                rows = service.forward(3, x, ids, weights, timeout_s=TIMEOUT_S)
            except public.Unavailable:
                continue
            assert torch.equal(rows, x + 3)
            return
    raise AssertionError("each call went to the worker that is gone")


class _Lines:
    """The line to a worker's calls, and the one to its request connections."""

    def __init__(self, *lines: Any) -> None:
        self._lines = lines

    def cut(self) -> None:
        for line in self._lines:
            line.cut()

    def mend(self) -> None:
        for line in self._lines:
            line.mend()


def _behind(network: Network, workers: list[FakeWorker]) -> tuple[control_pb2.GroupView, _Lines]:
    """Two workers, the first behind lines that can be cut."""
    here, port = f"127.0.0.1:{lasting_port()}", lasting_port()
    lines = (
        network.proxy(here, workers[0].address),
        network.proxy(f"127.0.0.1:{port}", f"127.0.0.1:{workers[0].description.request_port}"),
    )
    workers[0].description.request_port = port
    view = view_of(workers[:2])
    view.members[0].address = here
    return view, _Lines(*lines)


def test_a_worker_that_is_cut_off_costs_little_time(workers: list[FakeWorker], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing breaks when a line is cut: who says nothing is asked whether he is there, and another one is taken. Here
    nothing else would end the wait: there is no keepalive."""
    options = rpc._channel_options
    monkeypatch.setattr(rpc, "_channel_options", lambda size: [o for o in options(size) if "keepalive" not in o[0]])
    monkeypatch.setattr(connection, "QUIET_S", 0.2)
    monkeypatch.setattr(connection, "ALIVE_S", 0.5)
    monkeypatch.setattr(dialling, "DIAL_S", 0.5)
    network = Network()
    view, line = _behind(network, workers)
    control, (x, ids, weights) = FakeControl(view), _batch(5)
    with Client(control.address) as service:
        for _ in range(4):
            service.forward(0, x, ids, weights, timeout_s=TIMEOUT_S)
        line.cut()
        for _ in range(4):
            assert torch.equal(service.forward(1, x, ids, weights, timeout_s=TIMEOUT_S), x + 1)
        line.mend()
    control.kill()
    network.close()


def test_a_worker_that_is_cut_off_is_left_out_until_it_answers_again(
    workers: list[FakeWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long that is: else every AVOID_S some request would wait for it in vain."""
    monkeypatch.setattr(client, "AVOID_S", 0.0)
    monkeypatch.setattr(connection, "QUIET_S", 0.05)
    monkeypatch.setattr(connection, "ALIVE_S", 0.5)
    monkeypatch.setattr(dialling, "DIAL_S", 0.5)
    network = Network()
    view, line = _behind(network, workers)
    control, (x, ids, weights) = FakeControl(view), _batch(5)
    with contextlib.ExitStack() as end:
        end.callback(network.close)
        end.callback(control.kill)
        service = end.enter_context(Client(control.address))
        for _ in range(4):
            service.forward(0, x, ids, weights, timeout_s=TIMEOUT_S)
        line.cut()
        probing = service._requests._probing
        until(lambda: probing or service.forward(1, x, ids, weights, timeout_s=TIMEOUT_S) is None)
        number = len(workers[1].seen)
        for _ in range(8):
            service.forward(2, x, ids, weights, timeout_s=TIMEOUT_S)
        assert len(workers[1].seen) == number + 8, "none was tried at the other one"
        line.mend()
        until(lambda: not probing)
        number = len(workers[0].seen)
        until(lambda: len(workers[0].seen) > number or service.forward(3, x, ids, weights, timeout_s=TIMEOUT_S) is None)


def test_a_slow_worker_that_is_there_is_waited_for(workers: list[FakeWorker], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "QUIET_S", 0.05)
    workers[0].behave = lambda request: time.sleep(1.0) or echo(request)
    x, ids, weights = _batch(5)
    with Client(workers[0].address, retry=False) as service:
        assert torch.equal(service.forward(1, x, ids, weights, timeout_s=TIMEOUT_S), x + 1)
    assert workers[0].num_streams == 1


def test_requests_move_to_the_next_epoch(control: FakeControl, workers: list[FakeWorker]) -> None:
    arrived = threading.Event()
    workers[1].behave = lambda request: arrived.set()  # type: ignore[assignment, return-value]
    x, ids, weights = _batch(40)
    with Client(control.address, min_tokens_per_worker=1) as service, ThreadPoolExecutor(1) as pool:
        future = pool.submit(service.forward, 5, x, ids, weights, timeout_s=TIMEOUT_S)
        assert arrived.wait(TIMEOUT_S)
        forming = control_pb2.FORMING
        control.say(view_of([workers[0], None, *workers[2:]], epoch=2, state=forming, reason="rank 1 lost"))
        workers[1].kill()
        other = FakeWorker(DESCRIPTION, echo)
        control.say(view_of([workers[0], other, *workers[2:]], epoch=3))
        assert torch.equal(future.result(TIMEOUT_S), x + 5)
        assert torch.equal(service.forward(5, x, ids, weights, timeout_s=TIMEOUT_S), x + 5)
        assert other.seen
    other.kill()


def test_a_group_that_does_not_serve(workers: list[FakeWorker]) -> None:
    forming = view_of([workers[0], None], epoch=6, state=control_pb2.FORMING, reason="rank 1 (b/0) lost: lease expired")
    control = FakeControl(forming)
    words = r"the group is FORMING \(epoch 6\): rank 1 \(b/0\) lost"
    with Client(control.address, retry=False) as service:
        with pytest.raises(public.Unavailable, match=words) as caught:
            service.forward(0, *_batch(5), timeout_s=TIMEOUT_S)
        assert (caught.value.lost_ranks, caught.value.epoch) == ((1,), 6)
    with Client(control.address) as service, ThreadPoolExecutor(1) as pool:
        _told_in_time(service, words)
        future = pool.submit(service.forward, 0, *_batch(5), timeout_s=TIMEOUT_S)
        control.say(view_of(workers, epoch=7))
        assert future.result(TIMEOUT_S).shape == (5, 8)
    control.kill()


def test_whoever_waits_for_a_group_leaves_a_leader_that_is_cut_off(
    workers: list[FakeWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line of a leader goes down while the group forms anew: its view never changes, no connection breaks, and
    another replica says that the group serves."""
    options = rpc._channel_options
    monkeypatch.setattr(rpc, "_channel_options", lambda size: [o for o in options(size) if "keepalive" not in o[0]])
    monkeypatch.setattr(directory, "_RECHECK_S", 0.2)
    monkeypatch.setattr(control_channel, "_POLL_S", 0.5)
    forming = view_of([workers[0], None], epoch=6, state=control_pb2.FORMING)
    former, other = FakeControl(forming), FakeControl(view_of(workers, epoch=7))
    other.leads = False
    network, here = Network(), f"127.0.0.1:{lasting_port()}"
    line = network.proxy(here, former.address)
    with contextlib.ExitStack() as end:
        for stop in (network.close, former.kill, other.kill):
            end.callback(stop)
        service = end.enter_context(Client(f"{here},{other.address}"))
        pool = end.enter_context(ThreadPoolExecutor(1))
        future = pool.submit(service.forward, 0, *_batch(5), timeout_s=TIMEOUT_S)
        until(lambda: "FORMING" in str(getattr(service._requests._directory, "_trouble", "")))
        line.cut()
        other.leads = True
        assert future.result(TIMEOUT_S).shape == (5, 8)
        line.mend()


def _told_in_time(service: Client, words: str) -> None:
    """Who waits in vain is told why, if the control plane was heard before the deadline."""
    for timeout_s in SOON_S:
        with pytest.raises(public.Unavailable) as caught:
            service.forward(0, *_batch(5), timeout_s=timeout_s)
        if "no answer yet" not in str(caught.value):
            break
    assert re.search(words, str(caught.value))


def test_serving_goes_on_without_the_control_plane(control: FakeControl, workers: list[FakeWorker]) -> None:
    x, ids, weights = _batch(5)
    with Client(control.address) as service:
        service.forward(0, x, ids, weights)
        control.kill()
        for _ in range(5):
            assert torch.equal(service.forward(1, x, ids, weights, timeout_s=TIMEOUT_S), x + 1)


def test_nobody_there() -> None:
    with Client("127.0.0.1:1", retry=False) as service:
        with pytest.raises(public.Unavailable, match=r"control plane 127\.0\.0\.1:1: "):
            service.forward(0, *_batch(5), timeout_s=TIMEOUT_S)
        with pytest.raises(public.Unavailable):
            service.describe(timeout_s=TIMEOUT_S)


def test_deadline_and_cancel_message(workers: list[FakeWorker]) -> None:
    with Client(workers[0].address) as service:
        service.forward(0, *_batch(5))
        workers[0].behave = lambda request: None
        for timeout_s in SOON_S:
            workers[0].seen.clear()
            with pytest.raises(public.DeadlineExceeded, match="no answer within"):
                service.forward(0, *_batch(5), timeout_s=timeout_s)
            cancelled = workers[0].cancelled.get(timeout=TIMEOUT_S)
            if workers[0].seen:
                break
        assert cancelled == workers[0].seen[0].id
        assert 0 < workers[0].seen[0].timeout_ms <= timeout_s * 1000
        workers[0].behave = echo
        assert service.forward(0, *_batch(5)).shape == (5, 8)
    assert workers[0].num_streams == 1


async def test_cancelling_one_request_leaves_the_stream(workers: list[FakeWorker]) -> None:
    arrived = asyncio.Event()
    loop = asyncio.get_running_loop()

    def hang(request: expert_pb2.ForwardRequest) -> None:
        loop.call_soon_threadsafe(arrived.set)

    workers[0].behave = hang
    async with AsyncClient(workers[0].address) as service:
        task = asyncio.create_task(service.forward(0, *_batch(5)))
        await asyncio.wait_for(arrived.wait(), TIMEOUT_S)
        workers[0].behave = echo
        other = asyncio.create_task(service.forward(1, *_batch(5)))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await other).shape == (5, 8)
        assert await asyncio.to_thread(workers[0].cancelled.get, timeout=TIMEOUT_S) == workers[0].seen[0].id
    assert workers[0].num_streams == 1


async def test_one_failed_share_cancels_the_others(control: FakeControl, workers: list[FakeWorker]) -> None:
    workers[0].behave = refuse(grpc.StatusCode.INVALID_ARGUMENT, "no such layer")
    for worker in workers[1:]:
        worker.behave = lambda request: None
    async with AsyncClient(control.address, min_tokens_per_worker=1) as service:
        with pytest.raises(public.InvalidRequest, match="no such layer"):
            await service.forward(9, *_batch(40), timeout_s=TIMEOUT_S)
        for worker in workers[1:]:
            await asyncio.to_thread(worker.cancelled.get, timeout=TIMEOUT_S)


def test_answers_in_any_order(workers: list[FakeWorker]) -> None:
    held: list[Answer] = []

    def late(request: expert_pb2.ForwardRequest) -> Answer | None:
        held.append(Answer(id=request.id))
        return None

    workers[0].behave = late
    worker = workers[0]
    original = worker.Forward

    def reverse(requests: Iterator[expert_pb2.ForwardRequest], context: Any) -> Iterator[Answer]:
        batch = [next(requests) for _ in range(6)]
        for request in reversed(batch):
            answer = echo(request)
            answer.id = request.id
            yield answer
        yield from original(requests, context)

    server = FakeWorker.__new__(FakeWorker)
    server.Forward = reverse  # type: ignore[method-assign]
    FakeWorker.__init__(server, DESCRIPTION, echo)
    with Client(server.address) as service, ThreadPoolExecutor(6) as pool:
        batches = [_batch(n) for n in range(1, 7)]
        futures = [pool.submit(service.forward, n, *batch) for n, batch in enumerate(batches)]
        for n, (future, batch) in enumerate(zip(futures, batches, strict=True)):
            assert torch.equal(future.result(TIMEOUT_S), batch[0] + n)
    server.kill()


def test_many_threads(control: FakeControl) -> None:
    def run(number: int) -> bool:
        x, ids, weights = _batch(number + 1)
        return all(torch.equal(service.forward(n, x, ids, weights), x + n) for n in range(20))

    with Client(control.address, min_tokens_per_worker=4) as service, ThreadPoolExecutor(8) as pool:
        assert all(pool.map(run, range(8)))


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (Answer(y=wire.encode(torch.zeros(4, 8))), r"answer: expected \[5, 8\], got .*num_tokens=4"),
        (Answer(y=wire.encode(torch.zeros(5, 8).half())), r"answer: expected \[5, 8\], got .*float16"),
    ],
)
def test_a_worker_that_answers_nonsense(workers: list[FakeWorker], answer: Answer, words: str) -> None:
    workers[0].behave = lambda request: Answer.FromString(answer.SerializeToString())
    with Client(workers[0].address) as service, pytest.raises(public.ClientError, match=words):
        service.forward(0, *_batch(5))


def test_close_is_final_and_idempotent(workers: list[FakeWorker]) -> None:
    def others() -> list[threading.Thread]:
        """Threads beside those of the worker's server."""
        return [thread for thread in threading.enumerate() if not thread.name.startswith("ThreadPoolExecutor")]

    before = len(others())
    service = Client(workers[0].address)
    service.forward(0, *_batch(5))
    service.close()
    service.close()
    with pytest.raises(public.ClientError, match="the client is closed"):
        service.forward(0, *_batch(5))
    assert "crossdock-client" not in {thread.name for thread in threading.enumerate()}
    deadline = time.monotonic() + TIMEOUT_S
    while len(others()) > before + 1:
        assert time.monotonic() < deadline, others()
        time.sleep(0.01)


def test_close_ends_what_is_under_way(workers: list[FakeWorker]) -> None:
    arrived = threading.Event()
    workers[0].behave = lambda request: arrived.set()  # type: ignore[assignment, return-value]
    service = Client(workers[0].address)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(service.forward, 0, *_batch(5), timeout_s=TIMEOUT_S)
        assert arrived.wait(TIMEOUT_S)
        service.close()
        with pytest.raises(public.ClientError, match="closed"):
            future.result(TIMEOUT_S)


def test_a_call_that_races_with_close_does_not_hang(workers: list[FakeWorker], monkeypatch: pytest.MonkeyPatch) -> None:
    service = Client(workers[0].address)
    give_back, late = service._loop.give_back, ThreadPoolExecutor(1)

    def give_back_then_call() -> None:
        give_back()
        for call in (service.describe, lambda: service.forward(0, *_batch(1))):
            assert isinstance(late.submit(call).exception(TIMEOUT_S), public.ClientError)

    monkeypatch.setattr(service._loop, "give_back", give_back_then_call)
    service.close()


async def test_workers_that_are_gone_lose_their_connections(control: FakeControl, workers: list[FakeWorker]) -> None:
    async with AsyncClient(control.address, min_tokens_per_worker=1) as service:
        await service.forward(0, *_batch(40))
        held = dict(service._requests._connections)
        control.say(view_of([workers[0]], epoch=2))
        async with asyncio.timeout(TIMEOUT_S):
            while len((await service._requests._service(10)).workers) > 1:
                await asyncio.sleep(0.01)
        await asyncio.gather(*(service.forward(0, *_batch(4)) for _ in range(3)))
        closed = {address for address, each in held.items() if each.closed}
        assert closed == {worker.address for worker in workers[1:]}


def test_close_does_not_wait_for_a_group_that_never_serves(workers: list[FakeWorker]) -> None:
    control = FakeControl(view_of([workers[0], None], epoch=6, state=control_pb2.FORMING))
    service = Client(control.address)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(service.forward, 0, *_batch(5), timeout_s=100 * TIMEOUT_S)
        _told_in_time(service, "FORMING")
        service.close()
        with pytest.raises(public.ClientError, match="closed"):
            future.result(TIMEOUT_S)
    control.kill()


@pytest.mark.parametrize("way", ["by thread", "by coroutine"])
def test_shares_of_another_checkpoint_are_sent_again(control: FakeControl, workers: list[FakeWorker], way: str) -> None:
    """Worker 0 has switched when the others answer; each answer says whose rows it has."""

    def made_by(model: str) -> Callable[[expert_pb2.ForwardRequest], expert_pb2.ForwardResponse]:
        def behave(request: expert_pb2.ForwardRequest) -> expert_pb2.ForwardResponse:
            answer = echo(request)
            rows = wire.decode(answer.y, name="y", dtypes=[torch.float32], ndim=2) + 100 * (model == "new")
            return expert_pb2.ForwardResponse(y=wire.encode(rows), model=model)

        return behave

    for worker in workers[1:]:
        worker.behave = _first(made_by("old"), then=made_by("new"))
    workers[0].behave = made_by("new")
    x, ids, weights = _batch(4 * 64)

    async def by_coroutine() -> torch.Tensor:
        async with AsyncClient(control.address) as service:
            return await service.forward(1, x, ids, weights)

    with Client(control.address) as service:
        y = service.forward(1, x, ids, weights) if way == "by thread" else asyncio.run(by_coroutine())
    torch.testing.assert_close(y, x + 101)


def test_a_closed_client_goes_with_its_last_name(workers: list[FakeWorker]) -> None:
    """It is in no circle of references, which only a collection would end; nor is one that was refused."""
    gc.collect()
    gc.disable()
    try:
        with Client(workers[0].address) as service:
            service.forward(1, *_batch(5))
            with pytest.raises(public.InvalidRequest, match="min_tokens_per_worker: expected 1 or more, got 0"):
                Client(workers[0].address, min_tokens_per_worker=0)
        gone, loop = weakref.ref(service), service._loop
        del service
        assert gone() is None
        assert loop._users == 0
    finally:
        gc.enable()


def test_the_fingerprint_travels(workers: list[FakeWorker]) -> None:
    with Client(workers[0].address, model="f00d") as service:
        service.forward(0, *_batch(5))
    assert workers[0].seen[0].model == "f00d"


def test_a_view_that_cannot_be_read_is_told_and_the_next_one_is_read(
    control: FakeControl, workers: list[FakeWorker], caplog: pytest.LogCaptureFixture
) -> None:
    later = control_pb2.GroupView(epoch=1, state=77)  # type: ignore[arg-type]
    control.say(later)
    x, ids, weights = _batch(5)
    with Client(control.address, retry=False) as hasty, Client(control.address) as patient:
        with pytest.raises(tree.Unavailable, match=r"control plane .*: ValueError\(.*77"):
            hasty.forward(1, x, ids, weights, timeout_s=TIMEOUT_S)
        assert "cannot follow the control plane" in caplog.messages
        control.say(view_of(workers))
        assert torch.equal(patient.forward(1, x, ids, weights, timeout_s=TIMEOUT_S), x + 1)
