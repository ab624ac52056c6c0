"""The fp8 quantiser against a slow scalar definition, and its promises."""

import math

import numpy as np
import pytest
import torch

from ep_kernels import ArgumentError, checks, quant
from ep_kernels.groups import PaperGroup
from ep_kernels.transports.cpu import geometry
from ep_kernels.types import ScaleFormat
from tests.cases import RoutingCase, draw_seed
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


def scalar_quantize(row: list[float], power_of_two: bool, block_size: int = 128) -> tuple[list[int], list[float]]:
    codes, scales = [], []
    for start in range(0, len(row), block_size):
        block = [FLOAT(v) for v in row[start : start + block_size]]
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


@pytest.mark.parametrize("hidden", [32, 48, 300])
def test_mxfp8_equals_the_scalar_definition(hidden: int) -> None:
    x = hard_rows(hidden, draw_seed())
    q, scales = quant.quantize_mxfp8(x)
    assert (q.dtype, scales.dtype) == (torch.float8_e4m3fn, torch.float8_e8m0fnu)
    for row in range(len(x)):
        codes, want = scalar_quantize(x[row].tolist(), power_of_two=True, block_size=32)
        assert raw(q[row]).tolist() == codes
        assert scales[row].float().tolist() == want


def scalar_nvfp4(row: list[float], of_all: np.float32) -> tuple[list[int], list[int]]:
    """Codes with signs, and codes of the scales, by search among all values."""
    codes, scales = [], []
    for start in range(0, len(row), 16):
        block = [FLOAT(v) for v in row[start : start + 16]]
        if not all(map(math.isfinite, block)):
            codes += [8 if math.copysign(1, v) < 0 else 0 for v in block]
            scales.append(0x7F)
            continue
        with np.errstate(over="ignore"):
            exact = min(FLOAT(FLOAT(max(map(abs, block)) / FLOAT(6)) * of_all), FLOAT(448))
            scales.append(encode_e4m3(exact))
            number = FLOAT(decode_e4m3(scales[-1]))
            inverse = FLOAT(of_all / number) if number else FLOAT(0)
            sizes = [float(abs(FLOAT(v * inverse))) for v in block]
        for v, size in zip(block, sizes, strict=True):
            distance = [abs(value - min(size, 6.0)) for value in quant.E2M1]
            nearest = [code for code in range(8) if distance[code] == min(distance)]
            code = next(code for code in nearest if len(nearest) == 1 or code % 2 == 0)
            codes.append(code | (8 if math.copysign(1, v) < 0 else 0))
    return codes, scales


@pytest.mark.parametrize("number", [1.0, 448 * 6 / 3.5, 1e-20])
def test_nvfp4_equals_the_scalar_definition(number: float) -> None:
    """Ties, a block of zeros, NaN and Inf, scales that vanish and that saturate."""
    x = hard_rows(96, draw_seed())
    x[0, :16] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5, -6])
    x[5] = torch.linspace(-1e4, 1e4, 96)
    q, scales = quant.quantize_nvfp4(x, torch.tensor([number]))
    assert (q.shape, q.dtype, scales.shape, scales.dtype) == ((6, 48), torch.uint8, (6, 6), torch.float8_e4m3fn)
    for row in range(len(x)):
        codes, want = scalar_nvfp4(x[row].tolist(), FLOAT(number))
        assert torch.stack((q[row] & 15, q[row] >> 4), -1).flatten().tolist() == codes
        assert raw(scales[row]).tolist() == want
    back = quant.dequantize(q, scales, torch.tensor([number]))
    assert bool(back[2, :16].isnan().all()), "a NaN must not become a number"
    assert not back[1].any()


def test_nvfp4_of_usual_values_is_near() -> None:
    x = torch.randn(64, 256, dtype=torch.bfloat16)
    of_all = torch.tensor([448 * 6 / float(x.abs().max())])
    q, scales = quant.quantize_nvfp4(x, of_all)
    error = (quant.dequantize(q, scales, of_all) - x.float()).norm() / x.float().norm()
    assert 0.05 < float(error) < 0.12
    back = quant.dequantize(*quant.quantize_mxfp8(x))
    assert float((back - x.float()).norm() / x.float().norm()) < 0.04


@pytest.mark.parametrize(("name", "row"), [("mxfp8", 2880 + 90), ("nvfp4", 1440 + 180), (True, 2880 + 4 * 23)])
def test_bytes_of_a_row_are_those_of_codes_and_scales(name: bool | str, row: int) -> None:
    case = RoutingCase(4, 3, 2880, (2, 2))
    config = case.config(PaperGroup(0, 2), quantize=name)
    assert quant.row_bytes(config) == row
    assert geometry.wire_bytes(config, geometry.geometry_of(config))[0] == row + 8 * 3, "beside 3 places and weights"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (None, r"x: expected a pair \(x, global_scale\), since quantize is nvfp4, got Tensor"),
        (torch.ones(2), r"global_scale: expected shape \[1\], got \[2\]"),
        (torch.ones(1).double(), "global_scale: expected torch.float32"),
        *[(torch.tensor([bad]), "global_scale: expected a finite number above 0") for bad in (0.0, -1.0, math.inf)],
        (torch.tensor([math.nan]), "global_scale: expected a finite number above 0, got nan"),
    ],
)
def test_a_global_scale_that_is_none_is_refused(given: torch.Tensor | None, words: str) -> None:
    config = RoutingCase(4, 3, 64, (2, 2)).config(PaperGroup(0, 2), quantize="nvfp4")
    x = torch.randn(2, 64).bfloat16()
    with pytest.raises(ArgumentError, match=words):
        checks.payload(x if given is None else (x, given), config, "cpu")


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
