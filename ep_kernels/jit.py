"""From kernel sources to cubins: NVRTC through cuda-bindings, needing neither nvcc nor a GPU nor a driver.

    variant = Variant("ll_dispatch", layout=Layout.FLAT)
    binary = Compiler(cache_dir).get(variant, "sm_90a")      # from the wheel, from the disk cache, or compiled now

A variant's source is one text: the file of its kernel with every include in place; `types.h` (the records of
`kernels/abi.py`) and `variant.h` (its constants) are written here. The key is a hash of that text, the flags, the
NVRTC version and the architecture, so an entry never goes stale. Many processes share the cache: its files are written
at once or not at all, and checked when they are read. Knows nothing of torch tensors, streams or launches.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ep_kernels.errors import TransportError
from ep_kernels.kernels import abi, collective_abi
from ep_kernels.tuning import write_whole

ROOT = Path(__file__).parent
FEW_THREADS = 64
"""A thread for each rank."""
NUM_THREADS = 256
WIDE_THREADS = 512
"""Threads of a block of LL, and of HT combine with a warp for each task: one block fills an SM's registers."""
NUM_STAGES = 3
SHIPPED_ARCHS = ("sm_90a", "sm_100a", "sm_103a", "sm_120a")
"""Hopper; Blackwell for data centres, two steps of it; Blackwell for workstations."""

SOURCES = ROOT / "kernels"
"""Includes are relative to it; `ls` is the index."""
KERNELS: Mapping[str, str] = {
    "ll_dispatch": "ll/dispatch.cuh",
    "ll_combine": "ll/combine.cuh",
    "ht_dispatch": "ht/dispatch.cuh",
    "ht_combine": "ht/combine.cuh",
    "barrier": "barrier.cuh",
    "narrow": "narrow.cuh",
    "quantize": "quantize.cuh",
    "all_gather": "collectives/all_gather.cuh",
    "reduce_scatter": "collectives/reduce_scatter.cuh",
    "all_reduce": "collectives/all_reduce.cuh",
    "copy_wait": "collectives/copy_wait.cuh",
    "add_terms": "collectives/add_terms.cuh",
}
"""Entry point -> its file."""
_INCLUDE = re.compile(r'#include "([^"]+)"')
_FLAGS = (
    "--std=c++17",
    "--device-as-default-execution-space",
    "--fmad=false",
    "--ptxas-options=-v",
    "--diag-suppress=177",
)


_MAGIC = b"\x7fELF"
_DIGEST_BYTES = 32
LOCK_WAIT_S = 60.0
"""A kernel compiles in seconds. Who holds its lock for longer is stopped, or on a lost host that shares the folder."""
_LOCK_POLL_S = 0.02


