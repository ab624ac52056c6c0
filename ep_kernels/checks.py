"""Checks of call arguments, made once per call and before anything is sent. Below this page nothing checks again.

Each function raises ArgumentError (argument, expected, got) or returns what the transport wants.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

import torch

from ep_kernels.config import MoEConfig
from ep_kernels.errors import ArgumentError, HandleError
from ep_kernels.types import DispatchHandle, Layout, Mode

_IDS = torch.int32, torch.int64
_INT32 = torch.iinfo(torch.int32)
_FLOATS = torch.bfloat16, torch.float16, torch.float32
_COMPACT = Layout.GROUPED, Layout.FLAT


def tensor(
    name: str, value: object, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...], device_type: str
) -> torch.Tensor:
    """`value` if it is a contiguous tensor of this shape, dtype and device that has memory."""
    if (
        isinstance(value, torch.Tensor)
        and value.shape == shape
        and value.dtype in dtypes
        and (value.is_cuda if device_type == "cuda" else value.is_cpu)  # cheaper than `device`
        and value.layout is torch.strided
        and value.is_contiguous()
        and not value.is_neg()
    ):
        if value.data_ptr() == 0 and value.numel():  # a kernel would write to address 0
            raise without_memory(name, value)
        return value
    raise _unlike(name, value, shape, dtypes, device_type)


def without_memory(name: str, value: torch.Tensor) -> ArgumentError:
    """The error of a tensor at address 0."""
    kind = type(value).__name__
    if hasattr(value, "__tensor_flatten__"):
        held = f"a {kind}, which wraps others: pass the one it holds (a DTensor's to_local())"
        return ArgumentError(name, "a plain tensor", held)
    return ArgumentError(name, "a tensor with memory", f"a {kind} without: freed, fake or only traced")


def made(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that torch has just made for a call, if it has memory: under a mode like FakeTensorMode none has."""
    if type(tensor) is not torch.Tensor:
        raise ArgumentError("x", "a call where tensors have memory", f"one under a mode that makes {type(tensor)}")
    return tensor


def _unlike(
    name: str, value: object, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...], device_type: str
) -> ArgumentError:
    """In what `value` differs."""
    if not isinstance(value, torch.Tensor):
        return ArgumentError(name, "a torch.Tensor", type(value).__name__)
    if value.shape != shape:
        return ArgumentError(name, f"shape {list(shape)}", list(value.shape))
    if value.dtype not in dtypes:
        return ArgumentError(name, " or ".join(map(str, dtypes)), value.dtype)
    if value.device.type != device_type:
        return ArgumentError(name, f"a tensor on {device_type}", value.device)
    if value.layout is torch.strided and value.is_contiguous():
        return ArgumentError(name, "a resolved tensor", "one negated lazily: resolve_neg()")
    strides = list(value.stride()) if value.layout is torch.strided else value.layout
    return ArgumentError(name, "a contiguous tensor", f"strides {strides}")


