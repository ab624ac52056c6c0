"""The face of the transport (see `transports/base.py`): processes, regions, launches on the current stream.

Waiting is on the stream, never on the CPU, but where the caller asked for what only the device knows: exact shapes, and
overflow that raises (where there can be any). A failed wait is therefore raised by the call that synchronises, or by
the next one; what ranks did differently but broke nothing, by the call that synchronises or by `check_results`.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch

from ep_kernels import jit
from ep_kernels.config import MoEConfig, may_overflow
from ep_kernels.errors import ArgumentError
from ep_kernels.kernels import abi
from ep_kernels.transports.base import CombineArgs, DispatchArgs, Transport
from ep_kernels.transports.nvlink.calls import plan, tables
from ep_kernels.transports.nvlink.calls.engine import Call, LaunchEngine
from ep_kernels.transports.nvlink.calls.left_out import Unsent
from ep_kernels.transports.nvlink.calls.operation_plan import Surroundings
from ep_kernels.transports.nvlink.calls.operations import NvlinkCombine, NvlinkDispatch, NvlinkOperations
from ep_kernels.transports.nvlink.calls.routing_state import TensorState, restored, trimmed
from ep_kernels.transports.nvlink.gpu import launch
from ep_kernels.transports.nvlink.memory import links
from ep_kernels.transports.nvlink.memory.domain import needs_boxes
from ep_kernels.transports.nvlink.network import gpu_direct, remote
from ep_kernels.transports.nvlink.network.remote import RemoteRanks
from ep_kernels.transports.nvlink.nvlink_member import NvlinkMember, require_cuda
from ep_kernels.types import Capabilities, DispatchHandle, DispatchOutput, Mode, Overflow

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
        self.capabilities = Capabilities("cuda", joined, DTYPES, (Mode.LL, Mode.HT), True, self._abi, True)
        local = config.resolved_expert_map.num_local_experts(config.group.rank)
        self._raises = config.overflow is Overflow.RAISE and may_overflow(config, local)
        self._made: NvlinkOperations | None = None

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
        self._made = None  # of the epoch that has ended

    def _note_captures(self) -> None:
        if self._made is not None and self._made.was_captured:
            self._captured = True

    # Operations.

    @property
    def _operations(self) -> NvlinkOperations:
        """Of this epoch; made at first use."""
        if self._made is None:
            from ep_kernels.transports.nvlink.gpu import driver

            mailbox, host = self._domain.mailbox, self._tables.host
            quiet = launch.Quiet([*((address, 0) for address in host.fault_addresses), *mailbox.watched()])
            context = int(driver.call("cuCtxGetCurrent"))
            around = Surroundings(self._device, self._streams, quiet, (host, mailbox), context, launch.load())
            self._made = NvlinkOperations(self._engine, around, self._functions, self, self.epoch, self._raises)
        return self._made

    def quick(self, number: int, mode: Mode, ll_max_tokens: int) -> NvlinkOperations | None:
        if self.config.network is not None:  # whose proxy Python wakes
            return None
        self._operations.offer(number, mode, ll_max_tokens)
        return self._operations

    def is_captured(self) -> bool:
        self._note_captures()
        return self._captured

    def check_results(self) -> None:
        finding = self._engine.tables.host.finding()
        if finding is not None:
            raise finding

    def dropped_by(self, out: DispatchOutput, handle: DispatchHandle) -> int:
        return int(handle.state.num_dropped)

    def dropped_rows(self) -> int:
        return self._engine.tables.host.num_dropped

    def dispatch(self, args: DispatchArgs) -> NvlinkDispatch:
        self._check_device("x", args.x)
        if self._raises and torch.cuda.is_current_stream_capturing():
            raise ArgumentError(
                "overflow", "Overflow.DROP, or no max_recv_rows, under graph capture (RAISE reads the device)", "RAISE"
            )
        return self._operations.begin_dispatch(args)

    def combine(self, args: CombineArgs) -> NvlinkCombine:
        self._check_device("y", args.y)
        return self._operations.begin_combine(args)

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

    def blank_state(self, num_tokens: int) -> TensorState:
        return self._engine.blank_state(num_tokens)

    def restore(self, handle: DispatchHandle) -> DispatchHandle:
        return restored(handle)

    def wire_bytes(self, mode: Mode) -> tuple[int, int]:
        return tables.wire_bytes(self.config, mode)

    def ll_max_tokens(self) -> int:
        return plan.LL_MAX_TOKENS[self.config.resolved_layout]


def create(config: MoEConfig) -> NvlinkTransport:
    return NvlinkTransport(config)
