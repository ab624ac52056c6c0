"""R rank processes that live for many tests. `World.run(fn, *args)` calls `fn(rank, size, store, *args)` on each rank.

`fn` is a module-level function; its results come back in rank order. A rank that raises fails the test with the first
traceback shown; a rank that is silent past the deadline is killed, and the world is made anew by the next call.
"""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist


class RankFailed(AssertionError):
    """A rank raised; the message is its traceback."""


class RankDied:
    """Stands in the results for a rank that is gone (killed by the test on purpose)."""

    def __repr__(self) -> str:
        return "RankDied"


def _serve(rank: int, size: int, folder: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    while True:
        try:
            number, fn, args = pipe.recv()
        except EOFError:
            os._exit(0)
        store = dist.FileStore(os.path.join(folder, f"store-{number}"), size)
        try:
            pipe.send((True, fn(rank, size, store, *args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))


PRELOADED = (
    "torch.distributed", "ep_kernels.collectives", "tests.collectives.faults", "tests.collectives.stories",
    "tests.transports.calls", "tests.transports.faults", "tests.settled",
)  # fmt: skip
"""What most ranks need. A process that has it already is there in a tenth of the time."""


def context() -> Any:
    """Of processes that are forked from a server which has imported these and nothing else: this process may hold locks
    of other threads (gRPC's, a garbage collector's finalisers), which a fork of it would inherit held for ever."""
    made = mp.get_context("forkserver")
    made.set_forkserver_preload(list(PRELOADED))
    return made


class World:
    """A pool of `size` rank processes on this host."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._folder = tempfile.mkdtemp(prefix="world-")
        self._number = 0
        self._ranks: list[tuple[Any, Connection]] = []

    def _start(self) -> None:
        processes = context()
        for rank in range(self.size):
            here, there = processes.Pipe()
            process = processes.Process(target=_serve, args=(rank, self.size, self._folder, there), daemon=True)
            process.start()
            there.close()
            self._ranks.append((process, here))

    @property
    def pids(self) -> list[int]:
        """Process ids by rank (starts the world if need be)."""
        if not self._ranks:
            self._start()
        return [process.pid for process, _ in self._ranks]

    def run(
        self, fn: Callable[..., Any], *args: Any, timeout_s: float = 120, may_die: tuple[int, ...] = ()
    ) -> list[Any]:
        """Call fn on every rank. Ranks in `may_die` may be killed meanwhile; their result is RankDied()."""
        if not self._ranks:
            self._start()
        self._number += 1
        for _, pipe in self._ranks:
            pipe.send((self._number, fn, args))
        deadline = time.monotonic() + timeout_s
        results = [self._collect(rank, deadline, rank in may_die) for rank in range(self.size)]
        if may_die:
            self.close()
        bad = [f"rank {r}: {text}" for r, (ok, text) in enumerate(results) if not ok]
        if bad:
            self.close()
            raise RankFailed("\n".join(bad))
        return [value for _, value in results]

    def _collect(self, rank: int, deadline: float, may_die: bool) -> tuple[bool, Any]:
        _, pipe = self._ranks[rank]
        try:
            if pipe.poll(max(0.0, deadline - time.monotonic())):
                return pipe.recv()  # type: ignore[no-any-return]
        except (EOFError, ConnectionResetError):
            return (True, RankDied()) if may_die else (False, "died")
        return False, "silent past the deadline"

    def close(self) -> None:
        """Kill every rank."""
        for process, pipe in self._ranks:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.join()
            pipe.close()
        self._ranks.clear()

    def __del__(self) -> None:
        self.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def pools() -> Iterator[Callable[[int], World]]:
    """Once: pool(R), the pool of R rank processes, made when first needed; all are closed afterwards."""
    made: dict[int, World] = {}

    def of_size(size: int) -> World:
        if size not in made:
            made[size] = World(size)
        return made[size]

    yield of_size
    for pool in made.values():
        pool.close()
