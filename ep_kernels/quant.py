"""The one written-down quantiser. C++ and CUDA give the same bits; tests compare them with this file.

fp8, for each row and each block of 128 columns (the last block may be short), all in IEEE fp32, to nearest even:

    amax    = max |x| over the finite elements of the block
    scale   = 1                          if amax == 0
              max(amax / 448, 2^-126)    else (a true division; the floor keeps scales normal; some GPUs flush others)
    scale   = next power of two >= scale   for UE8M0 formats: mantissa bits set -> exponent + 1, mantissa cleared
    inverse = 1 / scale                  (a true division, once per block)
    q       = e4m3fn(x * inverse)        (fp32 multiplication, never x / scale: one instruction per element everywhere)
              0x7F                       where x is NaN or +-Inf

Why it never overflows: |x| * inverse <= 448 * (1 + 2^-22), which rounds to 448, the largest e4m3fn; no clamp is needed.
NaN and Inf propagate element by element: e4m3fn has no Inf, so both become its NaN (0x7F, whatever the sign), and their
neighbours keep their precision because amax does not see them. -0 stays -0 (0x80).

MXFP8 is the same with blocks of 32 and UE8M0 scales, of which the exponents are delivered (float8_e8m0fnu).

NVFP4, for each block of 16 columns and a scale g of all rows that the caller gives (NVIDIA's is 448 * 6 / the largest
magnitude that is expected):

    amax    = max |x| over the block
    scale   = e4m3fn(min(amax / 6 * g, 448))  (a true division, then a product, to nearest even; may become 0)
              0x7F, its NaN,               where the block has a NaN or an Inf
    inverse = g / scale                    (a true division, once per block); 0 where scale is 0
    code    = e2m1(|x * inverse|)          to nearest, ties to the even code; past 6: 6; 0 where the scale is NaN
    nibble  = code + 8 where x has a sign; column 2i in the low half of byte i

x is about code * scale / g. e2m1 has neither NaN nor Inf: the block's scale has it, so all 16 values become NaN, and
none is silently another number. A scale that was rounded down lets the largest value of a block saturate.
"""

from __future__ import annotations

import torch

from ep_kernels.config import FP8_BLOCK, MoEConfig
from ep_kernels.types import ScaleFormat

FP8_MAX, FP4_MAX = 448.0, 6.0
MX_BLOCK, NV_BLOCK = 32, 16
"""Columns that share a scale in MXFP8 and in NVFP4."""
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FP8_NAN = 0x7F
MIN_SCALE = 2.0**-126
PACK = 4
"""UE8M0 exponents in one int32, the lowest byte first."""
ROW_PAD = 4
"""Packed scales: the column stride is the number of rows rounded up to 4, because TMA wants strides of 16 bytes."""


