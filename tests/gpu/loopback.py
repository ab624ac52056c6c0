"""Many ranks on one GPU: one cooperative launch holds the blocks of all of them, so that they are resident together.

The engines, records and kernels are those of the transport; only processes and mapped memory are missing. This is where
compute-sanitizer can look, and where R may exceed the number of GPUs. The machine may also be an emulated one
(tests/emulator).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Protocol

import torch

from ep_kernels import jit
from ep_kernels.config import MoEConfig
from ep_kernels.network import NetworkConfig
from ep_kernels.transports.base import CombineArgs, DispatchArgs
from ep_kernels.transports.nvlink.calls.engine import BOTH, Call
from ep_kernels.transports.nvlink.gpu import driver
from ep_kernels.transports.nvlink.network import gpu_direct
from ep_kernels.transports.nvlink.network.boxes import Boxes, pin, unpin
from ep_kernels.transports.nvlink.network.remote import RemoteRanks
from ep_kernels.tuning import cache_dir
from ep_kernels.types import DispatchHandle, DispatchOutput, Layout, Mode
from tests.gpu.loopback_group import LoopGroup
from tests.gpu.rank_engine import Filled, RankEngine


class Bytes:
    """A region in ordinary device memory, poisoned but for what must be blank."""

    def __init__(self, num_bytes: int, blank: Sequence[tuple[int, int]], device: torch.device) -> None:
        self.data = torch.full((max(num_bytes, 1),), 0xA5, dtype=torch.uint8, device=device)
        for begin, end in blank:
            self.data[begin:end] = 0

    def view(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        return self.data[offset : offset + num_bytes].view(dtype).view(shape)


class Machine(Protocol):
    """What runs the kernels.

    Attributes:
        device: where tensors lie.
        num_sms: multiprocessors.
    """

    device: torch.device
    num_sms: int

    def boxes(self, network: NetworkConfig, rank: int) -> Boxes:
        """Memory of a rank's boxes."""

    def register(self, address: int, num_bytes: int) -> None:
        """Let kernels reach host memory."""

    def unregister(self, address: int) -> None:
        """Give it back."""

    def run(self, call: Call, num_blocks: int, records: torch.Tensor, blocks_per_rank: int) -> None:
        """One cooperative launch of the call's loop-back variant, to its end. `records`: uint8, on `device`."""


_CONNECT_S = 20.0
_functions: dict[tuple[jit.Variant, int], driver.Function] = {}


class Gpu:
    """The current CUDA device."""

    def __init__(self, config: MoEConfig) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.num_sms = torch.cuda.get_device_properties(self.device).multi_processor_count
        self._compiler = jit.Compiler(cache_dir(config.kernel_cache_dir))

    register, unregister = staticmethod(pin), staticmethod(unpin)

    def boxes(self, network: NetworkConfig, rank: int) -> Boxes:
        """See `Machine`."""
        from ep_kernels.transports.nvlink.network.gpu_boxes import CudaGpu

        return gpu_direct.choose(network, rank, CudaGpu(self.device.index))[0]

    def run(self, call: Call, num_blocks: int, records: torch.Tensor, blocks_per_rank: int) -> None:
        """See `Machine`."""
        self.enqueue(call, num_blocks, records, blocks_per_rank)
        torch.cuda.synchronize()

    def enqueue(self, call: Call, num_blocks: int, records: torch.Tensor, blocks_per_rank: int) -> None:
        """`run` on the current stream, without its end."""
        self._function(call).launch(
            num_blocks, call.variant.num_threads, torch.cuda.current_stream().cuda_stream,
            ctypes.c_uint64(records.data_ptr()), ctypes.c_int32(blocks_per_rank), cooperative=True,
        )  # fmt: skip

    def _function(self, call: Call) -> driver.Function:
        variant = replace(call.variant, loopback=True)
        key = (variant, call.launch.shared_bytes)
        if key not in _functions:
            cubin = self._compiler.get(variant, driver.architecture(self.device.index))
            _functions[key] = driver.Function(cubin, variant.kernel, call.launch.shared_bytes)
        return _functions[key]


