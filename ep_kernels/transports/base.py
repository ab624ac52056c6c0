"""What a transport must supply. docs/adding-a-transport.md is the way; `communicator.py` is the only caller.

Order and places of rows are defined by `ep_kernels/routing.py`, bits by `ep_kernels/{reference,quant}.py`. Details:

* Views of dispatch n (out.tokens, combine_input) stay good until dispatch n + max_in_flight *starts*; a transport lets
  peers overwrite them no earlier. The communicator counts this and raises HandleError; handles themselves (routing)
  live as long as the caller keeps them. Requests are waited for in any order, but each before the max_in_flight-th
  later operation of its kind begins: that one the communicator refuses. So at most max_in_flight dispatches, and as
  many combines, are pending at once, all of them the latest begun, and slots may be taken in turn.
* Handles leave the transport with owner 0 and without topk_ids and topk_weights, which the communicator sets.
* Receive capacity is `config.receive_rows`. A row whose place (`reference.py`) lies past it is dropped: combine leaves
  it out of its rank's partial; a partial with no row left is +0.0, and so is a dropped row of an exact combine.
* Packed UE8M0 scales have the strides of `quant.pack` for the rows of the tensor that is handed out.

A transport is one folder `ep_kernels/transports/<name>/` with a `transport.py` that defines `create(config)`, and a
`transport.toml` with what others must know without loading it (services/crossdock/common/transports.py). It derives
from `Transport`: what is abstract here it must write, the rest has a default that is right and perhaps slow. It may
assume that the communicator has checked every shape, dtype, stride and device, and that calls come from one thread,
except `samples`, `traffic`, `peek`, `wake`, `abort`, `give_up` and `close`, which any thread may call at any time (but
never two of these at once).

Order of a life: (AUTO is settled: `device_name`, `ll_max_tokens`) -> `allocate` -> tickets travel by the group ->
`import_regions` -> `barrier` -> operations -> `close`.
Every wait obeys `config.timeout_s` and ends in PeerTimeout (naming the peer), AbortedError or ClosedError; none hangs.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch

from ep_kernels import quant, tuning
from ep_kernels.config import MoEConfig
from ep_kernels.errors import ArgumentError, ConfigError
from ep_kernels.network.network_config import NetworkConfig
from ep_kernels.transports.whole_routing import WholeRouting
from ep_kernels.types import Capabilities, DispatchHandle, DispatchOutput, KeptStep, LatencySample, Mode, PeerTraffic

EXCHANGE_WORDS = 8
"""int64 words per rank in one `exchange`."""
LL_MAX_TOKENS = 128
"""AUTO's crossover where a transport names none: the size of a decode step."""
_NAP_S = 20e-6
"""Instead of a look for a peer."""


@dataclass(slots=True)
class DispatchArgs:
    """One dispatch, checked.

    Attributes:
        x: [T, H] contiguous payload.
        scales: [T, S] contiguous, the caller's own, or NVFP4's global scale [1], or None.
        topk_ids: int32 (`Capabilities.wide_ids`: or int64) [T, K] contiguous, logical ids; -1 or out of range = no
            expert.
        topk_weights: float32 [T, K] contiguous; with `previous`, they may differ from those of the first dispatch.
        mode: LL or HT, already resolved.
        at_once: `wait` follows immediately; a transport may then run both phases there, as one.
        previous: handle whose routing is used again (topk_ids then are its own), or None.
        step_tokens: largest T of the step, equal on all ranks; None: M.
    """

    x: torch.Tensor
    scales: torch.Tensor | None
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor
    mode: Mode
    previous: DispatchHandle | None
    at_once: bool = False
    step_tokens: int | None = None


class StepInputs(NamedTuple):
    """Arguments of `begin_step`, checked by one communicator (its number is `owner`): x [T, H], topk_ids and
    topk_weights [T, K], where they lie, T, and whether the ids are int64."""

    owner: int
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    addresses: tuple[int, int, int]
    num_tokens: int
    wide_ids: bool


