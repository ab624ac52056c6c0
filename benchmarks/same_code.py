"""Whether two versions of the sources compile to the same machine code, for every kernel variant. Needs no GPU.

    python -m benchmarks.same_code v0.1.0 .                   a git revision against this checkout
    python -m benchmarks.same_code ../before . --arch sm_100a --only ll_dispatch

Both versions are compiled with the NVRTC of this environment. It compares the bytes of functions and compiler-made
constants, registers and static shared memory. It does not compare names, line numbers and debug sections, nor what
follows from names alone: the order of functions, and the table of constants where no instruction reads it.

Exit status: 0 = every variant of NEW is in OLD with the same code; 1 = differences, listed with the number of
instructions that differ; 2 = a version that cannot be read or compiled.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from benchmarks import kernels, scoreboards
from ep_kernels import jit

# Runs in processes of its own, which import the version's `ep_kernels`; `worker` of `num_workers` compiles its part.
_COMPILE = """
import pathlib, sys
sources, folder, arch, only, worker, num_workers = sys.argv[1:]
sys.path.insert(0, sources)
from ep_kernels import jit
assert pathlib.Path(jit.__file__).is_relative_to(sources), jit.__file__
variants = [variant for variant in jit.all_variants() if variant.name.startswith(only)]
for variant in variants[int(worker) :: int(num_workers)]:
    binary = jit.compile_source(jit.source(variant), variant.name, arch)
    pathlib.Path(folder, variant.name).write_bytes(binary.cubin)
"""
_COMPARED = re.compile(r"\.text\.|\.nv\.constant[1-9]|\.nv\.global\.init|\.nv\.shared\.")
_TARGET, _RETURN_TO = re.compile(r"`\(([^)]*)\)"), re.compile(r"(\bMOV R\d+, )0x([0-9a-f]+)")
_CONTROL_SHIFT = 41  # scoreboards and stalls: what a listing does not show; below are operands and places
_NAMED_TABLE = "c[0x4]"
_NOBITS = 8


class VersionError(Exception):
    """A version that cannot be read or compiled."""


@dataclass(frozen=True, slots=True)
class Code:
    """What a cubin runs: (kind of section, registers, bytes) of every section that decides it, in the cubin's order."""

    sections: tuple[tuple[str, int, bytes], ...]


def code_of(cubin: bytes) -> Code:
    """Read an ELF file of machine code. Raises VersionError where it is none."""
    if cubin[:5] != b"\x7fELF\x02":
        raise VersionError("expected a 64-bit ELF file of machine code")
    table, entry_size, num_entries, names_at = struct.unpack_from("<Q10xHHH", cubin, 0x28)
    headers = [struct.unpack_from("<IIQQQQIIQQ", cubin, table + entry_size * i) for i in range(num_entries)]
    names_start = headers[names_at][4]
    found = []
    for name_at, kind, _, _, start, size, _, info, _, _ in headers:
        name = cubin[names_start + name_at : cubin.index(b"\0", names_start + name_at)].decode()
        if match := _COMPARED.match(name):
            body = struct.pack("<Q", size) if kind == _NOBITS else cubin[start : start + size]
            registers = info >> 24 if match.group() == ".text." else 0
            found.append((match.group(), registers, body))
    return Code(tuple(found))


def instructions(cubin: bytes) -> list[str] | None:
    """Instructions without addresses and names of labels; None where there is no nvdisasm."""
    listing = kernels.disassemble(cubin)
    return None if listing is None else [_TARGET.sub("label", text) for _, _, text, _ in scoreboards.lines(listing)]


