"""`crossdock.deep_ep` on every transport: the surface that vLLM, SGLang and Megatron call as `deep_ep`."""

from __future__ import annotations

import dataclasses
import inspect
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

import crossdock
from crossdock import deep_ep
from crossdock.common.config import FrameworkConfig
from crossdock.deep_ep.exporter import CountingTimeouts, FrameworkTelemetry, _WatchedCommunicator, telemetry
from crossdock.deep_ep.guard import EXIT_CODE, GRACE_S, Guard
from crossdock.deep_ep.low_latency import BufferShape, LowLatency, PreparedStep
from ep_kernels import ArgumentError, PeerTimeout
from ep_kernels.telemetry import Samples
from ep_kernels.types import LatencySample, ScaleFormat
from tests.cases import RoutingCase, draw_seed
from tests.transports import deep_ep_steps as steps
from tests.worlds import World

Worlds = Callable[[int], World]
FOLDER = Path(crossdock.__file__).parent / "deep_ep" / "path"


def case_of(hidden: int = 256, kind: str = "single_none") -> RoutingCase:
    return RoutingCase(8, 3, hidden, (6, 2, 0, 5), kind, draw_seed(), max_tokens=8)


@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("scales", [None, *ScaleFormat])
def test_low_latency(world: Worlds, transport: str, scales: ScaleFormat | None, hooked: bool) -> None:
    world(4).run(steps.run, steps.ll_steps, case_of(), transport, scales, hooked)


@pytest.mark.parametrize(
    "story",
    [steps.ll_two_at_once, steps.ll_wrong, steps.ht_scaled, steps.ht_worst, steps.ht_wrong, steps.ht_sms, steps.sizes],
)
def test_stories(world: Worlds, transport: str, story: Callable[..., Any]) -> None:
    world(4).run(steps.run, story, case_of(), transport)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_high_throughput(world: Worlds, transport: str, asynchronous: bool) -> None:
    world(4).run(steps.run, steps.ht_steps, case_of(128), transport, asynchronous)


@pytest.mark.parametrize("worst", [0, 32])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_handle_does_not_depend_on_what_its_caller_overwrites(
    world: Worlds, transport: str, asynchronous: bool, worst: int
) -> None:
    world(4).run(steps.run, steps.ht_overwritten, case_of(256), transport, asynchronous, worst)


@pytest.mark.parametrize("hooked", [False, True])
def test_nor_does_a_low_latency_one(world: Worlds, transport: str, hooked: bool) -> None:
    world(4).run(steps.run, steps.ll_overwritten, case_of(), transport, hooked)


def test_the_least_used_communicator_is_given_up(world: Worlds, transport: str) -> None:
    world(4).run(steps.run, steps.given_up, case_of(256), transport)


@pytest.mark.parametrize(
    ("name", "want", "got"),
    [
        ("num_worst_tokens", 24, 1536), ("combine_sms", None, 24), ("num_experts", 9, 18), ("topk", 3, 1),
        ("num_max_dispatch_tokens_per_rank", 8, 16), ("dtype", torch.bfloat16, torch.float16),
    ],
)  # fmt: skip
def test_ranks_that_disagree_hear_at_once_in_what(world: Worlds, name: str, want: Any, got: Any) -> None:
    case = RoutingCase(9, 3, 256, (6, 2, 5), "single_none", draw_seed(), max_tokens=8)
    heard = world(3).run(steps.run, steps.disagree, case, "cpu", name)
    assert [text for text, _ in heard] == [f"{name}: expected {want} as on rank 0, got '{got} on rank 2'"] * 3
    assert max(waited for _, waited in heard) < steps.DEADLINE_S / 3


def test_what_is_done_right_before_the_end_is_counted(world: Worlds, transport: str) -> None:
    for counted, sent in world(2).run(steps.run, steps.last_counts, RoutingCase(4, 2, 128, (3, 1)), transport):
        assert counted == sent


def test_nobody_brings_a_token(world: Worlds, transport: str) -> None:
    case = RoutingCase(8, 3, 128, (0, 0), seed=draw_seed(), max_tokens=4)
    world(2).run(steps.run, steps.ll_steps, case, transport, None, True)
    world(2).run(steps.run, steps.ht_steps, case, transport, False)


def test_a_buffer_that_nobody_holds_frees_its_regions(world: Worlds, transport: str) -> None:
    assert all(world(2).run(steps.run, steps.collected, RoutingCase(4, 2, 128, (3, 1)), transport))