def payload(x: object, config: MoEConfig, device_type: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """x [T, H], or (x, scales) where `scale_columns` > 0, or (x, global scale) of NVFP4; T at most M."""
    scales: object = None
    is_nvfp4 = config.quantize == "nvfp4"
    if config.scale_columns or is_nvfp4:
        if not isinstance(x, tuple) or len(x) != 2:
            pair = "(x, global_scale), since quantize is nvfp4" if is_nvfp4 else "(x, scales), since scale_columns > 0"
            raise ArgumentError("x", f"a pair {pair}", type(x).__name__)
        x, scales = x
    if not isinstance(x, torch.Tensor):
        raise ArgumentError("x", "a torch.Tensor", type(x).__name__)
    if x.ndim != 2:
        raise ArgumentError("x", f"shape [T, {config.hidden_size}]", list(x.shape))
    rows = x.shape[0]
    if rows > config.max_tokens_per_rank:
        raise ArgumentError("x", f"at most max_tokens_per_rank = {config.max_tokens_per_rank} rows", rows)
    body = tensor("x", x, (rows, config.hidden_size), (config.dtype,), device_type)
    if is_nvfp4:
        return body, global_scale(scales, device_type)
    if not config.scale_columns:
        return body, None
    return body, tensor("scales", scales, (rows, config.scale_columns), (config.scale_dtype,), device_type)


def global_scale(value: object, device_type: str) -> torch.Tensor:
    """float32 [1], finite and above 0; on a GPU its number is not looked at."""
    found = tensor("global_scale", value, (1,), (torch.float32,), device_type)
    if device_type == "cpu" and not 0 < found.item() < math.inf:
        raise ArgumentError("global_scale", "a finite number above 0", found.item())
    return found


def topk_ids(value: object, rows: int, config: MoEConfig, device_type: str, wide: bool) -> torch.Tensor:
    """int32 or, unless `wide`, int64 [T, K] -> int32. Ids out of range stay so (an int64 is clamped, not wrapped into
    the range)."""
    ids = tensor("topk_ids", value, (rows, config.topk), _IDS, device_type)
    if config.validate and ((ids < -1) | (ids >= config.num_experts)).any():
        bad = ids[(ids < -1) | (ids >= config.num_experts)][0].item()
        raise ArgumentError("topk_ids", f"-1 or 0..{config.num_experts - 1}", bad)
    return ids if wide or ids.dtype is torch.int32 else ids.clamp(_INT32.min, _INT32.max).int()


def topk_weights(value: object, rows: int, config: MoEConfig, device_type: str) -> torch.Tensor:
    """float32 [T, K]. NaN propagates into the token's result; with `validate` it is refused."""
    weights = tensor("topk_weights", value, (rows, config.topk), (torch.float32,), device_type)
    if config.validate and weights.isnan().any():
        raise ArgumentError("topk_weights", "no NaN", f"{int(weights.isnan().sum())} of them")
    return weights


def combine_arguments(
    y: object, out: object, row_weights: object, handle: DispatchHandle, config: MoEConfig, device_type: str
) -> None:
    """Expert rows in the shape of the handle's tokens, z [T, H] or None, and a weight for each row (and k) or None."""
    tensor("y", y, (*handle.rows_shape, config.hidden_size), (config.resolved_output_dtype,), device_type)
    if out is not None:
        shape = handle.num_tokens, config.hidden_size
        if share_memory(y, tensor("out", out, shape, z_dtypes(config, device_type), device_type)):
            raise ArgumentError("out", "memory apart from y", "bytes in common")
    if row_weights is not None:
        each = () if config.resolved_layout.per_expert else (config.topk,)
        tensor("row_weights", row_weights, (*handle.rows_shape, *each), (torch.float32,), device_type)


def z_dtypes(config: MoEConfig, device_type: str) -> tuple[torch.dtype, ...]:
    """dtypes that z [T, H] may have to be written into."""
    dtype = config.resolved_output_dtype
    other = (config.dtype,) if config.dtype is not dtype and rounds_sums(config, device_type) else ()
    return dtype, *other


def traced_out(out: object, shape: tuple[int, ...], dtype: torch.dtype, device_type: str) -> None:
    """A tensor to copy a result to while torch.compile traces: `copy_` would convert, and repeat rows. It may share
    memory with what the operation reads, since the result has memory of its own."""
    fits = isinstance(out, torch.Tensor) and out.shape == shape and out.dtype == dtype
    if not fits or out.device.type != device_type or not out.is_contiguous():  # type: ignore[attr-defined]
        raise _unlike("out", out, shape, (dtype,), device_type)


def share_memory(one: object, other: object) -> bool:
    """Whether two contiguous tensors have a byte in common."""
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return False
    begin, there = one.data_ptr(), other.data_ptr()  # 0 where there is no byte
    return begin < there + other.nbytes and there < begin + one.nbytes


def rounds_sums(config: MoEConfig, device_type: str) -> bool:
    """Whether combine's sums may be rounded to `config.dtype` as they are written, once, instead of to the output
    dtype."""
    return device_type == "cpu" and config.dtype in _FLOATS


def source_weights(value: object, rows: int, config: MoEConfig, device_type: str) -> torch.Tensor:
    """float32 [T, K] that an exact combine applies at the source rank."""
    if not config.exact_combine:
        raise ArgumentError("topk_weights", "None unless exact_combine is on", type(value).__name__)
    return topk_weights(value, rows, config, device_type)


def uncompiled(topk_weights: object) -> None:
    if topk_weights is not None:
        raise ArgumentError("topk_weights", "None inside torch.compile", "a tensor")


def handle(value: object, owner: int, epoch: int) -> None:
    """A DispatchHandle of communicator `owner`, made in this epoch; HandleError otherwise."""
    if not isinstance(value, DispatchHandle):
        raise ArgumentError("handle", "a DispatchHandle", type(value).__name__)
    if value.owner != owner:
        raise HandleError("handle: made by another communicator, or in another process")
    if value.epoch != epoch:
        raise HandleError(f"handle: made in epoch {value.epoch}, the group is in epoch {epoch}")


def trimmed_rows(num_rows: int, handle: DispatchHandle, config: MoEConfig) -> None:
    """Rows of a compact layout in fixed shapes, no more than the handle has."""
    layout = config.resolved_layout
    if layout not in _COMPACT:
        raise ArgumentError("layout", "GROUPED or FLAT", layout.value)
    if config.exact_shapes:
        raise ArgumentError("exact_shapes", "False: a handle of exact shapes has its number of rows", True)
    if not 0 <= num_rows <= handle.rows_shape[0]:
        raise ArgumentError("num_rows", f"0..{handle.rows_shape[0]}", num_rows)


def input_rows(num_tokens: int, config: MoEConfig) -> None:
    """T of a buffer to write x into."""
    if not 0 <= num_tokens <= config.max_tokens_per_rank:
        raise ArgumentError("num_tokens", f"0..{config.max_tokens_per_rank}", num_tokens)


def known_early(config: MoEConfig) -> None:
    """Refuse buffers before they are full where their shapes depend on what arrives."""
    if config.resolved_layout in _COMPACT and config.exact_shapes:
        raise ArgumentError("exact_shapes", "False with GROUPED and FLAT, to know shapes before they arrive", True)


def per_expert(config: MoEConfig) -> None:
    if not config.resolved_layout.per_expert:
        raise ArgumentError("layout", "a per-expert layout", config.resolved_layout.value)


def int64_words(values: Sequence[int], count: int) -> None:
    """Exactly `count` integers that fit int64."""
    try:
        fits = len(struct.pack(f"={count}q", *values)) == 8 * len(values)
    except (TypeError, struct.error):  # no sequence, not of integers, or not so many
        fits = False
    if not fits:
        raise ArgumentError("words", f"{count} int64", values)


def step_tokens(value: object, rows: int, config: MoEConfig) -> int:
    """The step's agreed largest T, equal on all ranks."""
    if type(value) is not int or not rows <= value <= config.max_tokens_per_rank:
        raise ArgumentError("step_tokens", f"an int in {rows}..{config.max_tokens_per_rank}", repr(value))
    return value


def resolve_mode(config: MoEConfig, tokens: int, ll_max_tokens: int) -> Mode:
    """The algorithm of one step: the configured one, or by AUTO's crossover."""
    if config.mode is not Mode.AUTO:
        return config.mode
    return Mode.LL if tokens <= ll_max_tokens else Mode.HT


def active_mask(mask: object, epoch: int, rank: int, size: int, current_epoch: int) -> tuple[bool, ...]:
    """set_active's arguments: R bools, True for this rank, and an epoch that grew."""
    try:
        values = tuple(bool(v) for v in mask)  # type: ignore[attr-defined]
    except TypeError:
        raise ArgumentError("mask", f"{size} bools", type(mask).__name__) from None
    if len(values) != size:
        raise ArgumentError("mask", f"{size} bools", f"{len(values)} values")
    if not values[rank]:
        raise ArgumentError("mask", f"True for this rank ({rank})", list(values))
    if type(epoch) is not int or epoch <= current_epoch:
        raise ArgumentError("epoch", f"an int > {current_epoch}", repr(epoch))
    return values
