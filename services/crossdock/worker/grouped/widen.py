"""MXFP4 matrices as bf16, for experts that have many rows: what a product decodes anew for each tile of rows is then
decoded once. Triton."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _floats(code):
    """float32 of e2m1 codes 0..15."""
    exponent, mantissa = (code >> 1) & 3, (code & 1).to(tl.float32)
    scaled = (2.0 + mantissa) * (1 << exponent).to(tl.float32) * 0.25
    magnitude = tl.where(exponent == 0, 0.5 * mantissa, scaled)
    return tl.where(code & 8 != 0, -magnitude, magnitude)


@triton.jit(do_not_specialize=["least"])
def widen_mxfp4(data, scales, out, counts, least, num_bytes, block: tl.constexpr):
    """Exactly, of the experts that have `least` rows or more; what others have in `out` stays.

    Args:
        data, scales: uint8 [L, B, A / 2], [L, B, A / 32].
        out: bf16 [L, B, A].
        counts: int32 [L].
        num_bytes: B * A / 2.
        block: bytes that one program decodes; its grid is (ceil(num_bytes / block), L).
    """
    expert = tl.program_id(1)
    if tl.load(counts + expert) >= least:
        inside = tl.program_id(0) * block + tl.arange(0, block)
        at = expert.to(tl.int64) * num_bytes + inside
        byte = tl.load(data + at, mask=inside < num_bytes, other=0).to(tl.int32)
        scale = tl.load(scales + at // 16, mask=inside < num_bytes, other=0).to(tl.int32)
        power = tl.where(scale == 0, 1 << 22, scale << 23).to(tl.float32, bitcast=True)
        pair = tl.interleave(_floats(byte & 15) * power, _floats(byte >> 4) * power)
        column = tl.program_id(0) * 2 * block + tl.arange(0, 2 * block)
        to = out + expert.to(tl.int64) * 2 * num_bytes + column
        tl.store(to, pair.to(tl.bfloat16), mask=column < 2 * num_bytes)
