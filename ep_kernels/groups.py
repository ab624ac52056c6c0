"""Bootstraps: small objects that know who the ranks are and exchange a few opaque bytes at bring-up."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch.distributed as dist

from ep_kernels.errors import ConfigError, TransportError

_COMPLETE = b"complete"
_FIRST_POLL_S, _LONGEST_POLL_S = 0.0005, 0.02
_ANSWER_S = 1.0
"""Seconds past a deadline within which a store must say which ranks are missing."""


class StoreGroup:
    """A group over a torch Store (FileStore, TCPStore): no process group and no backend needed.

    Args:
        store: any `torch.distributed.Store`, shared by all ranks.
        rank, size: this rank and the number of ranks.
        epoch: membership counter; a new epoch uses new keys, so one store serves many re-formings.
        name: distinguishes several groups over one store. Several communicators may share one StoreGroup object; two
            objects need two names, or two epochs.
    """

    def __init__(self, store: Any, rank: int, size: int, *, epoch: int = 0, name: str = "crossdock") -> None:
        self._store: Any = dist.PrefixStore(f"{name}/{epoch}", store)  # type: ignore[attr-defined]
        self._rank, self._size, self._epoch, self._name = rank, size, epoch, name
        self._owns_name = False

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    @property
    def epoch(self) -> int:
        return self._epoch

    def all_gather(self, payload: bytes, timeout_s: float) -> Sequence[bytes]:
        """See `config.Group`. Raises ConfigError where the name is taken: by a former group."""

        def gather() -> list[bytes]:
            if not self._owns_name and self._store.add(f"{self._rank}/owners", 1) > 1:  # it may be that of other ranks
                free = f"a StoreGroup whose name is new in its store in epoch {self._epoch}, or one object for all"
                raise ConfigError("group", free, self._name)
            self._owns_name = True
            return _exchange(self._store, self._rank, self._size, payload, timeout_s)

        return _within(timeout_s, gather)


class TorchGroup:
    """A group over an initialised torch.distributed process group, of any backend: ranks exchange their bytes through
    its store, since a wait in one of its collectives would end by its timeout, not by ours, and leave it unusable.
    Looked up once: it is the same group when torch's default one is another, and has its ranks when that is destroyed.

    Args:
        group: a ProcessGroup, or None for the default one.
    """

    def __init__(self, group: Any = None) -> None:
        self._group = group

    @cached_property
    def process_group(self) -> Any:
        """The ProcessGroup."""
        return dist.group.WORLD if self._group is None else self._group

    @cached_property
    def rank(self) -> int:
        return dist.get_rank(self.process_group)

    @cached_property
    def size(self) -> int:
        return dist.get_world_size(self.process_group)

    @property
    def epoch(self) -> int:
        return 0

    @cached_property
    def store(self) -> Any:
        """Keys of this group's ranks alone, also beside a sibling that torch has split off under the same name."""
        group = self.process_group
        store, ranks = group.get_group_store(), dist.get_process_group_ranks(group)
        if store is None:
            raise ConfigError("group", "a process group with a store", dist.get_backend(group))
        who = hashlib.sha256(repr(ranks).encode()).hexdigest()[:16]
        return dist.PrefixStore(f"crossdock/{who}", store)  # type: ignore[attr-defined]

    def all_gather(self, payload: bytes, timeout_s: float) -> Sequence[bytes]:
        """See `config.Group`."""
        store, rank, size = self.store, self.rank, self.size
        return _within(timeout_s, lambda: _exchange(store, rank, size, payload, timeout_s))


def _exchange(store: Any, rank: int, size: int, payload: bytes, timeout_s: float) -> list[bytes]:
    """Everybody's payload, in rank order.

    An exchange has a number, and one outcome, which who knows it first writes: complete, or who did not come. So all
    ranks end alike. A rank that comes after the outcome joins the next exchange: after a failure ranks are in step
    again. It asks instead of waiting: a wait keeps every other thread from the store.
    """
    number, past = _next(store, rank)
    keys, outcome = [f"{number}/{one}" for one in range(size)], f"{number}/outcome"
    store.set(keys[rank], payload)
    deadline, pause = time.monotonic() + timeout_s, _FIRST_POLL_S
    while not store.check([outcome]):
        if store.check(keys) or time.monotonic() >= deadline:
            missing = [one for one, key in enumerate(keys) if not store.check([key])]
            text = f"ranks {missing} did not arrive within {timeout_s} s" if missing else _COMPLETE
            store.compare_set(outcome, "", text)
        else:
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_POLL_S)
    ended = bytes(store.get(outcome))
    if ended != _COMPLETE:
        raise TransportError(f"bring-up: {ended.decode()}{past}")
    return [bytes(one) for one in store.multi_get(keys)]


def _next(store: Any, rank: int) -> tuple[int, str]:
    """(number of this rank's next exchange, what is to be said of those that failed before this rank came)."""
    past = ""
    while True:
        number = store.add(f"{rank}/begun", 1)
        if not store.check([f"{number}/outcome"]):
            return number, past
        ended = bytes(store.get(f"{number}/outcome"))
        past = past if ended == _COMPLETE else f"; before this rank came, {ended.decode()}"


def _within(timeout_s: float, gather: Callable[[], list[bytes]]) -> list[bytes]:
    """What `gather` gives. In a thread of its own: the call into a store whose server stands still never returns."""
    done: Future[list[bytes]] = Future()

    def run() -> None:
        try:
            done.set_result(gather())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name="crossdock-bring-up", daemon=True).start()
    try:
        return done.result(timeout_s + _ANSWER_S)
    except TimeoutError:
        raise TransportError(f"bring-up: the store of the group did not answer within {timeout_s} s") from None
    except RuntimeError as error:
        raise TransportError(f"bring-up: the store of the group failed: {error}") from error


@dataclass(frozen=True)
class PaperGroup:
    """A rank without peers: enough for sizes and plans."""

    rank: int
    size: int
    epoch: int = 0

    def all_gather(self, payload: bytes, timeout_s: float) -> Sequence[bytes]:
        raise RuntimeError("PaperGroup: exchanges nothing, it serves to compute sizes")
