"""The face of the transport (see `transports/base.py`): processes, regions, launches on the current stream.

Waiting is on the stream, never on the CPU, but where the caller asked for what only the device knows: exact shapes, and
overflow that raises (where there can be any). A failed wait is therefore raised by the call that synchronises, or by
the next one; what ranks did differently but broke nothing, by the call that synchronises or by `check_results`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import torch

from ep_kernels import jit
from ep_kernels.config import MoEConfig, may_overflow
from ep_kernels.errors import ArgumentError
from ep_kernels.kernels import abi
from ep_kernels.transports.base import CombineArgs, DispatchArgs, Transport
from ep_kernels.transports.nvlink.calls import plan, tables
from ep_kernels.transports.nvlink.calls.engine import BOTH, RECEIVE, SEND, Call, Dispatch, LaunchEngine
from ep_kernels.transports.nvlink.calls.left_out import Unsent
from ep_kernels.transports.nvlink.calls.quick import Surroundings, is_offered
from ep_kernels.transports.nvlink.calls.quick_calls import NvlinkQuickCalls
from ep_kernels.transports.nvlink.calls.routing_state import DispatchState, restored, trimmed
from ep_kernels.transports.nvlink.gpu import launch
from ep_kernels.transports.nvlink.memory import links
from ep_kernels.transports.nvlink.memory.domain import needs_boxes
from ep_kernels.transports.nvlink.network import gpu_direct, remote
from ep_kernels.transports.nvlink.network.remote import RemoteRanks
from ep_kernels.transports.nvlink.nvlink_member import NvlinkMember, require_cuda
from ep_kernels.types import Capabilities, DispatchHandle, DispatchOutput, Layout, Mode, Overflow

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.uint8, torch.int8)
_SMALLER = (
    "smaller max_tokens_per_rank, max_recv_rows or max_in_flight make it smaller, and `crossdock memory` shows what it "
    "consists of"
)


class NvlinkTransport(NvlinkMember, Transport):
    """Ranks on GPUs, one process each: those of one NVLink domain map each other's memory, the others are reached over
    a network. The device is torch's current one at `allocate`."""

    def __init__(self, config: MoEConfig) -> None:
        # AUTO's crossover sizes its buffers
        super().__init__(config, abi.fingerprint(jit.all_sources() + str(plan.LL_MAX_TOKENS)))
        joined = config.network is not None
        self.capabilities = Capabilities(
            "cuda", joined, DTYPES, (Mode.LL, Mode.HT), True, self._abi, True, quantize=(False, True, *jit.FORMATS)
        )
        local = config.resolved_expert_map.num_local_experts(config.group.rank)
        self._raises = config.overflow is Overflow.RAISE and may_overflow(config, local)
        compact = config.resolved_layout in (Layout.GROUPED, Layout.FLAT)
        self._exact = compact and config.exact_shapes
        self._quick: NvlinkQuickCalls | None = None

    # Life.

    def allocate(self, ll_max_tokens: int | None) -> bytes:
        require_cuda()
        self.config = msgspec.structs.replace(self.config, ll_max_tokens=ll_max_tokens)
        from ep_kernels.transports.nvlink.gpu import driver
        from ep_kernels.transports.nvlink.network.gpu_boxes import CudaGpu

        # The device, and whether rows go to other hosts.
        num_sms = self._enter_device([self.config.resolved_dispatch_sms, self.config.resolved_combine_sms])
        block_bytes = driver.block_bytes(self._device.index) - plan.STATIC_BYTES
        network, boxed = self.config.network, needs_boxes(self.config.network, self._device, self.config.memory_handle)
        if boxed:
            remote.check(self.config)
        # Sizes, records and tables.
        config = self.config if boxed else msgspec.structs.replace(self.config, network=None)
        self._engine = LaunchEngine(config, self._device, num_sms, block_bytes)
        self._tables = self._engine.tables
        # Boxes for ranks of other hosts.
        if boxed:
            group, shape = self.config.group, self._engine.sizes.shape
            boxes, _ = gpu_direct.choose(network, group.rank, CudaGpu(self._device.index))
            timeout_s = self.config.timeout_s
            self._remote = RemoteRanks(network, group.rank, group.size, shape, self._tables.host, boxes, timeout_s)
        # Kernels, then the region.
        self._load(self._engine.variants())
        self._num_rows = torch.zeros(1, dtype=torch.int32, pin_memory=True, device="cpu")
        return self._allocate(self._engine.region_bytes, self._engine.blank_bytes, _SMALLER)

    def import_regions(self, tickets: Sequence[bytes]) -> None:
        links.check(self.config, tickets)
        super().import_regions(tickets)

    def close(self) -> None:
        self._note_captures()
        super().close()

    def _attach(self) -> None:
        self._engine.attach(self._domain.region.mapping, self._domain.addresses)

    def _detach(self) -> None:
        self._engine.detach()

    def _barrier_call(self, left_out_epoch: int) -> Call:
        return self._engine.barrier(left_out_epoch)

    def _unsent(self, mask: Sequence[bool]) -> list[Unsent]:
        return self._engine.unsent(mask)

    def _restart(self, dispatch: int, combine: int, mask: Sequence[bool]) -> None:
        self._engine.restart_flags(dispatch, combine)
        self._tables.set_active(mask)
        self._engine.restart_slots()
        self._note_captures()
        self._quick = None  # of the epoch that has ended

    def _note_captures(self) -> None:
        if self._quick is not None and self._quick.was_captured:
            self._captured = True

    # Operations.

    def quick(self, number: int, mode: Mode, ll_max_tokens: int) -> NvlinkQuickCalls | None:
        library, mailbox, host = launch.load(), self._domain.mailbox, self._tables.host
        launches_two = isinstance(self.config.quantize, str)
        if self.config.network is not None or launches_two or not is_offered(library):
            return None
        from ep_kernels.transports.nvlink.gpu import driver

        watched = [(address, 0) for address in host.fault_addresses] + mailbox.watched()
        context = int(driver.call("cuCtxGetCurrent"))
        around = Surroundings(self._device, self._streams, watched, (host, mailbox), context, library)
        self._quick = NvlinkQuickCalls(
            self._engine, around, self._functions, self, number, self.epoch, mode, ll_max_tokens, self._raises
        )
        return self._quick

    def is_captured(self) -> bool:
        self._note_captures()
        return self._captured

    def check_results(self) -> None:
        finding = self._engine.tables.host.finding()
        if finding is not None:
            raise finding

    def dropped_rows(self) -> int:
        return self._engine.tables.host.num_dropped

    def dispatch(self, args: DispatchArgs) -> NvlinkDispatch:
        self._check_device("x", args.x)
        if self._raises and torch.cuda.is_current_stream_capturing():
            raise ArgumentError(
                "overflow", "Overflow.DROP, or no max_recv_rows, under graph capture (RAISE reads the device)", "RAISE"
            )
        made = self._engine.quantized(args)
        if made is not None:
            quantise, args = made
            self._launch(quantise)
        step = self._engine.dispatch(args)
        if not args.at_once:
            self._launch(step.call, SEND)
        return NvlinkDispatch(self, step, BOTH if args.at_once else RECEIVE)

    def finish(self, step: Dispatch, phases: int) -> tuple[DispatchOutput, DispatchHandle]:
        """Receive half of a dispatch. Reads the device where shapes or errors depend on it, never under capture."""
        self._launch(step.call, phases)
        rows = step.state.num_rows  # known where the routing is used again
        unknown = self._exact and rows is None
        if (unknown or self._raises) and not torch.cuda.is_current_stream_capturing():
            self._num_rows.copy_(self._engine.number(step, "num_rows"), non_blocking=True)
            self.settle()
            self.check_results()
            rows = int(self._num_rows) if unknown else rows
        return self._engine.finish(step, rows, self.epoch)

    def buffers(self, step: Dispatch) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        return self._engine.buffers(step)

    def combine(self, args: CombineArgs) -> NvlinkCombine:
        self._check_device("y", args.y)
        call, receive = self._engine.combine(args)
        if not args.at_once:
            self._launch(call, SEND)
        return NvlinkCombine(self, call, receive, BOTH if args.at_once else RECEIVE)

    def receive(self, call: Call, phases: int) -> None:
        """Receive half of a combine."""
        self._launch(call, phases)
        self._raise_fault()

    def dispatch_input(self, num_tokens: int) -> torch.Tensor:
        """See `base.Transport`. Kernels read x wherever it lies, so any memory will do."""
        return torch.empty(num_tokens, self.config.hidden_size, dtype=self.config.dtype, device=self._device)

    def combine_input(self, handle: DispatchHandle) -> torch.Tensor:
        return self._engine.combine_input(handle)

    def row_weights(self, handle: DispatchHandle) -> torch.Tensor:
        return self._engine.row_weights(handle)

    def source_rows(self, handle: DispatchHandle) -> torch.Tensor:
        return self._engine.source_rows(handle)

    def trimmed(self, handle: DispatchHandle, num_rows: int) -> DispatchHandle:
        return trimmed(handle, num_rows)

    def blank_state(self, num_tokens: int) -> DispatchState:
        return self._engine.blank_state(num_tokens)

    def restore(self, handle: DispatchHandle) -> DispatchHandle:
        return restored(handle)

    def wire_bytes(self, mode: Mode) -> tuple[int, int]:
        return tables.wire_bytes(self.config, mode)

    def ll_max_tokens(self) -> int:
        return plan.LL_MAX_TOKENS[self.config.resolved_layout]


