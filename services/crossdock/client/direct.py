"""A batch whose shares go through request buffers, in its caller's own thread or in the event loop."""

from __future__ import annotations

import asyncio
import select
import time
from collections.abc import Awaitable, Callable, Sequence

import torch

from crossdock.client.buffer_pool import BufferPool, ready
from crossdock.client.errors import DeadlineExceeded, Overloaded, Unavailable
from crossdock.client.opened_buffer import RequestBuffer
from crossdock.client.shares import ForwardCall, Share, rows_like

QUIET_S = 1.0
"""Without an answer for so long, the worker is probed."""


class DirectCall:
    """A batch whose shares go through request buffers.

    Args:
        pool: of the buffers.
        batch: the call.
        shares: of the batch, each with its buffer.

    Attributes:
        refused: the worker had no room for it.
        out: [T, H], filled by `read` or `finish`; there once it was sent.
    """

    def __init__(self, pool: BufferPool, batch: ForwardCall, shares: list[tuple[Share, RequestBuffer]]) -> None:
        self.refused: Overloaded | None = None
        self.out: torch.Tensor
        self._pool, self._batch, self._deadline = pool, batch, batch.deadline
        self._waiting, self._is_sent = shares, False

    def send(self, model: str) -> bool:
        """Send all shares. False: a worker is gone."""
        layer, parts, left_s = self._batch.layer, self._batch.parts, self._deadline - time.monotonic()
        try:
            for share, buffer in self._waiting:  # workers that are told together serve them in one step
                whole = len(self._waiting) == 1
                buffer.write(parts if whole else [part[share.start : share.stop] for part in parts])
            sent = [buffer.send(layer, left_s, model) for _, buffer in self._waiting]
            self._is_sent = all(sent)
            self.out = rows_like(parts[0])  # the workers are at it
        except BaseException as error:
            self.abandon()
            if isinstance(error, Unavailable):
                return False
            raise
        return True

    def give_back(self) -> None:
        """Send nothing."""
        for _, buffer in self._waiting:
            self._pool.give_back(buffer)
        self._waiting = []

    def read(self, timeout_s: float) -> bool:
        """Wait for all answers in this thread. False: some are missing. Raises ClientError."""
        until = min(time.monotonic() + timeout_s, self._deadline)
        try:
            if not (self._is_sent or self._sent(until)):
                return False
            while self._waiting:
                share, buffer = self._waiting[-1]
                whole = share.stop - share.start == len(self.out)
                rows = self.out if whole else self.out[share.start : share.stop]
                if buffer.read_into(rows, until - time.monotonic()):
                    self._waiting.pop()
                    self._batch.models[share] = buffer.model
                    self._pool.give_back(buffer)
                elif time.monotonic() >= until:
                    return False
        except BaseException as error:
            self.refused = error if isinstance(error, Overloaded) else None
            self.abandon()
            raise
        return True

    async def finish(self, is_alive: Callable[[str], Awaitable[bool]]) -> None:
        """Wait for all answers in the event loop. Raises ClientError; a worker that fails a probe is Unavailable."""
        try:
            while not self.read(0.0):
                buffer = next((each for _, each in self._waiting if each.is_sending), self._waiting[-1][1])
                left_s = self._deadline - time.monotonic()
                if left_s <= 0:
                    raise DeadlineExceeded(f"worker {buffer.address}: no answer before the deadline")
                try:
                    async with asyncio.timeout(min(QUIET_S, left_s)):
                        await ready(buffer, writable=buffer.is_sending)
                except TimeoutError:
                    if left_s > QUIET_S and not await is_alive(buffer.address):
                        raise Unavailable(f"worker {buffer.address}: silent") from None
        except BaseException:
            self.abandon()
            raise

    def _sent(self, until: float) -> bool:
        """Whether all requests are sent, before that time: together, since the workers serve them in one step."""
        while unsent := [buffer for _, buffer in self._waiting if not buffer.push()]:
            if not _are_writable(unsent, until - time.monotonic()):
                return False
        self._is_sent = True
        return True

    def abandon(self) -> None:
        """Withdraw what was not answered."""
        for _, buffer in self._waiting:
            buffer.close()
        self._waiting = []


def _are_writable(buffers: Sequence[RequestBuffer], timeout_s: float) -> bool:
    """Whether one of them takes more before that time, or has ended."""
    poll = select.poll()
    for buffer in buffers:
        poll.register(buffer, select.POLLOUT)
    return bool(poll.poll(max(0.0, 1e3 * timeout_s)))
