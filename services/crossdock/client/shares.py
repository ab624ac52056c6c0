"""How a batch is checked and cut into requests. Pure.

Letters: T tokens.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import NamedTuple, SupportsIndex

import torch

from crossdock.client.errors import InvalidRequest

Parts = Sequence[torch.Tensor]

MAX_TIMEOUT_S = 1e6
"""Longer ones, infinity too, mean this: what a request can carry as milliseconds."""
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_INTS = (torch.int32, torch.int64)


class ForwardCall(NamedTuple):
    """One call of `forward`.

    Attributes:
        layer: with the experts.
        parts: x [T, H], topk_ids [T, K], topk_weights float32 [T, K] on the host; T > 0.
        deadline: monotonic seconds.
        turn: number of the call, which says where its first share goes.
        model: fingerprint of the checkpoint that is wanted; empty: any.
        models: fingerprint of the checkpoint that made each share, in the order of the answers.
    """

    layer: int
    parts: Parts
    deadline: float
    turn: int
    model: str
    models: dict[Share, str]

    def stale(self) -> list[Share]:
        """Shares of another checkpoint than the last answer's."""
        last = next(reversed(self.models.values()), "")
        return [share for share, model in self.models.items() if model != last]


class Share(NamedTuple):
    """Rows start..stop of a batch, for the worker at position `worker` of the list."""

    worker: int
    start: int
    stop: int


def split(num_tokens: int, num_workers: int, first: int, min_tokens: int) -> list[Share]:
    """Cut a batch into even shares, one per worker. Pure.

    Args:
        num_tokens: T > 0.
        num_workers: number of workers.
        first: worker of the first share.
        min_tokens: smallest share; fewer workers are used if necessary.
    """
    parts = max(1, min(num_workers, num_tokens // min_tokens))
    bounds = [part * num_tokens // parts for part in range(parts + 1)]
    return [Share((first + part) % num_workers, bounds[part], bounds[part + 1]) for part in range(parts)]


def cut(share: Share, max_tokens: int) -> list[Share]:
    """The share as requests of at most that many tokens."""
    starts = range(share.start, share.stop, max_tokens)
    return [Share(share.worker, start, min(start + max_tokens, share.stop)) for start in starts]


def row_bytes(parts: Parts) -> int:
    """Of one token in a request, whose ids are int32."""
    x, ids, _ = parts
    return x.shape[1] * x.element_size() + 8 * ids.shape[1]


def check(layer: int, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, timeout_s: float) -> None:
    """Raises InvalidRequest: what no worker would take, apart from sizes of the model."""
    if _is_usual(x, _FLOATS) and _is_usual(topk_ids, _INTS) and _is_usual(topk_weights, _FLOATS):
        fit = topk_ids.shape == topk_weights.shape and len(topk_ids) == len(x)
        if fit and type(layer) is int and 0 <= layer < 1 << 32 and type(timeout_s) is float and timeout_s >= 0:
            return
    if not _is_layer(layer):
        raise InvalidRequest(f"layer: expected an int in 0..2^32-1, got {layer!r}")
    check_timeout(timeout_s)
    for name, tensor, dtypes in (
        ("x", x, _FLOATS),
        ("topk_ids", topk_ids, _INTS),
        ("topk_weights", topk_weights, _FLOATS),
    ):
        if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided or not _has_memory(tensor):
            got = type(tensor).__name__
            if isinstance(tensor, torch.Tensor):
                got = f"a {got}, {tensor.layout}, on {tensor.device}"
            raise InvalidRequest(f"{name}: expected a torch.Tensor with memory, got {got}")
        if tensor.ndim != 2:
            raise InvalidRequest(f"{name}: expected 2 dimensions, got {tensor.ndim}")
        if tensor.dtype not in dtypes:
            raise InvalidRequest(f"{name}: expected dtype one of {dtypes}, got {tensor.dtype}")
    expected = (x.shape[0], topk_ids.shape[1])
    for name, tensor in (("topk_ids", topk_ids), ("topk_weights", topk_weights)):
        if tuple(tensor.shape) != expected:
            raise InvalidRequest(f"{name}: expected {list(expected)}, got {list(tensor.shape)}")


def _is_usual(tensor: object, dtypes: Sequence[torch.dtype]) -> bool:
    """Whether nothing but its sizes can be wrong with one part of a batch."""
    return (
        type(tensor) is torch.Tensor
        and tensor.is_cpu
        and tensor.dtype in dtypes
        and tensor.dim() == 2
        and tensor.layout is torch.strided
        and _has_memory(tensor)
    )


def _has_memory(tensor: torch.Tensor) -> bool:
    """Not one that is freed, fake, only traced, or around others, as a DTensor."""
    return tensor.data_ptr() != 0 or not tensor.numel()


def check_timeout(timeout_s: float) -> None:
    """Raises InvalidRequest: no number of seconds."""
    try:
        is_number = not math.isnan(timeout_s)
    except TypeError:
        is_number = False
    if not is_number:
        raise InvalidRequest(f"timeout_s: expected seconds, got {timeout_s!r}")


def _is_layer(value: SupportsIndex) -> bool:
    try:
        return 0 <= operator.index(value) < 1 << 32
    except TypeError:
        return False


def rows_like(x: torch.Tensor) -> torch.Tensor:
    """Room for the rows of an answer, contiguous whatever x is; any thread may write it."""
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False):
            return rows_like(x)
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def on_host(x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """As requests carry them, the ids apart."""
    weights = topk_weights if topk_weights.dtype is torch.float32 else topk_weights.detach().float()
    if x.is_cpu and topk_ids.is_cpu and weights.is_cpu and not x.requires_grad and not weights.requires_grad:
        return x, topk_ids, weights
    return _on_host(x), _on_host(topk_ids), _on_host(weights)


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.is_cpu and not tensor.requires_grad else tensor.detach().cpu()
