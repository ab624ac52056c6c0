"""The holder's end: gives weights of this rank's experts to other workers, one thread for each.

What is given is one version: a layer's experts, weights and checkpoint are one value, which a switch replaces and never
changes. Of one host the reader gets the descriptor of the memory that they lie in, and copies for itself. A thread that
sends bytes has a low priority; the lowest would keep the interpreter lock for long where the processors are busy.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable
from typing import Protocol

import torch

from crossdock.common import descriptors, log
from crossdock.common.call_errors import ResourceExhausted, Unavailable
from crossdock.common.helper_thread import HelperThread
from crossdock.protocol import frames
from crossdock.worker.checkpoints.expert_sources import OneExpert
from crossdock.worker.checkpoints.weight_memory import PIECE_BYTES, hashed
from crossdock.worker.experts.device import DeviceLost
from crossdock.worker.experts.expert_mlps import HeldLayer
from crossdock.worker.peers.host_bytes import HostBytes
from crossdock.worker.peers.messages import (
    MAX_ASK_BYTES,
    Ask,
    Granted,
    Held,
    HeldExperts,
    MessageError,
    Read,
    Sum,
    WeightLine,
    bytes_of,
    form_of,
)

MAX_READERS = 64
"""Of one holder at a time, fewer where descriptors are."""
IDLE_S = 30.0
"""After so long without a question a reader is not waited for."""
_NICE = 10
"""Of a thread that sends bytes."""

_log = log.get(__name__)


class Shelf(Protocol):
    """What a worker holds now; any thread."""

    device: torch.device

    def held_layers(self) -> dict[int, HeldLayer]:
        """By layer."""

    def fingerprint_of(self, held: HeldLayer) -> str:
        """Of the checkpoint of these weights."""

    def digest_of(self, layer: int, expert: int, held: HeldLayer) -> int:
        """As `Checkpoint.digest`; 0: it is not known."""


class WeightGiver:
    """All readers of a worker.

    Args:
        timeout_s: time for a reader to take one expert.
        gave: called with bytes, after each expert.
    """

    def __init__(self, shelf: Shelf, timeout_s: float, gave: Callable[[int], None] = lambda num_bytes: None) -> None:
        self._shelf, self._timeout_s, self._gave = shelf, timeout_s, gave
        self._lines: dict[WeightLine, None] = {}
        self._lock, self._closed = threading.Lock(), False

    def give(self, sock: socket.socket) -> None:
        """To a reader that was admitted; the socket is this one's from here on. Any thread. Raises CallError."""
        line, most = WeightLine(sock, self._timeout_s), descriptors.share(MAX_READERS, descriptors.STRANGERS)
        with self._lock:
            if self._closed:
                raise Unavailable("this worker has left the group")
            if len(self._lines) >= most:
                raise ResourceExhausted(f"readers of weights: expected at most {most}, got one more")
            self._lines[line] = None
        HelperThread("weights", self._serve, line).start()

    def close(self) -> None:
        """End all of them at once."""
        with self._lock:
            self._closed = True
            for line in self._lines:
                line.shut_down()

    def _serve(self, line: WeightLine) -> None:
        try:
            line.send_piece(memoryview(frames.welcome(1, PIECE_BYTES)))
            host = HostBytes(self._shelf.device)
            while True:
                line.within(IDLE_S)
                ask: Ask = line.receive(Ask, MAX_ASK_BYTES)
                line.within(self._timeout_s)
                if isinstance(ask, Read):
                    self._read(line, ask, host)
                else:
                    line.send(self._held())
        except (OSError, EOFError) as error:
            _log.debug("a reader of weights is gone", why=str(error))
        except (MessageError, DeviceLost, RuntimeError) as error:  # the last: of a GPU that was lost just now
            _log.seldom("reading of weights ended", why=str(error))
        finally:
            with self._lock:
                self._lines.pop(line)
                line.close()

    def _held(self) -> Held:
        of, layers = self._shelf.fingerprint_of, self._shelf.held_layers()
        return Held([HeldExperts(layer, of(held), list(held.ids)) for layer, held in layers.items()])

    def _read(self, line: WeightLine, ask: Read, host: HostBytes) -> None:
        # One version of the layer, and whether it is what the reader wants.
        held = self._shelf.held_layers().get(ask.layer)
        if held is None or (why := self._refusal(held, ask)):
            line.send(Granted(why if held is not None else f"layer {ask.layer}: not held"))
            return
        # Its memory, or each expert's bytes.
        memory = held.weights[0].memory if ask.maps and line.is_local else None
        line.send(Granted("", memory.num_bytes if memory else 0), memory.reader() if memory else -1)
        if memory is None:
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        for expert in ask.experts:
            line.within(self._timeout_s)
            slot = held.ids.index(expert)
            given = held.expert(slot)
            places = [memory.place(tensor) for tensor in given.tensors] if memory else []
            total = given.hash() if memory else _sent(line, given, host)
            line.send(Sum(total, self._shelf.digest_of(ask.layer, expert, held), places))
            self._gave(given.num_bytes)

    def _refusal(self, held: HeldLayer, ask: Read) -> str:
        """Why it cannot be read; empty: it can."""
        fingerprint, form = self._shelf.fingerprint_of(held), form_of(held.expert(0))
        if ask.fingerprint != fingerprint:
            return f"layer {ask.layer}: expected weights of {fingerprint}, got {ask.fingerprint}"
        if ask.form != form:
            return f"layer {ask.layer}: expected {form}, got {ask.form}"
        strange = sorted(set(ask.experts).difference(held.ids))
        return f"layer {ask.layer}: expected some of its experts here, got {strange[0]}" if strange else ""


def _sent(line: WeightLine, given: OneExpert, host: HostBytes) -> int:
    """Hash of an expert, whose bytes go to the reader. Raises OSError."""
    known, total = given.hash(), 0
    for tensor in given.tensors:
        for piece in host.out_of(tensor):
            if not known:
                total = hashed(piece.data_ptr(), piece.numel(), total)
            line.send_piece(bytes_of(piece))
    return known or total
