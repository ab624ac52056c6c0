"""The fp8 quantiser against a slow scalar definition, and its promises."""

import math

import numpy as np
import pytest
import torch

from ep_kernels import quant
from ep_kernels.types import ScaleFormat
from tests.cases import draw_seed
from tests.compare import packed_layout, raw

FLOAT = np.float32


def decode_e4m3(code: int) -> float:
    """Value of a positive e4m3fn code, 0x7F excluded."""
    exponent, mantissa = code >> 3, code & 7
    return mantissa * 2.0**-9 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)


TABLE = [decode_e4m3(code) for code in range(0x7F)]


def encode_e4m3(value: np.float32) -> int:
    """Round to nearest even among the 127 positive values; |value| below 464 as the quantiser guarantees."""
    sign = 0x80 if math.copysign(1, value) < 0 else 0
    distance = [abs(v - abs(float(value))) for v in TABLE]
    best = min(distance)
    codes = [code for code, d in enumerate(distance) if d == best]
    return sign | next(code for code in codes if len(codes) == 1 or code % 2 == 0)


def scalar_quantize(row: list[float], power_of_two: bool) -> tuple[list[int], list[float]]:
    codes, scales = [], []
    for start in range(0, len(row), 128):
        block = [FLOAT(v) for v in row[start : start + 128]]
        amax = max([abs(v) for v in block if math.isfinite(v)], default=FLOAT(0))
        scale = FLOAT(1) if amax == 0 else max(FLOAT(amax / FLOAT(448)), FLOAT(2.0**-126))
        if power_of_two and amax:
            mantissa, exponent = math.frexp(float(scale))
            scale = FLOAT(2.0 ** (exponent - 1 if mantissa == 0.5 else exponent))
        inverse = FLOAT(FLOAT(1) / scale)
        codes += [encode_e4m3(FLOAT(v * inverse)) if math.isfinite(v) else 0x7F for v in block]
        scales.append(float(scale))
    return codes, scales


def hard_rows(hidden: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    exponent = torch.randint(-149, 127, (6, 1), generator=generator).float()
    x = torch.randn(6, hidden, generator=generator).double() * torch.exp2(exponent.double())
    x[0] = torch.randint(-448, 449, (hidden,), generator=generator) / 2  # ties
    x[1, :] = 0
    x[1, hidden // 2] = -0.0
    x[2, 3], x[2, 5], x[2, 7] = float("nan"), float("inf"), -float("inf")
    x[3] = torch.randn(hidden, generator=generator) * 1e-41  # fp32 subnormals: the floor of the scale
    x[4, : min(hidden, 128)] = float("nan")
    return x.float()


@pytest.mark.parametrize("hidden", [16, 128, 136, 300])
@pytest.mark.parametrize("scale_format", list(ScaleFormat))
def test_equals_the_scalar_definition(hidden: int, scale_format: ScaleFormat) -> None:
    seed = draw_seed()
    x = hard_rows(hidden, seed)
    q, scales = quant.quantize(x, scale_format)
    if scale_format is ScaleFormat.UE8M0_PACKED:
        scales = quant.unpack(scales, -(-hidden // 128))
    for row in range(len(x)):
        codes, want = scalar_quantize(x[row].tolist(), scale_format is not ScaleFormat.FP32)
        assert raw(q[row]).tolist() == codes, f"seed {seed} row {row}"
        assert scales[row].tolist() == want, f"seed {seed} row {row}"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_error_is_half_a_step(dtype: torch.dtype) -> None:
    x = torch.randn(64, 384, generator=torch.Generator().manual_seed(draw_seed())).to(dtype)
    for scale_format in ScaleFormat:
        q, scales = quant.quantize(x, scale_format)
        back = quant.dequantize(q, scales)
        blocks = x.float().view(64, 3, 128)
        step = 2.0 if scale_format is not ScaleFormat.FP32 else 1.0  # a rounded-up scale is at most twice as coarse
        bound = blocks.abs() * 2**-4 + blocks.abs().amax(-1, keepdim=True) * step / 448 * 2**-10
        assert ((back - x.float()).view(64, 3, 128).abs() <= bound * (1 + 2**-20)).all()


def test_not_finite_values_stay_alone() -> None:
    x = torch.randn(4, 256)
    clean, _ = quant.quantize(x)
    small = int(x[0, :128].abs().argmin())
    x[0, small], x[1, 200] = float("inf"), float("nan")
    q, scales = quant.quantize(x)
    assert raw(q[0])[small] == 0x7F
    assert raw(q[1])[200] == 0x7F
    assert scales.isfinite().all()
    assert (raw(q[0])[:small] == raw(clean[0])[:small]).all()
    assert int(quant.dequantize(q, scales).isnan().sum()) == 2


def test_largest_values_do_not_overflow() -> None:
    top = torch.finfo(torch.float32).max
    bits = torch.randint(0, 0x7F7FFFFF, (4096, 1), dtype=torch.int32)
    x = torch.cat([torch.tensor([[top]]), bits.view(torch.float32)]).expand(-1, 16)
    for scale_format in ScaleFormat:
        assert not quant.quantize(x.contiguous(), scale_format)[0].float().isnan().any()


def test_zero_blocks_and_signed_zero() -> None:
    x = torch.zeros(2, 160)
    x[1, 3] = -0.0
    q, scales = quant.quantize(x)
    assert (scales == 1).all()
    assert raw(q[1])[3] == 0x80
    assert raw(q[0]).sum() == 0


@pytest.mark.parametrize("shape", [(1,), (3,), (4,), (5, 3), (0,), (2, 0), (0, 4)])
@pytest.mark.parametrize("blocks", [1, 4, 5, 9])
def test_packed_scales(shape: tuple[int, ...], blocks: int) -> None:
    exponents = torch.randint(1, 250, (*shape, blocks), dtype=torch.int32)
    scale = (exponents << 23).view(torch.float32)
    packed = quant.pack(scale)
    assert packed.shape == (*shape, -(-blocks // 4))
    assert packed.dtype == torch.int32
    packed_layout(packed)
    assert torch.equal(quant.unpack(packed, blocks), scale)
    if packed.numel() and blocks % 4:
        assert (packed[..., -1].int() >> (8 * (blocks % 4)) == 0).all() or blocks % 4 == 3
    if packed.numel():
        assert ((packed[..., 0] & 0xFF) == exponents[..., 0]).all(), "the first block is the lowest byte"


def test_no_rows() -> None:
    q, scales = quant.quantize(torch.empty(0, 256), ScaleFormat.UE8M0_PACKED)
    assert q.shape == (0, 256)
    assert scales.shape == (0, 1)
