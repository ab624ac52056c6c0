"""Memory for the rows of requests that come in frames: received there, read there by a step, answered from there.

A slot has the rows in the order of the frame: x [T, H], topk_ids [T, K], topk_weights [T, K]. y [T, H] is written over
x, which a step has read by then. The memory is the worker's own, or shared with a client of its host, which can change
it at any time.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable

import torch

from crossdock.common import log
from crossdock.protocol import native
from crossdock.protocol.frames import request_bytes
from crossdock.protocol.shared_memory import SharedMemory
from crossdock.worker.steps.work import Kept

_log = log.get(__name__)

MAX_IDLE_BYTES = 64 << 20
"""Of slots that no request uses; those used longest ago go first."""
MAX_SHARED_BYTES, SHARE_OF_CLIENT = 256 << 20, 2
"""Shared with clients of this host; one client may have this part of it."""


class RequestSlot:
    """Rows of one request.

    Args:
        num_tokens, hidden, topk, dtype: T, H, K, dtype of x.
        shared: bytes that begin where the rows are; None: memory of its own.

    Attributes:
        x: [T, H], then y; kept: made of it and of ids.
        ids, weights: int32, float32 [T, K]: what was checked, in memory that no client shares.
        memory: uint8 [num_bytes], with all rows as they come; address: of it.
        answered: bytes of y to be sent: none where a client shares the memory.
        is_shared: it does. num_tokens, hidden, dtype: T, H, dtype of x.
    """

    __slots__ = (
        "_came", "_checked", "_num_ids", "address", "answered", "dtype", "hidden", "ids", "is_shared", "kept",
        "memory", "num_bytes", "num_tokens", "weights", "x",
    )  # fmt: skip

    def __init__(
        self, num_tokens: int, hidden: int, topk: int, dtype: torch.dtype, shared: torch.Tensor | None = None
    ) -> None:
        num_bytes, x_bytes = request_bytes(num_tokens, hidden, topk, dtype), num_tokens * hidden * dtype.itemsize
        middle = (x_bytes + num_bytes) // 2
        with torch.inference_mode(False):  # it is kept, and written in no such mode, too
            memory = torch.empty(num_bytes, dtype=torch.uint8, device="cpu") if shared is None else shared[:num_bytes]
            checked = memory[x_bytes:] if shared is None else torch.empty_like(memory[x_bytes:])
            self.x = memory[:x_bytes].view(dtype).view(num_tokens, hidden)
            self.ids = checked[: middle - x_bytes].view(torch.int32).view(num_tokens, topk)
            self.weights = checked[middle - x_bytes :].view(torch.float32).view(num_tokens, topk)
            self.kept = Kept(self.x[:, 0], self.ids.view(-1).numpy().data)
        self.memory, self.address, self.num_bytes = memory, memory.data_ptr(), num_bytes
        self.num_tokens, self.hidden, self.dtype, self.is_shared = num_tokens, hidden, dtype, shared is not None
        self._num_ids = num_tokens * topk
        self.answered = memory[:x_bytes].numpy().data if shared is None else memoryview(b"")
        self._came = self.address + x_bytes, self.address + middle
        self._checked = self.ids.data_ptr(), self.weights.data_ptr()

    def check_routing(self, num_experts: int) -> int:
        """Take ids and weights where no client can change them; `native.WRONG_ID`, another number, or 0: nothing is
        wrong with them."""
        addresses = *self._checked, *self._came
        wrong: int = native.load_held().cd_copy_routing(*addresses, self._num_ids, num_experts - 1)
        return wrong


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
                self._num_bytes -= slot.num_bytes
                if not idle:
                    del self._idle[num_tokens]
                return slot
        return RequestSlot(num_tokens, *self._shape)

    def give_back(self, slot: RequestSlot) -> None:
        """No step, and no socket, uses it any more."""
        if slot.is_shared:
            return
        with self._lock:
            num_tokens = slot.num_tokens
            self._idle.setdefault(num_tokens, []).append(slot)
            self._idle.move_to_end(num_tokens)
            self._num_bytes += slot.num_bytes
            while self._num_bytes > MAX_IDLE_BYTES:
                oldest = next(iter(self._idle))
                self._num_bytes -= self._idle[oldest].pop(0).num_bytes
                if not self._idle[oldest]:
                    del self._idle[oldest]

    def at(self, shared: SharedMemory, place: int, num_tokens: int) -> RequestSlot:
        """Rows that lie in shared memory; the caller has checked that they fit."""
        return RequestSlot(num_tokens, *self._shape, shared.bytes[place:])

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