class DeviceFunction:
    """One function of a listing: its instructions, and where its labels are."""

    def __init__(self, start: int) -> None:
        self.start, self.places = start, dict[str, int]()
        self.lines: list[tuple[str, int]] = []  # text, control bits

    def body(self, called: Mapping[str, str]) -> str:
        """The kernel's instructions without its place and name; callees are named by `called`."""
        width = 16
        after_calls = {self.start + width * (i + 1) for i, (text, _) in enumerate(self.lines) if "CALL" in text}

        def target(match: re.Match[str]) -> str:
            place = self.places.get(match[1])
            return called.get(match[1], "function") if place is None else f"{place - self.start:#x}"

        def return_to(match: re.Match[str]) -> str:
            place = int(match[2], 16)
            return f"{match[1]}return {place - self.start:#x}" if place in after_calls else match[0]

        lines = [f"{_RETURN_TO.sub(return_to, _TARGET.sub(target, text))} {control:x}" for text, control in self.lines]
        while lines and (lines[-1].startswith("NOP") or lines[-1].startswith(f"BRA {width * (len(lines) - 1):#x} ")):
            lines.pop()  # what fills the end of the section
        return "\n".join(lines)


def _read_functions(listing: str) -> dict[str, DeviceFunction]:
    found, current = dict[str, DeviceFunction](), DeviceFunction(0)
    for labels, address, text, upper in scoreboards.lines(listing):
        if names := [label for label in labels if not label.startswith(".L")]:
            current = DeviceFunction(address)
            found.update((name, current) for name in names)
        current.places.update((label, address) for label in labels if label.startswith(".L"))
        current.lines.append((text, upper >> _CONTROL_SHIFT))
    return found


def functions(cubin: bytes) -> list[str] | None:
    """The bodies of its functions without names, places and order; None where that is not known: no nvdisasm, or an
    instruction reads the table of constants."""
    listing = kernels.disassemble(cubin)
    if listing is None or _NAMED_TABLE in listing:
        return None
    found, called = _read_functions(listing), dict[str, str]()
    for _ in found:  # callees of callees: until nothing changes
        known = {name: hashlib.sha256(function.body(called).encode()).hexdigest() for name, function in found.items()}
        known = {name: value for name, value in known.items() if name.startswith("$")}
        if known == called:
            break
        called = known
    return sorted({id(function): function.body(called) for function in found.values()}.values())


def _beside_functions(code: Code) -> list[tuple[str, int, bytes]]:
    """What must be equal beside the functions: registers, constants that code may read, sizes of shared memory."""
    dead = {".nv.constant4", ".nv.global.init"}
    return [
        (kind, registers, b"" if kind == ".text." else body)
        for kind, registers, body in code.sections
        if kind not in dead
    ]


def difference(old: bytes, new: bytes) -> str:
    """How two cubins differ, in words; "" = the same code."""
    before, after = code_of(old), code_of(new)
    if before == after:
        return ""
    if _beside_functions(before) == _beside_functions(after):
        bodies = functions(old)
        if bodies is not None and bodies == functions(new):
            return ""
    (was, now) = (max((registers for _, registers, _ in code.sections), default=0) for code in (before, after))
    parts = [] if was == now else [f"registers {was} -> {now}"]
    then, since = instructions(old), instructions(new)
    if then is None or since is None:
        return ", ".join([*parts, "other code; no nvdisasm here to count instructions"])
    removed, added = _changed_lines(then, since)
    parts.append(f"{removed} instructions gone, {added} new")
    return ", ".join([*parts, f"{len(then)} -> {len(since)} in all"])


def _changed_lines(old: list[str], new: list[str]) -> tuple[str, str]:
    """How many lines are gone and new; git counts, which is quick where difflib takes minutes."""
    with tempfile.TemporaryDirectory() as folder:
        for name, lines in (("old", old), ("new", new)):
            Path(folder, name).write_text("\n".join([*lines, ""]))
        command = ["git", "diff", "--no-index", "--numstat", "old", "new"]
        counted = subprocess.run(command, check=False, cwd=folder, capture_output=True, text=True).stdout
    added, removed = counted.split()[:2] if counted else ("0", "0")
    return removed, added


