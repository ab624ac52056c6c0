"""The two operations of `Mode.AG`: a collective each, with torch operators around it. Nothing here waits for a device.

    dispatch   all-gather of [metadata, tokens, scales] into this dispatch's slot; places become local ids. Where copy
               engines alone move tokens, these go first, and the rest is done meanwhile
    combine    rows of tokens without an expert here <- identity; reduce-scatter; z is the first T rows

Why combine gives the bits of `reference.combine`: a reduce-scatter sums in fp32 in ascending rank and rounds once, and
adding -0.0 changes no value, so ranks that hold no expert of a token leave no trace. A token without any expert is 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ep_kernels import quant
from ep_kernels.collectives.choose import BufferPlace, CollectiveShape, choose
from ep_kernels.collectives.collective_types import Algorithm, CollectiveOp
from ep_kernels.config import MoEConfig
from ep_kernels.gather import gather_memory as memory
from ep_kernels.gather.gather_member import operation_errors
from ep_kernels.gather.gather_routing import GatherState, GatherTables
from ep_kernels.transports.base import DispatchArgs
from ep_kernels.transports.collective_base import (
    CollectiveTransport,
    GatherArgs,
    GatherPart,
    PendingCollective,
    ReduceArgs,
)
from ep_kernels.transports.flat_copy import copy_by_kernel
from ep_kernels.types import ScaleFormat

_PULLED = {Algorithm.COPY_PUSH: Algorithm.COPY_PULL}
"""What copy engines have begun to push cannot be called back when a rank that lives is left out: they do where the
caller wants them."""


class Routed(NamedTuple):
    """A step's routing, and what follows from it here: local expert ids int32 [R, S, K], -1 = not here; bool."""

    state: GatherState
    ids: torch.Tensor
    here: torch.Tensor


