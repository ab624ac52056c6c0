"""The one written-down fp8 quantiser. C++ and CUDA give the same bits; tests compare them with this file.

For each row and each block of 128 columns (the last block may be short), all in IEEE fp32, round to nearest even:

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
"""

from __future__ import annotations

import torch

from ep_kernels.config import FP8_BLOCK, MoEConfig
from ep_kernels.types import ScaleFormat

FP8_MAX = 448.0
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
    scales = config.scale_columns * config.scale_dtype.itemsize
    if config.quantize:
        scales = 4 * scale_columns(config.hidden_size, config.scale_format)  # float32, or four exponents to an int32
    return int(config.hidden_size * config.payload_dtype.itemsize + scales)


def partial_bytes(config: MoEConfig) -> int:
    """Bytes of one partial sum as combine moves it, scales included."""
    dtype = config.resolved_combine_dtype
    scales = 4 * scale_columns(config.hidden_size, ScaleFormat.FP32) if dtype.itemsize == 1 else 0
    return int(config.hidden_size * dtype.itemsize + scales)


def quantize(x: torch.Tensor, scale_format: ScaleFormat = ScaleFormat.FP32) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., H] floating -> (q [..., H] float8_e4m3fn, scales).

    scales is [..., ceil(H/128)] float32, or for UE8M0_PACKED what `pack` makes of them.
    """
    hidden = x.shape[-1]
    blocks = scale_columns(hidden, ScaleFormat.FP32)
    padded = torch.nn.functional.pad(x.float(), (0, blocks * FP8_BLOCK - hidden))
    wide = padded.reshape(*x.shape[:-1], blocks, FP8_BLOCK)
    amax = torch.where(wide.isfinite(), wide.abs(), 0.0).amax(-1)
    scale = torch.where(amax == 0, 1.0, (amax / torch.full_like(amax, FP8_MAX)).clamp(min=MIN_SCALE))
    if scale_format is not ScaleFormat.FP32:
        scale = ceil_power_of_two(scale)
    inverse = torch.ones_like(scale) / scale
    q = (wide * inverse[..., None]).to(torch.float8_e4m3fn).view(torch.uint8)
    q = torch.where(wide.isfinite(), q, FP8_NAN).flatten(-2)[..., :hidden].contiguous().view(torch.float8_e4m3fn)
    return q, pack(scale) if scale_format is ScaleFormat.UE8M0_PACKED else scale


def dequantize(q: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """(q [..., H] float8_e4m3fn, scales float32 [..., ceil(H/128)] or packed int32) -> [..., H] float32, q * scale."""
    blocks = scale_columns(q.shape[-1], ScaleFormat.FP32)
    scale = unpack(scales, blocks) if scales.dtype == torch.int32 else scales
    return q.float() * scale.repeat_interleave(FP8_BLOCK, -1)[..., : q.shape[-1]]


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
