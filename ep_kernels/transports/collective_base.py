"""What a transport must supply for collectives; `collectives/collectives.py` is the only caller.

Bits are defined by `ep_kernels/collectives/collective_reference.py`. A transport that has collectives keeps a
`collectives.py` in its folder that defines `create(config)`. It may assume that the caller has checked every shape,
dtype, stride and device, that arguments agree in size where one rank can see it, and that calls come from one thread,
except those that `base.py` names.

* Order. Operations complete in the order in which all ranks begin them. `wait` of one first completes those before it;
  beginning one more than `config.max_in_flight` first completes the oldest. A work that is not waited for is completed
  by a later operation, by `barrier`, or by `drain`.
* Buffers. x and out belong to the operation from its call until `wait` has returned (GPUs: until the current stream has
  passed what `wait` put on it). Then no peer reads x or writes out any more, and both are the caller's again. Where
  `wait` raised, out is unspecified, and peers may use a registered x or out until `set_active` has returned.
* Arguments that differ between ranks (operation, bytes per part, dtype, algorithm, offset of a registered tensor) are
  noticed before a result is given out: TransportError with the rank and both values. Like every TransportError it
  breaks the object until `set_active` or `close`.
* Inactive ranks take no part; their shards of an all-gather's out are not written.

Order of a life: `allocate` -> tickets travel by the group -> `import_regions` -> `barrier` -> operations -> `close`.
`create`, `allocate`, `import_regions` and the first `barrier` raise TransportError with the reason in words where this
machine cannot do it (other hosts, no peer access, no driver): the caller then falls back on all ranks.
"""

from __future__ import annotations

import importlib
import importlib.util
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ep_kernels.collectives.collective_config import CollectiveConfig
from ep_kernels.collectives.collective_types import Algorithm, CollectiveCapabilities, CollectiveOp
from ep_kernels.errors import ConfigError, TransportError
from ep_kernels.transports import base


@dataclass(frozen=True, slots=True)
class GatherPart:
    """One tensor of an all-gather. Both are contiguous and flat, views of the caller's memory; alignment is that of a
    byte. n may be 0.

    Attributes:
        x: uint8 [n], this rank's shard. May be out[rank * n :][:n] itself (in place); it overlaps `out` nowhere
            else.
        out: uint8 [R * n].
        dtype: of the caller's tensors; ranks must agree on it, as on n.
    """

    x: torch.Tensor
    out: torch.Tensor
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class GatherArgs:
    """One all-gather, checked.

    Attributes:
        parts: in the order in which the caller gave them; equal n on all ranks, part by part. At least one.
        algorithm: as `choose.choose` says, equal on all ranks.
        num_sms: multiprocessors to fill, 0 = copy engines alone, None = chosen.
        half_bytes: of a single part: bytes at the start of each shard that arrive under a flag of their own, equal on
            all ranks; 0: none.
        takes_halves: whether `shards` gives those bytes one by one; of this rank alone.
    """

    parts: tuple[GatherPart, ...]
    algorithm: Algorithm
    num_sms: int | None
    half_bytes: int = 0
    takes_halves: bool = False


@dataclass(frozen=True, slots=True)
class ReduceArgs:
    """One reduce-scatter or all-reduce (a sum), checked.

    Attributes:
        x: [R * n] (reduce-scatter) or [n] (all-reduce), contiguous, flat, one of SUM_DTYPES, aligned to its element.
        out: [n], the same dtype. All-reduce: may be x itself. Reduce-scatter: may be x[rank * n : (rank + 1) * n].
        algorithm, num_sms: as in GatherArgs.
    """

    x: torch.Tensor
    out: torch.Tensor
    algorithm: Algorithm
    num_sms: int | None


class PendingCollective(Protocol):
    """An operation that has begun."""

    def wait(self) -> None:
        """Finish: the current stream waits, the CPU does not (transport on the CPU: it does). Idempotent. Raises
        PeerTimeout, AbortedError, ClosedError, TransportError; what a call that does not wait for its device cannot
        know yet, `check` raises later. HandleError where `set_active` came between."""

    def is_completed(self) -> bool:
        """Whether out holds the result. Waits for nothing and raises nothing: False where it never will. A transport
        on the CPU may move what has arrived. With GPUs: whether the device has got there."""


class PendingGather(PendingCollective, Protocol):
    """An all-gather that has begun.

    Attributes:
        halves: shards come by halves, as `GatherArgs.takes_halves` wanted.
    """

    halves: bool

    def shards(self) -> Iterator[list[int]]:
        """Active ranks in the order of arrival, this rank first; those that come together in one list. With `halves`
        2 * rank for the first half of a shard and 2 * rank + 1 for the second, instead of ranks. Each is given
        when its shard of every part is in out (GPUs: for whatever the current stream runs from then on). The end of it
        is `wait`. At most once, and not after `wait`; raises what `wait` does."""


