"""Kernel launches and copies through `native/launch.cpp`: what every call of the transport pays, and nothing more.

Knows function handles and addresses; neither modules (see `driver`) nor tensors.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
from array import array
from collections.abc import Iterable, Sequence
from ctypes import addressof, c_char_p, c_int, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from typing import Any

from ep_kernels.errors import TransportError
from ep_kernels.transports.build import Native, native_of
from ep_kernels.transports.library import Signature
from ep_kernels.transports.library import load as load_library
from ep_kernels.transports.nvlink.gpu.copy_schedule import StreamOp

DRIVER = "libcuda.so.1"
_COOPERATIVE, _OVERLAPPED = 1, 2
LAUNCH, COPIES = "cuLaunchKernelEx", "copies on a stream"
_NAME, _TEXT = 0, 1


class Prepared(ctypes.Structure):
    """`Prepared` of native/launch.cpp."""

    _fields_ = (
        ("function", c_void_p),
        ("blocks", c_uint32),
        ("threads", c_uint32),
        ("shared_bytes", c_uint32),
        ("flags", c_uint32),
    )


class QuietWord(ctypes.Structure):
    """`QuietWord` of native/launch.hpp."""

    _fields_ = (("word", c_uint64), ("most", c_int64))


class QuietRecord(ctypes.Structure):
    """`Quiet` of native/launch.hpp."""

    _fields_ = (("words", c_void_p), ("count", c_int64))


class Quiet:
    """Words that an operation looks at first.

    Args:
        words: (address of an int64, the most that it may be).
    """

    def __init__(self, words: Iterable[tuple[int, int]]) -> None:
        listed = [QuietWord(*word) for word in words]
        self._words = (QuietWord * len(listed))(*listed)
        self._record = QuietRecord(ctypes.addressof(self._words), len(listed))
        self.address = ctypes.addressof(self._record)


_SIGNATURES: dict[str, Signature] = {
    "cd_open": (c_char_p, (c_char_p,)),
    "cd_error": (c_char_p, (c_int, c_int)),
    "cd_launch": (c_int, (c_void_p, c_void_p, c_void_p)),
    "cd_launch_one": (c_int, (c_void_p, c_void_p, c_void_p)),
    "cd_copies": (c_int, (c_void_p, c_int, c_void_p)),
    "cd_copies_behind": (c_int, (c_void_p, c_int, c_void_p, c_void_p, c_void_p)),
    "cd_graph": (c_int, (c_void_p, c_int, c_void_p)),
    "cd_graph_free": (c_int, (c_void_p,)),
    "cd_await": (c_int, (c_void_p, c_void_p)),
    "cd_repeat_kernel": (c_int, (c_void_p, c_void_p, c_uint64, c_uint64)),
    "cd_repeat_copies": (c_int, (c_void_p, c_uint64, c_void_p, c_void_p)),
    "cd_operation_open": (c_int, (c_void_p, c_void_p)),
    "cd_operation_plan_bytes": (c_size_t, ()),
    # The rest needs no driver. Parts the stores and loads of Python before it from those behind it, on processors
    # (Arm's) which would not keep them in order.
    "cd_fence": (None, ()),
    # native/box_words.cpp
    "cd_boxes_new": (c_void_p, (c_int, c_void_p, c_void_p)),
    "cd_boxes_flush": (None, (c_void_p, c_void_p, c_void_p, c_void_p)),
    "cd_boxes_handler": (c_void_p, ()),
    "cd_boxes_restart": (None, (c_void_p, c_uint64, c_uint64, c_uint64)),
    "cd_boxes_free": (None, (c_void_p,)),
    # native/host_words.cpp
    "cd_words_open": (c_void_p, (c_void_p,) * 4),
    "cd_words_close": (None, (c_void_p,)),
    "cd_words_handler": (c_void_p, ()),
    # native/samples.cpp
    "cd_samples_whole": (c_int, (c_void_p, c_int, c_int, c_int64, c_void_p)),
    "cd_samples": (None, (c_void_p, c_void_p, c_int, c_int, c_int64, c_void_p)),
}


@functools.cache
def library(native: Native = native_of("nvlink")) -> ctypes.CDLL:
    """The library, for what needs no CUDA driver. Raises TransportError."""
    return load_library("nvlink transport", native, _SIGNATURES)


@functools.cache
def load(native: Native = native_of("nvlink"), driver: str = DRIVER) -> ctypes.CDLL:
    """The library, with the CUDA driver found. Raises TransportError saying which of the two is missing, and the
    cure.
    """
    found = library(native)
    problem = found.cd_open(driver.encode())
    if problem is not None:
        raise TransportError(f"nvlink transport: cannot use the CUDA driver: {problem.decode()}; is one installed?")
    return found


def run_ops(steps: Sequence[StreamOp], stream: int, library: ctypes.CDLL) -> None:
    """Put copies, waits and writes on a CUstream, in order, by one call. Raises TransportError; then those behind the
    refused one are not there."""
    words = array("Q", itertools.chain.from_iterable(steps))
    raise_refused(COPIES, library.cd_copies(words.buffer_info()[0], len(steps), stream), library)


def run_ops_behind(steps: Sequence[StreamOp], stream: int, behind: int, event: int, library: ctypes.CDLL) -> None:
    """As `run_ops`, after what another CUstream has now; the event stands there."""
    words = array("Q", itertools.chain.from_iterable(steps))
    status = library.cd_copies_behind(words.buffer_info()[0], len(steps), stream, behind, event)
    raise_refused(COPIES, status, library)


def graph_of(steps: Sequence[StreamOp], library: ctypes.CDLL) -> int:
    """A CUgraphExec of copies, to be given back by `free_graph`. Raises TransportError."""
    words, made = array("Q", itertools.chain.from_iterable(steps)), c_void_p()
    status = library.cd_graph(words.buffer_info()[0], len(steps), addressof(made))
    raise_refused("a graph of copies", status, library)
    return made.value or 0


def free_graph(graph: int, library: ctypes.CDLL) -> None:
    library.cd_graph_free(graph)


def raise_refused(call: str, status: int, library: ctypes.CDLL) -> None:
    """Raise TransportError where a driver's status is none of success."""
    if status > 0:
        raise refused(call, status, library)


