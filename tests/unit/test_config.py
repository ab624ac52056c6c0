"""MoEConfig: every field refuses what can never work, by name; defaults resolve as documented."""

from typing import Any

import msgspec
import pytest
import torch

from ep_kernels.config import MoEConfig
from ep_kernels.errors import ConfigError
from ep_kernels.routing import ExpertMap
from ep_kernels.types import Layout, Mode, ScaleFormat
from tests.groups import LonelyGroup

GOOD: dict[str, Any] = {
    "group": LonelyGroup(size=2),
    "num_experts": 4,
    "hidden_size": 64,
    "topk": 2,
    "max_tokens_per_rank": 8,
}
HT = {"mode": Mode.HT}
FP8 = torch.float8_e4m3fn

BAD: list[tuple[str, dict[str, Any]]] = [
    ("group", {"group": None}),
    ("group", {"group": LonelyGroup(rank=2, size=2)}),
    ("num_experts", {"num_experts": 0}),
    ("num_experts", {"num_experts": 4.0}),
    ("num_experts", {"num_experts": True}),
    ("hidden_size", {"hidden_size": 0}),
    ("hidden_size", {"hidden_size": 4}),
    ("hidden_size", {"hidden_size": 8, "quantize": True}),
    ("hidden_size", {"hidden_size": 16, "quantize": "nvfp4"}),
    ("hidden_size", {"hidden_size": 12, "dtype": torch.float32, "output_dtype": torch.bfloat16}),
    ("hidden_size", {"hidden_size": 100}),
    ("topk", {"topk": 0}),
    ("topk", {"topk": 5}),
    ("topk", {"topk": 33, "num_experts": 64}),
    ("max_tokens_per_rank", {"max_tokens_per_rank": 0}),
    ("expert_alignment", {"expert_alignment": 0, "mode": Mode.AUTO}),
    ("expert_alignment", {"expert_alignment": 8}),
    ("max_in_flight", {"max_in_flight": 0}),
    ("scale_columns", {"scale_columns": -1}),
    ("scale_columns", {"scale_columns": 1, "quantize": True}),
    ("dtype", {"dtype": torch.int64}),
    ("dtype", {"dtype": "bfloat16"}),
    ("quantize", {"quantize": True, "dtype": torch.uint8}),
    ("quantize", {"quantize": True, "dtype": torch.float32}),
    ("quantize", {"quantize": "nvfp4", "dtype": torch.float32}),
    ("quantize", {"quantize": "fp4"}),
    ("quantize", {"quantize": []}),
    ("scale_columns", {"scale_columns": 1, "quantize": "mxfp8"}),
    ("scale_format", {"scale_format": ScaleFormat.UE8M0, "quantize": "mxfp8"}),
    ("output_dtype", {"output_dtype": torch.float64}),
    ("combine_dtype", {"combine_dtype": torch.uint8}),
    ("combine_dtype", {"combine_dtype": torch.float32}),
    ("combine_dtype", {"combine_dtype": torch.bfloat16, "dtype": torch.float32}),
    ("combine_dtype", {"combine_dtype": torch.bfloat16, "output_dtype": torch.float16}),
    ("combine_dtype", {"combine_dtype": FP8, "exact_combine": True}),
    ("scale_format", {"scale_format": ScaleFormat.UE8M0_PACKED}),
    ("exact_combine", {"exact_combine": True, **HT}),
    ("max_recv_rows", {"max_recv_rows": 0}),
    ("max_recv_rows", {"max_recv_rows": 8, "layout": Layout.RANK_MAJOR}),
    ("max_recv_rows", {"max_recv_rows": 9, "layout": Layout.GROUPED, "expert_alignment": 8}),
    ("max_recv_rows", {"max_recv_rows": 4.0}),
    ("max_recv_rows", {"max_recv_rows": 1 << 31}),
    ("mode", {"mode": "ht"}),
    ("layout", {"layout": "flat"}),
    ("scale_format", {"scale_format": "ue8m0"}),
    ("overflow", {"overflow": "raise"}),
    ("quantize", {"quantize": 1}),
    ("exact_shapes", {"exact_shapes": "no"}),
    ("validate", {"validate": None}),
    ("exact_combine", {"exact_combine": 1}),
    ("scale_dtype", {"scale_dtype": "uint8"}),
    ("timeout_s", {"timeout_s": "10"}),
    ("timeout_s", {"timeout_s": 0}),
    ("timeout_s", {"timeout_s": float("nan")}),
    ("timeout_s", {"timeout_s": 1e9}),
    ("ll_max_tokens", {"ll_max_tokens": -1}),
    ("num_sms", {"num_sms": 0}),
    ("dispatch_sms", {"dispatch_sms": 0}),
    ("combine_sms", {"combine_sms": 1.0}),
    ("kernel_cache_dir", {"kernel_cache_dir": 7}),
    ("ll_max_tokens", {"ll_max_tokens": 2.5}),
    ("expert_map", {"expert_map": [[0, 1], [2, 3]]}),
    ("expert_map", {"expert_map": ExpertMap.contiguous(5, 2)}),
    ("expert_map", {"expert_map": ExpertMap.contiguous(4, 3)}),
]


