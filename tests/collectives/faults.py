"""What ranks do in test_collective_faults.py: peers are late, silent or dead. Each function runs on every rank."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from crossdock.common.transports import needs_gpu
from ep_kernels import AbortedError, ClosedError, PeerTimeout
from ep_kernels.collectives import Collectives
from ep_kernels.collectives import collectives as front
from ep_kernels.errors import TransportError
from tests.collectives.steps import Seat, Store, check_all, everyone, on_device, same_bits, settle, values
from tests.transports.lives import holdings

PATIENCE_S = 2.0
"""Deadline of waits in these tests; a rank that lives is never late by so much."""
OPS = ("all_gather", "reduce_scatter", "all_reduce", "all_gather registered", "all_reduce registered", "barrier")
AHEAD = 12
"""Processes that start while others are killed: one that uses a GPU takes seconds to start."""
ELEMENTS = 300_000
"""Of one rank's x: several rounds through the staging of `Seat.config`."""


@dataclass(frozen=True)
class Loss:
    """What a survivor saw.

    Attributes:
        peer, gone, given_up, op, phase: as in PeerTimeout.
        waited_s: seconds until it was raised.
    """

    peer: int
    gone: bool
    given_up: bool
    op: str
    phase: str
    waited_s: float


def lose(call: Callable[[], Any]) -> Loss:
    """The PeerTimeout that `call` ends in."""
    begin = time.monotonic()
    with pytest.raises(PeerTimeout) as error:
        call()
    fault = error.value
    return Loss(fault.peer, fault.gone, fault.given_up, fault.op, fault.phase, time.monotonic() - begin)


def given(coll: Collectives, op: str) -> torch.Tensor:
    """x of an operation."""
    n = ELEMENTS * coll.size if op == "reduce_scatter" else ELEMENTS
    x = values((n,), torch.float32, coll.rank, 1)
    return coll.empty((n,), torch.float32).copy_(x) if "registered" in op else on_device(coll, x)


def begun(coll: Collectives, op: str, x: torch.Tensor | None = None) -> Callable[[], Any]:
    """Begin an operation; what finishes it."""
    if op == "barrier":
        return coll.barrier
    work = getattr(coll, op.split(" ", maxsplit=1)[0])(given(coll, op) if x is None else x)

    def finish() -> None:
        work.wait()
        settle(coll)

    return finish


def refuses_at_once(coll: Collectives) -> None:
    """Every later call raises the same error without waiting."""
    begin = time.monotonic()
    for call in (lambda: coll.all_reduce(torch.zeros(1)), coll.barrier, coll.check):
        with pytest.raises(PeerTimeout):
            call()
    assert time.monotonic() - begin < 1.0


def late(rank: int, size: int, store: Store, transport: str, delay_s: float) -> float:
    """Rank 1 comes late by less than the deadline: the others wait for it."""
    with Seat(rank, size, store, transport).collectives() as coll:
        coll.barrier()
        if rank == 1:
            time.sleep(delay_s)
        begin = time.monotonic()
        xs = everyone(coll, (5000,), torch.bfloat16, 1)
        same_bits(coll.all_gather(on_device(coll, xs[rank])).wait(), torch.cat(xs), "late")
        took = time.monotonic() - begin
        check_all(coll, 1, 1)
        coll.barrier()
        return took


def one_is_silent(rank: int, size: int, store: Store, transport: str, op: str) -> Loss | None:
    """`rank 1` lives and does nothing; the others name it at their deadline; set_active of all heals the group."""
    with Seat(rank, size, store, transport).collectives(timeout_s=PATIENCE_S) as coll:
        seen = None
        if "registered" in op and rank == 1:
            coll.empty((ELEMENTS,), torch.float32)
        if rank != 1:
            seen = lose(begun(coll, op))
            refuses_at_once(coll)
        store.set(f"seen-{rank}", b"1")
        store.wait([f"seen-{r}" for r in range(size)], timedelta(seconds=60))
        coll.set_active([True] * size, 1)
        for number in range(4):
            check_all(coll, number, 5)
        coll.barrier()
    return seen