def compile_version(sources: Path, arch: str, only: str, into: Path) -> dict[str, bytes]:
    """Every variant of a checkout, by name. Raises VersionError with the compiler's or Python's words."""
    into.mkdir()
    num_variants = sum(variant.name.startswith(only) for variant in jit.all_variants())
    num_workers = max(1, min(num_variants, len(os.sched_getaffinity(0))))
    command = [sys.executable, "-P", "-c", _COMPILE, str(sources), str(into), arch, only]
    workers = [
        subprocess.Popen([*command, str(worker), str(num_workers)], stderr=subprocess.PIPE, text=True)
        for worker in range(num_workers)
    ]
    errors = [worker.communicate()[1] for worker in workers]
    for worker, error in zip(workers, errors, strict=True):
        if worker.returncode:
            raise VersionError(f"{sources}: {error.strip()[-2000:]}")
    return {path.name: path.read_bytes() for path in sorted(into.iterdir())}


def sources_of(version: str, scratch: Path) -> Path:
    """The folder that holds a version's `ep_kernels`: a checkout as it is, a git revision unpacked into `scratch`."""
    if (Path(version) / "ep_kernels").is_dir():
        return Path(version).resolve()
    scratch.mkdir()
    archive = subprocess.run(["git", "archive", version, "ep_kernels"], check=False, capture_output=True)
    if archive.returncode:
        raise VersionError(f"expected a checkout or a git revision, got {version}: {archive.stderr.decode().strip()}")
    subprocess.run(["tar", "-x", "-C", str(scratch)], input=archive.stdout, check=True)
    return scratch


def compare(old: Mapping[str, bytes], new: Mapping[str, bytes]) -> Iterator[tuple[str, str]]:
    """(variant, difference) of all variants of either; "" = the same code."""
    both = sorted({*old} & {*new})
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:  # most of the time is nvdisasm's
        differences = dict(zip(both, threads.map(lambda name: difference(old[name], new[name]), both), strict=True))
    for name in sorted({*old, *new}):
        yield name, differences.get(name, "new" if name in new else "gone")


def show(found: Mapping[str, str], title: str, arch: str) -> None:
    """Print the variants that differ, and the counts."""
    differing = {name: text for name, text in found.items() if text}
    if differing:
        print(f"{title}, {arch}:")
    width = max(map(len, differing), default=0)
    for name, text in differing.items():
        print(f"  {name:{width}}  {text}")
    num_gone, num_new = (sum(text == word for text in differing.values()) for word in ("gone", "new"))
    num_same, num_differ = len(found) - len(differing), len(differing) - num_gone - num_new
    print(
        f"{len(found)} variants for {arch} by NVRTC {jit.compiler_version()}: "
        f"{num_same} the same, {num_differ} differ, {num_gone} gone, {num_new} new"
    )


def main(words: Sequence[str] | None = None) -> int:
    """Parse the command line, compile both versions, print the table; the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.same_code",
        description="Compare the machine code of two versions of the kernels.",
    )
    parser.add_argument("old", help="a checkout, or a git revision")
    parser.add_argument("new", help="a checkout, or a git revision")
    parser.add_argument("--arch", default="sm_90a", help="default sm_90a")
    parser.add_argument("--only", default="", metavar="PREFIX", help="only variants of such a name, as ll_dispatch")
    chosen = parser.parse_args(words)
    if chosen.arch not in jit.supported_archs():
        parser.error(f"--arch: expected one of {', '.join(jit.supported_archs())}, got {chosen.arch}")
    with tempfile.TemporaryDirectory(prefix="same-code-") as scratch:
        try:
            old, new = (
                compile_version(sources_of(version, Path(scratch, name)), chosen.arch, chosen.only, Path(scratch, code))
                for version, name, code in ((chosen.old, "old", "old-code"), (chosen.new, "new", "new-code"))
            )
            found = dict(compare(old, new))
        except VersionError as error:
            print(f"same_code: {error}", file=sys.stderr)
            return 2
    show(found, f"{chosen.old} -> {chosen.new}", chosen.arch)
    return int(any(text not in ("", "gone") for text in found.values()))


if __name__ == "__main__":
    sys.exit(main())