@pytest.mark.parametrize(("field", "change"), BAD, ids=[f"{f}-{n}" for n, (f, _) in enumerate(BAD)])
def test_refused_by_name(field: str, change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"^{field}: expected .*, got ") as error:
        MoEConfig(**(GOOD | change))
    assert error.value.field == field
    assert isinstance(error.value, ValueError)


def test_unknown_and_changed_fields_are_refused() -> None:
    with pytest.raises(TypeError, match="num_smz"):
        MoEConfig(**GOOD, num_smz=3)  # type: ignore[call-arg]
    with pytest.raises(AttributeError):
        MoEConfig(**GOOD).topk = 1  # type: ignore[misc]
    with pytest.raises(ConfigError):
        msgspec.structs.replace(MoEConfig(**GOOD), topk=9)


def test_defaults() -> None:
    config = MoEConfig(**GOOD)
    assert config.resolved_layout is Layout.EXPERT_MAJOR
    assert MoEConfig(**GOOD, mode=Mode.HT).resolved_layout is Layout.FLAT
    assert MoEConfig(**GOOD, mode=Mode.AUTO).resolved_layout is Layout.GROUPED
    assert config.resolved_expert_map == ExpertMap.contiguous(4, 2)
    assert config.payload_dtype == config.resolved_combine_dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("change", "payload", "output", "combine"),
    [
        ({"dtype": torch.float16}, torch.float16, torch.float16, torch.float16),
        ({"quantize": True}, FP8, torch.bfloat16, torch.bfloat16),
        ({"quantize": "mxfp8"}, FP8, torch.bfloat16, torch.bfloat16),
        ({"quantize": "nvfp4", "hidden_size": 32}, torch.uint8, torch.bfloat16, torch.bfloat16),
        ({"dtype": FP8, "scale_columns": 1}, FP8, torch.bfloat16, torch.bfloat16),
        ({"dtype": torch.uint8, "output_dtype": torch.float16}, torch.uint8, torch.float16, torch.float16),
        ({"combine_dtype": FP8}, torch.bfloat16, torch.bfloat16, FP8),
        ({"combine_dtype": FP8, "dtype": torch.float32}, torch.float32, torch.float32, FP8),
        ({"combine_dtype": torch.float16, "dtype": torch.float16}, torch.float16, torch.float16, torch.float16),
        ({"output_dtype": torch.float32}, torch.bfloat16, torch.float32, torch.float32),
    ],
)
def test_dtypes_resolve(
    change: dict[str, Any], payload: torch.dtype, output: torch.dtype, combine: torch.dtype
) -> None:
    config = MoEConfig(**(GOOD | change))
    resolved = (config.payload_dtype, config.resolved_output_dtype, config.resolved_combine_dtype)
    assert resolved == (payload, output, combine)