@dataclass(slots=True)
class CombineArgs:
    """One combine, checked.

    Attributes:
        y: expert rows in the shape of the handle's `DispatchOutput.tokens`, output dtype. Either anywhere in memory or
            the very tensor `combine_input` gave (zero copy).
        handle: the dispatch to undo.
        row_weights: float32 [N, K] | [R, M, K] to be returned beside the rows (weight gradients), or None.
            Per-expert layouts: float32 [L, slots] | [N], one number per row.
        at_once: as in DispatchArgs.
        apply_weights: False sums a rank's rows unweighted (backward of dispatch). Ignored by rank-wise layouts.
        topk_weights: float32 [T, K] contiguous, exact combines only: weigh with these instead of the dispatch's; or
            None. Unless `at_once`, the caller may overwrite them before `wait`.
        out: room for z, or None.
    """

    y: torch.Tensor
    handle: DispatchHandle
    row_weights: torch.Tensor | None
    apply_weights: bool
    at_once: bool = False
    topk_weights: torch.Tensor | None = None
    out: torch.Tensor | None = None


class PendingDispatch(Protocol):
    """A dispatch whose send phase is done."""

    def wait(self) -> tuple[DispatchOutput, DispatchHandle]:
        """Run the receive phase; called at most once. Raises PeerTimeout, AbortedError, ClosedError, TransportError
        where peers have gone on without this rank, HandleError where ranks bring the routings of different steps and
        ArgumentError where AUTO's modes differ (both break nothing); what a call that does not wait for its device
        cannot know yet, `check` and `check_results` raise later. Rows past the capacity are dropped and counted in
        `num_dropped` whatever `config.overflow` says: it is the communicator that raises CapacityError."""

    def buffers(self) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """(tokens, scales, counts) of the output to come: the same memory, before `wait` has filled it. Asked only
        where their shapes do not depend on what arrives."""


