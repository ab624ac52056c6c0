"""DeepEP V2's `ElasticBuffer` on every transport, and what of newer callers is refused by name."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from crossdock import deep_ep
from crossdock.deep_ep.refused import UnsupportedElastic
from ep_kernels import ArgumentError, ConfigError
from tests.cases import RoutingCase, draw_seed
from tests.transports import deep_ep_steps, elastic_steps
from tests.transports.elastic_steps import Way
from tests.transports.test_deep_ep import Worlds, case_of

WAYS = [
    Way(expand, sync, alignment, kind)
    for expand in (False, True)
    for sync in (True, False)
    for alignment, kind in ((1, "bf16"), (4, "blocks"))
]


@pytest.mark.parametrize("way", [*WAYS, Way(False, True, 1, "bf16", True), Way(True, False, 4, "blocks", True)])
def test_steps(world: Worlds, transport: str, way: Way) -> None:
    world(4).run(deep_ep_steps.run, elastic_steps.steps, case_of(), transport, way)


@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("expand", [False, True])
def test_the_same_routing_again(world: Worlds, transport: str, expand: bool, sync: bool) -> None:
    world(4).run(deep_ep_steps.run, elastic_steps.again, case_of(), transport, expand, sync)


@pytest.mark.parametrize("story", [elastic_steps.details, elastic_steps.sizes, elastic_steps.wrong])
def test_stories(world: Worlds, transport: str, story: Any) -> None:
    world(4).run(deep_ep_steps.run, story, case_of(), transport)


def test_nobody_brings_a_token(world: Worlds, transport: str) -> None:
    case = RoutingCase(8, 3, 128, (0, 0), seed=draw_seed(), max_tokens=4)
    for way in (Way(True, True, 4), Way(True, False, 4), Way(False, True, 1)):
        world(2).run(deep_ep_steps.run, elastic_steps.steps, case, transport, way)


@pytest.mark.parametrize("hooked", [False, True])
def test_rows_that_are_late_are_waited_for(world: Worlds, transport: str, hooked: bool) -> None:
    said = world(4).run(deep_ep_steps.run, elastic_steps.overlapped, case_of(), transport, hooked)
    assert said == [1] * 4


def test_every_name_that_frameworks_call_is_here() -> None:
    """By keyword, as DeepEP 2.1.0 has them, and SGLang 0.5.23, vLLM 0.33.0 call them."""
    wanted = {
        "__init__": {"group", "num_bytes", "num_cpu_bytes", "num_max_tokens_per_rank", "hidden", "num_topk",
                     "use_fp8_dispatch", "deterministic", "allow_hybrid_mode", "allow_multiple_reduction",
                     "prefer_overlap_with_compute", "sl_idx", "num_allocated_qps", "num_cpu_timeout_secs",
                     "num_gpu_timeout_secs", "explicitly_destroy"},
        "dispatch": {"x", "topk_idx", "topk_weights", "cumulative_local_expert_recv_stats", "num_experts",
                     "num_max_tokens_per_rank", "expert_alignment", "num_sms", "num_qps", "previous_event",
                     "previous_event_before_epilogue", "async_with_compute_stream", "allocate_on_comm_stream",
                     "handle", "do_handle_copy", "do_cpu_sync", "do_expand", "do_zero_padding",
                     "use_tma_aligned_col_major_sf"},
        "combine": {"x", "handle", "topk_weights", "bias", "num_sms", "num_qps", "previous_event",
                    "previous_event_before_epilogue", "async_with_compute_stream", "allocate_on_comm_stream"},
        "get_buffer_size_hint": {"group", "num_max_tokens_per_rank", "hidden", "num_topk", "use_fp8_dispatch",
                                 "allow_hybrid_mode", "allow_multiple_reduction"},
        "barrier": {"use_comm_stream", "with_cpu_sync", "sequential"},
        "get_theoretical_num_sms": {"num_experts", "num_topk"}, "get_theoretical_num_qps": {"num_sms"},
        "get_physical_domain_size": set(), "get_logical_domain_size": set(), "capture": set(), "destroy": set(),
        "get_comm_stream": set(),
    }  # fmt: skip
    for name, keywords in wanted.items():
        assert keywords <= set(inspect.signature(getattr(deep_ep.ElasticBuffer, name)).parameters), name
    overlap = {"overlap", "packed_recv_count", "comp_signal", "block_m", "threshold", "num_sms", "src_signals",
               "src_signal_expect_value"}  # fmt: skip
    assert overlap <= set(inspect.signature(deep_ep.Buffer.low_latency_combine).parameters)


@pytest.mark.parametrize("name", [name for name in vars(UnsupportedElastic) if not name.startswith("_")])
def test_what_is_not_offered_is_refused_by_name(name: str) -> None:
    buffer: Any = deep_ep.ElasticBuffer.__new__(deep_ep.ElasticBuffer)
    with pytest.raises(ArgumentError, match=rf"^{name}: expected no call of it \(.*\), got one"):
        getattr(buffer, name)(1, storage=2)


def test_a_handle_says_why_it_tells_of_no_buffers() -> None:
    handle: Any = deep_ep.EPHandle.__new__(deep_ep.EPHandle)
    with pytest.raises(AttributeError, match="'recv_src_metadata': regions are made for the shapes that come"):
        handle.recv_src_metadata  # noqa: B018
    assert not hasattr(handle, "nothing")


@pytest.mark.parametrize(
    ("kind", "call"),
    [
        (deep_ep.Buffer, "dispatch"), (deep_ep.Buffer, "combine"), (deep_ep.Buffer, "low_latency_dispatch"),
        (deep_ep.Buffer, "low_latency_combine"), (deep_ep.ElasticBuffer, "dispatch"),
        (deep_ep.ElasticBuffer, "combine"),
    ],
)  # fmt: skip
def test_a_keyword_of_a_newer_caller_names_itself_and_the_caller(kind: Any, call: str) -> None:
    buffer = kind.__new__(kind)
    given = [None] * sum(
        parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        for parameter in inspect.signature(getattr(buffer, call)).parameters.values()
    )
    with pytest.raises(ConfigError, match=rf"^{call}\(use_fp3\): expected no such keyword: .*{__name__}.*docs/engines"):
        getattr(buffer, call)(*given, use_fp3=True)
    with pytest.raises(ConfigError, match=r"^Buffer\(sl_idx\)"):
        deep_ep.Buffer(None, sl_idx=3)
