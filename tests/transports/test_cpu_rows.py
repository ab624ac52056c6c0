"""The native arithmetic, every build of it, against torch and against quant.py, bit for bit."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest
import torch

from ep_kernels import quant
from ep_kernels.transports.cpu import native
from ep_kernels.types import ScaleFormat


def builds() -> list[int]:
    """Builds that this processor runs: 0 baseline, 1 AVX2, 2 AVX-512."""
    if platform.machine() != "x86_64":
        return [0]
    flags = Path("/proc/cpuinfo").read_text().split("flags", 1)[1].split("\n", 1)[0].split()
    return [0] + [1] * ("avx2" in flags) + [2] * ({"avx512f", "avx512bw", "avx512vl", "avx512dq"} <= set(flags))


def all_bits(dtype: torch.dtype) -> torch.Tensor:
    """Every 8- or 16-bit pattern."""
    if dtype.itemsize == 1:
        return torch.arange(256, dtype=torch.int16).to(torch.uint8).view(dtype)
    return torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)


def awkward(count: int) -> torch.Tensor:
    """float32 of every magnitude, with zeros, infinities, NaN, subnormals and halfway cases of the narrow formats."""
    bits = torch.randint(-(1 << 31), 1 << 31, (count,), dtype=torch.int64).to(torch.int32).view(torch.float32)
    halves = torch.cat(
        [all_bits(t).float() * (1 + 2.0**-8 + e) for t in (torch.bfloat16, torch.float16) for e in (0, 1e-7)]
    )
    special = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 65504.0, 65519.9, 65520.0, 1e-45])
    return torch.cat([bits, halves, special])


@pytest.mark.parametrize("build", builds())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_widening_is_exact(build: int, dtype: torch.dtype) -> None:
    source = all_bits(dtype)
    out = torch.full((source.numel(),), 7.0)
    native.load().cd_convert(build, out.data_ptr(), source.data_ptr(), native.type_code(dtype), 0, source.numel())
    want = source.float()
    nan = want.isnan()
    assert torch.equal(out.isnan(), nan)
    assert torch.equal(out[~nan].view(torch.int32), want[~nan].view(torch.int32))


@pytest.mark.parametrize("build", builds())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrowing_rounds_as_torch(build: int, dtype: torch.dtype) -> None:
    source = awkward(200_000)
    out = torch.zeros(source.numel(), dtype=dtype)
    native.load().cd_convert(build, out.data_ptr(), source.data_ptr(), native.type_code(dtype), 1, source.numel())
    want = source.to(dtype)
    nan = want.isnan()
    assert torch.equal(out.isnan(), nan)
    assert torch.equal(out[~nan].view(torch.int16), want[~nan].view(torch.int16))


@pytest.mark.parametrize("build", builds())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("count", [1, 15, 16, 129, 1024])
def test_weighted_sum_rounds_twice(build: int, dtype: torch.dtype, count: int) -> None:
    total, row, weight = torch.randn(count), torch.randn(count).to(dtype), float(torch.randn(1))
    want = total + row.float() * torch.tensor(weight)
    native.load().cd_scale_add(build, total.data_ptr(), row.data_ptr(), native.type_code(dtype), weight, count)
    assert torch.equal(total.view(torch.int32), want.view(torch.int32))


@pytest.mark.parametrize("build", builds())
@pytest.mark.parametrize("number", [1.0, 448 * 6 / 3.7, 1e-30, 3e38], ids=str)
def test_small_formats_are_the_written_ones(build: int, number: float) -> None:
    """MXFP8, and NVFP4 with such a global scale; of NVFP4 every tie and every bf16 number, too."""
    hidden, lib, of_all = 272, native.load(), torch.tensor([number])
    every = torch.arange(1 << 16).to(torch.uint16).view(torch.bfloat16).float()
    rows = torch.cat([awkward(16 * hidden)[: 16 * hidden], every[: len(every) // hidden * hidden]]).view(-1, hidden)
    q, scales = quant.quantize_mxfp8(rows)
    fp4, of_blocks = quant.quantize_nvfp4(rows, of_all)
    codes, exponents = torch.zeros(q.shape, dtype=torch.uint8), torch.zeros(scales.shape, dtype=torch.uint8)
    nibbles, small = torch.zeros(fp4.shape, dtype=torch.uint8), torch.zeros(of_blocks.shape, dtype=torch.uint8)
    for row in range(len(rows)):
        values = rows[row].data_ptr()
        lib.cd_quantize_mxfp8(build, codes[row].data_ptr(), exponents[row].data_ptr(), values, hidden)
        lib.cd_quantize_nvfp4(build, nibbles[row].data_ptr(), small[row].data_ptr(), values, of_all.item(), hidden)
    assert torch.equal(codes, q.view(torch.uint8))
    assert torch.equal(exponents, scales.view(torch.uint8))
    assert torch.equal(small, of_blocks.view(torch.uint8))
    assert torch.equal(nibbles, fp4)


@pytest.mark.parametrize("build", builds())
@pytest.mark.parametrize("scale_format", [ScaleFormat.FP32, ScaleFormat.UE8M0])
@pytest.mark.parametrize("hidden", [16, 128, 272, 2056])
def test_quantiser_is_the_written_one(build: int, scale_format: ScaleFormat, hidden: int) -> None:
    rows = torch.randn(40, hidden) * torch.logspace(-44, 37, 40)[:, None]
    rows[3], rows[4, ::3], rows[5, 1], rows[6, 2], rows[7] = 0.0, -0.0, float("nan"), -float("inf"), 448.0
    rows[8:16] = awkward(8 * hidden)[: 8 * hidden].view(8, hidden)
    want_q, want_scales = quant.quantize(rows, scale_format)
    pow2 = scale_format is ScaleFormat.UE8M0
    for row, q, scales in zip(rows, want_q, want_scales, strict=True):
        got = torch.zeros(hidden, dtype=torch.uint8)
        got_scales = torch.zeros(scales.numel())
        native.load().cd_quantize(build, got.data_ptr(), got_scales.data_ptr(), row.data_ptr(), pow2, hidden)
        assert torch.equal(got, q.view(torch.uint8))
        assert torch.equal(got_scales.view(torch.int32), scales.view(torch.int32))