def read_entry(path: Path) -> bytes | None:
    """A cache entry is digest + cubin; anything else (torn by a crash of the machine, say) counts as absent."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    digest, cubin = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
    whole = cubin.startswith(_MAGIC) and hashlib.sha256(cubin).digest() == digest
    return cubin if whole else None


def write_entry(path: Path, cubin: bytes) -> None:
    """A full disk is no error: the next process compiles again."""
    with suppress(OSError):
        write_whole(path, hashlib.sha256(cubin).digest() + cubin)


@contextmanager
def _locked(fd: int, timeout_s: float = LOCK_WAIT_S) -> Iterator[None]:
    """An exclusive lock that the kernel drops when its owner dies; without it on a file system that has none, and after
    `timeout_s`: two processes may then compile the same kernel."""
    held = _lock(fd, time.monotonic() + timeout_s)
    try:
        yield
    finally:
        if held:
            fcntl.flock(fd, fcntl.LOCK_UN)


def _lock(fd: int, until: float) -> bool:
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until:
                return False
            time.sleep(_LOCK_POLL_S)
        except OSError:
            return False
        else:
            return True


@dataclass(frozen=True, slots=True)
class Variant:
    """One kernel with its compile-time constants.

    Attributes:
        kernel: of KERNELS; also the entry point.
        constants: (name, C++ text) pairs. Types are given as `using`, numbers as `constexpr`.
        loopback: all ranks in one launch on one GPU (tests); the entry point then takes an array of arguments.
        network: some ranks may be reached over the network; LL and barrier only.
    """

    kernel: str
    constants: tuple[tuple[str, str], ...] = ()
    loopback: bool = False
    network: bool = False

    @property
    def num_threads(self) -> int:
        if self.kernel == "copy_wait":
            return FEW_THREADS
        return NUM_THREADS if self.kernel in ("ht_dispatch", "barrier", "narrow", "quantize") else WIDE_THREADS

    @property
    def name(self) -> str:
        """Readable and unique: kernel and the values of its constants."""
        parts = [self.kernel, *(value for _, value in self.constants)]
        return "-".join([*parts, *(["network"] if self.network else []), *(["loopback"] if self.loopback else [])])


FORMATS = ("mxfp8", "nvfp4")
"""Values of `MoEConfig.quantize` whose rows a launch of its own makes, in front of the dispatch."""
NARROW = Variant("narrow")
GENERAL = Variant("barrier"), NARROW
"""Variants that every configuration launches."""


def dispatch_variant(mode: str, layout: int, quantized: str = "u8") -> Variant:
    """mode ll | ht; layout 0..3 as in `variant_header`; quantized: u8 = rows as they are, or the type quantised to
    fp8.
    """
    return Variant(f"{mode}_dispatch", (("LAYOUT", str(layout)), ("X", quantized)))


def quantize_variant(dtype: str, to: str) -> Variant:
    """What runs in front of a dispatch. dtype: bf16 | f16; to: of FORMATS."""
    return Variant("quantize", (("X", dtype), ("FORMAT", str(FORMATS.index(to)))))


def combine_variant(mode: str, kind: int, output: str, moved: str) -> Variant:
    """kind 0 per expert, 1 per rank, 2 exact; output dtype; dtype in which partials move: that, or not exact, e4m3."""
    return Variant(f"{mode}_combine", (("KIND", str(kind)), ("Y", output), ("C", moved)))


def shipped_variants() -> Iterator[Variant]:
    """The variants that serving meets: compiled into the wheel."""
    yield from _token_variants(("u8", "bf16"), ("bf16",))
    yield from collective_variants(("bf16",))


def all_variants() -> Iterator[Variant]:
    """Every variant that a legal MoEConfig or CollectiveConfig can ask for."""
    yield from _token_variants(("u8", "bf16", "f16"), ("bf16", "f16", "f32"))
    yield from collective_variants()


def _token_variants(rows: Sequence[str], outputs: Sequence[str]) -> Iterator[Variant]:
    """Of dispatches of these rows, combines with these outputs, and of both."""
    for mode in ("ll", "ht"):
        for layout in range(4):
            for quantized in rows:
                yield dispatch_variant(mode, layout, quantized)
        for output in outputs:
            for kind in (0, 1, 2):
                yield combine_variant(mode, kind, output, output)
            for kind in (0, 1):
                yield combine_variant(mode, kind, output, "e4m3")
    for dtype in rows:
        yield from (quantize_variant(dtype, to) for to in FORMATS if dtype != "u8")
    yield from GENERAL


def collective_variants(dtypes: Sequence[str] = ("bf16", "f16", "f32")) -> Iterator[Variant]:
    """Variants of collectives, for sums of these types."""
    yield Variant("all_gather")
    yield Variant("copy_wait")
    for dtype in dtypes:
        yield Variant("reduce_scatter", (("X", dtype),))
        yield Variant("add_terms", (("X", dtype),))
        for kind in (0, 1):  # one-shot, two-shot
            yield Variant("all_reduce", (("KIND", str(kind)), ("X", dtype)))


def network_variants() -> Iterator[Variant]:
    """Variants for groups of several domains: those of LL, which carries their HT, too."""
    for variant in all_variants():
        if variant.kernel == "barrier" or variant.kernel.startswith("ll_"):
            yield replace(variant, network=True)


def source(variant: Variant, instead: Mapping[str, str] = MappingProxyType({})) -> str:
    """The whole C++ text of a variant: its kernel's file with every include in place. `instead`: texts of files that
    are not to be as they lie in `kernels/`."""
    supplied = {"types.h": abi.header(), "collective_types.h": collective_abi.header()}
    return flatten(KERNELS[variant.kernel], {**supplied, "variant.h": variant_header(variant), **instead})


def flatten(file: str, supplied: Mapping[str, str] = MappingProxyType({})) -> str:
    """The text of a file of `kernels/`, or a `supplied` one, with each include in place, once; `#line` names the file
    that a compiler's message is about."""
    seen = set()

    def expand(name: str) -> Iterator[str]:
        seen.add(name)
        text = supplied[name] if name in supplied else _read(name)
        yield f'#line 1 "{name}"'
        for number, line in enumerate(text.replace("#pragma once", "").splitlines(), 1):
            include = _INCLUDE.fullmatch(line)
            if include is None:
                yield line
            elif include[1] in seen:
                yield ""
            else:
                yield from expand(include[1])
                yield f'#line {number + 1} "{name}"'

    return "\n".join(expand(file)) + "\n"


