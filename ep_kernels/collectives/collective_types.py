"""Plain frozen records of the collectives. R ranks; n elements or bytes of one rank's shard."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import torch

SUM_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""dtypes that are summed: in fp32, in ascending rank, rounded once."""


class CollectiveOp(enum.Enum):
    """Kind of operation."""

    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_REDUCE = "all_reduce"


class Algorithm(enum.Enum):
    """How an operation moves its bytes. The result does not depend on it, TORCH apart."""

    COPY_PUSH = "copy_push"
    """all_gather: copy engines write the shard into the registered `out` of every peer."""
    COPY_PULL = "copy_pull"
    """all_gather: copy engines read every peer's shard from its registered x, or from its staging."""
    KERNEL_PUSH = "kernel_push"
    """all_gather: multiprocessors write the shard into the registered `out` of every peer."""
    KERNEL_PULL = "kernel_pull"
    """all_gather and reduce_scatter: multiprocessors read every peer's shard."""
    PULL = "pull"
    """all_gather and reduce_scatter: CPUs read every peer's shard."""
    ONE_SHOT = "one_shot"
    """all_reduce: every rank reads all of every peer's x and sums it."""
    TWO_SHOT = "two_shot"
    """all_reduce: every rank sums 1/R of the elements, then gathers the sums."""
    TORCH = "torch"
    """torch.distributed over the group's process group."""


@dataclass(frozen=True, slots=True)
class CollectiveCapabilities:
    """What the collectives of a transport can do; `choose.choose` and the front end ask this, never its name.

    Attributes:
        device_type: torch device type of the tensors.
        cross_host: True if ranks may live on several hosts.
        graphs: True if operations can be captured in a CUDA graph.
        abi: hash of the region's byte map; ranks with different hashes must not form a group.
        algorithms: those it runs, by operation. An operation that is missing is left to torch.distributed.
        max_bytes: by operation, most bytes of one rank's x; absent = no limit.
        one_shot_max_bytes: all_reduce: most bytes of x at which ONE_SHOT beats TWO_SHOT, by number of ranks; the entry
            of the largest number that is not above R counts.
        copy_min_bytes: all_gather: fewest bytes that a rank sends, over all peers, at which copy engines are chosen
            where `num_sms` is None.
        beside_min_bytes: the same, beside a product: fewest bytes that a rank sends to another.
        term_min_bytes: matmuls that are summed: fewest bytes of its product that a rank sends to another at which copy
            engines bring them; 0: there are none.
        library_min_bytes: by operation and fewest ranks: fewest bytes of one rank's result at which torch.distributed
            was measured faster.
        reason: why torch.distributed serves this object instead of a transport; "" where it does not.
    """

    device_type: str
    cross_host: bool
    graphs: bool
    abi: str
    algorithms: dict[CollectiveOp, tuple[Algorithm, ...]]
    max_bytes: dict[CollectiveOp, int] = field(default_factory=dict)
    one_shot_max_bytes: dict[int, int] = field(default_factory=dict)
    copy_min_bytes: int = 0
    beside_min_bytes: int = 0
    term_min_bytes: int = 0
    library_min_bytes: dict[CollectiveOp, dict[int, int]] = field(default_factory=dict)
    reason: str = ""
