"""Peer access, really tried: attributes lie. A process of its own opens each GPU and copies bytes between each two.

    try_peers() == ({("0000:1b:00.0", "0000:43:00.0"): PeerTrial(ok=True, ...), ...}, "")

The process ends with all its contexts, so nothing of the trial stays on a GPU, and a driver that hangs or crashes takes
nobody with it. `python peers.py` is that process: JSON on standard output. It imports cuda-bindings only.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

TIMEOUT_S = 60.0
_NUM_BYTES = 64 << 20
_PATTERN, _BLANK = 0xA5, 0


@dataclass(frozen=True, slots=True)
class PeerTrial:
    """A copy of 64 MiB from one GPU's memory into another's, mapped.

    Attributes:
        gbps: gigabytes per second of the copy engine, 0 where it failed.
        why: what failed, in the driver's words.
    """

    ok: bool
    gbps: float
    why: str


def try_peers(timeout_s: float = TIMEOUT_S) -> tuple[dict[tuple[str, str], PeerTrial], str]:
    """Try each ordered pair of the GPUs that this process may use: ({(from, to): trial}, "") or ({}, why not).

    GPUs are named by PCI address. Needs about half a gigabyte on each GPU for some seconds.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-P", __file__], capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        return {}, f"no answer within {timeout_s:g} s: a GPU or its driver hangs"
    with contextlib.suppress(ValueError):
        answer = json.loads(done.stdout)
        return {(src, dst): PeerTrial(*trial) for src, dst, *trial in answer["pairs"]}, answer["why"]
    last = done.stderr.strip().splitlines()[-1:]
    return {}, f"the trial ended with status {done.returncode}: {' '.join(last)}"


class _Failed(RuntimeError):
    """The driver refused a call."""


def _call(name: str, *args: Any) -> Any:
    from cuda.bindings import driver as cuda

    status, *values = getattr(cuda, name)(*args)
    if status != cuda.CUresult.CUDA_SUCCESS:
        raise _Failed(f"{name}: {status.name}")
    return values[0] if len(values) == 1 else None


@dataclass(frozen=True, slots=True)
class _Opened:
    device: int
    address: str
    context: Any
    source: Any
    target: Any


def address_of(raw: bytes) -> str:
    """The PCI address in a buffer of the driver: what lies behind its zero is the buffer's."""
    return raw.partition(b"\0")[0].decode().lower()[-len("0000:00:00.0") :]


def _open(device: int) -> _Opened:
    address = address_of(_call("cuDeviceGetPCIBusId", 32, device))
    context = _call("cuDevicePrimaryCtxRetain", device)
    _call("cuCtxSetCurrent", context)
    source, target = _call("cuMemAlloc", _NUM_BYTES), _call("cuMemAlloc", _NUM_BYTES)
    _call("cuMemsetD8", source, _PATTERN, _NUM_BYTES)
    _call("cuCtxSynchronize")
    return _Opened(device, address, context, source, target)


def _try(src: _Opened, dst: _Opened) -> tuple[bool, float, str]:
    """Map dst's memory at src and write there: what a dispatch does."""
    try:
        if not _call("cuDeviceCanAccessPeer", src.device, dst.device):
            return False, 0.0, "cuDeviceCanAccessPeer says no"
        _call("cuCtxSetCurrent", dst.context)
        _call("cuMemsetD8", dst.target, _BLANK, _NUM_BYTES)
        _call("cuCtxSynchronize")
        _call("cuCtxSetCurrent", src.context)
        _call("cuCtxEnablePeerAccess", dst.context, 0)
        for timed in (False, True):
            started = time.perf_counter()
            for _ in range(8 if timed else 1):
                _call("cuMemcpyDtoDAsync", dst.target, src.source, _NUM_BYTES, 0)
            _call("cuCtxSynchronize")
        seconds = (time.perf_counter() - started) / 8
        _call("cuCtxSetCurrent", dst.context)
        ends = bytearray(2)
        for place, offset in enumerate((0, _NUM_BYTES - 1)):
            byte = bytearray(1)
            _call("cuMemcpyDtoH", byte, int(dst.target) + offset, 1)
            ends[place] = byte[0]
    except _Failed as error:
        return False, 0.0, str(error)
    if set(ends) != {_PATTERN}:
        return False, 0.0, f"wrong bytes arrived: {ends.hex()}"
    return True, round(_NUM_BYTES / seconds / 1e9, 1), ""


def _main() -> dict[str, Any]:
    try:
        _call("cuInit", 0)
        count = _call("cuDeviceGetCount")
        if count < 2:
            return {"pairs": [], "why": f"{count} GPU: there are no pairs"}
        opened = [_open(device) for device in range(count)]
    except ImportError as error:
        return {"pairs": [], "why": f"cuda-bindings: {error}"}
    except RuntimeError as error:  # from cuda-bindings: there is no driver
        return {"pairs": [], "why": str(error)}
    pairs = [(a.address, b.address, *_try(a, b)) for a in opened for b in opened if a is not b]
    return {"pairs": pairs, "why": ""}


if __name__ == "__main__":
    print(json.dumps(_main()))