def left_between(rank: int, size: int, store: Store, transport: str) -> str:
    """The last rank runs out of memory between the operations of one call, and tries again: this raises, since peers
    would take its first chunk for their second. Returns this rank's error."""
    with Seat(rank, size, store, transport).collectives(timeout_s=PATIENCE_S) as coll:
        x, w = on_device(coll, values((size * 64, 8), torch.float32, rank, 1)), on_device(coll, torch.eye(8))
        told = []
        for call in (coll.matmul_reduce_scatter, coll.matmul_all_reduce):
            with pytest.MonkeyPatch.context() as monkeypatch:
                monkeypatch.setattr(front, "sums_whole", lambda *_: False)  # so few bytes would be one operation
                if rank == size - 1:
                    with monkeypatch.context() as fails:
                        fails.setattr(torch, "mm", failing(torch.mm, size + 1))
                        with pytest.raises(MemoryError):
                            call(x, w, chunks=2 * size)
                with pytest.raises(TransportError) as error:
                    (call(x, w, chunks=2 * size), settle(coll))
            told.append(str(error.value))
            store.set(f"told-{len(told)}-{rank}", b"1")
            store.wait([f"told-{len(told)}-{r}" for r in range(size)], timedelta(seconds=60))
            coll.set_active([True] * size, len(told))
            check_all(coll, 2, 5)
        coll.barrier()
    assert told[0] == told[1] or rank < size - 1
    return told[0]


def failing(call: Callable[..., Any], times: int) -> Callable[..., Any]:
    """It works so many times."""
    left = [times]

    def limited(*args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise MemoryError("no more")
        return call(*args, **kwargs)

    return limited


def one_dies(rank: int, size: int, store: Store, transport: str, op: str) -> Loss:
    """The last rank is killed in the middle of an operation: seen long before the deadline, and the rest go on."""
    victim = size - 1
    coll = Seat(rank, size, store, transport).collectives(timeout_s=30.0)
    check_all(coll, 1, 1)
    kept = coll.empty((100,), torch.float32)
    x = given(coll, op)
    if rank == victim and (op == "barrier" or coll.capabilities.device_type == "cuda"):
        os.kill(os.getpid(), signal.SIGKILL)  # a kernel that was launched does its part
    finish = begun(coll, op, x)
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)  # it has published what needs no peer, and will read nothing
    seen = lose(finish)
    refuses_at_once(coll)
    coll.set_active([r != victim for r in range(size)], 1)
    for number in range(4):
        check_all(coll, number, 5)
    kept.fill_(rank)
    coll.barrier()
    begin = time.monotonic()
    coll.close()
    assert time.monotonic() - begin < 1.0
    assert bool((kept == rank).all())
    return seen


def one_is_given_up(rank: int, size: int, store: Store, transport: str) -> Loss | None:
    """Rank 1 stands still, and lives; the others are told that it is lost, and go on without it at once."""
    with Seat(rank, size, store, transport).collectives(timeout_s=30.0) as coll:
        seen = None
        if rank != 1:
            threading.Timer(0.2, coll.give_up, [[1]]).start()
            seen = lose(begun(coll, "all_reduce"))
            coll.set_active([r != 1 for r in range(size)], 1)
            check_all(coll, 3, 5)
            coll.barrier()
        store.set(f"on-{rank}", b"1")
        store.wait([f"on-{r}" for r in range(size)], timedelta(seconds=60))
        if rank == 1:  # it hears that the others have gone on
            with pytest.raises(TransportError):
                coll.all_gather(on_device(coll, torch.zeros(4))).wait()
    return seen


def ended_from_outside(rank: int, size: int, store: Store, transport: str, how: str) -> float:
    """`abort` and `close` from another thread end a wait."""
    coll = Seat(rank, size, store, transport).collectives(timeout_s=30.0)
    took = 0.0
    if rank == 0:
        finish = begun(coll, "all_gather")
        act = coll._leave if how == "close" else lambda: coll.abort("the test says so")
        begin = time.monotonic()
        threading.Timer(0.3, act).start()
        with pytest.raises(ClosedError if how == "close" else AbortedError):
            finish()
        took = time.monotonic() - begin
    store.set(f"ended-{rank}", b"1")
    store.wait([f"ended-{r}" for r in range(size)], timedelta(seconds=60))
    coll.abort("over")
    coll.close()
    return took


