"""Events on a device's stream, in DeepEP's two classes. On the CPU every event is complete."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ep_kernels import ArgumentError


class EventHandle:
    """An event on torch's current stream, after everything launched there before. Without a GPU: none."""

    def __init__(self) -> None:
        self.point: torch.cuda.Event | None = None
        if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            self.point = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self.point.record()

    def current_stream_wait(self) -> None:
        """Later launches on the current stream wait for it, on the device."""
        if self.point is not None:
            torch.cuda.current_stream().wait_event(self.point)


class EventOverlap:
    """An event that a caller may wait for later, or none. As a context manager it waits at the end.

    Args:
        event: the point, or None: nothing to wait for.
        extra_tensors: kept alive as long as this object.
    """

    event: EventHandle | None = None
    extra_tensors: tuple[torch.Tensor, ...] | None = None
    _after: Callable[[], None] | None = None
    _release = False

    def __init__(self, event: EventHandle | None = None, extra_tensors: tuple[torch.Tensor, ...] | None = None) -> None:
        if event is not None:
            self.event = event
        if extra_tensors is not None:
            self.extra_tensors = extra_tensors

    def register_hook_after_wait(self, hook_after_wait: Callable[[], None]) -> None:
        """To be called after the next `current_stream_wait`, once. ArgumentError where one is registered."""
        if self._after is not None:
            raise ArgumentError("hook_after_wait", "one per event", "a second one")
        self._after = hook_after_wait

    def current_stream_wait(self, release_handle: bool = False) -> None:
        """As `EventHandle.current_stream_wait`; nothing without an event. `release_handle`: and forget the event."""
        if self.event is not None:
            self.event.current_stream_wait()
        hook, self._after = self._after, None
        if hook is not None:
            hook()
        if release_handle:
            self.event = None

    def __call__(self, release_handle: bool = False) -> EventOverlap:
        """Itself, for `with`: whether the event is forgotten at the end."""
        self._release = release_handle
        return self

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.current_stream_wait(self._release)


class CommStream:
    """Runs operations on a separate stream where the caller asks for it (`async_finish`)."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None

    def stream(self) -> torch.cuda.Stream:
        if self._stream is None:
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        return self._stream

    def enter(
        self, like: torch.Tensor, async_finish: bool, previous: EventHandle | EventOverlap | None,
        also: EventHandle | EventOverlap | None = None,
    ) -> _Turn:  # fmt: skip
        """A context for one operation on tensors like this one, after `previous` (None: what was launched before) and
        `also`; its `done(inputs, outputs)` gives the event."""
        first, second = (each.event if isinstance(each, EventOverlap) else each for each in (previous, also))
        return _Turn(self.stream() if async_finish and like.is_cuda else None, first, second, async_finish)


class _Turn:
    """One operation: on the caller's stream, or on the separate one."""

    def __init__(
        self, aside: torch.cuda.Stream | None, after: EventHandle | None, also: EventHandle | None, wants_event: bool
    ) -> None:
        self._aside, self._after, self._also, self._wants_event = aside, after, also, wants_event
        self._caller: torch.cuda.Stream | None = None

    def __enter__(self) -> _Turn:
        if self._aside is None:
            for event in (self._after, self._also):
                if event is not None:
                    event.current_stream_wait()
            return self
        self._caller = torch.cuda.current_stream()
        if self._after is not None and self._after.point is not None:
            self._aside.wait_event(self._after.point)
        else:
            self._aside.wait_stream(self._caller)
        torch.cuda.set_stream(self._aside)
        if self._also is not None:
            self._also.current_stream_wait()
        return self

    def done(self, inputs: list[torch.Tensor | None], outputs: list[torch.Tensor | None]) -> EventOverlap:
        """The event after it. Torch's allocator learns which streams use which tensors."""
        event = EventHandle() if self._wants_event else None
        for stream, tensors in ((self._aside, inputs), (self._caller, outputs)):
            for tensor in tensors:
                if stream is not None and tensor is not None:
                    tensor.record_stream(stream)
        return EventOverlap(event)

    def __exit__(self, *_: object) -> None:
        if self._caller is not None:
            torch.cuda.set_stream(self._caller)