def test_every_name_that_frameworks_call_is_here() -> None:
    """By keyword, as vLLM 0.20-0.33, SGLang and Megatron call them."""
    wanted = {
        "__init__": {"group", "num_nvl_bytes", "num_rdma_bytes", "low_latency_mode", "num_qps_per_rank", "comm",
                     "allow_nvlink_for_low_latency_mode", "allow_mnnvl", "explicitly_destroy", "enable_shrink"},
        "get_low_latency_rdma_size_hint": {"num_max_dispatch_tokens_per_rank", "hidden", "num_ranks", "num_experts"},
        "get_dispatch_layout": {"topk_idx", "num_experts", "previous_event", "async_finish", "allocate_on_comm_stream"},
        "dispatch": {"x", "handle", "num_tokens_per_rank", "num_tokens_per_rdma_rank", "is_token_in_rank",
                     "num_tokens_per_expert", "topk_idx", "topk_weights", "expert_alignment", "config",
                     "previous_event", "async_finish", "allocate_on_comm_stream"},
        "combine": {"x", "handle", "topk_weights", "config", "previous_event", "async_finish",
                    "allocate_on_comm_stream"},
        "low_latency_dispatch": {"cumulative_local_expert_recv_stats", "dispatch_wait_recv_cost_stats", "use_fp8",
                                 "round_scale", "use_ue8m0", "async_finish", "return_recv_hook"},
        "low_latency_combine": {"use_logfmt", "async_finish", "zero_copy", "return_recv_hook", "out",
                                "combine_wait_recv_cost_stats"},
        "clean_low_latency_buffer": {"num_max_dispatch_tokens_per_rank", "hidden", "num_experts"},
        "get_dispatch_config": set(), "get_combine_config": set(), "set_num_sms": set(), "capture": set(),
        "destroy": set(), "get_comm_stream": set(), "get_next_low_latency_combine_buffer": set(),
    }  # fmt: skip
    for name, keywords in wanted.items():
        assert keywords <= set(inspect.signature(getattr(deep_ep.Buffer, name)).parameters), name
    config = deep_ep.Buffer.get_dispatch_config(7)
    assert (config.get_nvl_buffer_size_hint(4096, 8), config.get_rdma_buffer_size_hint(4096, 8)) == (0, 0)
    assert deep_ep.Buffer.get_low_latency_rdma_size_hint(128, 7168, 8, 256) > 8 * 32 * 128 * 7168 * 2


def test_what_is_not_offered_says_what_to_do_instead() -> None:
    buffer: Any = deep_ep.Buffer.__new__(deep_ep.Buffer)
    ids = torch.zeros(1, 1, dtype=torch.int64)
    with pytest.raises(
        ArgumentError, match=r"low_latency_query_mask_buffer: expected no call of it \(a lost rank ends in"
    ):
        buffer.low_latency_query_mask_buffer(torch.zeros(2, dtype=torch.int32))
    with pytest.raises(ArgumentError, match="low_latency_clean_mask_buffer"):
        buffer.low_latency_clean_mask_buffer()
    with pytest.raises(ArgumentError, match="low_latency_update_mask_buffer"):
        buffer.low_latency_update_mask_buffer(1, True)
    with pytest.raises(ArgumentError, match="get_local_buffer_tensor"):
        buffer.get_local_buffer_tensor(torch.int8, use_rdma_buffer=True)
    with pytest.raises(ArgumentError, match=r"use_nvfp4: expected False .*, got bool"):
        buffer.low_latency_dispatch(ids.float(), ids, 1, 2, use_nvfp4=True)
    with pytest.raises(ArgumentError, match=r"dispatch_wait_recv_cost_stats: expected None .*, got Tensor"):
        buffer.low_latency_dispatch(ids.float(), ids, 1, 2, dispatch_wait_recv_cost_stats=ids)
    with pytest.raises(ArgumentError, match=r"combine_wait_recv_cost_stats: expected None .*, got Tensor"):
        buffer.low_latency_combine(ids.float(), ids, ids.float(), None, combine_wait_recv_cost_stats=ids)
    with pytest.raises(ArgumentError, match="expert_alignment: expected an int >= 1, got 0"):
        buffer.dispatch(ids.float(), topk_idx=ids, expert_alignment=0)
    with pytest.raises(ArgumentError, match="comm: expected None"):
        deep_ep.Buffer(None, comm=object())
    with pytest.raises(AttributeError, match="has no attribute 'HybridEPBuffer': it is another interface"):
        deep_ep.HybridEPBuffer  # noqa: B018


