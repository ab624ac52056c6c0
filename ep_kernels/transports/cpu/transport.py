"""The `cpu` transport: processes of one host through shared memory, those of several hosts over a network too. See
docs/cpu-transport.md for what moves where, docs/network-protocol.md for what crosses hosts.

Python allocates, checks results and maps errors; all waiting and moving happens in the native half, without the GIL.
LL and HT are one algorithm here, because a receiver can read its peers' routing; what differs is the output's shape.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from ep_kernels import checks, quant
from ep_kernels.config import MoEConfig, may_overflow
from ep_kernels.errors import ArgumentError, HandleError, PeerTimeout, TransportError
from ep_kernels.lazy_output import lazy_output, recycle
from ep_kernels.network import NetworkConfig
from ep_kernels.network.greeting import NetworkTicket
from ep_kernels.network.network import Channel, ChannelMemory, Network, settled
from ep_kernels.transports.base import CombineArgs, DispatchArgs, StepInputs, Transport
from ep_kernels.transports.cpu import native
from ep_kernels.transports.cpu.comm import NativeComm, SlotBuffers
from ep_kernels.transports.cpu.cpu_member import CpuMember, mask_of
from ep_kernels.transports.cpu.cpu_routing import CPU, FreshState, RoutingState, StatePlaces
from ep_kernels.transports.cpu.geometry import check_rows, geometry_of, wire_bytes
from ep_kernels.transports.cpu.region import OwnRegion, own_domain, read_ticket
from ep_kernels.types import Capabilities, DispatchHandle, DispatchOutput, Layout, Mode, PeerTraffic

_LL = Mode.LL
_GIVEN, _RETURNED = struct.Struct("=2i4Q4i"), struct.Struct("=Q2i2Q2i2Q2i")
"""Of a DispatchOp, from `routing.tokens` on: tokens, mode, x, scales, ids, weights, fresh, exact_shapes, wide_ids, pad.
Of a CombineOp, from `routing.origin` on: origin, tokens, mode, y, row_weights, outputs_slot, apply_weights, z,
z_weights, z_type, to_collect."""
_GIVEN_AT = native.DispatchOp.routing.offset + native.Routing.tokens.offset
_RETURNED_AT = native.CombineOp.routing.offset + native.Routing.origin.offset
_VIEWS = 64
"""Numbers of rows of which views are kept."""


class CpuStep:
    """See `types.KeptStep`; of one slot."""

    def __init__(self, comm: NativeComm, slot: int) -> None:
        self._comm, self._slot = comm, slot
        self._buffers, self._rows = comm.buffers[slot], comm.buffers[slot].tokens()
        self._state = state = FreshState(comm.places, 0)
        self.counts, self.offsets = state.counts, state.offsets
        *routing, counts, offsets, valid = state.addresses()
        out = valid, *self._buffers.addresses(), 0, 0, counts, offsets
        self._dispatch = native.dispatch_op((*routing, 0), (0, 0), (0,) * 4, (0,) * 3, out)
        self._combine = native.combine_op((*routing, 0), (0, 0), (0, 0), (-1, 1), (0, 0, 0))
        self._at = ctypes.byref(self._dispatch), ctypes.byref(self._combine)
        self._views: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._y_address = self._buffers.expert_outputs.data_ptr()
        self.num_tokens = self._mode = self._num_rows = 0
        self._capacity = self._rows.shape[0]
        self.tokens, self.y = self._view(0)

    def dispatch(self, inputs: StepInputs, mode: Mode) -> int:
        """Both phases, and peers no longer read y. The native status."""
        op, comm, exact = self._dispatch, self._comm, self._buffers.exact_shapes
        tokens, is_ht, (x, ids, weights) = inputs.num_tokens, mode is not _LL, inputs.addresses
        _GIVEN.pack_into(op, _GIVEN_AT, tokens, is_ht, x, 0, ids, weights, 1, exact, inputs.wide_ids, 0)
        recycle(self._rows)
        status: int = comm.lib.cd_dispatch(comm.pointer, self._at[0], native.STEP)
        if not status:
            self.num_tokens, self._mode = tokens, is_ht
            self._num_rows = num_rows = op.num_rows if exact else self._capacity
            self.tokens, self.y = self._views.get(num_rows) or self._view(num_rows)
        return status

    def combine(self, z: int, z_type: int) -> int:
        """Of the rows in y, into [T, H] there. The native status."""
        comm, slot = self._comm, self._slot if self._num_rows else -1
        origin, tokens, mode = self._dispatch.seq, self.num_tokens, self._mode
        _RETURNED.pack_into(
            self._combine, _RETURNED_AT, origin, tokens, mode, self._y_address, 0, slot, 1, z, 0, z_type, 0
        )
        status: int = comm.lib.cd_combine(comm.pointer, self._at[1], native.BOTH)
        return status

    def _view(self, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        if len(self._views) == _VIEWS:
            self._views.clear()
        with torch.inference_mode(False):
            views = self._rows[:num_rows], self._buffers.expert_outputs[:num_rows]
        self._views[num_rows] = views
        return views


_TOTALS = ("num_rows", "num_dropped", "num_invalid_ids")
_PART_S = 0.1
"""Seconds to send what is left for a rank that is left out."""
THREADS = 3
"""Processors for each rank of a host from which on it gets a helper thread: itself, the proxy thread, the helper."""
SPIN_NS, LONG_NS = 100_000, 500_000
"""Where there is a processor for each rank of a host, a wait spins this long before it sleeps, and lets other threads
run meanwhile: a sleeper is woken after 50 us or more, a rank that spins sees its peer at once. With a helper, the rows
of other hosts come in parts, which are further apart."""
_RENEW_S, _REDIAL_S = 0.05, 1.0
"""Between two looks, while ranks agree, whether all connections stand; and how long one is tried."""


def create(config: MoEConfig) -> CpuTransport:
    """Build the transport; nothing is allocated yet. Raises TransportError when the native library is missing."""
    return CpuTransport(config)


def _keeps_steps(config: MoEConfig) -> bool:
    """Rows without scales, on one host, of which none is dropped or looked at."""
    plain = config.network is None and not config.quantize and not config.scale_columns and not config.validate
    local = config.resolved_expert_map.num_local_experts(config.group.rank)
    return plain and config.resolved_layout is Layout.GROUPED and not may_overflow(config, local)


class CpuTransport(CpuMember[NativeComm], Transport):
    def __init__(self, config: MoEConfig) -> None:
        self.config = config
        native.check_limits(config.group.size, config.max_in_flight)
        self.geometry = geometry_of(config)
        check_rows(config, self.geometry)
        super().__init__(NativeComm(config, self.geometry), config.group)
        self._dispatches: dict[int, CpuDispatch] = {}
        self._combines: dict[int, CpuCombine] = {}
        self._steps: dict[int, CpuStep] = {}
        self.keeps_steps = _keeps_steps(config)
        self._remote: dict[int, NetworkTicket] = {}
        self.capabilities = Capabilities(
            device_type="cpu",
            cross_host=config.network is not None,
            dtypes=(torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.uint8, torch.int8),
            modes=(Mode.LL, Mode.HT),
            graphs=False,
            wide_ids=True,
            abi=f"cpu-{self.lib.cd_abi():016x}",
            samples=True,
            quantize=(False, True, "mxfp8", "nvfp4"),
        )

    # Life.

    def allocate(self, ll_max_tokens: int | None) -> bytes:
        """See `Transport.allocate`. Both algorithms use the same buffers, so the crossover changes nothing."""
        comm = self.native()
        region, parts = self.make_region(comm), native.region_parts(self.geometry)
        for slot, buffers in enumerate(comm.buffers):
            at = parts.outputs + slot * parts.outputs_slot
            outputs = region.bytes[at : at + self.geometry.y_rows * buffers.output_row_bytes]
            buffers.expert_outputs = outputs.view(self.config.resolved_output_dtype).view(-1, self.config.hidden_size)
            at = parts.dispatch + slot * parts.dispatch_slot + parts.rows
            buffers.input = region.bytes[at : at + self.geometry.max_tokens * self.geometry.row_bytes]
        if self.config.network is None:
            return region.ticket(self.lib.cd_abi())
        self._open_channel(comm, region, self.config.network)
        assert comm.channel is not None
        return region.ticket(self.lib.cd_abi(), self.config.network.domain, comm.landing, comm.channel.ticket())

    def _open_channel(self, comm: NativeComm, region: OwnRegion, config: NetworkConfig) -> None:
        """Mirrors of the ranks of other hosts, and the network that writes them."""
        ranks, mirror = int(self.geometry.ranks), native.region_parts(self.geometry).mirror
        comm.landing = OwnRegion(mirror * ranks)
        landing = comm.landing.bytes.data_ptr()
        if self.lib.cd_attach_network(comm.pointer, landing):
            raise TransportError("cpu transport: out of memory")
        handler = self.lib.cd_network_handler()
        own = region.bytes.data_ptr()
        memory = ChannelMemory(own, region.num_bytes, landing, mirror, handler, comm.pointer)
        comm.channel = Channel(Network.of(config), int(self.geometry.rank), ranks, memory, self.config.timeout_s)
        self.lib.cd_set_outbox(comm.pointer, comm.channel.outbox)

    def import_regions(self, tickets: Sequence[bytes]) -> None:
        comm = self.native()
        num_bytes = self.lib.cd_region_bytes(comm.pointer)
        network = self.config.network
        domain = None if network is None else network.domain or own_domain()
        abi, own = self.lib.cd_abi(), int(self.geometry.rank)
        read = [read_ticket(rank, raw, abi=abi, num_bytes=num_bytes, domain=domain) for rank, raw in enumerate(tickets)]
        domains = [ticket.domain for ticket in read]
        hosts = [domains.index(ticket.domain) if network is not None else 0 for ticket in read]
        self.domains = tuple(hosts)
        if network is not None:
            self.lib.cd_set_hosts(comm.pointer, (ctypes.c_int32 * len(hosts))(*hosts))
        landing_bytes = 0 if comm.landing is None else comm.landing.num_bytes
        for rank, ticket in enumerate(read):
            if rank != own and hosts[rank] == hosts[own]:
                self.map_region(comm, rank, ticket, landing_bytes)
        if comm.channel is not None:
            tickets_of = {rank: ticket.network for rank, ticket in enumerate(read) if hosts[rank] != hosts[own]}
            self._remote = {rank: ticket for rank, ticket in tickets_of.items() if ticket is not None}
        self._use_processors(comm, hosts.count(hosts[own]))
        if comm.channel is not None:
            comm.channel.connect(self._remote, self.config.timeout_s)
        self.lib.cd_activate(comm.pointer, mask_of(self.active))

    def _use_processors(self, comm: NativeComm, here: int) -> None:
        """How long waits spin, and whether there is a helper thread, by the number of ranks of this host."""
        processors = len(os.sched_getaffinity(0))
        each = 1 if comm.channel is None else 2  # a proxy thread needs its own
        spare = bool(self._remote) and processors >= THREADS * here
        if spare or (here > 1 and processors >= each * here):
            self.lib.cd_set_spin(comm.pointer, LONG_NS if spare else SPIN_NS, SPIN_NS)
        if spare:
            self.lib.cd_start_helper(comm.pointer)  # if there can be no thread, the rank does it all

    def _why(self, peer: int) -> str:
        channel = self.native().channel
        return "" if channel is None else channel.why(peer)

    def drain(self, timeout_s: float) -> None:
        """See `Transport.drain`: operations end before they return, but the network may still send what they left."""
        channel = self._channel()
        if channel is not None:
            active = [rank for rank in self._remote if self.active[rank]]
            self._flush(channel, active, timeout_s)

    def clear(self) -> None:
        self._dispatches, self._combines, self._steps = {}, {}, {}

    # Operations.

    def dispatch(self, args: DispatchArgs) -> CpuDispatch:
        comm = self.native()
        if self._dispatches or self._combines:
            self._recycle(comm.next[0] % len(comm.buffers))
        pending = CpuDispatch(self, comm, args)
        if not args.at_once:
            self._dispatches[pending.slot] = pending
        return pending

    def combine(self, args: CombineArgs) -> CpuCombine:
        pending = CpuCombine(self, self.native(), args)
        if not args.at_once:
            self._combines[pending.slot] = pending
        return pending

    def begin_step(self, inputs: StepInputs, mode: Mode) -> CpuStep:
        comm = self.comm
        if comm is None or self.reason is not None:
            comm = self.native()
        slot = comm.next[0] % len(comm.buffers)
        step = self._steps.get(slot)
        if step is None:
            with torch.inference_mode(False):
                step = self._steps[slot] = CpuStep(comm, slot)
        if status := step.dispatch(inputs, mode):
            self.judge(status)
        return step

    def end_step(self, step: CpuStep, out: torch.Tensor) -> None:
        if status := step.combine(out.data_ptr(), native.type_code(out.dtype)):
            self.judge(status)

    def dispatch_input(self, num_tokens: int) -> torch.Tensor:
        """See `Transport.dispatch_input`. Waits until peers no longer read what an earlier dispatch left there."""
        comm = self.native()
        slot = comm.next[0] % len(comm.buffers)
        self._recycle(slot)
        self.judge(self.lib.cd_dispatch_free(comm.pointer))
        shape = (num_tokens, self.config.hidden_size)
        if self.config.quantize:
            return torch.empty(shape, dtype=self.config.dtype, device="cpu")
        return comm.buffers[slot].input_rows(num_tokens)

    def combine_input(self, handle: DispatchHandle) -> torch.Tensor:
        """See `Transport.combine_input`. Waits until peers no longer read what an earlier combine left there."""
        comm = self.native()
        slot = handle.seq % int(self.geometry.in_flight)
        self._recycle(slot)
        self.judge(self.lib.cd_outputs_free(comm.pointer, slot))
        return comm.buffers[slot].outputs(handle.rows_shape)

    def row_weights(self, handle: DispatchHandle) -> torch.Tensor:
        state: RoutingState = handle.state
        return state.weight_of_rows(handle.rows_shape)

    def source_rows(self, handle: DispatchHandle) -> torch.Tensor:
        """See `Transport.source_rows`; without tokens all of whose rows were dropped."""
        state: RoutingState = handle.state
        return state.rows_of_sources()

    def trimmed(self, handle: DispatchHandle, num_rows: int) -> DispatchHandle:
        state: RoutingState = handle.state
        if num_rows < state.totals[0]:  # combine would read past the end of y
            raise ArgumentError("num_rows", f"the {state.totals[0]} that arrived, or more", num_rows)
        return replace(handle, rows_shape=(num_rows,))

    def dropped_by(self, out: DispatchOutput, handle: DispatchHandle) -> int:
        state: RoutingState = handle.state
        return state.totals[1]

    def blank_state(self, num_tokens: int) -> RoutingState:
        return StatePlaces(self.geometry).apart(num_tokens)

    def restore(self, handle: DispatchHandle) -> DispatchHandle:
        return replace(handle, state=RoutingState.restore(handle.state))

    def _recycle(self, slot: int) -> None:
        """Finish what still uses the buffers of dispatch slot `slot` and was not waited for. All ranks do, in the
        same call, so none waits for credit that a peer would give only after that call."""
        dispatch = self._dispatches.get(slot)
        if dispatch is not None:
            dispatch.wait()
        for combine in list(self._combines.values()):
            if slot == combine.dispatch_slot:
                combine.finish()

    def ended(self, pending: CpuDispatch | CpuCombine) -> None:
        """The receive half of `pending` runs now; it must not run again, even if it fails."""
        for table in (self._dispatches, self._combines):
            if table.get(pending.slot) is pending:
                del table[pending.slot]

    # The group.

    def set_active(self, mask: Sequence[bool], epoch: int) -> None:
        comm = self.native()
        self._dispatches.clear()
        self._combines.clear()
        if comm.channel is not None:
            self._change_peers(comm.channel, mask, epoch)
        super().set_active(mask, epoch)

    def abort(self, reason: str) -> None:
        super().abort(reason)
        if channel := self._channel():
            channel.abort(reason)

    def give_up(self, ranks: Sequence[int]) -> None:
        super().give_up(ranks)
        if channel := self._channel():
            channel.give_up(ranks)

    def _channel(self) -> Channel | None:
        """None on one host, and once closed."""
        comm = self.comm
        return None if comm is None else comm.channel

    def _change_peers(self, channel: Channel, mask: Sequence[bool], epoch: int) -> None:
        """Part from the ranks of other hosts that are left out; reach those again whose connection was lost."""
        out = [rank for rank in self._remote if not mask[rank]]
        self._flush(channel, out, _PART_S)  # of an operation that this rank has ended, others may still be waiting
        for rank in out:
            channel.leave(rank, epoch + 1)
        channel.connect({rank: ticket for rank, ticket in self._remote.items() if mask[rank]}, self.config.timeout_s)

    def renew(self, mask: Sequence[bool]) -> float:
        """See `CpuMember.renew`. A side that has not noticed the end of a connection was not asked to make it again."""
        channel = self.native().channel
        if channel is None:
            return 0.0
        up = channel.up()
        ended = {rank: one for rank, one in self._remote.items() if mask[rank] and not up >> rank & 1}
        try:
            channel.connect(ended, min(_REDIAL_S, self.config.timeout_s))
        except PeerTimeout:
            return 0.0  # the wait that follows names the rank, and how its connection ended
        return _RENEW_S

    def _flush(self, channel: Channel, ranks: Sequence[int], timeout_s: float) -> None:
        """Wait until everything for those ranks has been sent, or is given up; at most so long."""
        settled(channel.is_quiet, sum(1 << rank for rank in ranks), timeout_s, lambda: self.reason is not None)

    def traffic(self) -> list[PeerTraffic]:
        comm = self.comm
        if comm is None or comm.channel is None:
            return []
        up, by_rank = comm.channel.up(), comm.channel.traffic()
        return [
            PeerTraffic(rank, bool(up >> rank & 1), one.sent_messages, one.sent_bytes, one.received_messages)
            for rank, one in enumerate(by_rank)
            if rank in self._remote
        ]

    def wire_bytes(self, mode: Mode) -> tuple[int, int]:
        """See `Transport.wire_bytes`: one algorithm runs both modes, and the receiver reads places and weights."""
        return wire_bytes(self.config, self.geometry)


class CpuDispatch:
    """See `base.PendingDispatch`. Unless `args.at_once` its rows are sent when it is made."""

    __slots__ = (
        "_args", "_buffers", "_comm", "_epoch", "_op", "_rank_wise", "_result", "_state", "_step", "_transport", "slot",
    )  # fmt: skip

    def __init__(self, transport: CpuTransport, comm: NativeComm, args: DispatchArgs) -> None:
        self._transport, self._comm, self._epoch = transport, comm, transport.epoch
        self._args: DispatchArgs | None = args
        self.slot = slot = comm.next[0] % len(comm.buffers)
        self._buffers = buffers = comm.buffers[slot]
        previous, (tokens, _), ids, mode = args.previous, args.x.shape, args.topk_ids, args.mode
        self._step = tokens, mode
        self._state = state = FreshState(comm.places, tokens) if previous is None else previous.state.again()
        scales = 0 if args.scales is None else args.scales.data_ptr()
        *routing, counts, offsets, valid = state.addresses()
        self._op = native.dispatch_op(
            (*routing, state.origin), (tokens, mode is not _LL),
            (args.x.data_ptr(), scales, ids.data_ptr(), args.topk_weights.data_ptr()),
            (previous is None, buffers.exact_shapes, ids.dtype is torch.int64),
            (valid, *buffers.addresses(), 0, 0, counts, offsets), state.totals,
        )  # fmt: skip
        self._rank_wise: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
        self._result: tuple[DispatchOutput, DispatchHandle] | None = None
        if not args.at_once:
            self._run(native.SEND)
            self._args = None  # x and the rest are staged; the caller may have them back

    def _run(self, phases: int) -> None:
        if phases & native.SEND:
            recycle(self._buffers.tokens())
        comm = self._comm
        status = comm.lib.cd_dispatch(comm.pointer, ctypes.byref(self._op), phases)
        if status:
            self._transport.judge(status)

    def _make_rank_wise(self) -> None:
        """Room for what rank-wise layouts say of a row: ids and weights."""
        geometry, config = self._transport.geometry, self._transport.config
        ids = torch.empty(geometry.capacity, geometry.topk, dtype=torch.int32, device=CPU)
        weights = torch.empty(geometry.capacity, geometry.topk, dtype=torch.float32, device=CPU)
        if config.absent_id is not None and not config.exact_shapes:
            ids.fill_(config.absent_id), weights.zero_()
        self._op.out_ids, self._op.out_weights = ids.data_ptr(), weights.data_ptr()
        self._rank_wise = ids, weights

    def buffers(self) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        lead = self._buffers.lead(0)
        stride = -(-lead[-1] // quant.ROW_PAD) * quant.ROW_PAD
        return self._buffers.tokens()[: lead[0]], self._buffers.scales(lead, stride), self._state.counts

    def wait(self) -> tuple[DispatchOutput, DispatchHandle]:
        if self._result is None:
            if not self._buffers.per_expert:
                self._make_rank_wise()
            if self._args is not None:
                self._run(native.BOTH)
            else:
                _same_epoch(self._transport, self._epoch)
                self._transport.native()
                self._transport.ended(self)
                self._run(native.RECEIVE)
            self._result = self._delivered()
        return self._result

    def _delivered(self) -> tuple[DispatchOutput, DispatchHandle]:
        op, state, buffers = self._op, self._state, self._buffers
        seq, num_rows, num_dropped = op.seq, op.num_rows, op.num_dropped
        self._transport.num_dropped += num_dropped
        state.totals, state.origin = (num_rows, num_dropped, op.num_invalid), state.origin or seq
        lead = buffers.lead(num_rows)
        made = DispatchHandle(0, seq, *self._step, self._epoch, state, lead)
        return lazy_output(_fields(buffers, state, lead, op.packed_stride, self._rank_wise)), made


def _fields(
    buffers: SlotBuffers,
    state: RoutingState,
    lead: tuple[int, ...],
    packed_stride: int,
    rank_wise: tuple[torch.Tensor | None, torch.Tensor | None],
) -> Callable[[str], Layout | torch.Tensor | None]:
    """Makes the fields of a DispatchOutput of leading shape `lead`; rank_wise: ids and weights of rows."""

    def field(name: str) -> Layout | torch.Tensor | None:
        match name:
            case "layout":
                return buffers.layout
            case "tokens":
                return buffers.tokens()[: lead[0]]
            case "scales":
                return buffers.scales(lead, packed_stride)
            case "counts" | "valid":
                return getattr(state, name)  # type: ignore[no-any-return]
            case "offsets":
                return state.offsets if buffers.layout is Layout.GROUPED else None
            case "topk_ids" | "topk_weights":
                return _shaped(rank_wise[name == "topk_weights"], lead)
            case _:
                return torch.tensor([state.totals[_TOTALS.index(name)]], dtype=torch.int32, device=CPU)

    return field


class CpuCombine:
    """See `base.PendingCombine`. Unless `args.at_once` its rows are sent when it is made."""

    __slots__ = (
        "_args",
        "_comm",
        "_epoch",
        "_op",
        "_out",
        "_state",
        "_transport",
        "_weights",
        "_z",
        "dispatch_slot",
        "slot",
    )

    def __init__(self, transport: CpuTransport, comm: NativeComm, args: CombineArgs) -> None:
        self._transport, self._comm, self._epoch = transport, comm, transport.epoch
        self._args: CombineArgs | None = args
        self._out = args.out
        handle, y, row_weights, buffers = args.handle, args.y, args.row_weights, comm.buffers
        state: RoutingState = handle.state
        if args.topk_weights is not None:
            state = state.weighted(args.topk_weights if args.at_once else args.topk_weights.clone())
        self._state = state
        self.slot = comm.next[1] % len(buffers)
        self.dispatch_slot = slot = handle.seq % len(buffers)
        lent = handle.rows_shape[0] > 0 and y.data_ptr() == buffers[slot].expert_outputs.data_ptr()
        tokens, weights, of_rows, of_tokens = handle.num_tokens, None, 0, 0
        if row_weights is not None:
            weights = torch.empty(tokens, transport.config.topk, dtype=torch.float32, device=CPU)
            of_rows, of_tokens = row_weights.data_ptr(), weights.data_ptr()
        self._weights = weights
        *routing, _, _, _ = state.addresses()
        self._op = native.combine_op(
            (*routing, state.origin), (tokens, handle.mode is not _LL),
            (y.data_ptr(), of_rows), (slot if lent else -1, args.apply_weights), (0, of_tokens, 0),
        )  # fmt: skip
        self._z: torch.Tensor | None = None
        if not args.at_once:
            checks.made(torch.empty(0, dtype=torch.uint8, device=CPU))  # z will have memory
            comm.collecting[self.slot] = self._op, state
            self._run(native.SEND)
            self._args = None  # the rows are staged, or lent

    def _run(self, phases: int) -> None:
        comm = self._comm
        status = comm.lib.cd_combine(comm.pointer, ctypes.byref(self._op), phases)
        if status:
            self._transport.judge(status)

    def finish(self) -> torch.Tensor:
        """What is left of it, once."""
        if self._z is None:
            transport, op, z = self._transport, self._op, self._out
            if z is None:
                hidden, dtype = self._comm.outputs
                z = checks.made(torch.empty(op.routing.tokens, hidden, dtype=dtype, device=CPU))
            op.z, op.z_type = z.data_ptr(), native.type_code(z.dtype)
            if self._args is not None:
                self._run(native.BOTH)
            else:
                _same_epoch(transport, self._epoch)
                transport.native()
                transport.ended(self)
                self._run(native.RECEIVE)
            self._z = z
        return self._z

    def wait(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self.finish(), self._weights


def _same_epoch(transport: CpuTransport, epoch: int) -> None:
    if transport.epoch != epoch:
        raise HandleError(f"wait: begun in epoch {epoch}, the group is in epoch {transport.epoch}")


def _shaped(values: torch.Tensor | None, lead: tuple[int, ...]) -> torch.Tensor | None:
    if values is None:
        return None
    return values[: lead[0]] if len(lead) == 1 else values.view(*lead, values.shape[1])
