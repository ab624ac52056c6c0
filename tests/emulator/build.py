"""From a kernel's source to a shared library that runs it on the CPU."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import re
import subprocess
import threading
import time
from pathlib import Path

from ep_kernels import jit

FOLDER = Path(__file__).parent
SLOWNESS = 10
"""So much longer than the GPU's are the kernels' seconds: deadlines are kept, but not while all is well."""
FLAGS = (
    "-std=c++20", "-O1", "-ffp-contract=off", "-fno-strict-aliasing", "-fpermissive", "-w", "-shared", "-fPIC",
    "-pthread",
)  # fmt: skip
"""-fpermissive: the kernels are CUDA C++, which knows things by themselves that C++ wants to be told."""

PTX = {"common/ptx.cuh": f'#include "types.h"\n#include <{FOLDER}/ptx.h>'}
"""The emulator's instructions in place of a GPU's."""
MADE = FOLDER.parents[1] / "build" / "emulated"
"""Libraries, those of earlier runs too, by all that they are made of."""
_KEPT_S = 7 * 24 * 3600
"""After the last use of one."""
_ARGUMENTS = {"dispatch": "ep::DispatchArgs", "combine": "ep::CombineArgs", "barrier": "ep::BarrierArgs",
              "quantize": "ep::QuantizeArgs"}  # fmt: skip
_COLLECTIVE = "ep::CollectiveArgs"
_FLAGS_LAST = """  for (int turn = 0; turn < 2; ++turn) {{
    if (is_flag_lane() == (turn == {when})) {{ {body} }}
    __syncwarp();
  }}
"""


def _swapped(text: str, old: str, new: str) -> str:
    if text.count(old) != 1:
        raise ValueError(f"emulator: expected once in the kernel's source, got {text.count(old)} times: {old}")
    return text.replace(old, new)


def _lines(text: str) -> str:
    """A line's eight lanes store and load as one on the GPU; here the flag is stored last and loaded first."""
    store = re.search(r"  ptx::store_pair\(mine, .*\n  ptx::store_pair\(mine \+ kPacketHalf, .*\n.*\n", text)
    load = re.search(r"  const Vector a = (ptx::load_pair_if.*), b = (ptx::load_pair_if.*);\n", text)
    if store is None or load is None:
        raise ValueError("emulator: store_packet or poll_packet is not as expected")
    text = _swapped(text, store[0], _FLAGS_LAST.format(when=1, body=" ".join(store[0].split())))
    loads = f"a = {load[1]}; b = {load[2]};"
    text = _swapped(text, load[0], "  Vector a, b;\n" + _FLAGS_LAST.format(when=0, body=loads))
    some = re.search(r"  if \(lane_idx\(\) < 8 \* num_lines\) ptx::store_pair\(.*\n", text)
    if some is None:
        raise ValueError("emulator: store_lines is not as expected")
    text = _swapped(text, some[0], _FLAGS_LAST.format(when=1, body=some[0].strip()))
    present = "  if (present) *mine = ptx::load_pair<Vector>(at + lane_idx() * 16);\n"
    return _swapped(text, present, _FLAGS_LAST.format(when=0, body=present.strip()))


def source(variant: jit.Variant) -> str:
    """C++ of a loop-back variant."""
    text = jit.source(variant, PTX)
    if "store_packet(" in text:
        text = _lines(text)
    arguments = _ARGUMENTS.get(variant.kernel.rpartition("_")[2], _COLLECTIVE)
    call = f"{variant.kernel}(reinterpret_cast<const {arguments}*>(records), blocks_per_rank)"
    if variant.kernel == "narrow":  # its arguments, a word each
        call = "narrow((ep::i64*)words[0], (ep::i32*)words[1], words[2], (ep::f32*)words[3], (ep::f32*)words[4])"
        call = f"auto* words = static_cast<const size_t*>(records); {call}"
    return program(text, call)


def program(text: str, call: str) -> str:
    """C++ that runs `call`, of a kernel of `text`, in each fiber."""
    text = text.replace("extern __shared__ __align__(128) u8 shared[];", "u8* shared = emulated::block->shared;")
    text = re.sub(r"#pragma (once|unroll.*)", "", text)
    head = f'#define SLOWNESS {SLOWNESS}\n#include "{FOLDER}/grid.h"\n'
    return f'{head}{text}\n#include "{FOLDER}/launch.h"\nvoid emulated::fiber_main() {{ {call}; }}\n'


@functools.cache
def build(variant: jit.Variant) -> ctypes.CDLL:
    """The library of a loop-back variant; `emulated_launch` of `launch.h` runs it. Raises RuntimeError with what the
    compiler says."""
    return compiled(source(variant), variant.name)


def compiled(text: str, name: str) -> ctypes.CDLL:
    """The library of a `program`. Raises RuntimeError with what the compiler says."""
    library = MADE / f"{name}-{hashlib.sha256(_surroundings() + text.encode()).hexdigest()[:16]}.so"
    if not library.exists():
        staged = MADE / f".{library.stem}.{os.getpid()}.so"
        written = staged.with_suffix(".cpp")
        written.write_text(text, encoding="utf-8")
        with _ONE_AT_A_TIME:
            headers = _standard_headers()
        command = ["g++", *FLAGS, "-include", str(headers), str(written), "-o", str(staged)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        written.unlink()
        if done.returncode:
            raise RuntimeError(f"{name}: {done.stderr[:4000]}")
        staged.replace(library)
    os.utime(library)
    return ctypes.CDLL(str(library))


_ONE_AT_A_TIME = threading.Lock()
"""Of threads that would compile the standard headers."""


def _standard_headers() -> Path:
    """Those of `grid.h`, compiled once: to read them is a third of what a kernel takes."""
    lines = re.findall(r"#include <.*>\n", (FOLDER / "grid.h").read_text())
    header = MADE / f"standard-{hashlib.sha256(_surroundings()).hexdigest()[:16]}.h"
    made = header.with_suffix(".h.gch")
    if not made.exists():
        staged = MADE / f".{made.stem}.{os.getpid()}.gch"
        header.write_text("".join(lines), encoding="utf-8")
        subprocess.run(["g++", *FLAGS, "-x", "c++-header", str(header), "-o", str(staged)], timeout=300, check=True)
        staged.replace(made)
    for each in (header, made):
        os.utime(each)
    return header


@functools.cache
def _surroundings() -> bytes:
    """What a library is made of beside its text. Drops those that nobody has used for long."""
    MADE.mkdir(parents=True, exist_ok=True)
    for old in MADE.iterdir():
        with contextlib.suppress(FileNotFoundError):  # another process does the same
            if old.stat().st_mtime < time.time() - _KEPT_S:
                old.unlink()
    version = subprocess.run(["g++", "--version"], capture_output=True, timeout=60, check=True).stdout
    headers = [path.read_bytes() for path in sorted(FOLDER.glob("*.h"))]
    return b"\0".join([version, " ".join(FLAGS).encode(), *headers])