@pytest.mark.parametrize("wrong", [torch.zeros(4, dtype=torch.int32), torch.zeros(2)], ids=["all experts", "floats"])
def test_counts_that_cannot_be_added_to_are_refused_before_anything_is_sent(wrong: torch.Tensor) -> None:
    pool: Any = SimpleNamespace(size=2, shortcuts={})
    shape, place = BufferShape(8, 16, 4, 2, torch.bfloat16, None), SimpleNamespace(comm=SimpleNamespace(size=2))
    step = PreparedStep(cast(Any, place), shape, cast(Any, None), 1, 8, torch.ones(1, 2))
    x, ids = torch.zeros(1, 16, dtype=torch.bfloat16), torch.zeros(1, 2, dtype=torch.int64)
    with pytest.raises(ArgumentError, match=r"cumulative_local_expert_recv_stats: expected int32 \[2\], got"):
        LowLatency(pool).dispatch(x, ids, step, wrong, hooked=False)


def test_an_event_runs_what_is_to_follow_it_once() -> None:
    ran: list[str] = []
    event = deep_ep.EventOverlap(deep_ep.EventHandle())
    event.register_hook_after_wait(lambda: ran.append("hook"))
    with pytest.raises(ArgumentError, match="hook_after_wait"):
        event.register_hook_after_wait(lambda: None)
    with event(release_handle=True) as entered:
        assert entered is event
        assert not ran
    assert ran == ["hook"]
    assert event.event is None
    event.current_stream_wait()
    assert ran == ["hook"]