def refused(call: str, status: int, library: ctypes.CDLL) -> TransportError:
    name, text = (library.cd_error(status, which).decode() for which in (_NAME, _TEXT))
    return TransportError(f"{call}: {name or status}: {text or 'unknown error'}")


class Kernel:
    """A loaded kernel as its callers see it."""

    def __init__(self, function: int, shared_bytes: int, library: ctypes.CDLL) -> None:
        self._function, self._shared_bytes, self.library = function, shared_bytes, library
        self._prepared: dict[tuple[int, int, int], Prepared] = {}

    def launch(
        self,
        num_blocks: int,
        num_threads: int,
        stream: int,
        *arguments: Any,
        cooperative: bool = False,
        overlapped: bool = True,
    ) -> None:
        """Launch on a CUstream. Arguments are ctypes values, which are copied before this returns.

        Cooperative: all blocks are resident together or the launch is refused; never overlapped. Overlapped: the launch
        may be set up while the kernel before it ends; such kernels wait for that end themselves. Raises TransportError.
        """
        prepared = self.prepared(num_blocks, num_threads, cooperative=cooperative, overlapped=overlapped)
        address = addressof(prepared)
        status = self.library.cd_launch(address, stream, (c_void_p * len(arguments))(*map(addressof, arguments)))
        if status:
            raise refused(LAUNCH, status, self.library)

    def launch_record(
        self, num_blocks: int, num_threads: int, stream: int, record: Any, *, cooperative: bool, overlapped: bool
    ) -> bool:
        """`launch` of a kernel of one argument; True where a CUDA graph captured it."""
        prepared = self.prepared(num_blocks, num_threads, cooperative=cooperative, overlapped=overlapped)
        status = int(self.library.cd_launch_one(addressof(prepared), stream, addressof(record)))
        raise_refused(LAUNCH, status, self.library)
        return bool(status)

    def prepared(self, num_blocks: int, num_threads: int, *, cooperative: bool, overlapped: bool) -> Prepared:
        """A launch with this grid; made once."""
        flags = _COOPERATIVE if cooperative else _OVERLAPPED if overlapped else 0
        found = self._prepared.get((num_blocks, num_threads, flags))
        if found is None:
            found = Prepared(self._function, num_blocks, num_threads, self._shared_bytes, flags)
            self._prepared[num_blocks, num_threads, flags] = found
        return found
