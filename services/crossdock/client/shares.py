"""How a batch is checked and cut into requests. Pure.

Letters: T tokens.
"""

from __future__ import annotations

import itertools
import math
import operator
from typing import NamedTuple, SupportsIndex

import torch

from crossdock.client.errors import InvalidRequest
from crossdock.protocol import wire
from crossdock.protocol.rows import CallRows, usual_rows
from crossdock.protocol.rows import rows_of as all_rows

MAX_TIMEOUT_S = 1e6
"""Longer ones, infinity too, mean this: what a request can carry as milliseconds."""
REQUEST_BYTES = 2 << 20
"""Most of one request, but for one row: a step has one while the next is on its way."""
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_INTS = (torch.int32, torch.int64)


class ForwardCall:
    """One call of `forward`.

    Args:
        layer: with the experts.
        rows: its tensors; T > 0.
        deadline: monotonic seconds.
        turn: number of the call, which says where its first share goes.
        model: fingerprint of the only checkpoint that is wanted; empty: any.

    Attributes:
        models: fingerprint of the checkpoint that made each share, in the order of the answers.
        y: [T, H] on the host, dtype of x, once `land` has made it; y_address: of it.
    """

    __slots__ = ("deadline", "layer", "model", "models", "rows", "turn", "y", "y_address")

    def __init__(self, layer: int, rows: CallRows, deadline: float, turn: int, model: str) -> None:
        self.layer, self.rows, self.deadline, self.turn, self.model = layer, rows, deadline, turn, model
        self.models = dict[Share, str]()
        self.y: torch.Tensor | None = None
        self.y_address = 0

    def land(self) -> None:
        """Make room for the rows of the answers: while a worker has the first request, since it takes a while."""
        if self.y is None:
            rows = self.rows
            self.y = torch.empty((rows.num_tokens, rows.hidden), dtype=rows.dtype, device="cpu")
            self.y_address = self.y.data_ptr()

    def stale(self) -> list[Share]:
        """Shares of another checkpoint than the last answer's."""
        last = next(reversed(self.models.values()), "")
        return [share for share, model in self.models.items() if model != last]


class Share(NamedTuple):
    """Rows start..stop of a batch, for the worker at position `worker` of the list."""

    worker: int
    start: int
    stop: int


def split(num_tokens: int, num_workers: int, first: int, min_tokens: int, most_tokens: int) -> list[Share]:
    """Cut a batch into even shares, one per worker, and these into requests: in turn one of each share. Pure.

    Args:
        num_tokens: T > 0.
        first: worker of the first share.
        min_tokens: smallest share; fewer workers are used if necessary.
        most_tokens: of a request.
    """
    parts = max(1, min(num_workers, num_tokens // min_tokens))
    bounds = [part * num_tokens // parts for part in range(parts + 1)]
    shares = [Share((first + part) % num_workers, bounds[part], bounds[part + 1]) for part in range(parts)]
    if bounds[parts] - bounds[parts - 1] <= most_tokens:  # as a rule; the last is a largest one
        return shares
    turns = itertools.zip_longest(*(cut(share, most_tokens) for share in shares))
    return [piece for turn in turns for piece in turn if piece is not None]


def cut(share: Share, max_tokens: int) -> list[Share]:
    """The share as the fewest requests of at most that many tokens, equally large."""
    num_tokens = share.stop - share.start
    parts = -(-num_tokens // max_tokens)
    bounds = [share.start + part * num_tokens // parts for part in range(parts + 1)]
    return [Share(share.worker, start, stop) for start, stop in itertools.pairwise(bounds)]


def rows_of_call(
    layer: int, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, timeout_s: float
) -> CallRows:
    """The tensors of a call as requests carry them. Raises InvalidRequest: what no worker would take, apart from sizes
    of the model."""
    rows = usual_rows(x, topk_ids, topk_weights)
    if rows is None or type(layer) is not int or type(timeout_s) is not float or not 0 <= layer < 1 << 32:
        check(layer, x, topk_ids, topk_weights, timeout_s)
        rows = all_rows(_plain(x), _plain(topk_ids), _plain(topk_weights.detach().float()))
    elif not timeout_s >= 0:
        check_timeout(timeout_s)
    return rows


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    is_plain = tensor.is_cpu and tensor.is_contiguous() and not tensor.requires_grad and not tensor.is_neg()
    return tensor if is_plain else wire.plain(tensor)


def check(layer: int, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, timeout_s: float) -> None:
    """Raises InvalidRequest: what no worker would take, apart from sizes of the model."""
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
