"""vLLM's dual-batch overlap over the `cpu` transport, as far as that goes without a GPU: threads, hooks, yields."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests import tools
from tests.vllm import overlapped
from tests.vllm.layers import HT, LL, Case
from tests.worlds import World

tools.require("vllm")


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
    wanted = "comm" if backend == HT or plugin == "native" else "compute"
    assert {stream for _, _, stream in calls} == {wanted}
    if plugin == "native":
        each = {"comm": 5 + fp8, "compute": 4 + fp8 - (backend == LL)}
        assert kept == {stream: 2 * overlapped.NUM_LAYERS * number for stream, number in each.items()}


class Runner(SimpleNamespace):
    """In vLLM's runner's place: what is not given is None."""

    def __getattr__(self, name: str) -> None:
        return None


def metadata_of_halves(builder: Any, lengths: list[int]) -> list[Any]:
    """What vLLM's runner gives the attention of either half of a step of new prompts of such lengths."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner
    from vllm.v1.worker.ubatch_utils import maybe_create_ubatch_slices

    number, total = len(lengths), sum(lengths)
    halves, _ = maybe_create_ubatch_slices(True, np.array(lengths), total, number, 2)
    starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    table = SimpleNamespace(get_device_tensor=lambda rows: torch.arange(rows).reshape(rows, 1))
    none_yet = torch.zeros(number, dtype=torch.int32)
    group = SimpleNamespace(
        layer_names=["layer"], get_metadata_builder=lambda half: builder,
        build_metadata=lambda common, half: builder.build(0, common),  # these two: 0.33
        map_to_kernel_block_table=lambda table, half: table,
    )  # fmt: skip
    runner = Runner(
        kv_cache_config=SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec="spec")]), attn_groups=[[group]],
        input_batch=SimpleNamespace(
            block_table=[table], num_computed_tokens_cpu_tensor=none_yet, num_prompt_tokens_cpu_tensor=none_yet
        ),
        query_start_loc=SimpleNamespace(gpu=starts, cpu=starts), positions=torch.arange(total),
        seq_lens=starts.diff(), optimistic_seq_lens_cpu=starts.diff(), dcp_world_size=1,
        model_config=Runner(), cache_config=Runner(), _get_encoder_seq_lens=lambda *_, **__: (None, None),
    )  # fmt: skip
    found, _ = GPUModelRunner._build_attention_metadata(
        runner, total, number, max(lengths), ubatch_slices=halves, slot_mappings={0: torch.arange(total)}
    )
    return [half["layer"] for half in found]


@pytest.mark.parametrize("lengths", [[5, 3, 2, 2, 1, 1], [1, 7, 4, 4]], ids=["refused", "wrong"])
@pytest.mark.parametrize("overlap", [{}, {"enable_dbo": True}, {"ubatch_size": 2}], ids=["none", "dbo", "ubatch"])
def test_each_half_has_attention_metadata_of_its_own(overlap: dict[str, Any], lengths: list[int]) -> None:
    """By vLLM's own runner, which gives the second half what was built for the first if we let it."""
    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
    from vllm.v1.attention.backend import AttentionMetadataBuilder

    from crossdock.vllm_plugin import compat

    class Builder(AttentionMetadataBuilder):  # type: ignore[misc,type-arg]
        supports_update_block_table = True

        def __init__(self) -> None:
            pass

        def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
            return common_attn_metadata

        def update_block_table(self, metadata: Any, blk_table: torch.Tensor, slot_mapping: torch.Tensor) -> Any:
            return replace(metadata, block_table_tensor=blk_table, slot_mapping=slot_mapping)

    config = VllmConfig(device_config=DeviceConfig(device="cpu"))
    for name, value in overlap.items():  # asked for at once they want a whole model
        setattr(config.parallel_config, name, value)
    assert not compat.part_halves(), "no engine is being made"
    with set_current_vllm_config(config):
        assert ("Builder" in compat.part_halves()) == bool(overlap)
        assert not compat.part_halves(), "once is enough"
    first, second = metadata_of_halves(Builder(), lengths)
    if overlap:
        assert second.seq_lens.tolist() == lengths[-len(second.block_table_tensor) :]
        assert int(first.query_start_loc[-1] + second.query_start_loc[-1]) == sum(lengths)
    else:
        assert torch.equal(second.seq_lens, first.seq_lens), "vLLM parts halves by itself now: part_halves() may go"