class GatherEngine:
    """Buffers, tables and operations of one rank.

    Args:
        config: of the communicator.
        coll: the collectives, whose ranks have met.
        block: uint8, registered, of `memory.arrays`.
    """

    def __init__(self, config: MoEConfig, coll: CollectiveTransport, block: torch.Tensor) -> None:
        self.config, self._coll, self.device = config, coll, block.device
        self.slots = memory.Slots(config, block)
        self.tables = GatherTables(config, block.device)
        self.active = config.group.size
        dtype = config.resolved_output_dtype
        self._minus_zero = torch.tensor(-0.0, dtype=dtype, device=block.device)
        self._zero = torch.tensor(0.0, dtype=dtype, device=block.device)

    def stream(self) -> int:
        """Handle of the current stream; 0 on the CPU."""
        return int(torch._C._cuda_getCurrentRawStream(self.device.index)) if self.device.type == "cuda" else 0

    def lend(self, stream: int, *tensors: torch.Tensor | None) -> None:
        """What was made on that stream is used on the current one from now on: torch's allocator must not recycle it
        before that has come by."""
        if self.stream() == stream:
            return
        for tensor in tensors:
            if tensor is not None and tensor.is_cuda:
                tensor.record_stream(torch.cuda.current_stream(self.device))

    def _algorithm(self, op: CollectiveOp, num_bytes: int) -> Algorithm:
        place = BufferPlace.REGISTERED if op is CollectiveOp.ALL_GATHER else BufferPlace.PLAIN
        gathers, c = op is CollectiveOp.ALL_GATHER, self.config
        num_sms = c.resolved_dispatch_sms if gathers else c.resolved_combine_sms
        shape = CollectiveShape(op, num_bytes, self.active, num_sms, BufferPlace.PLAIN, place)
        chosen = choose(shape, self._coll.capabilities).algorithm
        return _PULLED.get(chosen, chosen)

    # Dispatch.

    def announce(
        self, args: DispatchArgs, slot: int, tokens: int, previous: GatherState | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write this rank's metadata of a step of `tokens` into its place: (valid [T], number of invalid ids [1])."""
        rank, own = self.config.group.rank, args.x.shape[0]
        places = self.slots.places(slot, tokens)[rank]
        if previous is None:
            routed, valid, invalid = self.tables.route(args.topk_ids)
            places[:own], places[own:] = routed, -1
        else:
            valid, invalid = previous.valid, previous.num_invalid
            places.copy_(previous.places[rank])
        self.slots.weights(slot, tokens)[rank, :own] = args.topk_weights
        self.slots.num_tokens(slot)[rank].fill_(own)
        return valid, invalid

    def send_rows(self, x: torch.Tensor, slot: int, tag: int) -> PendingCollective | None:
        """Begin the all-gather of x alone, but for this rank's place, which `place_rows` fills; None where it goes with
        the rest, as in a CUDA graph, which has one."""
        captured = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if captured or not memory.sends_rows_apart(self.config, self._coll.capabilities):
            return None
        part = GatherPart(memory.flat_bytes(x), memory.flat_bytes(self.slots.tokens(slot)), x.dtype)
        with operation_errors():
            return self._coll.all_gather(GatherArgs((part,), Algorithm.COPY_PUSH, 0, tag, skips_own=True))

    def place_rows(self, x: torch.Tensor, slot: int) -> None:
        """Copy x into this rank's own place: a copy at the speed of memory, beside which ranks would find each other
        later, so that it comes behind what others wait for."""
        rows = self.slots.tokens(slot)[self.config.group.rank, : x.shape[0]]
        copy_by_kernel(memory.flat_bytes(rows), memory.flat_bytes(x))

    def gather(
        self, x: torch.Tensor | None, scales: torch.Tensor | None, slot: int, tokens: int, tag: int
    ) -> PendingCollective:
        """Begin the all-gather of a step of `tokens`: of metadata, and x and scales where they are not None."""
        metadata, rank = self.slots.metadata(slot), self.config.group.rank
        own = metadata[rank, : memory.metadata_bytes(self.config, tokens)]
        parts = [GatherPart(own, metadata.view(-1), torch.uint8)]
        for shard, out in ((x, self.slots.tokens(slot)), (scales, self.slots.get("scales", slot))):
            if shard is not None and out is not None:
                parts.append(GatherPart(memory.flat_bytes(shard), memory.flat_bytes(out), shard.dtype))
        chosen, num_sms = Algorithm.KERNEL_PUSH, None
        if x is not None:
            moved, num_sms = sum(part.x.numel() for part in parts), self.config.resolved_dispatch_sms
            chosen = self._algorithm(CollectiveOp.ALL_GATHER, moved)
        with operation_errors():
            return self._coll.all_gather(GatherArgs(tuple(parts), chosen, num_sms, tag))

    def payload(self, args: DispatchArgs, slot: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(x [tokens, H], scales [tokens, S_c] or None): x itself where it may be sent as it is, which is `at_once`,
        else a copy."""
        rank, own, x, scales = self.config.group.rank, args.x.shape[0], args.x, args.scales
        if self.config.quantize:
            packed = self.config.scale_format is ScaleFormat.UE8M0_PACKED
            x, scales = quant.quantize(x, ScaleFormat.UE8M0 if packed else self.config.scale_format)
        place = self.slots.get("scales", slot)
        if scales is not None and place is not None:
            place[rank, :own] = scales
            scales = place[rank, :tokens]
        if args.at_once and own == tokens:
            return x, scales
        rows = self.slots.tokens(slot)[rank]
        rows[:own] = x
        return rows[:tokens], scales

    def routing(self, slot: int, tokens: int, valid: torch.Tensor, invalid: torch.Tensor, origin: int) -> Routed:
        """What has arrived, by itself, in a step of `tokens`."""
        active = self.tables.active
        places = torch.where(active[:, None, None], self.slots.places(slot, tokens), -1)
        counts = torch.where(active, self.slots.num_tokens(slot), 0).int()
        ids, here = self.tables.local(places)
        reached = (places >= 0).any(-1, keepdim=True)
        identity = torch.where(reached, self._minus_zero, self._zero)
        return Routed(
            GatherState(places, here.any(-1, keepdim=True), identity, counts, valid, invalid, origin), ids, here
        )

    def routed_again(self, state: GatherState) -> Routed:
        """The routing of a handle that is used again."""
        return Routed(state, *self.tables.local(state.places))

    def local_choices(self, slot: int, routed: Routed) -> tuple[torch.Tensor, torch.Tensor]:
        """(local expert ids int32, weights float32), both [R, M, K]."""
        state, ids, here = routed
        weights = torch.where(here, self.slots.weights(slot, state.step_tokens), 0.0)
        shape = self.config.group.size, self.config.max_tokens_per_rank, self.config.topk
        return memory.padded(ids, shape, -1), memory.padded(weights, shape, 0.0)

    def blank_scales(self) -> torch.Tensor | None:
        """Packed scales of what is handed out, to be filled; None where they are as they travel."""
        config = self.config
        if config.scale_format is not ScaleFormat.UE8M0_PACKED:
            return None
        lead = config.group.size, config.max_tokens_per_rank
        words = quant.scale_columns(config.hidden_size, config.scale_format)
        return quant.packed_empty(lead, words, self.device)

    def pack(self, slot: int, packed: torch.Tensor) -> None:
        """Fill the packed scales of what has arrived."""
        scales = self.slots.get("scales", slot)
        assert scales is not None
        packed.copy_(quant.pack(scales))

    def set_active(self, mask: Sequence[bool]) -> None:
        """Go on with these ranks."""
        self.active = sum(mask)
        self.tables.set_active(mask)

    # Combine.

    def rows(self, y: torch.Tensor, state: GatherState) -> torch.Tensor:
        """[R, S, H]: y [R, M, H] with identities."""
        return torch.where(state.here, y[:, : state.step_tokens], state.identity)

    def choices(self, row_weights: torch.Tensor, state: GatherState) -> torch.Tensor:
        """[R, S, K]: row_weights [R, M, K] with identities."""
        _, here = self.tables.local(state.places)
        identity = torch.where(state.places >= 0, -0.0, 0.0)
        return torch.where(here, row_weights[:, : state.step_tokens], identity)

    def reduce(self, rows: torch.Tensor, out: torch.Tensor, tag: int) -> PendingCollective:
        """Begin the sum of rows [R, S, ...] of every rank into out [S, ...]."""
        chosen = self._algorithm(CollectiveOp.REDUCE_SCATTER, rows.nbytes)
        with operation_errors():
            args = ReduceArgs(rows.reshape(-1), out.reshape(-1), chosen, self.config.resolved_combine_sms or None, tag)
            return self._coll.reduce_scatter(args)
