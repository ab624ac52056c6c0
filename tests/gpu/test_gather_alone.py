"""`Mode.AG` on one GPU, by one rank: its torch operators, launches and graphs. Several ranks: tests/transports, and
test_several_gpus.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ep_kernels.types import Mode, ScaleFormat
from tests.cases import RoutingCase, cases, draw_seed
from tests.gpu import stories
from tests.transports import calls, devices, gradients
from tests.transports.steps import run_cases, run_story
from tests.worlds import World

pytestmark = pytest.mark.gpu(1)
PAYLOADS: list[dict[str, Any]] = [
    {},
    {"dtype": torch.float16},
    {"dtype": torch.float32},
    {"quantize": True, "scale_format": ScaleFormat.UE8M0_PACKED},
    {"dtype": torch.uint8, "scale_columns": 9, "scale_dtype": torch.uint8},
]


@pytest.fixture(scope="module")
def alone() -> Iterator[World]:
    world = World(1)
    yield world
    world.close()


@pytest.mark.parametrize("payload", PAYLOADS, ids=str)
def test_every_kind_of_routing(alone: World, payload: dict[str, Any]) -> None:
    steps = cases(1, 9, hidden_size=272, num_experts=5, topk=3)
    alone.run(run_cases, "nvlink", steps, {"mode": Mode.AG, **payload}, (None, 0, 9))


@pytest.mark.parametrize(
    "story",
    [
        stories.replayed_graph,
        stories.phases_in_a_graph,
        stories.delayed,
        calls.previous_handle,
        calls.two_in_flight,
        calls.inputs_may_be_reused,
        calls.sampled,
        calls.received,
        devices.any_stream,
        devices.never_waits_for_the_device,
        gradients.backward_matches_reference,
    ],
)
def test_stories(alone: World, story: Any) -> None:
    case = RoutingCase(5, 3, 256, (20,), "single_none", draw_seed(), max_tokens=24)
    alone.run(run_story, "nvlink", story, case, {"mode": Mode.AG})


def test_a_shard_for_copy_engines(alone: World) -> None:
    case = RoutingCase(64, 8, 7168, (512,), "uniform", draw_seed(), max_tokens=512)
    alone.run(run_cases, "nvlink", [case, case], {"mode": Mode.AG})
