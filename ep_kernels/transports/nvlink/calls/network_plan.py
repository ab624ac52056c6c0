"""How many blocks kernels have that reach ranks of other hosts, and in how many slices rows go there."""

from __future__ import annotations

from ep_kernels.config import MoEConfig
from ep_kernels.kernels import abi
from ep_kernels.network import NetworkConfig

LEAST, TOKENS_PER_BLOCK = 4, 4
SLICE_BYTES = 256 << 10
"""At least."""
LAG_BYTES = 2 << 20
"""A GPU that reads what a processor has just received slows what follows by a third: docs/lab/network-speed.md."""


def most_blocks(c: MoEConfig, asked: int | None, num_sms: int) -> int:
    """Of `num_sms`: as many as the caller asks for (None: all), but over a network by itself a few for few tokens.

    What blocks read of one place in host memory, each of them waits for the others' reads of it. Two H100, T = 1: a
    pair takes 84 to 96 us with 4 blocks, 126 to 159 with 16, and 310 to 440 with 132 (680 to 890 when each block read
    words by itself). 16 blocks move 20 GB/s to and from host memory: docs/lab/network-speed.md.
    """
    if c.network is None or asked is not None:
        return min(num_sms, asked or num_sms)
    return min(num_sms, max(LEAST, c.max_tokens_per_rank // TOKENS_PER_BLOCK))


def slice_rows(most_rows: int, row_bytes: int) -> int:
    """Rows of a slice, which leaves when it is staged and is read when it is here; 0: of so few rows there are none."""
    rows = max(-(-SLICE_BYTES // row_bytes), -(-most_rows // abi.MAX_SLICES))
    return rows if most_rows >= 2 * rows else 0


def slice_lag(network: NetworkConfig, slice_bytes: int) -> int:
    """How many slices later one is read: over sockets, `LAG_BYTES` later."""
    return -(-LAG_BYTES // slice_bytes) if slice_bytes and "tcp" in network.carrier else 0


def slices_of(shape: abi.Shape, stripe: int) -> tuple[int, int]:
    """Rows of a slice of dispatch, of combine. None, if a slice or the head would take too many descriptors, which
    bytes of `stripe` have."""
    partials = shape.ll_tokens * (shape.topk if shape.exact else 1)
    most_rows = ((shape.ll_tokens, shape.row_packets), (partials, shape.combine_packets))
    rows = [slice_rows(most, count * abi.PACKET_BYTES) for most, count in most_rows]
    head = (shape.ll_tokens * shape.metadata_lines + shape.count_lines) * abi.LINE_BYTES
    most = max(rows[0] * shape.row_packets * abi.PACKET_BYTES, rows[1] * shape.combine_packets * abi.PACKET_BYTES, head)
    fits = most // stripe + 2 * 3 <= abi.SLICE_PARTS  # three runs, each of which may begin and end within a stripe
    return (rows[0], rows[1]) if fits else (0, 0)
