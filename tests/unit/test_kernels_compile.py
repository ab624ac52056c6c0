"""Every kernel variant compiles without a GPU: no spills, no stack, the expected instructions; and what keeps cubins.

Here those that the wheel carries, for Hopper: about a minute of a core, and nothing after `make kernels`, a step of
`.ci/run`, which compiles every one for Hopper and Blackwell and keeps what it has seen of each.
"""

from __future__ import annotations

import fcntl
import functools
import itertools
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from benchmarks import kernels
from benchmarks.kernels import Job
from ep_kernels import ConfigError, Layout, Mode, MoEConfig, jit
from ep_kernels.collectives.collective_types import SUM_DTYPES
from ep_kernels.errors import TransportError
from ep_kernels.groups import PaperGroup
from ep_kernels.tools import kernels as shipping
from ep_kernels.transports.nvlink.calls.engine import LaunchEngine
from ep_kernels.transports.nvlink.copy_engines import collective_plan
from tests.tools import needs

pytest.importorskip("cuda.bindings.nvrtc")
HOPPER, BLACKWELL = "sm_90a", "sm_100a"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_shipped_kernels_are_sound() -> None:
    reports = kernels.inspect([Job(variant, HOPPER) for variant in jit.shipped_variants()])
    faults = [f"{r.job.variant.name} for {r.job.arch}: {'; '.join(r.faults)}" for r in reports if r.faults]
    assert not faults, "\n".join(faults)
    assert all(r.num_blocks >= 1 for r in reports)


FAULTY = """
extern "C" __global__ void faulty(int* out, const int* in, int n) {
  int kept[400];
  for (int i = 0; i < 400; ++i) kept[i] = in[i * n];
  for (int i = 0; i < n; ++i) out[i] = kept[in[i]];
}
"""


def test_every_file_is_of_some_kernel_and_errors_name_it() -> None:
    generated = dict.fromkeys(("types.h", "collective_types.h", "variant.h"), "")
    texts = [jit.flatten(file, generated) for file in jit.KERNELS.values()]
    assert [name for name in jit.sources() if not any(f'#line 1 "{name}"' in text for text in texts)] == []
    broken = jit.source(jit.Variant("barrier"), {"common/block.cuh": '#include "types.h"\n\nnot C++;\n'})
    with pytest.raises(TransportError, match=r"common/block\.cuh\(3\): error"):
        jit.compile_source(broken, "barrier", HOPPER)


def faults_of(variant: jit.Variant, binary: jit.Binary) -> tuple[str, ...]:
    job = Job(variant, HOPPER)
    return kernels.judge(job, kernels.look_at(job, binary)).faults


def test_a_bad_kernel_is_told() -> None:
    binary = jit.compile_source(FAULTY, "faulty", HOPPER)
    faults = faults_of(jit.Variant("barrier"), binary)
    assert "stack frame of 1600 bytes" in faults
    if kernels.disassembler() is not None:
        assert {"reads local memory", "no MEMBAR.ALL.SYS"} <= set(faults)


RELEASING = """
extern "C" __global__ void ll_dispatch(unsigned long long* flag) {
  asm volatile("red.release.sys.global.add.u64 [%0], 1;" ::"l"(flag) : "memory");
}
"""


@needs("nvdisasm")
def test_low_latency_kernels_wait_for_no_release() -> None:
    """What made the first ones slow is told, and so is the absence of lines."""
    variant = jit.dispatch_variant("ll", 2)
    faults = faults_of(variant, jit.compile_source(RELEASING, "ll_dispatch", HOPPER))
    assert {"has REDG.E.ADD.64.STRONG.SYS", "no STG.E.128.STRONG.SYS", "no LDG.E.128.STRONG.SYS"} <= set(faults)