def all_sources() -> str:
    """Every kernel and what it includes: what two ranks must have in common."""
    return "".join(f"{name}\n{_read(name)}" for name in sources())


def sources() -> list[str]:
    """Files of `kernels/` that are compiled, but for `types.h` and `variant.h`, which are generated."""
    return sorted(path.relative_to(SOURCES).as_posix() for path in SOURCES.rglob("*.cuh"))


def variant_header(variant: Variant) -> str:
    """`variant.h`: what the files of `kernels/` find in it when they are compiled for this variant."""
    lines = [
        "// Constants of a variant; generated by ep_kernels/jit.py. The file in the folder is one for editors alone.",
        "#pragma once",
        '#include "types.h"',
        f"#define THREADS {variant.num_threads}",
        f"#define STAGES {NUM_STAGES}",
        *(["#define LOOPBACK"] if variant.loopback else []),
        f"#define NETWORK {str(variant.network).lower()}",  # a macro: a constant would move code that it is not in
        "namespace ep {",
        "struct bf16;",
        "struct f16;",
        "struct e4m3;",
        "constexpr i32 EXPERT_MAJOR = 0, GROUPED = 1, RANK_MAJOR = 2, FLAT = 3;  // LAYOUT",
        "constexpr i32 PER_EXPERT = 0, PER_RANK = 1, EXACT = 2;                  // KIND",
        "constexpr i32 MXFP8 = 0, NVFP4 = 1;                                     // FORMAT",
        *(
            f"constexpr i32 {name} = {value};" if value.isdigit() else f"using {name} = {value};"
            for name, value in variant.constants
        ),
    ]
    return "\n".join([*lines, "}  // namespace ep", ""])


@functools.cache
def _read(name: str) -> str:
    return (SOURCES / name).read_text()


@dataclass(frozen=True, slots=True)
class Binary:
    """A compiled variant.

    Attributes:
        cubin: machine code for one architecture.
    """

    cubin: bytes
    log: str


def compile_source(text: str, name: str, arch: str) -> Binary:
    """Compile C++ for `arch` (sm_90a, ...). Raises TransportError with the compiler's log."""
    from cuda.bindings import nvrtc

    program = _check(nvrtc.nvrtcCreateProgram(text.encode(), f"{name}.cu".encode(), 0, [], []), nvrtc)
    options = [flag.encode() for flag in (*_FLAGS, f"--gpu-architecture={arch}")]
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        size = _check(nvrtc.nvrtcGetProgramLogSize(program), nvrtc)
        log = bytearray(size)
        _check(nvrtc.nvrtcGetProgramLog(program, log), nvrtc)
        report = bytes(log).rstrip(b"\0").decode(errors="replace")
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise TransportError(f"compiling {name} for {arch} failed: {status.name}\n{report}")
        cubin = bytearray(_check(nvrtc.nvrtcGetCUBINSize(program), nvrtc))
        _check(nvrtc.nvrtcGetCUBIN(program, cubin), nvrtc)
        return Binary(bytes(cubin), report)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _check(result: tuple[Any, ...], nvrtc: Any) -> Any:
    status, *values = result
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise TransportError(f"NVRTC: {status.name}")
    return values[0] if values else None