class Loopback:
    """R ranks of one configuration.

    Args:
        make: make(group) -> MoEConfig, for each rank's group.
        size: R.
        blocks_per_rank: blocks of each rank; None fills the machine.
        machine: None: the current CUDA device.
        nodes: hosts, as the ranks believe: consecutive ranks share one, the others are reached over the network of
            their configuration.
    """

    def __init__(
        self,
        make: Callable[[LoopGroup], MoEConfig],
        size: int,
        blocks_per_rank: int | None = None,
        machine: Machine | None = None,
        nodes: int = 1,
    ) -> None:
        self.size = size
        self.configs = [make(LoopGroup(rank, size)) for rank in range(size)]
        self._machine = machine or Gpu(self.configs[0])
        self.num_blocks = blocks_per_rank or max(1, self._machine.num_sms // size)
        device = self._machine.device
        self.engines = [RankEngine(c, device, self.num_blocks) for c in self.configs]
        self.memory = [Bytes(e.region_bytes, e.blank_bytes, device) for e in self.engines]
        addresses = [m.data.data_ptr() for m in self.memory]
        self.remotes: list[RemoteRanks] = []
        for rank, (engine, memory) in enumerate(zip(self.engines, self.memory, strict=True)):
            here = [rank * nodes // size == other * nodes // size for other in range(size)]
            engine.attach(memory, [a if near else 0 for a, near in zip(addresses, here, strict=True)])
        if self.configs[0].network is not None:
            self._join(nodes)

    def _join(self, nodes: int) -> None:
        """Real proxies and connections between the ranks of two nodes."""
        for rank, (config, engine) in enumerate(zip(self.configs, self.engines, strict=True)):
            shape, host = engine.sizes.shape, engine.tables.host
            boxes, pins = self._machine.boxes(config.network, rank), (self._machine.register, self._machine.unregister)
            place = config.network, rank, self.size, shape, host, boxes
            self.remotes.append(RemoteRanks(*place, config.timeout_s, *pins))
        tickets = [remote.ticket() for remote in self.remotes]
        nodes_of = [r * nodes // self.size for r in range(self.size)]
        hosts = [nodes_of.index(node) for node in nodes_of]
        landings = [host if self.remotes[r].landing else r for r, host in enumerate(hosts)]

        def connect(rank: int) -> None:
            far = [r for r in range(self.size) if hosts[r] != hosts[rank]]
            for near in range(self.size):
                if near != rank and landings[near] == landings[rank] and (landing := self.remotes[near].landing):
                    self.remotes[rank].share(near, landing.fd)
            self.remotes[rank].connect({r: tickets[r] for r in far}, hosts, landings, _CONNECT_S)
            self.engines[rank].tables.set_network(self.remotes[rank].record())

        with ThreadPoolExecutor(self.size) as pool:
            made = [pool.submit(connect, rank) for rank in range(self.size)]
        if any(one.exception() for one in made):
            self.close()
        for one in made:
            one.result()

    def close(self) -> None:
        """Part from the network, where there is one."""
        for far in self.remotes:
            far.close()

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of it where the kernels run."""
        return tensor.to(self._machine.device, copy=True)

    def launch(self, calls: Sequence[Call], phases: int = BOTH, missing_blocks: int = 0) -> None:
        """The calls of all ranks (of the same kernel) in one launch. With fewer calls the other ranks are silent;
        `missing_blocks` of the last rank stay away."""
        num_blocks, packed, blocks = self.pack(calls, phases)
        self._machine.run(calls[0], num_blocks - missing_blocks, packed, blocks)

    def pack(self, calls: Sequence[Call], phases: int = BOTH) -> tuple[int, torch.Tensor, int]:
        """(blocks of the launch, its records, blocks of a rank)."""
        num_blocks, records, blocks = packed(calls, phases)
        return num_blocks, self.put(records), blocks

    def check(self) -> None:
        """Raise what any rank's kernels met."""
        for engine in self.engines:
            if (found := engine.tables.host.fault() or engine.tables.host.finding()) is not None:
                raise found

    def dispatch(
        self,
        xs: Sequence[torch.Tensor],
        ids: Sequence[torch.Tensor],
        weights: Sequence[torch.Tensor],
        mode: Mode,
        scales: Sequence[torch.Tensor] | None = None,
        phases: Sequence[int] = (BOTH,),
        previous: Sequence[DispatchHandle | None] | None = None,
    ) -> list[tuple[DispatchOutput, DispatchHandle]]:
        """All ranks' dispatch; inputs on the CPU."""
        steps = self.begin(xs, ids, weights, mode, scales, previous)
        for phase in phases:
            self.launch([s.call for s in steps], phase)
        self.check()
        return self.finish(steps)

    def begin(
        self,
        xs: Sequence[torch.Tensor],
        ids: Sequence[torch.Tensor],
        weights: Sequence[torch.Tensor],
        mode: Mode,
        scales: Sequence[torch.Tensor] | None = None,
        previous: Sequence[DispatchHandle | None] | None = None,
    ) -> list[Filled]:
        """All ranks' dispatch, ready to be launched; rows are quantised where a launch of its own does it."""
        args = [
            DispatchArgs(
                x=self.put(xs[r]),
                scales=None if scales is None else self.put(scales[r]),
                topk_ids=self.put(ids[r]),
                topk_weights=self.put(weights[r]),
                mode=mode,
                previous=None if previous is None else previous[r],
            )
            for r in range(self.size)
        ]
        made = [found for engine, each in zip(self.engines, args, strict=True) if (found := engine.quantized(each))]
        if made:
            self.launch([call for call, _ in made])
            args = [each for _, each in made]
        return [engine.dispatch(each) for engine, each in zip(self.engines, args, strict=True)]

    def finish(self, steps: Sequence[Filled]) -> list[tuple[DispatchOutput, DispatchHandle]]:
        """What all ranks' callers get."""
        results = []
        for config, engine, step in zip(self.configs, self.engines, steps, strict=True):
            compact = config.resolved_layout in (Layout.GROUPED, Layout.FLAT) and config.exact_shapes
            known = step.known
            num_rows = int(engine.number(step, "num_rows")) if compact and known is None else known
            results.append(engine.finish(step, num_rows, 0))
        return results

    def combine(
        self,
        ys: Sequence[torch.Tensor],
        handles: Sequence[DispatchHandle],
        row_weights: Sequence[torch.Tensor] | None = None,
        apply_weights: bool = True,
        phases: Sequence[int] = (BOTH,),
    ) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        """All ranks' combine."""
        calls, results = [], []
        for r, engine in enumerate(self.engines):
            numbers = None if row_weights is None else row_weights[r]
            call, receive = engine.combine(CombineArgs(ys[r], handles[r], numbers, apply_weights))
            z, home = receive(None)
            z.fill_(float("nan"))
            calls.append(call)
            results.append((z, home))
        for phase in phases:
            self.launch(calls, phase)
        self.check()
        return results

    def preset(self, value: int) -> None:
        """Let every rank continue from `value`, flags included; also backwards, so no line may keep its flag."""
        for engine, memory in zip(self.engines, self.memory, strict=True):
            engine.tables.restart(value, value, value)
            engine.restart_slots()
            for begin, end in engine.blank_bytes:
                memory.data[begin:end] = 0
            memory.data[: engine.tables.world.map.counts].view(torch.int64).fill_(value)
            engine.restart_flags(value, value)
        for far in self.remotes:
            far.restart(value, value, value)


def packed(calls: Sequence[Call], phases: int = BOTH) -> tuple[int, torch.Tensor, int]:
    """(blocks of one launch of these calls, their records on the CPU, blocks of a rank)."""
    for call in calls:
        if hasattr(call.args, "work"):
            call.args.work = call.launch.work(phases)
    blocks = max(call.launch.num_blocks for call in calls)
    return (
        blocks * len(calls),
        torch.frombuffer(bytearray(b"".join(bytes(call.args) for call in calls)), dtype=torch.uint8),
        blocks,
    )