class NvlinkDispatch:
    """A dispatch whose send phase is done, or left for `wait` to do with the other. See `base.PendingDispatch`.

    Args:
        transport: whose it is.
        step: what has been prepared, and sent unless both phases are left.
        phases: RECEIVE or BOTH.
    """

    def __init__(self, transport: NvlinkTransport, step: Dispatch, phases: int) -> None:
        self._transport, self._step, self._phases = transport, step, phases
        self._result: tuple[DispatchOutput, DispatchHandle] | None = None

    def wait(self) -> tuple[DispatchOutput, DispatchHandle]:
        if self._result is None:
            self._result = self._transport.finish(self._step, self._phases)
        return self._result

    def buffers(self) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        return self._transport.buffers(self._step)


class NvlinkCombine:
    """See `base.PendingCombine`. `receive(out)` completes the arguments of `call`."""

    def __init__(self, transport: NvlinkTransport, call: Call, receive: Any, phases: int) -> None:
        self._transport, self._call, self._receive, self._phases = transport, call, receive, phases
        self._result: tuple[torch.Tensor, torch.Tensor | None] | None = None

    def wait(self, out: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self._result is None:
            z, weights = self._receive(out)
            self._transport.receive(self._call, self._phases)
            if out is not None and z is not out:
                z = out.copy_(z)
            self._result = z, weights
        return self._result


def create(config: MoEConfig) -> NvlinkTransport:
    """Build the transport; touches no GPU yet."""
    return NvlinkTransport(config)
