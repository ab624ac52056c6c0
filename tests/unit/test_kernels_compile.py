"""Every kernel variant compiles for Hopper and Blackwell without a GPU: no spills, no stack, the expected instructions.

`python -m pytest tests/unit/test_kernels_compile.py -s` prints the table.
"""

from __future__ import annotations

import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ep_kernels import jit
from ep_kernels.errors import TransportError

nvrtc = pytest.importorskip("cuda.bindings.nvrtc")
ARCHS = ("sm_90a", "sm_100a")
MOST_REGISTERS = 224
"""65536 registers of an SM / 256 threads of its one block, less a margin."""
STORE, LOAD, WAIT = "UBLKCP.G.S", "UBLKCP.S.G", "SYNCS.PHASECHK.TRANS64.TRYWAIT"
"""Bulk copies from and to shared memory, and the mbarrier that loads complete on."""
SHARE, FENCE = "REDG.E.ADD.64.STRONG.SYS", "MEMBAR.ALL.SYS"
"""The release of a share at a peer: one reduction, ordered after all stores."""


def expected(variant: str) -> tuple[str, ...]:
    """Instructions that a variant must have, as nvdisasm spells them on sm_90a and sm_100a."""
    if variant == "barrier":
        return (FENCE, "STG.E.64.STRONG.SYS")
    loads = (LOAD, WAIT) if variant.endswith("-u8") or variant == "combine-1-bf16-bf16" else ()
    return (STORE, SHARE, FENCE, *loads)


@pytest.fixture(scope="module")
def binaries() -> dict[tuple[str, str], jit.Binary]:
    """(variant name, architecture) -> binary, of the shipped variants; compiled side by side."""
    wanted = [(variant, arch) for arch in ARCHS for variant in jit.shipped_variants()]
    with ThreadPoolExecutor() as pool:
        built = pool.map(lambda pair: jit.compile_source(jit.source(pair[0]), pair[0].name, pair[1]), wanted)
    return {(v.name, arch): binary for (v, arch), binary in zip(wanted, built, strict=True)}


def test_resources(binaries: dict[tuple[str, str], jit.Binary]) -> None:
    print(f"\n{'variant':28} {'arch':8} registers stack spills static shared   bytes")
    for (name, arch), binary in binaries.items():
        (found,) = binary.resources()
        print(
            f"{name:28} {arch:8} {found.registers:9} {found.stack_bytes:5} {found.spill_bytes:6} "
            f"{found.shared_bytes:13} {len(binary.cubin):7}"
        )
        assert 0 < found.registers <= MOST_REGISTERS, (name, arch)
        assert found.stack_bytes == found.spill_bytes == 0, (name, arch)


def test_expected_instructions(binaries: dict[tuple[str, str], jit.Binary], tmp_path: Path) -> None:
    tool = disassembler()
    if tool is None:
        pytest.skip("no nvdisasm here")
    for (name, arch), binary in binaries.items():
        file = tmp_path / f"{name}-{arch}.cubin"
        file.write_bytes(binary.cubin)
        listing = subprocess.run([tool, "-c", str(file)], check=True, capture_output=True, text=True).stdout
        for instruction in expected(name):
            assert instruction in listing, f"{name} for {arch}: no {instruction}"
        assert "LDL" not in listing, f"{name} for {arch}: local memory"


def disassembler() -> str | None:
    """nvdisasm from the path, or the one that Triton brings."""
    found = shutil.which("nvdisasm")
    if found is None:
        triton = pytest.importorskip("triton", reason="no nvdisasm here")
        bundled = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
        found = str(bundled) if bundled.exists() else None
    return found


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

    def test_shipped_comes_first(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(jit, "shipped_variants", lambda: iter([self.variant]))
        compiler = jit.Compiler(None, tmp_path / "shipped")
        assert compiler.ship("sm_100a") == 1
        monkeypatch.setattr(jit, "compile_source", lambda *_: pytest.fail("compiled again"))
        assert compiler.get(self.variant, "sm_100a").startswith(b"\x7fELF")