def supported_archs() -> tuple[str, ...]:
    """Architectures of SHIPPED_ARCHS that this NVRTC can compile for."""
    from cuda.bindings import nvrtc

    known = _check(nvrtc.nvrtcGetSupportedArchs(), nvrtc)
    return tuple(arch for arch in SHIPPED_ARCHS if int(arch[3:-1]) in known)


@functools.cache
def compiler_version() -> str:
    """NVRTC's version, e.g. "13.2"."""
    from cuda.bindings import nvrtc

    status, major, minor = nvrtc.nvrtcVersion()
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise TransportError(f"NVRTC: {status.name}")
    return f"{major}.{minor}"


class Compiler:
    """Gives cubins: shipped with the package, from the disk cache, or compiled now.

    Args:
        cache_dir: where compiled variants are kept; None = compile anew in each process. Many processes, also of
            several containers over one file system, may share it: one compiles a variant while the others wait for its
            file.
        shipped_dir: cubins that came with the package.
    """

    def __init__(self, cache_dir: Path | None, shipped_dir: Path = ROOT / "cubins") -> None:
        self._cache, self._shipped = cache_dir, shipped_dir

    def get(self, variant: Variant, arch: str, *, shipped: bool = True) -> bytes:
        """The cubin of a variant; `shipped` False passes over the package's own. Raises TransportError when it does not
        compile."""
        text = source(variant)
        file = self._shipped_file(text, variant, arch)
        if shipped and file.is_file():
            return file.read_bytes()
        if self._cache is None:
            return compile_source(text, variant.name, arch).cubin
        path = self._cache / f"{variant.name}-{key(text, arch, compiler_version())}.cubin"
        if (found := read_entry(path)) is not None:
            return found
        try:
            self._cache.mkdir(parents=True, exist_ok=True, mode=0o700)
            lock = path.with_suffix(".lock").open("w")
        except OSError:  # a read-only or full disk costs time, never the run
            return compile_source(text, variant.name, arch).cubin
        with lock, _locked(lock.fileno()):
            if (found := read_entry(path)) is not None:
                return found
            cubin = compile_source(text, variant.name, arch).cubin
            write_entry(path, cubin)
            return cubin

    def is_shipped(self, variant: Variant, arch: str) -> bool:
        """Whether the package brought this kernel."""
        return self._shipped_file(source(variant), variant, arch).is_file()

    def ship(self, arch: str, compiled: Mapping[Variant, Binary] | None = None) -> list[Path]:
        """Write every shipped variant for `arch` into `shipped_dir`, compiling those that are not given, and remove
        what lies there from before."""
        folder = self._shipped / arch
        folder.mkdir(parents=True, exist_ok=True)
        made = []
        for variant in shipped_variants():
            text = source(variant)
            binary = (compiled or {}).get(variant) or compile_source(text, variant.name, arch)
            made.append(self._shipped_file(text, variant, arch))
            made[-1].write_bytes(binary.cubin)
        for stale in set(folder.iterdir()) - set(made):
            stale.unlink()
        return made

    def _shipped_file(self, text: str, variant: Variant, arch: str) -> Path:
        return self._shipped / arch / f"{variant.name}-{key(text, arch)}.cubin"


def key(*parts: str) -> str:
    """Of a compilation: a hash of these and of the flags."""
    return hashlib.sha256("\0".join((*parts, *_FLAGS)).encode()).hexdigest()[:20]
