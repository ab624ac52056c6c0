"""Memory for the rows of requests that come in frames: received there, read there by a step, answered from there.

A slot has the rows in the order of the frame: x [T, H], topk_ids [T, K], topk_weights [T, K]. y [T, H] is written over
x, which a step has read by then. The memory is the worker's own: no client can change it.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass

import torch

from crossdock.protocol.frames import request_bytes

MAX_IDLE_BYTES = 64 << 20
"""Of slots that no request uses; those used longest ago go first."""


@dataclass(frozen=True, slots=True, eq=False)
class RequestSlot:
    """Rows of one request: x, y [T, H] (one memory), ids int32 [T, K], weights float32 [T, K], the first column of y;
    the bytes that come, and those of y."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    first_column: torch.Tensor
    sent: memoryview
    answered: memoryview

    @staticmethod
    def make(num_tokens: int, hidden: int, topk: int, dtype: torch.dtype) -> RequestSlot:
        """A new one."""
        num_bytes, x_bytes = request_bytes(num_tokens, hidden, topk, dtype), num_tokens * hidden * dtype.itemsize
        middle = (x_bytes + num_bytes) // 2
        with torch.inference_mode(False):  # it is kept, and written in no such mode, too
            memory = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
            x = memory[:x_bytes].view(dtype).view(num_tokens, hidden)
            ids = memory[x_bytes:middle].view(torch.int32).view(num_tokens, topk)
            weights = memory[middle:].view(torch.float32).view(num_tokens, topk)
        view = memory.numpy().data
        return RequestSlot(x, ids, weights, x[:, 0], view, view[:x_bytes])


class RequestSlots:
    """Slots of one worker, used again by requests of as many tokens. Any thread.

    Args:
        hidden, topk, dtype: of the model.
    """

    def __init__(self, hidden: int, topk: int, dtype: torch.dtype) -> None:
        self._shape = hidden, topk, dtype
        self._idle: OrderedDict[int, list[RequestSlot]] = OrderedDict()
        self._num_bytes, self._lock = 0, threading.Lock()

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
