"""One communicator, several streams: its operations keep one order, whatever streams its caller is on.

Slots of the region are recycled in the order of calls, so an operation on another stream waits (on the device) for the
one before; from then on, what an operation used is kept from being recycled by torch's allocator until that stream is
past it. A communicator that lives on one stream is like any torch operation there: tensors that were made on another
stream are the caller's to keep (`record_stream`).

Under graph capture nothing runs yet: operations captured on several streams of one capture are ordered within it, and
it is the caller who orders replays with each other and with operations outside of the graph, as for any other work.

Several communicators on one GPU, on several streams: their kernels wait for peers while they hold multiprocessors.
Where those of two do not fit together and one rank begins with the one, its peer with the other, each waits for the
other until its deadline. In which order peers begin is not known here; what does not fit is, and one RuntimeWarning
says so, where a communicator runs on another stream than others do.
"""

from __future__ import annotations

import ctypes
import dataclasses
import threading
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from ep_kernels.transports.nvlink.calls.routing_state import StateParts

_NO_STREAM = -1
"""No stream's handle: the default stream's is 0."""


_lock = threading.RLock()  # a garbage collection within may close a communicator, which forgets itself
_used: dict[int, weakref.WeakKeyDictionary[Any, tuple[int, int]]] = {}
_warned: set[int] = set()


def note_use(communicator: Any, device: int, stream: int, num_blocks: int, num_sms: int) -> None:
    """A communicator launches kernels of up to `num_blocks` blocks, one on a multiprocessor, on this stream of a device
    with `num_sms`, and on no other at the same time. RuntimeWarning, once for a device."""
    with _lock:
        used = _used.setdefault(device, weakref.WeakKeyDictionary())
        used[communicator] = stream, num_blocks
        blocks = dict[int, int]()
        for where, count in list(used.data.values()):  # type: ignore[attr-defined]
            blocks[where] = max(count, blocks.get(where, 0))
        if len(blocks) < 2 or sum(blocks.values()) <= num_sms or device in _warned:
            return
        _warned.add(device)
    warnings.warn(
        f"cuda:{device}: communicators are used on {len(blocks)} streams, with kernels of up to "
        f"{' + '.join(map(str, blocks.values()))} blocks that wait for peers, on {num_sms} multiprocessors; where they "
        "may run at the same time, all ranks must launch them in the same order, or each waits for the other until its "
        "deadline: give them num_sms that fit together, or one stream (docs/torch.md, streams)",
        RuntimeWarning,
        stacklevel=2,
    )


def forget_use(communicator: Any, device: int) -> None:
    """It has no kernel under way, and is on no stream until its next one."""
    with _lock:
        if device in _used:
            _used[device].pop(communicator, None)


class StreamOrder:
    """The order of one communicator's launches.

    Args:
        num_blocks, num_sms: most blocks of a launch, and multiprocessors of the device: see `beside`. 0: unknown.
    """

    def __init__(self, device: torch.device, num_blocks: int = 0, num_sms: int = 0) -> None:
        self._device, self._num_blocks, self._num_sms = device, num_blocks, num_sms
        self._handle = _NO_STREAM  # of `_last`
        self._last: torch.cuda.Stream | None = None
        self._captured: torch.cuda.Stream | None = None
        self._has_kept = False
        self.current = ctypes.c_int64(_NO_STREAM)
        """The handle of the stream on which the next launch needs no `enter`; -1: none."""
        self.event: torch.cuda.Event | None = None
        """After the last launch; made when a second stream first shows. From then on each launch needs `leave`."""

    def enter(self) -> int:
        """The handle of the stream to launch on: the current one, made to wait for the launch before this one."""
        handle = int(torch._C._cuda_getCurrentRawStream(self._device.index))
        if handle != self._handle:
            self._change(torch.cuda.current_stream(self._device))
        return handle

    def here(self) -> torch.cuda.Stream | None:
        """The current stream, where the launch before was on it: the next one needs no `enter`. None elsewhere."""
        return self._last if torch._C._cuda_getCurrentRawStream(self._device.index) == self._handle else None

    def _change(self, stream: torch.cuda.Stream) -> None:
        if torch.cuda.is_current_stream_capturing():
            for other in (self._last, self._captured):
                if other is not None and other != stream and _capturing(other):
                    stream.wait_event(other.record_event())
            self._captured, self._handle, self.current.value = stream, _NO_STREAM, _NO_STREAM
            return
        last, self._last, self._handle = self._last, stream, stream.cuda_stream
        if self._num_blocks:
            note_use(self, self._device.index, self._handle, self._num_blocks, self._num_sms)
        if last is not None and last != stream:
            if self.event is None:
                self.event = last.record_event()
            stream.wait_event(self.event)
        self.current.value = self._handle

    def rest(self) -> None:
        """The host has waited for the last launch. The next one, on whatever stream, is looked at closely. While only
        barriers have run, as at bring-up, it is the first: no handle has memory of another stream."""
        self._handle = self.current.value = _NO_STREAM
        if not self._has_kept:
            self._last = self.event = None
        if self._num_blocks:
            forget_use(self, self._device.index)

    def leave(self, kept: Any) -> None:
        """A kernel that uses the tensors in `kept` was launched on the stream that `enter` gave."""
        self._has_kept = self._has_kept or bool(kept)
        if self.event is None or self._last is None or torch.cuda.is_current_stream_capturing():
            return
        self.event.record(self._last)
        for tensor in tensors_in(kept):
            tensor.record_stream(self._last)


def tensors_in(thing: Any) -> Iterator[torch.Tensor]:
    """Every tensor on a device in nested lists, dicts, records and states of handles."""
    if isinstance(thing, torch.Tensor):
        if thing.is_cuda:
            yield thing
    elif isinstance(thing, StateParts):
        yield from tensors_in(thing.memory)
    elif isinstance(thing, list | tuple):
        for each in thing:
            yield from tensors_in(each)
    elif isinstance(thing, dict):
        yield from tensors_in(list(thing.values()))
    elif dataclasses.is_dataclass(thing) and not isinstance(thing, type):
        yield from tensors_in([getattr(thing, field.name) for field in dataclasses.fields(thing)])


def _capturing(stream: torch.cuda.Stream) -> bool:
    with torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()