def scale_columns(hidden_size: int, scale_format: ScaleFormat) -> int:
    """Columns of the scale tensor beside rows of `hidden_size` values."""
    blocks = -(-hidden_size // FP8_BLOCK)
    return -(-blocks // PACK) if scale_format is ScaleFormat.UE8M0_PACKED else blocks


def row_bytes(config: MoEConfig) -> int:
    """Bytes of one token's row as dispatch moves it, scales included."""
    columns, dtype = delivered_scales(config)
    return int(config.payload_columns * config.payload_dtype.itemsize + columns * dtype.itemsize)


def delivered_scales(config: MoEConfig) -> tuple[int, torch.dtype]:
    """Columns and dtype of `DispatchOutput.scales`; 0: there are none."""
    if not config.quantize:
        return config.scale_columns, config.scale_dtype
    if isinstance(config.quantize, str):
        is_mx = config.quantize == "mxfp8"
        dtype = torch.float8_e8m0fnu if is_mx else torch.float8_e4m3fn
        return -(-config.hidden_size // (MX_BLOCK if is_mx else NV_BLOCK)), dtype
    packed = config.scale_format is ScaleFormat.UE8M0_PACKED
    return scale_columns(config.hidden_size, config.scale_format), torch.int32 if packed else torch.float32


def quantize_for(
    config: MoEConfig, x: torch.Tensor, global_scale: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows as a dispatch of this configuration moves them, UE8M0_PACKED not yet packed.

    Args:
        x: [T, H] floating.
        global_scale: float32 [1], of NVFP4.
    """
    if config.quantize == "nvfp4":
        assert global_scale is not None
        return quantize_nvfp4(x, global_scale)
    if config.quantize == "mxfp8":
        return quantize_mxfp8(x)
    packed = config.scale_format is ScaleFormat.UE8M0_PACKED
    return quantize(x, ScaleFormat.UE8M0 if packed else config.scale_format)


def partial_bytes(config: MoEConfig) -> int:
    """Bytes of one partial sum as combine moves it, scales included."""
    dtype = config.resolved_combine_dtype
    scales = 4 * scale_columns(config.hidden_size, ScaleFormat.FP32) if dtype.itemsize == 1 else 0
    return int(config.hidden_size * dtype.itemsize + scales)


def quantize(
    x: torch.Tensor, scale_format: ScaleFormat = ScaleFormat.FP32, block: int = FP8_BLOCK
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., H] floating -> (q [..., H] float8_e4m3fn, scales).

    scales is [..., ceil(H/block)] float32, or for UE8M0_PACKED what `pack` makes of them.
    """
    hidden = x.shape[-1]
    blocks = -(-hidden // block)
    padded = torch.nn.functional.pad(x.float(), (0, blocks * block - hidden))
    wide = padded.reshape(*x.shape[:-1], blocks, block)
    amax = torch.where(wide.isfinite(), wide.abs(), 0.0).amax(-1)
    scale = torch.where(amax == 0, 1.0, (amax / torch.full_like(amax, FP8_MAX)).clamp(min=MIN_SCALE))
    if scale_format is not ScaleFormat.FP32:
        scale = ceil_power_of_two(scale)
    inverse = torch.ones_like(scale) / scale
    q = (wide * inverse[..., None]).to(torch.float8_e4m3fn).view(torch.uint8)
    q = torch.where(wide.isfinite(), q, FP8_NAN).flatten(-2)[..., :hidden].contiguous().view(torch.float8_e4m3fn)
    return q, pack(scale) if scale_format is ScaleFormat.UE8M0_PACKED else scale


def quantize_mxfp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., H] floating -> (q [..., H] float8_e4m3fn, scales [..., ceil(H/32)] float8_e8m0fnu)."""
    q, scale = quantize(x, ScaleFormat.UE8M0, MX_BLOCK)
    return q, (scale.view(torch.int32) >> 23).to(torch.uint8).view(torch.float8_e8m0fnu)


def quantize_nvfp4(x: torch.Tensor, global_scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., H] floating, H a multiple of 16, float32 [1] -> (uint8 [..., H/2], scales [..., H/16] float8_e4m3fn)."""
    wide = x.float().unflatten(-1, (-1, NV_BLOCK))  # type: ignore[no-untyped-call]
    amax = wide.abs().amax(-1)
    exact = (amax / torch.full_like(amax, FP4_MAX) * global_scale).clamp(max=FP8_MAX)
    scale = torch.where(wide.isfinite().all(-1), exact, torch.nan).to(torch.float8_e4m3fn)
    number = scale.float()
    inverse = torch.where(number == 0, 0.0, global_scale / number)
    size = (wide * inverse[..., None]).abs()
    ties_down, ties_up = (0.25, 1.25, 2.5, 5.0), (0.75, 1.75, 3.5)
    code = sum([size > limit for limit in ties_down] + [size >= limit for limit in ties_up], wide.signbit() * 8)
    flat = code.to(torch.uint8).flatten(-2)
    return flat[..., ::2] | flat[..., 1::2] << 4, scale


def dequantize(q: torch.Tensor, scales: torch.Tensor, global_scale: torch.Tensor | None = None) -> torch.Tensor:
    """What a quantiser's rows mean, float32 [..., H]; by the dtype of the scales. global_scale: NVFP4's."""
    if scales.dtype is torch.float8_e4m3fn:
        assert global_scale is not None
        values = torch.tensor([*E2M1, *(-value for value in E2M1)], device=q.device)
        codes = torch.stack((q & 15, q >> 4), -1).flatten(-2)
        return values[codes.int()] * (scales.float() / global_scale).repeat_interleave(NV_BLOCK, -1)
    block = MX_BLOCK if scales.dtype is torch.float8_e8m0fnu else FP8_BLOCK
    scale = unpack(scales, -(-q.shape[-1] // block)) if scales.dtype == torch.int32 else scales.float()
    return q.float() * scale.repeat_interleave(block, -1)[..., : q.shape[-1]]


def ceil_power_of_two(scale: torch.Tensor) -> torch.Tensor:
    """The smallest power of two >= scale, for positive normal float32."""
    bits = scale.view(torch.int32)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).int()
    return (exponent << 23).view(torch.float32)


def pack(scale: torch.Tensor) -> torch.Tensor:
    """Powers of two, float32 [..., rows, blocks] -> int32 [..., rows, ceil(blocks/4)], the row index fastest.

    Byte b of word w is the biased exponent (value 2^(byte - 127)) of block 4w + b; bytes past the last block are 0. The
    strides are (..., 1, rows rounded up to 4); padding rows exist in memory and hold unspecified bytes.
    """
    *lead, rows, blocks = scale.shape
    words = -(-blocks // PACK)
    bytes_ = torch.nn.functional.pad((scale.view(torch.int32) >> 23), (0, words * PACK - blocks)).to(torch.uint8)
    packed = bytes_.contiguous().view(torch.int32)
    out = packed_empty((*lead, rows), words, scale.device)
    out.copy_(packed)
    return out


def packed_empty(rows_shape: tuple[int, ...], words: int, device: torch.device | None = None) -> torch.Tensor:
    """An int32 [*rows_shape, words] of the strides that `pack` describes, holding zeros."""
    *lead, rows = rows_shape
    padded = -(-rows // ROW_PAD) * ROW_PAD
    return torch.zeros(*lead, words, padded, dtype=torch.int32, device=device).transpose(-1, -2)[..., :rows, :]


def unpack(packed: torch.Tensor, blocks: int) -> torch.Tensor:
    """Inverse of `pack`: int32 [..., rows, words] -> float32 [..., rows, blocks]."""
    rows = packed.clone(memory_format=torch.contiguous_format)
    exponents = rows.view(torch.uint8)[..., :blocks].int()
    return (exponents << 23).view(torch.float32)
