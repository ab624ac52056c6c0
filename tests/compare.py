"""What "the same" means between a transport and the reference, and a toy expert that both can run."""

from __future__ import annotations

import torch

from ep_kernels.config import MoEConfig
from ep_kernels.routing import delivered
from ep_kernels.types import DispatchOutput, Layout, Mode


def raw(t: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, [..., bytes]."""
    return t.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def freed(tensor: torch.Tensor) -> torch.Tensor:
    """As FSDP frees parameters."""
    tensor.untyped_storage().resize_(0)
    return tensor


def same_bits(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    """Equal shape, dtype and bits; one NaN is as good as another."""
    assert got.shape == want.shape, f"{what}: shape {list(got.shape)}, want {list(want.shape)}"
    assert got.dtype == want.dtype, f"{what}: dtype {got.dtype}, want {want.dtype}"
    if not want.numel():
        return
    got, want = got.cpu(), want.cpu()
    equal = (raw(got) == raw(want)).view(*got.shape, got.itemsize).all(-1)
    if got.is_floating_point():
        equal |= got.float().isnan() & want.float().isnan()
    if not equal.all():
        where = (~equal).nonzero()
        first = tuple(where[0].tolist())
        raise AssertionError(
            f"{what}: {len(where)} of {equal.numel()} differ, first at {list(first)}: "
            f"got {got[first].item()!r}, want {want[first].item()!r}"
        )


def same_dispatch(got: DispatchOutput, want: DispatchOutput, filled: int = 0) -> None:
    """Equal in everything the contract promises; rows past the counts may hold anything, but for the ids and weights of
    the first `filled` rows."""
    for name in ("counts", "offsets", "num_rows", "valid", "num_dropped", "num_invalid_ids"):
        a, b = getattr(got, name), getattr(want, name)
        assert (a is None) == (b is None), name
        if b is not None:
            assert a.dtype == b.dtype, f"{name}: dtype {a.dtype}, want {b.dtype}"
            assert a.tolist() == b.tolist(), f"{name}: got {a.tolist()}, want {b.tolist()}"
    assert got.layout is want.layout
    rows = delivered(want)
    for name in ("tokens", "scales", "topk_ids", "topk_weights"):
        a, b = getattr(got, name), getattr(want, name)
        assert (a is None) == (b is None), name
        if b is not None:
            assert a.shape == b.shape, f"{name}: shape {list(a.shape)}, want {list(b.shape)}"
            assert a.dtype == b.dtype, f"{name}: dtype {a.dtype}, want {b.dtype}"
            same_bits(raw(a.cpu()[rows]), raw(b[rows]), name)
    for name in ("topk_ids", "topk_weights") if filled else ():
        same_bits(getattr(got, name)[:filled], getattr(want, name)[:filled], f"{name} of rows that did not come")


def filled_rows(config: MoEConfig, mode: Mode | None = None) -> int:
    """Rows whose ids are there though they did not come, in a step of as many tokens as the mode may bring."""
    if config.absent_id is None or config.exact_shapes:
        return 0
    few = config.mode is Mode.AUTO and mode is Mode.LL and config.ll_max_tokens is not None
    most = config.max_tokens_per_rank
    return int(config.group.size * (min(most, config.ll_max_tokens) if few else most))


def packed_layout(scales: torch.Tensor) -> None:
    """The strides that TMA wants of packed UE8M0 scales (see `quant.pack`)."""
    rows, words = scales.shape[-2:]
    if rows > 1:
        assert scales.stride(-2) == 1, scales.stride()
    if words > 1 and rows:
        assert scales.stride(-1) == -(-rows // 4) * 4, scales.stride()


def expert(out: DispatchOutput, dtype: torch.dtype) -> torch.Tensor:
    """Toy experts, the same per row wherever the row lies: expert e multiplies by 1 + e/4 (and rank-wise layouts weight
    and sum). Undelivered rows are NaN, so that whoever reads them shows it."""
    tokens = out.tokens if out.tokens.is_floating_point() else out.tokens.view(torch.uint8).float() / 16 - 8
    tokens = tokens.float()
    if out.scales is not None and out.scales.dtype is torch.float8_e4m3fn:  # NVFP4 has two columns in a byte
        tokens = tokens.repeat_interleave(2, -1)
    rows = torch.arange(tokens.shape[-2], device=tokens.device)
    match out.layout:
        case Layout.EXPERT_MAJOR:
            gain = (1 + torch.arange(tokens.shape[0], device=tokens.device) / 4)[:, None].expand(tokens.shape[:-1])
        case Layout.GROUPED:
            assert out.offsets is not None
            gain = 1 + (torch.searchsorted(out.offsets, rows.int(), right=True) - 1) / 4
        case _:
            assert out.topk_ids is not None
            assert out.topk_weights is not None
            weighted = torch.where(out.topk_ids >= 0, out.topk_weights * (1 + out.topk_ids / 4), 0)
            gain = torch.zeros(tokens.shape[:-1], device=tokens.device)
            for k in range(weighted.shape[-1]):
                gain = gain + weighted[..., k]
    y = tokens * gain[..., None]
    return torch.where(delivered(out)[..., None], y, float("nan")).to(dtype)


def poison(t: torch.Tensor) -> None:
    """Overwrite a buffer that the transport will recycle."""
    if t.numel():
        t.view(torch.uint8).fill_(0xA5)