class PendingCombine(Protocol):
    """A combine whose send phase is done."""

    def wait(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run the receive phase; called at most once. (z [T, H], which is `CombineArgs.out` where that is given, else
        of the output dtype; float32 [T, K] with row_weights). Raises as `PendingDispatch.wait`."""


class QuickCalls(Protocol):
    """Plain operations by their shortest way, arguments not checked. None: nothing has begun, the full path serves."""

    def dispatch(
        self, x: Any, topk_ids: Any, topk_weights: Any, previous: Any, step_tokens: int | None = None
    ) -> tuple[DispatchOutput, DispatchHandle] | None:
        """Both phases, or with the routing of `previous`; the handle is complete. Raises as `PendingDispatch.wait`."""

    def dispatch_async(self, x: Any, topk_ids: Any, topk_weights: Any, previous: Any) -> PendingDispatch | None:
        """The send phase of the same."""

    def combine(self, y: Any, handle: Any, out: Any, topk_weights: Any) -> torch.Tensor | None:
        """Both phases; z."""

    def combine_async(self, y: Any, handle: Any, out: Any, topk_weights: Any) -> PendingCombine | None:
        """The send phase of the same."""


class HandleState(Protocol):
    """What `DispatchHandle.state` is."""

    def flatten(self) -> list[torch.Tensor]:
        """All that the handle itself has not, as tensors in a fixed order; on GPUs on the device, for CUDA graphs."""


class MemberTransport(ABC):
    """What every transport of a group does, whatever it moves: life, membership, meeting, errors, measurements.

    Attributes:
        capabilities: what it can do; its `device_type` is torch's, of tensors.
        domains: [R], lowest rank of each rank's domain: the ranks of one are reached without a network. Final after
            `import_regions`; by default, of one domain.
        active: [R], ranks that take part.
        epoch: membership counter.
        checks: whether `check` is to be asked before an operation; False while it would find nothing.
    """

    capabilities: Any
    checks = True

    def __init__(self, group: Any) -> None:
        self.domains: tuple[int, ...] = (0,) * group.size
        self.active: tuple[bool, ...] = (True,) * group.size
        self.epoch: int = group.epoch

    # To be written.

    @abstractmethod
    def import_regions(self, tickets: Sequence[bytes]) -> None:
        """Map every peer's region. Raises TransportError naming the rank and why (ABI, gone, no permission)."""

    @abstractmethod
    def exchange(self, words: Sequence[int]) -> list[tuple[int, ...] | None]:
        """Host-side all-gather of EXCHANGE_WORDS int64 among active ranks (None for the others). A rank in it is
        visible to its peers' `wait_for_peer` at once. No words: a `barrier`, by whose name errors call it, and which
        no `wait_for_peer` sees."""

    @abstractmethod
    def set_active(self, mask: Sequence[bool], epoch: int) -> None:
        """Collective of the survivors: from the next operation on, ranks with mask False take no part. What is under
        way is void. A rank that was left out hears it at its next wait, in a TransportError."""

    @abstractmethod
    def wait_for_peer(self, timeout_s: float) -> bool:
        """Sleep without spinning until a peer is in an `exchange` that this rank has not entered, or has called it
        (True), until `wake()` (True; a wake before the call counts) or until the timeout (False)."""

    @abstractmethod
    def wake(self) -> None:
        """End this rank's `wait_for_peer` from another thread."""

    @abstractmethod
    def abort(self, reason: str) -> None:
        """Sticky: every wait of this rank, present and future, ends in AbortedError(reason)."""

    @abstractmethod
    def give_up(self, ranks: Sequence[int]) -> None:
        """Give up these ranks: while they are active, this rank's waits for their parts, present and future, end in
        PeerTimeout (`given_up`) at once; on the host those for others, too. What has arrived already counts."""

    @abstractmethod
    def close(self) -> None:
        """Free everything. Never waits for a peer; safe with dead ones; idempotent."""

    # With a default. Errors: for calls that raise their own.

    def check(self, op: str = "check") -> None:
        """Raise what has failed on the device so far, if anything did; waits for nothing. The communicator asks before
        each operation, whose name errors get. By default nothing."""

    def failed(self) -> torch.Tensor:
        """int64 [1], 0 until an operation has ended in an error on the device, on which it lies. By default always."""
        return torch.zeros(1, dtype=torch.int64, device=self.capabilities.device_type)

    def check_results(self) -> None:
        """Raise, once each, what operations found whose `wait` did not read the device: HandleError where ranks brought
        the routings of different steps, CapacityError (without output and handle) where rows were dropped though none
        should be. Waits for nothing and breaks nothing. By default nothing."""

    def drain(self, timeout_s: float) -> None:
        """Wait until the operations that this rank has begun have done their part: peers may need rows of them. Bounded
        by their deadlines, and for what the network has still to send by `timeout_s`; ended by `abort`, from any
        thread. By default they have when they return."""

    # Meeting.

    def barrier(self) -> None:
        """Meet all active ranks."""
        self.exchange(())

    def look_for_peer(self, timeout_s: float, fd: int) -> bool:
        """As `wait_for_peer`, but spins; in between, other threads of its processor run. False, too, once `fd` can be
        read. By default one short sleep."""
        return self.wait_for_peer(min(timeout_s, _NAP_S))

    def call_exchange(self) -> None:
        """End the peers' `wait_for_peer`, if that can be done at once: this rank is about to enter an exchange. By
        default it cannot."""

    # Measurements.

    def samples(self) -> Sequence[LatencySample]:
        """Latency records since the last call, oldest first; the ring keeps the newest 4096. By default none
        (`Capabilities.samples`)."""
        return ()

    def traffic(self) -> list[PeerTraffic]:
        """Traffic by rank of other hosts, in ascending order; [] without a network. Any thread."""
        return []

    def peek(self, words: torch.Tensor) -> torch.Tensor | None:
        """A host copy of int64 [R] on the device, beside whatever that does: no stream is waited for. None where it
        could not be had at once."""
        return words.clone() if words.is_cpu else None

    def device_name(self) -> str:
        """What this rank computes on, as its maker names it: crossovers are remembered by it. Allocates nothing."""
        return tuning.cpu_name() if self.capabilities.device_type == "cpu" else torch.cuda.get_device_name()

    # Life.

    def close_in_child(self) -> None:
        """This process is a forked child, and nothing will be called here any more: close its copies of descriptors,
        let go of mappings where that calls no driver, and touch nothing that is shared with the parent. By default
        they stay until the child ends."""


class Transport(MemberTransport):
    """One backend between the ranks of one group, for dispatch and combine.

    Defaults that speak of a handle's routing want a `WholeRouting` as `DispatchHandle.state`; a transport with a state
    of its own overrides them: `row_weights`, `source_rows`, `trimmed`, `blank_state`, `restore`.

    Attributes:
        num_dropped: rows past the receive capacity that dispatches have dropped here; they add to it.
    """

    config: MoEConfig
    capabilities: Capabilities
    num_dropped = 0
    keeps_steps = False
    """Whether there is `begin_step` for this configuration."""

    # To be written.

    @abstractmethod
    def allocate(self, ll_max_tokens: int | None) -> bytes:
        """Allocate this rank's region; return the ticket by which peers redeem it. Opaque, at most 64 KiB.

        Args:
            ll_max_tokens: AUTO's crossover, equal on all ranks; known only now where the config gave none. Other modes:
                the config's, which nothing depends on.
        """

    @abstractmethod
    def dispatch(self, args: DispatchArgs) -> PendingDispatch:
        """Run the send phase. Never waits for a peer's *payload*; may wait for buffer credit."""

    @abstractmethod
    def combine(self, args: CombineArgs) -> PendingCombine:
        """Run the send phase: pre-reduce, then rows to their source ranks."""

    # With a default.

    def begin_step(self, inputs: StepInputs, mode: Mode) -> KeptStep:
        """See `MoECommunicator.begin_step`: both phases of a dispatch, while no request is pending. Only with
        `keeps_steps`, as `end_step`."""
        raise ArgumentError("begin_step", "a transport that keeps steps", type(self).__name__)

    def end_step(self, step: Any, out: torch.Tensor) -> None:
        """See `MoECommunicator.end_step`: both phases of the combine of what `begin_step` gave."""
        raise ArgumentError("end_step", "a transport that keeps steps", type(self).__name__)

    def is_captured(self) -> bool:
        """Whether a CUDA graph has captured operations."""
        return False

    def quick(self, number: int, mode: Mode, ll_max_tokens: int) -> QuickCalls | None:
        """The shortest way of plain operations, for handles of communicator `number` and, where nothing is said of the
        step, of this mode; until the next `set_active`. None: there is none. ll_max_tokens: AUTO's crossover."""
        return None

    def dispatch_input(self, num_tokens: int) -> torch.Tensor:
        """A registered buffer [num_tokens, H] to write the next dispatch's x into, which then is not copied. From that
        dispatch on it is lent to the peers: to write again, ask again. By default ordinary memory, which is copied."""
        shape, device = (num_tokens, self.config.hidden_size), self.capabilities.device_type
        return torch.empty(shape, dtype=self.config.dtype, device=device)

    def combine_input(self, handle: DispatchHandle) -> torch.Tensor:
        """A registered buffer in the shape of the handle's tokens and the output dtype, to write expert rows into.
        After `combine(y=that)` peers may read it until this rank asks for the same buffer again (which may wait). By
        default ordinary memory, as `dispatch_input`."""
        shape, dtype = (*handle.rows_shape, self.config.hidden_size), self.config.resolved_output_dtype
        return torch.empty(shape, dtype=dtype, device=self.capabilities.device_type)

    def row_weights(self, handle: DispatchHandle) -> torch.Tensor:
        """Weight of every row of the handle's tokens, for backward passes: float32 [L, slots] | [N] (per-expert layouts
        only). A copy that does not expire; rows past the counts and padding hold 0."""
        routing: WholeRouting = handle.state
        return routing.row_weights(self.config, self.active, handle.rows_shape)

    def source_rows(self, handle: DispatchHandle) -> torch.Tensor:
        """int32 [R], tokens that each rank sent here by the handle's dispatch, this rank's own among them; on the
        device, where a dispatch that was waited for has written it before anything that is launched afterwards."""
        routing: WholeRouting = handle.state
        return routing.source_rows(self.config, self.active)

    def trimmed(self, handle: DispatchHandle, num_rows: int) -> DispatchHandle:
        """The handle with `num_rows` rows, of a compact layout. ArgumentError: fewer than arrived, if that is known."""
        routing: WholeRouting = handle.state
        arrived = routing.num_rows(self.config, self.active)
        if num_rows < arrived:
            raise ArgumentError("num_rows", f"the {arrived} that arrived, or more", num_rows)
        return replace(handle, rows_shape=(num_rows,))

    def dropped_by(self, out: DispatchOutput, handle: DispatchHandle) -> int:
        """Rows that this dispatch has dropped. Where only the device knows, it is read."""
        return int(out.num_dropped)

    def dropped_rows(self) -> int:
        """Rows past the receive capacity that dispatches have dropped here so far, as far as the device has got. Waits
        for nothing. Any thread."""
        return self.num_dropped

    def blank_state(self, num_tokens: int) -> HandleState:
        """The state of a fresh dispatch of that many tokens, its tensors uninitialised. For tracing, so made of
        `torch.empty`; touches nothing else."""
        return WholeRouting.blank(self.config, self.capabilities.device_type)

    def restore(self, handle: DispatchHandle) -> DispatchHandle:
        """The handle with its state as it was, where it is the tuple of what `HandleState.flatten` gave."""
        return replace(handle, state=WholeRouting(*handle.state))

    def wire_bytes(self, mode: Mode) -> tuple[int, int]:
        """Bytes of one row between two ranks, in dispatch and in combine (of one partial): with scales, routing and
        padding, as that algorithm sends it. By default an id and a weight for each expert, and no padding."""
        return quant.row_bytes(self.config) + 8 * self.config.topk, quant.partial_bytes(self.config)

    def ll_max_tokens(self) -> int:
        """Crossover for AUTO where this machine has not measured one: most tokens per rank at which LL wins."""
        return LL_MAX_TOKENS


@dataclass(frozen=True, slots=True)
class RegionArray:
    """One array of a region.

    Attributes:
        name: as the transport's own pages have it.
        offset: where it starts, bytes.
        num_slots: buffers that calls take in turn; 1 where there is but one.
        slot_bytes: of one of them, padding included.
        holds: what it is for, in words.
    """

    name: str
    offset: int
    num_slots: int
    slot_bytes: int
    holds: str

    @property
    def num_bytes(self) -> int:
        return self.num_slots * self.slot_bytes


@dataclass(frozen=True, slots=True)
class RegionMap:
    """What one rank's region consists of, in order of address.

    Attributes:
        ll_tokens: most tokens per rank of a step that runs LL; its buffers are sized by it.
        mirror_bytes: of the mirror, at a rank of another host, of this region; 0: there is none.
        box_bytes: of one box, of which a rank has two for each rank of another host; 0: there are none. With neither
            the group stays on one host.
        box_row_bytes: of these, for rows of a dispatch, which only boxes of rails have: those to one rank of each
            other host, and those from the sources there whose rows come to this one.
    """

    arrays: tuple[RegionArray, ...]
    ll_tokens: int
    mirror_bytes: int = 0
    box_bytes: int = 0
    box_row_bytes: int = 0

    @property
    def num_bytes(self) -> int:
        return sum(array.num_bytes for array in self.arrays)


def names() -> list[str]:
    """The transports in this installation, by folder name."""
    package = importlib.import_module("ep_kernels.transports")
    return sorted(m.name for m in pkgutil.iter_modules(package.__path__) if m.ispkg)


def create(config: MoEConfig) -> Transport:
    """Build the transport that `config.transport` names. The folder is the registry: there is no table to edit."""
    if config.transport not in names():
        raise ConfigError("transport", f"one of {names()}", config.transport)
    module = importlib.import_module(f"ep_kernels.transports.{config.transport}.transport")
    return module.create(config)  # type: ignore[no-any-return]


def region_map(config: MoEConfig) -> RegionMap | None:
    """The bytes of a rank's region, computed without a device; None where a transport has no `inspection.py` with such
    a function. Raises ConfigError."""
    tell = inspection(config.transport, "region_map")
    return None if tell is None else tell(config)


def probe(name: str, device: int) -> dict[str, Any]:
    """What a transport finds out on a device for `crossdock doctor`, as JSON; {} where it has no `inspection.py` with
    such a function. Shown are "handles": {"kind": how memory is shared, "refused": {better kind: why not}} and
    "gpu_direct": how NICs would reach it, in words."""
    look = inspection(name, "probe")
    return {} if look is None else look(device)


def boxes(name: str, network: NetworkConfig, device: int) -> str:
    """Where a transport keeps what the network sends from and writes to on a GPU, and why, in words; "" where it has no
    `inspection.py` with such a function. Raises TransportError: `network.gpu_direct` names a way that cannot be had."""
    tell = inspection(name, "boxes")
    return "" if tell is None else str(tell(network, device))


def inspection(transport: str, function: str) -> Any:
    """A function of a transport's `inspection.py`; None where there is none."""
    name = f"ep_kernels.transports.{transport}.inspection"
    if transport not in names() or importlib.util.find_spec(name) is None:
        return None
    return getattr(importlib.import_module(name), function, None)