def test_a_kernel_that_was_looked_at_is_not_compiled_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nor believed when it is another, or when something else would be looked for."""
    job, compiled = Job(jit.Variant("barrier"), HOPPER), []
    source, tool = jit.source(job.variant), tmp_path / "nvdisasm"
    tool.write_text("")

    def compile_kernel(asked: tuple[jit.Variant, str]) -> jit.Binary:
        compiled.append(asked)
        return jit.Binary(b"1234", "Compiling entry function 'barrier' Used 40 registers, 8 bytes spill stores")

    monkeypatch.setattr(kernels, "KEPT", tmp_path / "kept")
    monkeypatch.setattr(kernels, "compile_kernel", compile_kernel)
    monkeypatch.setattr(kernels, "disassemble", lambda cubin: "LDL")
    monkeypatch.setattr(kernels, "disassembler", lambda: str(tool))
    first = kernels.inspect_job(job)
    assert first.faults[:2] == ("8 bytes spilled", "reads local memory")
    assert kernels.inspect_job(job) == first
    assert len(compiled) == 1
    os.utime(tool, ns=(1, 1))
    assert kernels.inspect_job(job) == first
    monkeypatch.setattr(jit, "source", lambda variant: f"{source}// changed")
    (kept,) = {kernels.inspect_job(job), kernels.inspect_job(job)}
    assert (kept, len(compiled)) == (first, 3)
    for path in (tmp_path / "kept").iterdir():
        path.write_bytes(path.read_bytes()[:-1])
    assert kernels.inspect_job(job) == first
    assert len(compiled) == 4


def test_the_table_shows_faults_and_fails(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(kernels, "KEPT", tmp_path / "once")
    barrier = jit.Variant("barrier")
    monkeypatch.setattr(jit, "all_variants", lambda: iter([barrier]))
    monkeypatch.setattr(kernels, "inspect", lambda jobs: [kernels.inspect_job(job) for job in jobs])
    assert kernels.main(["--arch", HOPPER]) == 0
    shown = capsys.readouterr().out
    assert "1 kernels, 0 with faults" in shown
    assert "barrier" in shown
    monkeypatch.setattr(kernels, "KEPT", tmp_path / "again")
    monkeypatch.setattr(kernels, "expected_instructions", lambda variant: ("NONSUCH",))
    wanted = 0 if kernels.disassembler() is None else 1
    assert kernels.main(["--arch", HOPPER]) == wanted
    assert ("no NONSUCH" in capsys.readouterr().out) == bool(wanted)
    with pytest.raises(SystemExit):
        kernels.main(["--arch", "sm_10"])


def test_shipping(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    barrier = jit.Variant("barrier")
    monkeypatch.setattr(jit, "shipped_variants", lambda: iter([barrier]))
    monkeypatch.setattr(shipping, "spread", map)
    assert shipping.main(["--ship", "--into", str(tmp_path), "--arch", HOPPER, "--arch", BLACKWELL]) == 0
    table = capsys.readouterr().out
    for arch in (HOPPER, BLACKWELL):
        (file,) = (tmp_path / arch).iterdir()
        assert file.read_bytes() == jit.Compiler(None, tmp_path / "none").get(barrier, arch)
        assert arch in table
        assert f"barrier {file.stat().st_size}" in table


@pytest.mark.parametrize(
    ("arch", "registers", "shared", "blocks"),
    [
        (HOPPER, 32, 0, 8),  # threads
        (HOPPER, 64, 0, 4),  # registers
        (HOPPER, 72, 0, 3),
        (HOPPER, 224, 0, 1),
        (HOPPER, 32, 100 << 10, 2),  # shared memory, 1 KiB of it reserved for each block
        (HOPPER, 32, 113 << 10, 2),
        (HOPPER, 32, 227 << 10, 1),
        (HOPPER, 32, (227 << 10) + 1, 0),
        ("sm_120a", 32, 0, 6),
        ("sm_120a", 32, 100 << 10, 0),
    ],
)
def test_blocks_of_an_sm(arch: str, registers: int, shared: int, blocks: int) -> None:
    assert kernels.blocks_per_sm(arch, registers, shared, 256) == blocks


def configs() -> list[MoEConfig]:
    """Every legal combination of what chooses a kernel."""
    found = []
    floats = (torch.bfloat16, torch.float16, torch.float32)
    choices = itertools.product(
        (Mode.LL, Mode.HT, Mode.AUTO), Layout, (*floats, torch.uint8), (False, True), (None, *floats),
        (None, *floats, torch.float8_e4m3fn), (False, True),
    )  # fmt: skip
    for mode, layout, dtype, quantize, output, moved, exact in choices:
        try:
            config = MoEConfig(
                group=PaperGroup(0, 2), num_experts=4, hidden_size=256, topk=2, max_tokens_per_rank=8, mode=mode,
                layout=layout, dtype=dtype, quantize=quantize, output_dtype=output, combine_dtype=moved,
                exact_combine=exact,
            )  # fmt: skip
        except ConfigError:
            continue
        found.append(config)
    return found


def test_all_variants_are_all_that_can_be_launched() -> None:
    engine, wanted = LaunchEngine.__new__(LaunchEngine), set()
    for config in configs():
        engine.config = config
        modes = (Mode.LL, Mode.HT) if config.mode is Mode.AUTO else (config.mode,)
        wanted |= {make(mode) for make in (engine._combine_variant, engine._dispatch_variant) for mode in modes}
    wanted |= {jit.quantize_variant(dtype, to) for dtype in ("bf16", "f16") for to in jit.FORMATS}
    assert wanted | {*jit.GENERAL, *jit.collective_variants()} == set(jit.all_variants())


def test_all_collective_variants_are_all_that_can_be_launched() -> None:
    wanted = {collective_plan.gather_variant(), collective_plan.copy_wait_variant()}
    for dtype in SUM_DTYPES:
        wanted |= {collective_plan.reduce_variant(kernel, dtype) for kernel in ("reduce_scatter", "add_terms")}
        for kind in (collective_plan.ONE_SHOT, collective_plan.TWO_SHOT):
            wanted.add(collective_plan.reduce_variant("all_reduce", dtype, kind))
    assert wanted == set(jit.collective_variants())


def test_what_is_shipped_can_be_launched() -> None:
    assert set(jit.shipped_variants()) <= set(jit.all_variants())
    for variant in jit.all_variants():
        if variant.kernel not in ("barrier", "narrow", "quantize") and variant not in jit.collective_variants():
            engine = LaunchEngine.__new__(LaunchEngine)
            engine.config = config = kernels.serving_config(variant)
            assert variant in (engine._dispatch_variant(config.mode), engine._combine_variant(config.mode))


def test_errors_carry_the_log() -> None:
    with pytest.raises(TransportError, match=r"compiling broken for sm_90a failed.*\n(.|\n)*expected"):
        jit.compile_source("__global__ void broken( {", "broken", "sm_90a")


def test_loopback_is_another_binary() -> None:
    plain, loop = jit.Variant("barrier"), jit.Variant("barrier", loopback=True)
    assert plain.name != loop.name
    assert jit.source(plain) != jit.source(loop)


class TestCache:
    """Crash-safe, shared by processes, never in the way."""

    variant = jit.Variant("barrier")

    def test_compiles_once(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        first = jit.Compiler(tmp_path, tmp_path / "none").get(self.variant, "sm_90a")
        monkeypatch.setattr(jit, "compile_source", lambda *_: pytest.fail("compiled again"))
        assert jit.Compiler(tmp_path, tmp_path / "none").get(self.variant, "sm_90a") == first

    def test_torn_entry_is_made_anew(self, tmp_path: Path) -> None:
        compiler = jit.Compiler(tmp_path, tmp_path / "none")
        whole = compiler.get(self.variant, "sm_90a")
        (entry,) = tmp_path.glob("*.cubin")
        entry.write_bytes(entry.read_bytes()[:-100])
        assert compiler.get(self.variant, "sm_90a") == whole
        assert not list(tmp_path.glob(".tmp-*"))

    def test_unwritable_cache_costs_only_time(self, tmp_path: Path) -> None:
        blocked = tmp_path / "file"
        blocked.write_text("not a folder")
        assert jit.Compiler(blocked / "cache", tmp_path / "none").get(self.variant, "sm_90a").startswith(b"\x7fELF")

    def test_one_compiles_others_wait(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        compiled = []
        real = jit.compile_source

        def counted(text: str, name: str, arch: str) -> jit.Binary:
            compiled.append(name)
            return real(text, name, arch)

        monkeypatch.setattr(jit, "compile_source", counted)
        with ThreadPoolExecutor(8) as pool:
            jobs = [pool.submit(jit.Compiler(tmp_path, tmp_path / "n").get, self.variant, "sm_90a") for _ in range(8)]
            results = {job.result() for job in jobs}
        assert len(results) == 1
        assert compiled == ["barrier"]

    def test_a_stopped_process_holds_nobody_up(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """It has begun to compile, and keeps the lock for good."""
        compiler = jit.Compiler(tmp_path, tmp_path / "none")
        whole = compiler.get(self.variant, "sm_90a")
        for entry in tmp_path.glob("*.cubin"):
            entry.unlink()
        (lock,) = tmp_path.glob("*.lock")
        monkeypatch.setattr(jit, "_locked", functools.partial(jit._locked, timeout_s=0.1))
        with lock.open("w") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            assert compiler.get(self.variant, "sm_90a") == whole

    def test_shipped_comes_first(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(jit, "shipped_variants", lambda: iter([self.variant]))
        compiler = jit.Compiler(None, tmp_path / "shipped")
        (tmp_path / "shipped" / "sm_100a").mkdir(parents=True)
        (tmp_path / "shipped" / "sm_100a" / "barrier-of-another-day.cubin").write_text("stale")
        (made,) = compiler.ship("sm_100a")
        assert list(made.parent.iterdir()) == [made]
        assert compiler.is_shipped(self.variant, "sm_100a")
        assert not compiler.is_shipped(self.variant, "sm_90a")
        monkeypatch.setattr(jit, "compile_source", lambda *_: pytest.fail("compiled again"))
        assert compiler.get(self.variant, "sm_100a").startswith(b"\x7fELF")
