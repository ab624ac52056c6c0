"""What copy engines move: one ordered stream, and a thread that ends its waits at a deadline or with a peer.

The stream's waits have no deadline of their own. The thread sees in host memory which operation the stream has begun
and ended (copy_schedule.py). When one lasts too long, or a peer that it needs is gone, the thread notes the error,
stops this rank's kernels, and stores what the waits want into this rank's own flags, again and again until the stream
is through: a late peer may overwrite them with less. Contents of `out` are then unspecified, here and, since released
copies still run, at peers that had not come; `NvlinkCollectives.set_active` therefore refuses to go on beside a rank
that lives, was left out and may still push.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ep_kernels.collectives.collective_types import Algorithm
from ep_kernels.errors import PeerTimeout, TransportError
from ep_kernels.kernels import abi, collective_abi
from ep_kernels.transports.nvlink.copy_engines.copy_times import CopyTimes, TimedKind
from ep_kernels.transports.nvlink.copy_engines.repeat_records import DISTURBED, PushTemplate, Quiet
from ep_kernels.transports.nvlink.gpu import copy_schedule, launch
from ep_kernels.transports.nvlink.gpu.copy_schedule import CopyPart, CopyPlaces
from ep_kernels.transports.nvlink.memory.host_page import HostPage, Mismatch
from ep_kernels.types import LatencySample

_NAP_S, _RELEASE_S, _PATIENCE_S = 0.01, 0.002, 1.0
_BEGUN, _ENDED, _SEEN = 0, 1, 2
MAX_GRAPHS = 257
"""Graphs take memory of the device: a program that repeats more places than these has the others as the first time."""
DIRECT_BYTES = 8 << 20
"""Fewest bytes of a shard whose repeated push is no graph: the first copy of a graph begins 8 us later on the GPU than
one that the host calls for, whose 5 us lie beside such a copy's own 22."""
_PUSH, _PULL = Algorithm.COPY_PUSH.value, Algorithm.COPY_PULL.value


@dataclass(slots=True)
class _Open:
    """An operation that the stream has not ended, as far as the host knows."""

    seq: int
    signature: int
    pushes: bool
    keep: Any
    op: str
    since: float | None = None  # when the stream was first seen to have begun it


class FlagMemory:
    """The rows of flags that peers write here, from any thread, beside whatever the device does.

    Args:
        size: R.
        address: of READY [R], which SHARD [R] and HALF [R] follow.
        aborted: address of the word that stops this rank's kernels.
    """

    def __init__(self, size: int, address: int, aborted: int) -> None:
        from ep_kernels.transports.nvlink.gpu import driver

        self._size, self._address, self._aborted = size, address, aborted
        self._words = torch.zeros(10 * size + 1, dtype=torch.int64, pin_memory=True, device="cpu")
        self._reader = driver.Reader(self._words)

    def read(self) -> tuple[list[int], list[int]] | None:
        """(READY, SHARD); None where the device does not get to it in time."""
        num_bytes = 2 * self._size * copy_schedule.FLAG_BYTES
        if not self._reader.read(self._words.data_ptr(), self._address, num_bytes, _PATIENCE_S):
            return None
        seqs = self._words[: 4 * self._size : 2].tolist()
        return seqs[: self._size], seqs[self._size :]

    def fill(self, seq: int) -> None:
        """All of them, without signatures."""
        words = self._words[4 * self._size : 10 * self._size]
        words[::2] = seq
        self._reader.write(self._address, words.data_ptr(), words.nbytes, _PATIENCE_S)

    def stop(self) -> None:
        """Kernels of this rank return at once from now on."""
        self._words[-1] = abi.STOPS.index("TIMED_OUT")
        self._reader.write(self._aborted, self._words[-1:].data_ptr(), copy_schedule.WORD_BYTES, _PATIENCE_S)


