"""Memory for the rows of requests that come in frames: received there, read there by a step, answered from there.

A slot has the rows in the order of the frame: x [T, H], topk_ids [T, K], topk_weights [T, K]. y [T, H] is written over
x, which a step has read by then. The memory is the worker's own, or shared with a client of its host, which can change
it at any time.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass

import torch

from crossdock.common import log
from crossdock.protocol.frames import request_bytes
from crossdock.protocol.shared_memory import SharedMemory

_log = log.get(__name__)

MAX_IDLE_BYTES = 64 << 20
"""Of slots that no request uses; those used longest ago go first."""
MAX_SHARED_BYTES, SHARE_OF_CLIENT = 256 << 20, 2
"""Shared with clients of this host; one client may have this part of it."""


@dataclass(frozen=True, slots=True, eq=False)
class RequestSlot:
    """Rows of one request: x, y [T, H] (one memory), ids int32 [T, K], weights float32 [T, K], the first column of y;
    the bytes that come, and those of y: none where a client shares the memory."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    first_column: torch.Tensor
    sent: memoryview
    answered: memoryview
    is_shared: bool

    @staticmethod
    def make(
        num_tokens: int, hidden: int, topk: int, dtype: torch.dtype, shared: torch.Tensor | None = None
    ) -> RequestSlot:
        """A new one. shared: bytes that begin where the rows are; None: memory of its own."""
        num_bytes, x_bytes = request_bytes(num_tokens, hidden, topk, dtype), num_tokens * hidden * dtype.itemsize
        middle = (x_bytes + num_bytes) // 2
        with torch.inference_mode(False):  # it is kept, and written in no such mode, too
            memory = torch.empty(num_bytes, dtype=torch.uint8, device="cpu") if shared is None else shared
            x = memory[:x_bytes].view(dtype).view(num_tokens, hidden)
            ids = memory[x_bytes:middle].view(torch.int32).view(num_tokens, topk)
            weights = memory[middle:num_bytes].view(torch.float32).view(num_tokens, topk)
            first_column = x[:, 0]
        view = memory.numpy().data if shared is None else memoryview(b"")
        return RequestSlot(x, ids, weights, first_column, view, view[:x_bytes], shared is not None)


class RequestSlots:
    """Slots of one worker, used again by requests of as many tokens. Any thread.

    Args:
        hidden, topk, dtype: of the model.
    """

    def __init__(self, hidden: int, topk: int, dtype: torch.dtype) -> None:
        self._shape = hidden, topk, dtype
        self._idle: OrderedDict[int, list[RequestSlot]] = OrderedDict()
        self._num_bytes, self._lock = 0, threading.Lock()
        self._shared: dict[Hashable, int] = {}

    def take(self, num_tokens: int) -> RequestSlot:
        """A slot for one request, with anything in it."""
        with self._lock:
            idle = self._idle.get(num_tokens)
            if idle:
                slot = idle.pop()
                self._num_bytes -= len(slot.sent)
                if not idle:
                    del self._idle[num_tokens]
                return slot
        return RequestSlot.make(num_tokens, *self._shape)

    def give_back(self, slot: RequestSlot) -> None:
        """No step, and no socket, uses it any more."""
        if slot.is_shared:
            return
        with self._lock:
            num_tokens = len(slot.x)
            self._idle.setdefault(num_tokens, []).append(slot)
            self._idle.move_to_end(num_tokens)
            self._num_bytes += len(slot.sent)
            while self._num_bytes > MAX_IDLE_BYTES:
                oldest = next(iter(self._idle))
                self._num_bytes -= len(self._idle[oldest].pop(0).sent)
                if not self._idle[oldest]:
                    del self._idle[oldest]

    def at(self, shared: SharedMemory, place: int, num_tokens: int) -> RequestSlot:
        """Rows that lie in shared memory; the caller has checked that they fit."""
        return RequestSlot.make(num_tokens, *self._shape, shared.bytes[place:])

    def share(self, client: Hashable, num_bytes: int) -> tuple[SharedMemory, int] | None:
        """Memory to share with a client, and its descriptor; None: there is none left for it."""
        with self._lock:
            own, everything = self._shared.get(client, 0) + num_bytes, sum(self._shared.values()) + num_bytes
            if not num_bytes or own > MAX_SHARED_BYTES // SHARE_OF_CLIENT or everything > MAX_SHARED_BYTES:
                return None
            self._shared[client] = own
        try:
            return SharedMemory.make(num_bytes)
        except OSError as error:
            _log.seldom("no memory to share with a client", why=str(error))
            self._unshare(client, num_bytes)
            return None

    def take_back(self, client: Hashable, shared: SharedMemory) -> None:
        """Its client has gone."""
        shared.free()
        self._unshare(client, shared.num_bytes)

    def _unshare(self, client: Hashable, num_bytes: int) -> None:
        with self._lock:
            self._shared[client] -= num_bytes
            if not self._shared[client]:
                del self._shared[client]