def closes_at_once(rank: int, size: int, store: Store, transport: str) -> None:
    """Works that nobody has waited for are brought to their end by `close`: peers need their rounds."""
    for turn in range(3):
        with Seat(rank, size, store, transport).collectives(f"turn-{turn}", staging_bytes=1 << 15) as coll:
            xs = everyone(coll, (60_000,), torch.bfloat16, turn)
            work = coll.all_gather(on_device(coll, xs[rank]))
            if rank == turn % size:
                same_bits(work.wait(), torch.cat(xs), "waited for")
            coll.barrier() if turn == 2 else None


def closes_with_a_dead_peer(rank: int, size: int, store: Store, transport: str) -> float:
    """A work that can never end is under way: `close` returns, and long before the deadline."""
    coll = Seat(rank, size, store, transport).collectives(timeout_s=30.0)
    coll.barrier()
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    begun(coll, "all_gather")
    begin = time.monotonic()
    coll.close()
    return time.monotonic() - begin


def closed_by_another_thread(rank: int, size: int, store: Store, transport: str) -> None:
    """`close` in a second thread lets the work that the first waits for end well."""
    coll = Seat(rank, size, store, transport).collectives()
    if rank == 1:
        time.sleep(0.5)
    xs = everyone(coll, (100_000,), torch.bfloat16, 1)
    work = coll.all_gather(on_device(coll, xs[rank]))
    closing = threading.Timer(0.2, coll.close)
    closing.start()
    same_bits(work.wait(), torch.cat(xs), "while another thread closes")
    closing.join()
    with pytest.raises(ClosedError):
        coll.barrier()


def crashes(rank: int, size: int, store: Store, transport: str, folder: str, times: int) -> list[str]:
    """Children come as the second rank and are killed in the first operation, which a GPU may still complete; what this
    process holds afterwards, more than after the first few. Forked, where nothing of CUDA is in this process."""
    before: dict[str, int] = {}
    begin_victim, ahead = (_started, AHEAD) if needs_gpu(transport) else (_forked, 1)
    victims = deque[Callable[[], object]]()
    for turn in range(times):
        for coming in range(turn + len(victims), min(turn + ahead, times)):
            victims.append(begin_victim(f"{folder}/store-{coming}", transport, coming))
        victim, store = victims.popleft(), dist.FileStore(f"{folder}/store-{turn}", 2)
        coll = Seat(0, 2, store, transport).collectives(f"crash-{turn}", timeout_s=60.0)
        seen = lose(lambda coll=coll, op=OPS[turn % 5]: [begun(coll, op)() for _ in range(2)])  # type: ignore[misc]
        assert (seen.peer, seen.gone) == (1, True)
        coll.close()
        victim()
        del coll, store
        if turn == 9:
            before = holdings()
    return [f"{name}: {before[name]} -> {n}" for name, n in holdings().items() if n > before[name]]


def crash(path: str, transport: str, turn: int) -> None:
    """Come as the second rank, begin an operation, and be killed."""
    try:
        coll = Seat(1, 2, dist.FileStore(path, 2), transport).collectives(f"crash-{turn}", timeout_s=60.0)
        begun(coll, OPS[turn % 5])
    finally:
        os.kill(os.getpid(), signal.SIGKILL)


def _forked(path: str, transport: str, turn: int) -> Callable[[], object]:
    child = os.fork()
    if child == 0:
        crash(path, transport, turn)
    return lambda: os.waitpid(child, 0)


def _started(path: str, transport: str, turn: int) -> Callable[[], object]:
    line = f"from tests.collectives.faults import crash; crash({path!r}, {transport!r}, {turn})"
    return subprocess.Popen([sys.executable, "-c", line]).wait