class CopyEngines:
    """The copies of one rank.

    Attributes:
        seq: operations begun.
        has_pushed: whether any of them wrote to peers.

    Args:
        places: everything but the words of host memory.
        host: learns of failures, and knows who is gone.
        timeout_s: deadline of an operation, from when the stream has come to it.
        stream: CUstream of the copies.
        library: `launch.load()`.
        flags: this rank's own.
        times: events around operations.
    """

    def __init__(
        self,
        places: CopyPlaces,
        host: HostPage,
        timeout_s: float,
        stream: int,
        library: Any,
        flags: FlagMemory,
        times: CopyTimes,
    ) -> None:
        self._host, self._timeout_s = host, timeout_s
        self._stream, self._library, self._flags, self._times = stream, library, flags, times
        size = len(places.active)
        self._pinned = torch.zeros(
            _SEEN + 2 * copy_schedule.SEEN_SLOTS * size, dtype=torch.int64, pin_memory=True, device="cpu"
        )
        self._words = (ctypes.c_int64 * self._pinned.numel()).from_address(self._pinned.data_ptr())
        base = self._pinned.data_ptr()
        begun, ended, seen = (base + copy_schedule.WORD_BYTES * word for word in (_BEGUN, _ENDED, _SEEN))
        self._places = replace(places, begun=begun, ended=ended, seen=seen)
        self._peers = self._others()
        self.seq, self.has_pushed = 0, False
        self._looked = 0  # operations that had ended at the last look
        self._found: Mismatch | None = None
        self._open: deque[_Open] = deque()
        self._lock = threading.Condition()
        self._storing = threading.Lock()  # held while storing into this rank's flags
        self._graphs: list[int] = []  # that of `ready_flags`, then one for each template
        self._ends = self._sleeps = False
        self._thread: threading.Thread | None = None

    # Operations; one thread calls these.

    def begin(
        self,
        parts: Sequence[CopyPart],
        signature: int,
        pushes: bool,
        keep: Any,
        behind: int | None = None,
        op: str = "all_gather",
    ) -> int:
        """Put an operation on the stream; its number. Raises TransportError.

        Args:
            keep: what holds the memory until it has ended.
            behind: CUstream whose present work comes before it; None: the copies' own.
            op: its name in errors and records.
        """
        places, seq = self._places, self.seq + 1
        steps_of, mode = (copy_schedule.push, _PUSH) if pushes else (copy_schedule.pull, _PULL)
        arrivals = copy_schedule.marked(places, parts) if pushes else tuple(places.others(1))
        steps = steps_of(places, seq, signature, parts, self._times.marks(seq, arrivals))
        self._times.note(seq, TimedKind(mode, sum(part.num_bytes for part in parts), arrivals, self._peers, op))
        self._note(signature, pushes, keep, op)
        behind = self._stream if behind is None else behind
        launch.run_ops_behind(steps, self._stream, behind, self._times.behind(seq), self._library)
        return seq

    def begin_push(self, parts: Sequence[CopyPart], signature: int, keep: Any, behind: int, op: str) -> int:
        """As `begin`, of a push whose shards are sent by `push_to`, each to its peer, before `end_push`."""
        seq, arrivals = self.seq + 1, copy_schedule.marked(self._places, parts)
        self._times.note(seq, TimedKind(_PUSH, sum(part.num_bytes for part in parts), arrivals, self._peers, op))
        self._note(signature, True, keep, op)
        steps = copy_schedule.push_begin(self._places, seq, signature)
        launch.run_ops_behind(steps, self._stream, behind, self._times.behind(seq), self._library)
        return seq

    def push_to(self, seq: int, peer: int, parts: Sequence[CopyPart], behind: int) -> None:
        """Send to a peer, behind what the CUstream `behind` has now."""
        steps = copy_schedule.push_to(self._places, peer, seq, parts)
        launch.run_ops_behind(steps, self._stream, behind, self._times.order, self._library)

    def end_push(self, seq: int, parts: Sequence[CopyPart]) -> None:
        """All is sent: wait for what peers send."""
        marks = self._times.marks(seq, copy_schedule.marked(self._places, parts))
        launch.run_ops(copy_schedule.push_end(self._places, seq, marks), self._stream, self._library)

    def template(self, parts: Sequence[CopyPart], signature: int, quiet: Quiet) -> PushTemplate | None:
        """A push to be begun many times, until `restart`, as long as all is quiet; None where there are MAX_GRAPHS.
        Raises TransportError."""
        places, num_bytes = self._places, sum(part.num_bytes for part in parts)
        kind = TimedKind(_PUSH, num_bytes, copy_schedule.marked(places, parts), self._peers)
        if num_bytes >= DIRECT_BYTES:
            steps_of = functools.partial(copy_schedule.push, places, signature=signature, parts=parts)
            return PushTemplate(places, kind, signature, steps_of, self._stream, quiet)
        if len(self._graphs) >= MAX_GRAPHS:
            return None
        if not self._graphs:
            self._graphs.append(launch.graph_of(copy_schedule.ready_flags(places), self._library))
        self._graphs.append(launch.graph_of(copy_schedule.all_shards(places, parts), self._library))
        ready, shards = self._graphs[0], self._graphs[-1]
        by_graphs = functools.partial(
            copy_schedule.push_by_graphs, places, signature=signature, ready=ready, shards=shards
        )
        return PushTemplate(places, kind, signature, by_graphs, self._stream, quiet)

    def push_again(self, template: PushTemplate, keep: Any, behind: int) -> int:
        """As `begin`; 0: it is not quiet, and nothing was begun."""
        seq = self.seq + 1
        status = self._library.cd_repeat_copies(template.address, seq, behind, self._times.address(seq))
        if status == DISTURBED:
            return 0
        self._times.note(seq, template.kind)
        self._note(template.signature, True, keep, template.kind.op)
        if status:
            launch.raise_refused(launch.COPIES, status, self._library)
        return seq

    def _note(self, signature: int, pushes: bool, keep: Any, op: str) -> None:
        with self._lock:
            if self._open and self._words[_ENDED] > self._looked:
                self._forget_ended()
            self.seq += 1
            self._open.append(_Open(self.seq, signature, pushes, keep, op))
            self.has_pushed = self.has_pushed or pushes
            if self._sleeps:
                self._lock.notify()
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="crossdock-copies", daemon=True)
            self._thread.start()

    def graph_copies(self, parts: Sequence[CopyPart]) -> None:
        """Put the copies of a pull on the stream, which is being captured."""
        launch.run_ops(copy_schedule.graph_copies(self._places, parts), self._stream, self._library)

    def await_shard(self, seq: int, peer: int, stream: int, half: bool) -> None:
        """Let another CUstream wait for a peer's shard, or the first half of it."""
        launch.run_ops([copy_schedule.arrival(self._places, peer, seq, half)], stream, self._library)

    def await_end(self, seq: int, stream: int) -> None:
        """Let another CUstream wait for the end of an operation."""
        status = self._library.cd_await(stream, self._times.end(seq))
        if status:
            launch.raise_refused("cuStreamWaitEvent", status, self._library)

    def arrivals(self) -> list[int]:
        """Active peers in the order in which their shards are expected."""
        return self._places.others(-1)

    def samples(self) -> list[LatencySample]:
        """Latency records since the last call, oldest first. Any thread, one at a time."""
        return self._times.take(self.has_ended)

    def has_ended(self, seq: int) -> bool:
        """Whether the stream is through with it. Any thread."""
        return self._words[_ENDED] >= seq

    def is_quiet(self) -> bool:
        """Whether `mismatch` has nothing to tell."""
        if self._open and self._words[_ENDED] > self._looked:
            with self._lock:
                self._forget_ended()
        return self._found is None

    def mismatch(self) -> Mismatch | None:
        """The first operation that has ended in which a peer brought something else; told once."""
        with self._lock:
            self._forget_ended()
            found, self._found = self._found, None
        return found

    # The thread.

    def _forget_ended(self) -> None:
        ended, size = self._words[_ENDED], len(self._places.active)
        self._looked = ended
        while self._open and self._open[0].seq <= ended:
            done = self._open.popleft()
            start = _SEEN + 2 * (done.seq % copy_schedule.SEEN_SLOTS) * size
            row = self._words[start : start + 2 * size]
            if row.count(done.signature) == size - 1:  # all peers' and, since nobody writes its own, no other
                continue
            for peer in self._peers:
                seq, theirs = row[2 * peer : 2 * peer + 2]
                if seq == done.seq and theirs not in (0, done.signature):
                    self._found = self._found or Mismatch(done.op, peer, done.signature, theirs)

    def _watch(self) -> None:
        while True:
            with self._lock:
                self._forget_ended()
                while not self._open and not self._ends:
                    self._sleeps = True
                    self._lock.wait()
                self._sleeps = False
                if self._ends and not self._open:
                    return
            self._poll()
            time.sleep(_NAP_S)

    def _poll(self) -> None:
        """At the operation that the stream is in."""
        with self._lock:
            first = self._open[0] if self._open else None
            if first is None or self._words[_BEGUN] < first.seq or self.has_ended(first.seq):
                return
            first.since = first.since or time.monotonic()
        waited = time.monotonic() - first.since
        lost = [peer for peer in self._peers if self._host.is_given_up(peer)]
        fault = self._host.fault()
        if fault is None and waited <= self._timeout_s and not lost:
            return
        if fault is None:
            error = self._error_of(first, waited, lost)
            if error is None:
                return
            self._host.fail(error)
        self._release()

    def _others(self) -> list[int]:
        return [peer for peer, active in enumerate(self._places.active) if active and peer != self._places.rank]

    def _error_of(self, open_: _Open, waited: float, lost: Sequence[int]) -> PeerTimeout | None:
        """Who is missing; None where nobody is, after all, or the one who is may still come."""
        rows = None
        with self._storing, contextlib.suppress(TransportError):  # a device that is lost, or another time
            rows = self._flags.read()
        if rows is None or self.has_ended(open_.seq):
            return None
        ready, shard = rows
        for phase, row in (("credit", ready), ("shards", shard)):
            if phase == "credit" and not open_.pushes:
                continue
            missing = [peer for peer in self._peers if row[peer] < open_.seq]
            silent = [peer for peer in missing if peer in lost] if waited <= self._timeout_s else missing
            if silent:
                peer = silent[0]
                gone = self._host.is_gone(peer)
                return PeerTimeout(
                    peer=peer, op=open_.op, phase=phase, expected=open_.seq,
                    seen=row[peer], waited_s=waited, gone=gone,
                    given_up=peer in lost and not gone,
                )  # fmt: skip
        return None

    def _release(self) -> None:
        """Let the stream go on until it is through with all that it has begun; what it begins later finds the same."""
        first = True
        while self._words[_BEGUN] > self._words[_ENDED]:
            with self._storing:
                if self._words[_BEGUN] <= self._words[_ENDED]:
                    return
                try:
                    if first:
                        self._flags.stop()
                    self._flags.fill(self.seq)
                except TransportError:  # the device is lost: so are the waits
                    return
            first = False
            time.sleep(_RELEASE_S)

    # Membership and life.

    def settle(self) -> None:
        """The stream is through: from now on nobody stores into this rank's flags or stops its kernels."""
        with self._storing:
            pass

    def restart(self, seq: int, mask: Sequence[bool]) -> None:
        """Count on from `seq`, among the ranks in `mask`; nothing is under way."""
        with self._lock, self._storing:
            self._open.clear()
            self._places = replace(self._places, active=tuple(mask))
            self._peers = self._others()
            self._free_graphs()
            self._times.restart()
            self.seq, self._found, self._looked = seq, None, seq
            self._words[_BEGUN] = self._words[_ENDED] = seq
            self._flags.fill(seq)

    def close(self) -> None:
        """End the thread, once nothing is under way. Idempotent."""
        thread, self._thread = self._thread, None
        if thread is not None:
            with self._lock:
                self._open.clear()
                self._ends = True
                self._lock.notify()
            thread.join()
        self._free_graphs()
        self._times.close()

    def _free_graphs(self) -> None:
        """Free the graphs; no operation is under way."""
        graphs, self._graphs = self._graphs, []
        for graph in graphs:
            launch.free_graph(graph, self._library)


def flag_row(map_: Any, name: str, size: int) -> int:
    """Offset of a row of `collective_abi.COPY_FLAGS` in the region of one of `size` ranks."""
    return int(map_.copy_flags) + collective_abi.COPY_FLAGS.index(name) * size * copy_schedule.FLAG_BYTES
