"""Memory of a rank for `Mode.AG`: which registered tensors there are, and where in one block of the pool they lie.
Pure, but for the views.

Each of the F = max_in_flight slots of a dispatch has

    tokens    [R, M, H]            what is handed out: rows of every rank where they arrive
    metadata  [R, metadata_bytes]  by rank: T as int64, 8 bytes of padding, places int32 [S, K], weights float32 [S, K]
    scales    [R, M, S_c]          of the rows, as they travel

S is the step's number of tokens, S <= M: of a rank's place only what S tokens need is moved. Combine has no memory of
its own: the collectives stage its rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ep_kernels.collectives.collective_config import CollectiveConfig
from ep_kernels.collectives.collective_types import Algorithm, CollectiveCapabilities, CollectiveOp
from ep_kernels.collectives.pool import ALIGN_BYTES
from ep_kernels.config import MoEConfig
from ep_kernels.quant import scale_columns
from ep_kernels.types import ScaleFormat

HEAD_BYTES = 16
"""Bytes in front of a rank's metadata: T, and padding."""
ROUND_BYTES = 16
"""Pieces of a shard that kernels like to move."""
LEAST_STAGING, MOST_STAGING = 1 << 20, 64 << 20
"""Bytes of a staging slot: the rows of a whole step, within these. GPUs have five slots."""
COLLECTIVES = 3
"""Most collectives of a dispatch and its combine: tokens, rows, gradients of weights."""
_PAGE = 4096
HOLDS = {
    "tokens": "output: rows of every rank in their final place",
    "metadata": "T, places and weights of every rank's tokens",
    "scales": "scales of the rows",
}
"""What each array is for."""


@dataclass(frozen=True, slots=True)
class Array:
    """One kind of buffer.

    Attributes:
        shape, dtype: of one slot.
        offset: of slot 0, bytes.
        slot_bytes: padding included.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    slot_bytes: int


def arrays(config: MoEConfig) -> tuple[dict[str, Array], int]:
    """(registered arrays by name, bytes in all)."""
    size, most, hidden = config.group.size, config.max_tokens_per_rank, config.hidden_size
    shapes: list[tuple[str, tuple[int, ...], torch.dtype]] = [
        ("tokens", (size, most, hidden), config.payload_dtype),
        ("metadata", (size, metadata_bytes(config, most)), torch.uint8),
    ]
    columns, dtype = scale_row(config)
    if columns:
        shapes.append(("scales", (size, most, columns), dtype))
    found, offset = {}, 0
    for name, shape, kind in shapes:
        slot_bytes = _rounded(math.prod(shape) * kind.itemsize, ALIGN_BYTES)
        found[name] = Array(shape, kind, offset, slot_bytes)
        offset += slot_bytes * config.max_in_flight
    return found, offset


def metadata_bytes(config: MoEConfig, tokens: int) -> int:
    """Bytes of the metadata of a rank with `tokens` tokens."""
    return _rounded(HEAD_BYTES + 8 * tokens * config.topk, ROUND_BYTES)


def step_tokens(config: MoEConfig, num_bytes: int, alone: bool = False) -> int:
    """S of a dispatch that moves `num_bytes` of each rank; alone: of rows, without metadata and scales."""
    if alone:
        return num_bytes // (config.hidden_size * config.payload_dtype.itemsize)
    columns, dtype = scale_row(config)
    row = 8 * config.topk + config.hidden_size * config.payload_dtype.itemsize + columns * dtype.itemsize
    return (num_bytes - HEAD_BYTES) // row


def sends_rows_apart(config: MoEConfig, can: CollectiveCapabilities) -> bool:
    """Whether copy engines alone move tokens, and kernels the rest."""
    return config.resolved_dispatch_sms == 0 and Algorithm.COPY_PUSH in can.algorithms.get(CollectiveOp.ALL_GATHER, ())


def scale_row(config: MoEConfig) -> tuple[int, torch.dtype]:
    """(columns, dtype) of a row's scales as they travel; 0 columns: it has none."""
    if config.quantize:
        return scale_columns(config.hidden_size, ScaleFormat.FP32), torch.float32
    return config.scale_columns, config.scale_dtype


def collective_config(config: MoEConfig) -> CollectiveConfig:
    """The configuration of the collectives underneath."""
    item = max(config.payload_dtype.itemsize, config.resolved_output_dtype.itemsize)
    rows = config.group.size * config.max_tokens_per_rank * config.hidden_size * item
    return CollectiveConfig(
        group=config.group,
        transport=config.transport,
        pool_bytes=_rounded(arrays(config)[1], _PAGE),
        staging_bytes=min(max(_rounded(rows, config.group.size * ALIGN_BYTES), LEAST_STAGING), MOST_STAGING),
        max_in_flight=COLLECTIVES * config.max_in_flight,
        timeout_s=config.timeout_s,
        num_sms=config.num_sms,
        fallback=False,
        kernel_cache_dir=config.kernel_cache_dir,
    )


class Slots:
    """The registered tensors.

    Args:
        config: of the communicator.
        block: uint8, registered, as large as `arrays` says.
    """

    def __init__(self, config: MoEConfig, block: torch.Tensor) -> None:
        self._config, self._size = config, config.group.size
        table, _ = arrays(config)
        self._views = {
            name: [_view(block, array, slot) for slot in range(config.max_in_flight)] for name, array in table.items()
        }

    def get(self, name: str, slot: int) -> torch.Tensor | None:
        """One array; None where this configuration has none of that name."""
        views = self._views.get(name)
        return None if views is None else views[slot]

    def tokens(self, slot: int) -> torch.Tensor:
        """[R, M, H]."""
        return self._views["tokens"][slot]

    def metadata(self, slot: int) -> torch.Tensor:
        """uint8 [R, metadata_bytes]."""
        return self._views["metadata"][slot]

    def num_tokens(self, slot: int) -> torch.Tensor:
        """int64 [R]: T of every rank."""
        return self.metadata(slot)[:, :8].view(torch.int64)[:, 0]

    def places(self, slot: int, tokens: int) -> torch.Tensor:
        """int32 [R, tokens, K] of a step of `tokens` tokens."""
        return self._columns(slot, HEAD_BYTES, tokens, torch.int32)

    def weights(self, slot: int, tokens: int) -> torch.Tensor:
        """float32 [R, tokens, K]."""
        return self._columns(slot, HEAD_BYTES + 4 * tokens * self._config.topk, tokens, torch.float32)

    def _columns(self, slot: int, first: int, tokens: int, dtype: torch.dtype) -> torch.Tensor:
        topk = self._config.topk
        words = self.metadata(slot)[:, first : first + 4 * tokens * topk].view(dtype)
        return words.as_strided((self._size, tokens, topk), (words.stride(0), topk, 1))


def _view(block: torch.Tensor, array: Array, slot: int) -> torch.Tensor:
    first = array.offset + slot * array.slot_bytes
    return block[first : first + math.prod(array.shape) * array.dtype.itemsize].view(array.dtype).view(array.shape)


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """uint8 [n] over a contiguous tensor."""
    return tensor.reshape(-1).view(torch.uint8)


def _rounded(num_bytes: int, unit: int) -> int:
    return -(-num_bytes // unit) * unit


def padded(rows: torch.Tensor, shape: Sequence[int], value: float) -> torch.Tensor:
    """rows [R, S, K] in a new tensor [R, M, K], `value` behind them; rows itself where S = M."""
    if rows.shape[1] == shape[1]:
        return rows
    out = torch.full(tuple(shape), value, dtype=rows.dtype, device=rows.device)
    out[:, : rows.shape[1]] = rows
    return out