@dataclass(frozen=True, slots=True)
class SentTerms:
    """Terms on their way.

    Attributes:
        seq: number of the operation.
        slot: where they go, from the base of every rank's region.
    """

    seq: int
    slot: int


class TermCopies(Protocol):
    """Sums whose terms copy engines bring while multiprocessors do other things; every rank takes part. One operation
    of all ranks each, but for `add`. At most two that were sent may wait for `add`.

    Attributes:
        row_bytes: most bytes that a rank sends to another in one operation.
    """

    row_bytes: int

    def send(self, rows: torch.Tensor, made: Iterable[int]) -> SentTerms:
        """Begin to bring rows[p] of [R, m, N] to each other rank p: when `made` gives p, behind what the current stream
        has then. They are the operation's until `share` has ended, or the `add` of what was sent two operations later
        has begun. Raises ArgumentError where they are on another device, before anything else."""

    def add(self, sent: SentTerms, own: torch.Tensor, out: torch.Tensor, *, shares: bool = False) -> None:
        """The current stream waits for what the others sent, and puts the sum with own [m, N] into out [m, N], which
        may be own: in fp32, in ascending rank, rounded once. shares: `share` follows."""

    def share(self, sent: SentTerms, out: torch.Tensor) -> PendingCollective:
        """Begin to bring the sums of each other rank p to out[p] of [R, m, N]: the second operation after `send`, and
        behind the `add` of all ranks."""


class CollectivePlan(Protocol):
    """An operation that has run once, checked and planned, to be begun again with like arguments."""

    def begin(self, x: torch.Tensor, out: torch.Tensor, x_at: int, out_at: int) -> PendingCollective | None:
        """As `all_gather` and the others. None: nothing was begun, call those. Raises TransportError.

        Args:
            x, out: of the shapes, dtypes, devices and registered offsets of the arguments of the plan, and as far from
                each other, where they overlap.
            x_at, out_at: their addresses.
        """


class Planner(Protocol):
    """Plans operations that repeat."""

    def pool(self) -> range:
        """Addresses of registered memory, as this process maps it; the same for a life."""

    def plan_for(self, args: GatherArgs | ReduceArgs, op: CollectiveOp) -> CollectivePlan | None:
        """For operations like this one; None where planning cannot be spared. Good until `set_active`."""


class CollectiveTransport(base.MemberTransport):
    """One backend between the ranks of one group, for collectives.

    Attributes:
        terms: None until `import_regions`, and where `capabilities.term_min_bytes` is 0.
    """

    capabilities: CollectiveCapabilities
    terms: TermCopies | None = None

    # To be written.

    @abstractmethod
    def allocate(self) -> bytes:
        """Allocate this rank's region (pool, staging, flags); return the ticket by which peers redeem it. Opaque, at
        most 64 KiB."""

    @abstractmethod
    def all_gather(self, args: GatherArgs) -> PendingGather:
        """Begin. The caller's stream orders it behind what made x."""

    @abstractmethod
    def reduce_scatter(self, args: ReduceArgs) -> PendingCollective:
        """Begin, as `all_gather`."""

    @abstractmethod
    def all_reduce(self, args: ReduceArgs) -> PendingCollective:
        """Begin, as `all_gather`."""

    # With a default: nothing is registered, and nothing planned.

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous, uninitialised tensor in the pool, at the same offset on all ranks. Collective (one `exchange`:
        `pool.SymmetricPool` says why), and the same on all ranks. Its memory is used again once its last view has died
        on all of them. Raises ArgumentError where the sizes differ or the pool is full, on all ranks alike. By default
        ordinary memory."""
        return torch.empty(tuple(shape), dtype=dtype, device=self.capabilities.device_type)

    def offset_of(self, tensor: torch.Tensor) -> int | None:
        """Where the tensor's first byte lies in the pool; None where the tensor is not wholly in it, or is empty."""
        return None

    @property
    def planner(self) -> Planner | None:
        """None where planning costs nothing. Asked for after the first `barrier`."""
        return None


def create(config: CollectiveConfig) -> CollectiveTransport:
    """Build the collectives of the transport that `config.transport` names; allocates nothing. Raises ConfigError, or
    TransportError with the reason where this machine cannot."""
    name = f"ep_kernels.transports.{config.transport}.collectives"
    if config.transport not in base.names():
        raise ConfigError("transport", f"one of {base.names()}", config.transport)
    if importlib.util.find_spec(name) is None:
        raise TransportError(f"transport {config.transport!r} has no collectives")
    return importlib.import_module(name).create(config)  # type: ignore[no-any-return]