def test_it_is_deep_ep_by_choice_only() -> None:
    code = f"""
import importlib.util, sys
sys.path += {sys.path}
import crossdock.deep_ep
print(importlib.util.find_spec("deep_ep"))
sys.path.insert(0, {str(FOLDER)!r})
import deep_ep as d, deep_ep.utils, deep_ep.buffer
print(d.__spec__.name, d.Buffer is d.buffer.Buffer, "crossdock" in d.__version__, hasattr(d, "nothing"))
print(set(d.__all__) - set(vars(d)))
try:
    d.HybridEPBuffer
except AttributeError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    without, under_its_name, missing, refused = done.stdout.splitlines()
    assert (without, under_its_name) == ("None", "deep_ep True True False")
    assert missing == "set()"
    assert "has no attribute 'HybridEPBuffer': it is another interface" in refused


LOST = PeerTimeout(peer=2, op="combine", phase="payload", expected=2, seen=1, waited_s=1.0, gone=True)
SAMPLE = LatencySample("dispatch", "ll", 1, 7, 0, 1000, (0, 2000, 500), 4000)
SAMPLE_LABELS = {"group": "default", "rank": "3", "op": "dispatch", "mode": "ll"}


class Broken:
    """A communicator, as guard and telemetry know it: any error but a PeerTimeout is raised when it is asked."""

    rank, size, row_bytes = 3, 4, 100

    def __init__(self) -> None:
        self.error: Exception | None = None

    def _ask(self) -> None:
        if self.error is not None and not isinstance(self.error, PeerTimeout):
            raise self.error

    def unheard(self) -> Exception | None:
        self._ask()
        return self.error

    def samples(self) -> Samples:
        self._ask()
        return Samples.of([SAMPLE])

    def received(self) -> None:
        return None

    def dropped_rows(self) -> int:
        return 5

    @property
    def config(self) -> SimpleNamespace:
        return SimpleNamespace(transport="nvlink")


def test_a_failure_that_nobody_hears_of_ends_the_process() -> None:
    now, said = [0.0], list[str]()
    guard = Guard(said.append, lambda: now[0])
    guard._thread = threading.current_thread()  # its own is not started: looks happen when this test says so
    quiet, told, comm = Broken(), Broken(), Broken()
    for each in (quiet, told, comm):
        guard.watch(each)  # type: ignore[arg-type]
    told.error = comm.error = LOST
    guard.look()
    now[0] = GRACE_S - 0.01
    guard.look()
    assert not said, "an eager engine's next call may still raise it"
    told.error = None  # it has
    now[0] = GRACE_S
    guard.look()
    guard.look()
    assert len(said) == 1
    assert said[0].startswith(f"crossdock: rank 3: {comm.error}")


def test_a_communicator_that_cannot_be_asked_ends_no_watch(caplog: pytest.LogCaptureFixture) -> None:
    now, said = [0.0], list[str]()
    guard, counts = Guard(said.append, lambda: now[0]), FrameworkTelemetry()
    guard._thread = counts._thread = threading.current_thread()
    odd, good = Broken(), Broken()
    odd.error, good.error = ValueError("odd"), LOST
    for each in (odd, good):
        guard.watch(each)  # type: ignore[arg-type]
        counts.watch(each, FrameworkConfig())  # type: ignore[arg-type]
    for now[0] in (0.0, GRACE_S, 2 * GRACE_S):
        guard.look()
        counts.collect()
    assert said == [f"crossdock: rank 3: {LOST}"]
    value = counts.metrics.registry.get_sample_value
    assert value("crossdock_ep_tokens_total", SAMPLE_LABELS) == 21
    assert value("crossdock_ep_rows_dropped_total", {"group": "default", "rank": "3"}) == 5
    labels = {**SAMPLE_LABELS, "phase": "total", "transport": "nvlink"}
    assert value("crossdock_ep_operation_duration_seconds_count", labels) == 3
    told = [record for record in caplog.records if "odd" in str(record.__dict__.get("crossdock_fields"))]
    assert [record.message for record in told] == [
        "crossdock: rank 3: cannot check whether an operation has failed",
        "crossdock: rank 3: counts of a communicator are lost",
    ]


def test_the_process_ends_with_the_reason() -> None:
    code = "from crossdock.deep_ep.guard import leave; leave('crossdock: rank 3: rank 2 did not deliver')"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path += {sys.path}\n{code}"],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == EXIT_CODE
    assert done.stderr.startswith("crossdock: rank 3: rank 2 did not deliver; no call has raised it")


def test_a_process_that_cannot_say_why_it_ends_ends() -> None:
    code = "import sys; from crossdock.deep_ep.guard import leave; sys.stderr.close(); leave('nobody reads this')"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path += {sys.path}\n{code}"], timeout=300, check=False
    )
    assert done.returncode == EXIT_CODE


def test_samples_become_metrics(caplog: pytest.LogCaptureFixture) -> None:
    made = FrameworkTelemetry()
    about = _WatchedCommunicator(("default", "1"), [])
    made._count(about, Samples.of([SAMPLE]))
    made._count(about, Samples.of([dataclasses.replace(SAMPLE, seq=SAMPLE.seq + 3)]))
    value = made.metrics.registry.get_sample_value
    assert value("crossdock_ep_samples_dropped_total", {"group": "default", "rank": "1", "op": "dispatch"}) == 2
    labels = {"group": "default", "rank": "1", "op": "dispatch", "mode": "ll"}
    assert value("crossdock_ep_tokens_total", labels) == 14
    assert value(
        "crossdock_ep_operation_duration_seconds_sum", labels | {"phase": "wait", "transport": "cpu"}
    ) == pytest.approx(4e-6)
    waited = {"group": "default", "rank": "1", "op": "dispatch", "peer": "2"}
    assert value("crossdock_ep_peer_wait_seconds_total", waited) == pytest.approx(1e-6)
    made._serve("127.0.0.1:0")
    with urllib.request.urlopen(f"http://{made.address}/metrics", timeout=10) as answer:
        assert b'crossdock_ep_tokens_total{group="default",mode="ll",op="dispatch",rank="1"} 14.0' in answer.read()
    other = FrameworkTelemetry()
    other._serve(made.address)
    assert other.address == "", "taken: said in the log, and the engine goes on"
    assert made.address in caplog.records[-1].message, "engines' logs show the text alone"


def test_what_arrived_becomes_metrics() -> None:
    made, about = FrameworkTelemetry(), _WatchedCommunicator(("default", "1"), [0, 0, 0])
    for received in ([4, 2, 0], None, [9, 2, 1]):
        made._count_received(about, received, row_bytes=100)
    value = made.metrics.registry.get_sample_value

    def told(name: str) -> list[float | None]:
        return [
            value(f"crossdock_ep_received_{name}_total", {"group": "default", "rank": "1", "peer": peer})
            for peer in "012"
        ]

    assert told("tokens") == [9, 2, 1]
    assert told("bytes") == [900, None, 100], "what stays on its rank does not travel"


@pytest.mark.parametrize("counted", [True, False])
def test_a_silent_peer_is_counted(counted: bool) -> None:
    def value() -> float:
        labels = {"group": "g", "rank": "1", "peer": "2"}
        return telemetry().metrics.registry.get_sample_value("crossdock_ep_peer_timeouts_total", labels) or 0

    before = value()
    lost = PeerTimeout(peer=2, op="dispatch", phase="counts", expected=2, seen=1, waited_s=1.0)
    with pytest.raises(PeerTimeout), CountingTimeouts(1, FrameworkConfig(metrics=counted, group="g")):
        raise lost
    assert value() - before == counted
