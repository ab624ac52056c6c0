"""What the transport asks of a GPU, found out without one: the bytes of a region, and every kernel's resources.

    region = arrays(config)                                   # pure: the byte map that host and kernels share
    reports = inspect([Job(v, "sm_90a") for v in jit.all_variants()])      # compiles; reports say what is wrong

NVRTC compiles one program at a time in a process, so jobs are spread over processes.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from ep_kernels import jit
from ep_kernels.collectives.collective_config import CollectiveConfig
from ep_kernels.config import MoEConfig
from ep_kernels.groups import PaperGroup
from ep_kernels.kernels import abi, collective_abi
from ep_kernels.network import NetworkConfig
from ep_kernels.transports.base import RegionArray, RegionMap
from ep_kernels.transports.nvlink import scoreboards
from ep_kernels.transports.nvlink.calls import plan
from ep_kernels.transports.nvlink.copy_engines import collective_plan
from ep_kernels.types import Layout, Mode

A = TypeVar("A")
T = TypeVar("T")


# Memory.

HOLDS = {
    "flags": "progress of each peer: the seq of its last operation",
    "counts": "HT: rows that each source sends, per expert",
    "arrivals": "HT, per-expert layouts: which rows have arrived",
    "routing_ids": "HT: routing_id of each source",
    "metadata": "HT: expert, row, weight, token of each row",
    "scales": "HT: fp8 scales of the rows, by source",
    "rows": "output: rows in their final place",
    "combine_rows": "HT: combine receive buffer: partials, with their fp8 scales",
    "combine_weights": "HT: gradients of weights, received by combine",
    "combine_routing_ids": "HT: routing_id of each expert rank",
    "row_lines": "LL: rows and their scales as they travel, by source",
    "metadata_lines": "LL: expert, row, weight, token of each row",
    "count_lines": "LL, per-expert layouts: rows that each source sends, per expert",
    "count_packets": "LL: rows that each source sends, and how many dispatches old its routing is",
    "combine_lines": "LL: combine receive buffer: partials, with their fp8 scales",
    "weight_lines": "LL: gradients of weights, received by combine",
    "routing_packets": "LL: routing_id of each expert rank",
}
"""What each array is for. LL, HT: there only where the mode, or AUTO, may come to use it."""


def collective_bytes(config: CollectiveConfig) -> int:
    """See `collective_base.bytes_before_pool`."""
    sizes = collective_plan.sizes_of(config.group.size, config.pool_bytes, config.staging_bytes)
    return int(collective_abi.collective_map(sizes).pool)


def arrays(config: MoEConfig) -> list[RegionArray]:
    """The byte map of one rank's region, in order of address; it ends where the last array does. Raises ConfigError."""
    shared = abi.region_map(plan.sizes_of(config).shape)
    names = [name for name, _ in abi.RegionMap._fields_]
    starts = {name: getattr(shared, name) for name in names if name != "num_bytes" and not name.endswith("_stride")}
    ends = [*list(starts.values())[1:], shared.num_bytes]
    found = []
    for (name, start), end in zip(starts.items(), ends, strict=True):
        stride = getattr(shared, f"{name}_stride", end - start)
        found.append(RegionArray(name, start, (end - start) // stride if stride else 0, stride, HOLDS[name]))
    return found


def region_map(config: MoEConfig) -> RegionMap:
    """See `base.region_map`. Raises ConfigError."""
    boxes = 0 if config.network is None else abi.box_bytes(plan.sizes_of(config).shape)
    return RegionMap(tuple(arrays(config)), plan.ll_tokens(config), box_bytes=boxes)


def probe(device: int) -> dict[str, Any]:
    """See `base.probe`: how device memory is shared here, and why no better way is; how NICs would reach it."""
    from ep_kernels.transports.nvlink.memory.memory import choose_kind
    from ep_kernels.transports.nvlink.network.gpu_boxes import CudaGpu

    kind, refused = choose_kind(device)
    handles = {"kind": kind.value, "refused": {other.value: why for other, why in refused.items()}}
    return {"handles": handles, "gpu_direct": CudaGpu(device).probe()}


def boxes(network: NetworkConfig, device: int) -> str:
    """See `base.boxes`."""
    from ep_kernels.transports.nvlink.network import gpu_direct
    from ep_kernels.transports.nvlink.network.gpu_boxes import CudaGpu

    torch.zeros(1, device=f"cuda:{device}", dtype=torch.float32)  # its context is current
    return str(gpu_direct.probe(network, CudaGpu(device)))


# Kernels.


@dataclass(frozen=True, slots=True)
class Multiprocessor:
    """What blocks of one SM share.

    Attributes:
        shared_bytes: shared memory of the SM.
        block_shared_bytes: most of it that one block may take.
        num_threads, num_blocks: most that are resident.
    """

    shared_bytes: int
    block_shared_bytes: int
    num_threads: int
    num_blocks: int


_BIG = Multiprocessor(228 << 10, 227 << 10, 2048, 32)
MULTIPROCESSORS = {
    "sm_90a": _BIG,
    "sm_100a": _BIG,
    "sm_103a": _BIG,
    "sm_120a": Multiprocessor(100 << 10, 99 << 10, 1536, 24),
}
_REGISTERS, _PARTITIONS, _REGISTER_UNIT, _RESERVED_SHARED = 65536, 4, 256, 1 << 10


def blocks_per_sm(arch: str, registers: int, shared_bytes: int, num_threads: int) -> int:
    """Blocks that are resident together on one SM; 0 = a block does not fit. shared_bytes: static and dynamic."""
    sm = MULTIPROCESSORS[arch]
    if shared_bytes > sm.block_shared_bytes:
        return 0
    warps = -(-num_threads // 32)
    registers_of_warp = -(-registers * 32 // _REGISTER_UNIT) * _REGISTER_UNIT
    resident_warps = _REGISTERS // _PARTITIONS // max(1, registers_of_warp) * _PARTITIONS
    by_shared = sm.shared_bytes // (-(-shared_bytes // 128) * 128 + _RESERVED_SHARED)
    return min(resident_warps // warps, by_shared, sm.num_threads // num_threads, sm.num_blocks)


@dataclass(frozen=True, slots=True)
class Job:
    """One variant for one architecture; its instructions are looked at where `disassembled`, which takes a third of the
    time."""

    variant: jit.Variant
    arch: str
    disassembled: bool = True


@dataclass(frozen=True, slots=True)
class KernelReport:
    """One compiled kernel.

    Attributes:
        job: what was compiled.
        resources: registers, stack, spills, static shared memory.
        dynamic_bytes: dynamic shared memory of a block in `serving_config`.
        num_blocks: blocks per SM then, 0 = too large for this architecture.
        code_bytes: size of the cubin.
        early_waits: where a load is waited for only to write over what it brings (scoreboards.py), in words.
        faults: what must not be, in words.
    """

    job: Job
    resources: jit.Resources
    dynamic_bytes: int
    num_blocks: int
    code_bytes: int
    early_waits: tuple[str, ...]
    faults: tuple[str, ...]


MOST_REGISTERS = {jit.FEW_THREADS: 252, jit.NUM_THREADS: 252, jit.WIDE_THREADS: 128}
"""65536 registers of an SM / threads of its one block; where that is more, what fits an instruction, less a few."""
_STORE, _LOAD, _WAIT = "UBLKCP.G.S", "UBLKCP.S.G", "SYNCS.PHASECHK.TRANS64.TRYWAIT"
_SHARE, _FENCE = "REDG.E.ADD.64.STRONG.SYS", "MEMBAR.ALL.SYS"
_SC_FENCE = "MEMBAR.SC.GPU"
_STORE_TO_HOST = "STG.E.64.STRONG.SYS"
_STORE_LINE, _PEEK_LINE = "STG.E.128.STRONG.SYS", "LDG.E.128.STRONG.SYS"
_LOCAL_MEMORY = "LDL"


def expected_instructions(variant: jit.Variant) -> tuple[str, ...]:
    """What nvdisasm must show. LL: 16 bytes of a line, stored and loaded by one instruction each, in front of every
    cache; dispatch: the fence between a failure and the counts. HT: bulk copies from and to shared memory and the
    mbarrier that loads complete on; dispatch: the release of a share at a peer, which is one reduction, ordered after
    all stores; combine: words of progress behind a fence. Collectives: flags behind a fence; all-gather the copy
    engine, one-shot all-reduce lines."""
    if variant == jit.NARROW or variant.kernel == "add_terms":
        return ()
    if variant.kernel == "barrier":
        return (_FENCE, "STG.E.64.STRONG.SYS")
    if variant in jit.collective_variants():
        return (_FENCE, _STORE_TO_HOST, *((_STORE, _LOAD, _WAIT) if variant.kernel == "all_gather" else ()),
                *((_STORE_LINE, _PEEK_LINE) if ("KIND", "0") in variant.constants else ()))  # fmt: skip
    if variant.kernel.startswith("ll_"):
        lines = (_STORE_LINE, _PEEK_LINE)
        return (*lines, _SC_FENCE) if variant.kernel == "ll_dispatch" else lines
    if variant.kernel == "ht_combine":
        return (_STORE, _STORE_TO_HOST, _FENCE, _LOAD, _WAIT)
    return (_STORE, _SHARE, _FENCE, _LOAD, _WAIT)


def unwanted_instructions(variant: jit.Variant) -> tuple[str, ...]:
    """Instructions that a kernel must not contain. LL: the release of a share, which waits for the links to
    drain, and the copy engine, whose writes are not lines. (Fences are in every kernel, for post-mortems.)"""
    return (_SHARE, _STORE, _LOAD) if variant.kernel.startswith("ll_") else ()


def serving_config(variant: jit.Variant) -> MoEConfig:
    """A configuration of serving size that launches a dispatch or combine variant: H 7168, K 8, E 256, R 8."""
    constants = dict(variant.constants)
    types = {name: dtype for dtype, name in plan.CPP_TYPES.items()}
    name, _, operation = variant.kernel.partition("_")
    mode = Mode(name)
    if operation == "combine":
        exact = constants["KIND"] == "2"
        layout = Layout.RANK_MAJOR if constants["KIND"] == "1" else Layout.EXPERT_MAJOR
        dtype, moved, quantize = types[constants["Y"]], types[constants["C"]], False
    else:
        layout = {number: layout for layout, number in plan.LAYOUTS.items()}[int(constants["LAYOUT"])]
        quantize, exact, moved = constants["X"] != "u8", False, None
        dtype = types[constants["X"]] if quantize else types["bf16"]
    return MoEConfig(
        group=PaperGroup(0, 8), num_experts=256, hidden_size=7168, topk=8, mode=mode, layout=layout, dtype=dtype,
        quantize=quantize, exact_combine=exact, combine_dtype=moved,
        max_tokens_per_rank=128 if mode is Mode.LL else 4096,
    )  # fmt: skip


def dynamic_bytes(variant: jit.Variant) -> int:
    """Dynamic shared memory of one block in `serving_config`."""
    if variant in jit.GENERAL:
        return 0
    if variant in jit.collective_variants():
        return collective_plan.launch_of(variant, 8).shared_bytes
    config = serving_config(variant)
    of = plan.combine_launch if variant.kernel.endswith("combine") else plan.dispatch_launch
    return of(config, plan.sizes_of(config), config.mode, 132).shared_bytes


def compile_job(job: Job) -> jit.Binary:
    """Runs in a process of the pool."""
    return jit.compile_source(jit.source(job.variant), job.variant.name, job.arch)


def inspect_job(job: Job) -> KernelReport:
    """Compile and look. Runs in a process of the pool."""
    return report_of(job, compile_job(job))


def report_of(job: Job, binary: jit.Binary) -> KernelReport:
    """Look at a compiled kernel."""
    (found,) = binary.resources()
    dynamic = dynamic_bytes(job.variant)
    blocks = blocks_per_sm(job.arch, found.registers, found.shared_bytes + dynamic, job.variant.num_threads)
    listing = disassemble(binary.cubin) if job.disassembled else None
    early = tuple(map(str, scoreboards.early_waits(listing or "")))
    faults = tuple(_faults(job, found, blocks, listing))
    return KernelReport(job, found, dynamic, blocks, len(binary.cubin), early, faults)


def _faults(job: Job, found: jit.Resources, blocks: int, listing: str | None) -> Iterator[str]:
    most = MOST_REGISTERS[job.variant.num_threads]
    if not 0 < found.registers <= most:
        yield f"{found.registers} registers, at most {most}"
    if found.spill_bytes:
        yield f"{found.spill_bytes} bytes spilled"
    if found.stack_bytes:
        yield f"stack frame of {found.stack_bytes} bytes"
    if not blocks and MULTIPROCESSORS[job.arch] == _BIG:
        yield "no block fits an SM"
    if listing is not None:
        if _LOCAL_MEMORY in listing:
            yield "reads local memory"
        yield from (f"no {name}" for name in expected_instructions(job.variant) if name not in listing)
        yield from (f"has {name}" for name in unwanted_instructions(job.variant) if name in listing)


def inspect(jobs: Iterable[Job]) -> list[KernelReport]:
    """Reports in the order of `jobs`. Raises TransportError where one does not compile."""
    return list(spread(inspect_job, jobs))


def spread(work: Callable[[A], T], jobs: Iterable[A]) -> Iterator[T]:
    """work(job) for each job, in order, over as many processes as this one may use cores."""
    context = multiprocessing.get_context("forkserver")  # a fork of this process might inherit a held lock
    context.set_forkserver_preload([__name__])
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), mp_context=context) as pool:
        yield from pool.map(work, list(jobs))


def ship(archs: Sequence[str], folder: Path) -> dict[str, list[Path]]:
    """Write the cubins that travel in the wheel; the files by architecture."""
    jobs = [Job(variant, arch) for arch in archs for variant in jit.shipped_variants()]
    binaries = dict(zip(jobs, spread(compile_job, jobs), strict=True))
    made = {}
    for arch in archs:
        compiled = {job.variant: binary for job, binary in binaries.items() if job.arch == arch}
        made[arch] = jit.Compiler(None, folder).ship(arch, compiled)
    return made


def disassemble(cubin: bytes) -> str | None:
    """Instructions of a cubin, each with its bits; None where there is no nvdisasm."""
    tool = disassembler()
    if tool is None:
        return None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run(
            [tool, "-c", "-ndf", "-hex", file.name], check=True, capture_output=True, text=True, timeout=120
        ).stdout


def disassembler() -> str | None:
    """nvdisasm from PATH, or the one that Triton brings."""
    if found := shutil.which("nvdisasm"):
        return found
    triton = importlib.util.find_spec("triton")
    if triton is None or triton.origin is None:
        return None
    bundled = Path(triton.origin).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    return str(bundled) if bundled.exists() else None
