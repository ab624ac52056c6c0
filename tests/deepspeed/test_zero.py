"""ZeRO-3 with our all-gathers: the losses of DeepSpeed's own, bit by bit."""

from __future__ import annotations

from typing import Any

import pytest

from tests import tools
from tests.deepspeed import steps
from tests.worlds import World

tools.require("deepspeed")

HOW: dict[str, dict[str, Any]] = {
    "prefetch": {},
    "bf16": {"bf16": True},
    "one by one": {"zero": {"stage3_allgather_sequential": True}},
    "nothing kept": {"zero": {"stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 0}},
}


@pytest.mark.parametrize("how", HOW)
def test_losses_are_bit_identical(two: World, transport: str, how: str) -> None:
    for calls, theirs in two.run(steps.with_and_without, transport, HOW[how], 100, timeout_s=300):
        assert calls >= 500
        assert theirs == 0


def test_what_goes_its_own_way(two: World, transport: str) -> None:
    two.run(steps.own_way, transport, timeout_s=300)
