"""What a rank does whatever it moves: life, launches on the current stream, membership, meeting, errors.

`NvlinkTransport` adds dispatch and combine, `NvlinkCollectives` the collectives. Waiting is on the stream, never on the
CPU, but where a method says so.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ep_kernels import jit, tuning
from ep_kernels.errors import ArgumentError, TransportError
from ep_kernels.network.network import require
from ep_kernels.telemetry import merged
from ep_kernels.transports.base import EXCHANGE_WORDS, MemberTransport
from ep_kernels.transports.nvlink.calls import left_out
from ep_kernels.transports.nvlink.calls.engine import Call
from ep_kernels.transports.nvlink.calls.left_out import Unsent
from ep_kernels.transports.nvlink.calls.plan import Launch
from ep_kernels.transports.nvlink.calls.streams import StreamOrder
from ep_kernels.transports.nvlink.calls.tables import RankTables
from ep_kernels.transports.nvlink.memory.domain import Domain
from ep_kernels.transports.nvlink.network.remote import RemoteRanks
from ep_kernels.types import LatencySample, PeerTraffic

_kept: list[Any] = []
"""What graphs of closed communicators still read. The end of a graph is not reported, so it is kept for good."""


def require_cuda() -> None:
    """Raise TransportError where no CUDA device, or no way to its driver and compiler, is here."""
    if not torch.cuda.is_available():
        raise TransportError(
            "nvlink: needs one CUDA device per rank; torch sees none (no GPU, or a torch without CUDA)"
        )
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None:
        raise TransportError("nvlink: needs cuda-bindings (it comes with torch for CUDA)")


class NvlinkMember(MemberTransport):
    """One rank of a group on the GPUs of one NVLink domain, a process each. The device is torch's current one at
    `_enter_device`.

    Args:
        config: has `group`, `timeout_s`, `memory_handle` and `kernel_cache_dir`.
        abi: what all ranks must have in common.
    """

    _tables: RankTables
    _domain: Domain
    _remote: RemoteRanks | None = None

    def __init__(self, config: Any, abi: str) -> None:
        MemberTransport.__init__(self, config.group)
        self.config, self._abi = config, abi
        self._functions: dict[jit.Variant, Any] = {}
        self._closed = self._captured = False

    # What a kind of transport adds.

    def _barrier_call(self, left_out_epoch: int) -> Call:
        raise AssertionError("each kind of transport has one")

    def _unsent(self, mask: Sequence[bool]) -> list[Unsent]:
        raise AssertionError("each kind of transport has one")

    def _attach(self) -> None:
        """All regions are mapped."""

    def _kept_for_graphs(self) -> list[Any]:
        """What graphs read beside this rank's own region and tables."""
        return []

    def _detach(self) -> None:
        """No operation follows: let go of the region."""

    def _restart(self, dispatch: int, combine: int, mask: Sequence[bool]) -> None:
        """A new epoch begins, of the ranks in `mask`; counters of operations go on from here."""

    def _settle_copies(self) -> None:
        """The device is idle, and waits that no kernel makes have ended."""

    def _sequence(self) -> tuple[int, int, int]:
        """(dispatch, combine, barrier) operations so far. Synchronises."""
        return self._tables.sequence()

    # Life.

    def _enter_device(self, limits: Sequence[int | None], usual_blocks: int | None = None) -> int:
        """The device's multiprocessors. `limits`: of SMs, for each operation; None: launches fill `usual_blocks`, or
        the device."""
        torch.cuda.init()  # type: ignore[no-untyped-call]
        self._device = torch.device("cuda", torch.cuda.current_device())
        torch.zeros(1, device=self._device, dtype=torch.float32)  # makes torch's context current
        num_sms: int = torch.cuda.get_device_properties(self._device).multi_processor_count
        most = max(usual_blocks or num_sms if limit is None else max(1, limit) for limit in limits)
        self._streams = StreamOrder(self._device, min(num_sms, most), num_sms)
        return num_sms

    def _load(self, variants: Mapping[jit.Variant, Launch]) -> None:
        from ep_kernels.transports.nvlink.gpu import driver

        compiler = jit.Compiler(tuning.cache_dir(self.config.kernel_cache_dir))
        for variant, launch in variants.items():
            self._functions[variant] = driver.load(compiler, variant, self._device.index, launch.shared_bytes)

    def _allocate(self, num_bytes: int, blank: Sequence[tuple[int, int]], cure: str) -> bytes:
        """The region with bytes [begin, end) of each `blank` zero; the ticket."""
        config, network = self.config, getattr(self.config, "network", None)  # collectives have none
        self._domain = Domain(
            config.group, config.timeout_s, self._abi, self._tables.host, network, config.memory_handle
        )
        boxes, landing = (None, None) if self._remote is None else (self._remote.ticket(), self._remote.landing)
        ticket = self._domain.allocate(num_bytes, self._device, cure, boxes, landing)
        for begin, end in blank:
            self._domain.region.mapping.view(begin, (end - begin,), torch.uint8).zero_()
        torch.cuda.synchronize(self._device)
        return ticket

    def import_regions(self, tickets: Sequence[bytes]) -> None:
        domain = self._domain
        domain.import_regions(tickets, None if self._remote is None else self._remote.share)
        self.domains = domain.hosts
        if self._remote is not None:
            self._remote.connect(domain.boxed, domain.hosts, domain.landings, self.config.timeout_s)
            self._tables.set_network(self._remote.record())
        self._attach()

    def drain(self, timeout_s: float) -> None:
        """See `base.MemberTransport`. Of the whole device, since graphs are replayed on any stream."""
        if hasattr(self, "_domain") and not torch.cuda.is_current_stream_capturing():
            with contextlib.suppress(RuntimeError):  # the device is lost: `check` says so
                torch.cuda.synchronize(self._device)
            if self._remote is not None:
                self._remote.settle(timeout_s)
            self._domain.mailbox.settle(timeout_s)

    def close(self) -> None:
        """See `base.MemberTransport`. Kernels that still wait are stopped; peers keep their own mappings of this
        memory. A graph may be replayed after this: its kernels read tables, look at one word and return, and the
        caller's own may read the views that they were captured with."""
        if self._closed:
            return
        self._closed = True
        # Kernels that wait end.
        if hasattr(self, "_streams"):
            self._streams.rest()
        if hasattr(self, "_tables"):
            self._tables.host.abort("the communicator was closed")
        # The device rests; what a captured graph reads stays.
        if hasattr(self, "_domain"):
            with contextlib.suppress(RuntimeError):
                torch.cuda.synchronize(self._device)
                if self._captured:
                    self._tables.stop()
                    torch.cuda.synchronize(self._device)
                    _kept.append((self._tables, self._domain.region.mapping, self._kept_for_graphs()))
            self._detach()
        # Network, then peers' memory.
        if self._remote is not None:  # which may be there without the region that was to follow
            self._remote.close()
        if hasattr(self, "_domain"):
            self._domain.close()
            self._domain.free_returned()

    def close_in_child(self) -> None:
        if hasattr(self, "_domain"):
            self._domain.close_in_child()
        if self._remote is not None:
            self._remote.close_in_child()

    # Operations.

    def enter(self) -> int:
        """The CUstream to launch on: the current one, after the launch before."""
        if self._remote is not None:
            self._remote.channel.wake()
        return self._streams.enter()

    def _launch(self, call: Call) -> None:
        self._start(call, self.enter())
        self._streams.leave(call.keep)

    def _launch_on(self, stream: torch.cuda.Stream, call: Call) -> None:
        """On a stream of the rank's own, beside the order of its other operations."""
        self._start(call, stream.cuda_stream)

    def _start(self, call: Call, stream: int) -> None:
        how = call.launch
        if self._functions[call.variant].launch_record(
            how.num_blocks, call.variant.num_threads, stream, call.args, cooperative=how.cooperative,
            overlapped=how.overlapped,
        ):  # fmt: skip
            self._captured = True

    def check(self, op: str = "check") -> None:
        """See `base.MemberTransport`: what failed on the device so far, or that this rank was left out."""
        self.raise_fault()
        self._domain.mailbox.check_left_out(op)

    def raise_fault(self) -> None:
        fault = self._tables.host.fault()
        if fault is not None:
            try:
                raise fault
            finally:
                fault = None  # its traceback holds this frame, and so the regions, until a collection

    def failed(self) -> torch.Tensor:
        return self._tables.aborted

    def settle(self) -> None:
        """Wait for the current stream and raise what failed on it."""
        torch.cuda.current_stream(self._device).synchronize()
        self.raise_fault()

    def _check_device(self, name: str, tensor: torch.Tensor) -> None:
        """Another GPU's memory, or another GPU being torch's current one, would fault in the kernel."""
        if tensor.get_device() != self._device.index:  # cheaper than `device`
            raise ArgumentError(name, f"a tensor on {self._device}", tensor.device)
        if torch.cuda.current_device() != self._device.index:
            raise ArgumentError("torch.cuda.current_device()", str(self._device.index), torch.cuda.current_device())

    def barrier(self) -> None:
        """See `base.MemberTransport`. Host and device wait."""
        self._launch(self._barrier_call(0))
        self.settle()
        self._streams.rest()
        self._tables.host.relate_clocks()

    # Membership, hosts, clock.

    def set_active(self, mask: Sequence[bool], epoch: int) -> None:
        """See `base.MemberTransport`. Survivors may have stopped at different operations: they agree on the next number
        once nothing of the old epoch runs any more."""
        tables, mailbox = self._tables, self._domain.mailbox
        with tables.host.interrupted():
            torch.cuda.synchronize(self._device)
        self._settle_copies()
        if self._remote is not None:
            require(self._remote.settle(self.config.timeout_s, mask), "set_active", self.config.timeout_s)
        up = 0 if self._remote is None else self._remote.channel.up()
        answers = mailbox.agree(mask, epoch, self._sequence(), up, self.config.timeout_s)
        dispatch, combine, barrier = (1 + max(words[i] for words, _ in answers if words) for i in range(3))
        tables.restart(dispatch, combine, barrier)
        if self._remote is not None:
            self._remote.go_on(mask, epoch, [up for _, up in answers], self.config.timeout_s)
            self._remote.restart(dispatch, combine, barrier)
            tables.set_network(self._remote.record())
        self._restart(dispatch, combine, mask)
        self.active, self.epoch = tuple(mask), epoch
        self._leave_out(mask, epoch)
        mailbox.leave(mask, epoch)
        # No rank sends before all have restarted.
        mailbox.exchange([0] * EXCHANGE_WORDS, self.config.timeout_s, sampled=False)

    def _leave_out(self, mask: Sequence[bool], epoch: int) -> None:
        def tell() -> None:
            self._launch(self._barrier_call(epoch))
            torch.cuda.synchronize(self._device)

        if left_out.is_needed(mask, self._tables.host.is_gone):
            left_out.leave_out(tell, lambda: self._unsent(mask), self._is_alive)

    def _is_alive(self, rank: int) -> bool:
        return self._domain.is_watched(rank) and not self._tables.host.is_gone(rank)

    def exchange(self, words: Sequence[int]) -> list[tuple[int, ...] | None]:
        return self._domain.mailbox.exchange(words, self.config.timeout_s)

    def wait_for_peer(self, timeout_s: float) -> bool:
        return self._domain.mailbox.wait_for_peer(timeout_s)

    def wake(self) -> None:
        self._domain.mailbox.wake()

    def samples(self) -> Sequence[LatencySample]:
        return merged(self._domain.mailbox.samples(), self._tables.samples())

    def traffic(self) -> list[PeerTraffic]:
        """See `base.MemberTransport`. What kernels send; nothing in one NVLink domain."""
        return [] if self._remote is None else self._remote.peers()

    def peek(self, words: torch.Tensor) -> torch.Tensor | None:
        return self._tables.peek(words)

    def device_name(self) -> str:
        require_cuda()
        return torch.cuda.get_device_name(torch.cuda.current_device())

    def abort(self, reason: str) -> None:
        self._tables.host.abort(reason)
        self._domain.mailbox.abort(reason)
        if self._remote is not None:
            self._remote.channel.abort(reason)

    def give_up(self, ranks: Sequence[int]) -> None:
        for rank in ranks:
            self._tables.host.give_up(rank)
        self._domain.mailbox.give_up(ranks)
        if self._remote is not None:
            self._remote.channel.give_up(ranks)
