"""vLLM's dual-batch overlap over the `cpu` transport, as far as that goes without a GPU: threads, hooks, yields."""

from __future__ import annotations

import pytest

from tests.vllm import overlapped
from tests.vllm.layers import HT, LL, Case
from tests.worlds import World

pytest.importorskip("vllm", reason="`make test-vllm` makes an environment that has vLLM")


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("backend", [LL, HT])
@pytest.mark.parametrize("plugin", ["deep_ep", "native"])
def test_two_halves_of_a_batch(four: World, plugin: str, backend: str, fp8: bool) -> None:
    results = four.run(overlapped.run, Case(plugin, backend, fp8), timeout_s=600)
    calls, kept = results[0]
    assert all(other == calls for other, _ in results), "all ranks call in one order"
    for number in range(2):
        assert [op for half, op, _ in calls if half == number] == ["dispatch", "combine"] * overlapped.NUM_LAYERS
    order = [(half, op) for half, op, _ in calls]
    assert order.index((1, "dispatch")) < order.index((0, "combine")), "the second begins while the first computes"
    wanted = "comm" if backend == HT else "compute"
    assert {stream for _, _, stream in calls} == {wanted}
    if plugin == "native":
        each = {"comm": 5 + fp8, "compute": 4 + fp8} if backend == HT else {"comm": 0, "compute": 0}
        assert kept == {stream: 2 * overlapped.NUM_LAYERS * number for stream, number in each.items()}
