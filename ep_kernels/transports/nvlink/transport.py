"""The face of the transport (see `transports/base.py`): processes, regions, launches on the current stream.

Waiting is on the stream, never on the CPU, but where the caller asked for what only the device knows: exact shapes, and
overflow that raises (where there can be any). A failed wait is therefore raised by the call that synchronises, or by
the next one; what ranks did differently but broke nothing, by the call that synchronises or by `check_results`.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Sequence
from typing import Any

import msgspec
import torch

from ep_kernels import jit, tuning
from ep_kernels.config import MoEConfig, may_overflow
from ep_kernels.errors import ArgumentError, TransportError
from ep_kernels.kernels import abi
from ep_kernels.transports.base import EXCHANGE_WORDS, CombineArgs, DispatchArgs
from ep_kernels.transports.nvlink import left_out, links, plan
from ep_kernels.transports.nvlink.domain import Domain
from ep_kernels.transports.nvlink.engine import BOTH, RECEIVE, SEND, Call, Dispatch, DispatchState, LaunchEngine
from ep_kernels.transports.nvlink.pending import NvlinkCombine, NvlinkDispatch
from ep_kernels.transports.nvlink.streams import StreamOrder
from ep_kernels.types import Capabilities, DispatchHandle, DispatchOutput, LatencySample, Layout, Mode, Overflow

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.uint8, torch.int8)
_SMALLER = (
    "smaller max_tokens_per_rank, max_recv_rows or max_in_flight make it smaller, and `crossdock memory` shows what it "
    "consists of"
)
_kept_for_graphs: list[Any] = []
"""What graphs of closed communicators still read. Nobody tells when a graph is gone, so it stays for good."""


def create(config: MoEConfig) -> NvlinkTransport:
    """Build the transport; touches no GPU yet."""
    return NvlinkTransport(config)


def require_cuda() -> None:
    """Raise TransportError where no CUDA device, or no way to its driver and compiler, is here."""
    if not torch.cuda.is_available():
        raise TransportError(
            "nvlink: needs one CUDA device per rank; torch sees none (no GPU, or a torch without CUDA)"
        )
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None:
        raise TransportError("nvlink: needs cuda-bindings (it comes with torch for CUDA)")


class NvlinkTransport:
    """Ranks on the GPUs of one NVLink domain, one process each. The device is torch's current one at `allocate`."""

    def __init__(self, config: MoEConfig) -> None:
        self._config = config
        fingerprint = abi.fingerprint(jit.all_sources() + str(plan.LL_MAX_TOKENS))  # AUTO's crossover sizes its buffers
        self.domains = (0,) * config.group.size
        self.capabilities = Capabilities("cuda", False, DTYPES, (Mode.LL, Mode.HT), True, fingerprint)
        self._epoch: int = config.group.epoch
        local = config.resolved_expert_map.num_local_experts(config.group.rank)
        self._raises = config.overflow is Overflow.RAISE and may_overflow(config, local)
        compact = config.resolved_layout in (Layout.GROUPED, Layout.FLAT)
        self._exact = compact and config.exact_shapes
        self._functions: dict[jit.Variant, Any] = {}
        self._closed = self._captured = False

    # Life.

    def allocate(self, ll_max_tokens: int | None) -> bytes:
        """See `base.Transport`."""
        require_cuda()
        self._config = msgspec.structs.replace(self._config, ll_max_tokens=ll_max_tokens)
        from ep_kernels.transports.nvlink import driver

        torch.cuda.init()  # type: ignore[no-untyped-call]
        self._device = torch.device("cuda", torch.cuda.current_device())
        torch.zeros(1, device=self._device)  # makes torch's context current
        self._streams = StreamOrder(self._device)
        num_sms = torch.cuda.get_device_properties(self._device).multi_processor_count
        block_bytes = driver.block_bytes(self._device.index) - plan.STATIC_BYTES
        self._engine = LaunchEngine(
            self._config, self._device, min(num_sms, self._config.num_sms or num_sms), block_bytes
        )
        self._load(driver)
        host, group = self._engine.tables.host, self._config.group
        self._domain = Domain(group, self._config.timeout_s, self.capabilities.abi, host)
        ticket = self._domain.allocate(self._engine.region_bytes, self._device, _SMALLER)
        for begin, end in self._engine.blank_bytes:
            self._domain.region.mapping.view(begin, (end - begin,), torch.uint8).zero_()
        torch.cuda.synchronize(self._device)
        self._mailbox = self._domain.mailbox
        return ticket

    def _load(self, driver: Any) -> None:
        compiler = jit.Compiler(tuning.cache_dir(self._config.kernel_cache_dir))
        for variant, launch in self._engine.variants().items():
            self._functions[variant] = driver.load(compiler, variant, self._device.index, launch.shared_bytes)

    def import_regions(self, tickets: Sequence[bytes]) -> None:
        """See `base.Transport`."""
        links.check(self._config, tickets)
        self._domain.import_regions(tickets)
        self._engine.attach(self._domain.region.mapping, self._domain.addresses)

    def drain(self) -> None:
        """See `base.Transport`. Of the whole device, since graphs are replayed on any stream."""
        if hasattr(self, "_engine") and not torch.cuda.is_current_stream_capturing():
            with contextlib.suppress(RuntimeError):  # the device is lost: `check` says so
                torch.cuda.synchronize(self._device)

    def close(self) -> None:
        """See `base.Transport`. Kernels that still wait are told to stop; peers keep their own mappings of this memory.
        A graph may be replayed after this: its kernels read tables, look at one word and return, and the caller's own
        may read the views that they were captured with."""
        if self._closed:
            return
        self._closed = True
        if hasattr(self, "_engine"):
            self._engine.tables.host.abort("the communicator was closed")
            with contextlib.suppress(RuntimeError):
                torch.cuda.synchronize(self._device)
                if self._captured:
                    self._engine.tables.stop()
                    torch.cuda.synchronize(self._device)
                    _kept_for_graphs.append((self._engine.tables, self._domain.region.mapping))
        if hasattr(self, "_domain"):
            self._domain.close()
            self._engine.detach()
            self._domain.free_returned()

    def forsake(self) -> None:
        """See `base.Transport`."""
        if hasattr(self, "_domain"):
            self._domain.forsake()

    # Operations.

    def _launch(self, call: Call, phases: int) -> None:
        args = call.of_phases(phases) if hasattr(call.args, "work") else call.args
        function, launch = self._functions[call.variant], call.launch
        stream = self._streams.enter()
        self._captured = self._captured or torch.cuda.is_current_stream_capturing()
        function.launch(
            launch.num_blocks, call.variant.num_threads, stream, args, cooperative=launch.cooperative,
            overlapped=launch.overlapped,
        )  # fmt: skip
        self._streams.leave(call.keep)

    def check(self, op: str = "check") -> None:
        """Raise what failed on the device so far, or that this rank was left out; waits for nothing. Also the way to
        look after a graph's replay."""
        self._raise_fault()
        self._mailbox.check_left_out(op)

    def _raise_fault(self) -> None:
        fault = self._engine.tables.host.fault()
        if fault is not None:
            raise fault

    def failed(self) -> torch.Tensor:
        """See `base.Transport`."""
        return self._engine.tables.aborted

    def check_results(self) -> None:
        """See `base.Transport`."""
        finding = self._engine.tables.host.finding()
        if finding is not None:
            raise finding

    def _settle(self) -> None:
        """Wait for the current stream and raise what failed on it."""
        torch.cuda.current_stream(self._device).synchronize()
        self._raise_fault()

    def _check_device(self, name: str, tensor: torch.Tensor) -> None:
        """Another GPU's memory, or another GPU being torch's current one, would fault in the kernel."""
        if tensor.device != self._device:
            raise ArgumentError(name, f"a tensor on {self._device}", tensor.device)
        if torch.cuda.current_device() != self._device.index:
            raise ArgumentError("torch.cuda.current_device()", str(self._device.index), torch.cuda.current_device())

    def barrier(self) -> None:
        """See `base.Transport`. Host and device wait."""
        self._launch(self._engine.barrier(), BOTH)
        self._settle()
        self._engine.tables.host.relate_clocks()

    def dispatch(self, args: DispatchArgs) -> NvlinkDispatch:
        """See `base.Transport`."""
        self.check("dispatch")
        self._check_device("x", args.x)
        if self._raises and torch.cuda.is_current_stream_capturing():
            raise ArgumentError(
                "overflow", "Overflow.DROP, or no max_recv_rows, under graph capture (RAISE reads the device)", "RAISE"
            )
        step = self._engine.dispatch(args)
        if not args.at_once:
            self._launch(step.call, SEND)
        return NvlinkDispatch(self, step, BOTH if args.at_once else RECEIVE)

    def finish(self, step: Dispatch, phases: int) -> tuple[DispatchOutput, DispatchHandle]:
        """What is left of it. Reads the device only where shapes or errors depend on it, and never under capture."""
        self._launch(step.call, phases)
        rows = step.state.num_rows  # known where the routing is used again
        unknown = self._exact and rows is None
        if (unknown or self._raises) and not torch.cuda.is_current_stream_capturing():
            self._settle()
            self.check_results()
            assert step.outputs["num_rows"] is not None
            rows = int(step.outputs["num_rows"]) if unknown else rows
        return self._engine.finish(step, rows, self._epoch)

    def buffers(self, step: Dispatch) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """See `base.PendingDispatch`."""
        return self._engine.buffers(step)

    def combine(self, args: CombineArgs) -> NvlinkCombine:
        """See `base.Transport`."""
        self.check("combine")
        self._check_device("y", args.y)
        call, receive = self._engine.combine(args)
        if not args.at_once:
            self._launch(call, SEND)
        return NvlinkCombine(self, call, receive, BOTH if args.at_once else RECEIVE)

    def receive(self, call: Call, phases: int) -> None:
        """What is left of a combine."""
        self._launch(call, phases)
        self._raise_fault()

    def dispatch_input(self, num_tokens: int) -> torch.Tensor:
        """See `base.Transport`. Kernels read x wherever it lies, so any memory will do."""
        return torch.empty(num_tokens, self._config.hidden_size, dtype=self._config.dtype, device=self._device)

    def combine_input(self, handle: DispatchHandle) -> torch.Tensor:
        """See `base.Transport`."""
        return self._engine.combine_input(handle)

    def row_weights(self, handle: DispatchHandle) -> torch.Tensor:
        """See `base.Transport`."""
        return self._engine.row_weights(handle)

    def source_rows(self, handle: DispatchHandle) -> torch.Tensor:
        """See `base.Transport`."""
        return self._engine.source_rows(handle)

    def blank_state(self, num_tokens: int) -> DispatchState:
        """See `base.Transport`."""
        return self._engine.blank_state(num_tokens)

    def restore(self, handle: DispatchHandle) -> DispatchHandle:
        """See `base.Transport`."""
        return self._engine.restore(handle)

    # Membership, hosts, clock.

    def set_active(self, mask: Sequence[bool], epoch: int) -> None:
        """See `base.Transport`. Survivors may have stopped at different operations: they agree on the next number once
        nothing of the old epoch runs any more."""
        tables = self._engine.tables
        with tables.host.interrupted():
            torch.cuda.synchronize(self._device)
        answers = self._mailbox.agree(mask, epoch, tables.sequence(), self._config.timeout_s)
        dispatch, combine, barrier = (1 + max(words[i] for words in answers) for i in range(3))
        tables.restart(dispatch, combine, barrier)
        self._engine.restart_flags(dispatch, combine)
        tables.set_active(mask)
        self._engine.restart_slots()
        self._epoch = epoch
        self._leave_out(mask, epoch)
        self._mailbox.exchange([0] * EXCHANGE_WORDS, self._config.timeout_s)  # nobody sends before all have restarted

    def _leave_out(self, mask: Sequence[bool], epoch: int) -> None:
        host = self._engine.tables.host

        def tell() -> None:
            self._launch(self._engine.barrier(left_out_epoch=epoch), BOTH)
            torch.cuda.synchronize(self._device)

        def is_alive(rank: int) -> bool:
            return rank in self._domain.watch.ranks and not host.is_gone(rank)

        if left_out.is_needed(mask, host.is_gone):
            left_out.leave_out(tell, lambda: self._engine.unsent(mask), is_alive)

    def exchange(self, words: Sequence[int]) -> list[tuple[int, ...] | None]:
        """See `base.Transport`."""
        return self._mailbox.exchange(words, self._config.timeout_s)

    def wait_for_peer(self, timeout_s: float) -> bool:
        """See `base.Transport`."""
        return self._mailbox.wait_for_peer(timeout_s)

    def wake(self) -> None:
        """See `base.Transport`."""
        self._mailbox.wake()

    def samples(self) -> list[LatencySample]:
        """See `base.Transport`."""
        return self._engine.tables.samples()

    def traffic(self) -> list[Any]:
        """See `base.Transport`. A group stays in one NVLink domain."""
        return []

    def peek(self, words: torch.Tensor) -> torch.Tensor | None:
        """See `base.Transport`."""
        return self._engine.tables.peek(words)

    def device_name(self) -> str:
        """See `base.Transport`."""
        require_cuda()
        return torch.cuda.get_device_name(torch.cuda.current_device())

    def ll_max_tokens(self) -> int:
        """See `base.Transport`."""
        return plan.LL_MAX_TOKENS[self._config.resolved_layout]

    def abort(self, reason: str) -> None:
        """See `base.Transport`."""
        self._engine.tables.host.abort(reason)
        self._mailbox.abort(reason)

    def give_up(self, ranks: Sequence[int]) -> None:
        """See `base.Transport`."""
        for rank in ranks:
            self._engine.tables.host.give_up(rank)
        self._mailbox.give_up(ranks)
