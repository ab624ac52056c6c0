"""vLLM's dual-batch overlap over the `cpu` transport, as far as that goes without a GPU: threads, hooks, yields."""

from __future__ import annotations

import importlib.util
from pathlib import Path

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


@pytest.mark.parametrize("overlap", [False, True])
def test_each_half_has_attention_metadata_of_its_own(overlap: bool) -> None:
    """By real vLLM's builders: the second half is not given what was built for the first."""
    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
    from vllm.v1.attention.backend import AttentionMetadataBuilder

    from crossdock.vllm_plugin import compat

    class Reuses(AttentionMetadataBuilder):  # type: ignore[misc,type-arg]
        supports_update_block_table = True

    class Inherits(Reuses):
        pass

    config = VllmConfig(device_config=DeviceConfig(device="cpu"))
    config.parallel_config.enable_dbo = overlap  # asked for at once it wants a whole model
    assert not compat.part_halves(), "no engine is being made"
    with set_current_vllm_config(config):
        changed = compat.part_halves()
        assert ("Reuses" in changed) == overlap
        assert not compat.part_halves(), "once is enough"
    assert Reuses.supports_update_block_table == Inherits.supports_update_block_table == (not overlap)


def test_vllm_still_asks_builders_whether_they_can_be_given_another_table() -> None:
    path = Path(importlib.util.find_spec("vllm").submodule_search_locations[0]) / "v1/worker/gpu_model_runner.py"
    text = path.read_text(encoding="utf-8")
    assert "builder.supports_update_block_table" in text
    assert "cache_key = (kv_cache_spec, type(builder))" in text, "vLLM tells halves apart by now: part_halves() may go"
