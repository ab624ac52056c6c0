"""How the ranks of a Buffer agree on a new communicator, and hear at once where they do not.

Bringing one up is collective, and which one follows from the arguments of a call. So before it begins each rank tells
the others what its call asks for, and a difference is an error of all ranks that names the argument.

A rank that asks while another uses a communicator that it has would wait for its deadline, and so would the other. So
the steps of a Buffer are numbered (each exchange, each dispatch, each new communicator), and a rank that asks first
writes the number of that step into the store of the process group. A thread of every rank looks there four times a
second: if its own rank has begun that step, and without asking, the ranks differ, and the thread answers in its place.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch.distributed as dist

from crossdock.common import log
from ep_kernels import CapacityError, ConfigError, EpError, TorchGroup, TransportError

_log = log.get(__name__)
LOOK_S = 0.25
REMEMBERED = 1024
"""Calls: a host may be that many operations ahead of its GPU when its thread looks."""


class Wish(msgspec.Struct, frozen=True):
    """What one rank says.

    Attributes:
        step: its number.
        fields: what the call asks for, as text; "communicator": whether this rank wants a new one.
        num_tokens: T, where the size of the communicator follows from it.
        free: communicators that it could do without, by number, the least used first.
    """

    step: int
    fields: dict[str, str]
    num_tokens: int
    free: list[int]


class Agreement:
    """Counts the steps of one Buffer on this rank, and asks the others.

    Args:
        group: whose ranks they are.
        refuse: called once by the thread, with the reason, where this rank waits in a step that others do not share.
    """

    def __init__(self, group: TorchGroup, timeout_s: float, refuse: Callable[[str], None]) -> None:
        self._group, self._timeout_s, self._refuse = group, timeout_s, refuse
        self.step = 0
        """Of those that this rank has begun."""
        self._asked = 0
        self._calls: deque[tuple[int, Any]] = deque(maxlen=REMEMBERED)
        self._store: Any = None
        self._stop, self._lock = threading.Event(), threading.Lock()

    def begin(self, call: Any) -> None:
        """A step without a question: on a communicator that exists, by a call with these parameters (a NamedTuple)."""
        self._calls.append((self.step + 1, call))
        self.step += 1  # last: the thread may look in between

    def failed(self, error: BaseException) -> None:
        """The step that was begun last has ended in this error: no step if it has sent nothing."""
        if not isinstance(error, TransportError | CapacityError):
            self.step -= 1

    def ask(self, call: Any, num_tokens: int, free: Sequence[int]) -> list[Wish]:
        """A step that begins with a new communicator: what each rank has said, in rank order. Collective. Raises
        ConfigError, on every rank, where calls differ; TransportError where a rank does not come."""
        with self._lock:
            step = self.step + 1
            self._asked = step  # what this rank has written itself is no news to its thread
            if self._group.size > 1:
                self._note(step)
            wishes = self._exchange(Wish(step, _fields(call, "a new one"), num_tokens, list(free)))
            self._asked = self.step = max(wish.step for wish in wishes)
        return wishes

    def restart(self, number: int) -> None:
        """All ranks go on after a fault, in which some may have begun a step more: recovery `number` of this Buffer."""
        self._asked = self.step = number << 32

    def close(self) -> None:
        """End the thread. Idempotent."""
        self._stop.set()

    def look(self) -> None:
        """Answer for this rank, if others ask in a step that it has begun otherwise."""
        wanted = int(self._store.get("step"))
        with self._lock:  # not while this rank asks: it may be in that very question
            if not self._asked < wanted <= self.step or not self._calls:
                return
            self._asked = wanted  # answered once
            call = next((call for step, call in reversed(self._calls) if step == wanted), self._calls[-1][1])
            try:
                self._exchange(Wish(wanted, _fields(call, "one that exists"), 0, []))
            except ConfigError as error:
                self._refuse(str(error))

    def _note(self, step: int) -> None:
        """Let the other ranks know that this one asks in that step."""
        if self._store is not None:
            self._store.set("step", str(step))
            return
        store, rank = self._group.store, self._group.rank
        number = store.add(f"crossdock/deep_ep/{rank}", 1)  # Buffers ask for the first time in one order on all ranks
        self._store = dist.PrefixStore(f"crossdock/deep_ep/buffer {number}", store)  # type: ignore[attr-defined]
        self._store.set("step", str(step))
        about = weakref.ref(self), self._stop
        threading.Thread(target=_watch, args=about, name="crossdock-agreement", daemon=True).start()

    def _exchange(self, mine: Wish) -> list[Wish]:
        answers = self._group.all_gather(msgspec.msgpack.encode(mine), self._timeout_s)
        try:
            wishes = [msgspec.msgpack.decode(answer, type=Wish) for answer in answers]
        except msgspec.MsgspecError as error:
            raise ConfigError("communicator", "one question on all ranks", f"another one: {error}") from error
        for rank, wish in enumerate(wishes):
            for name in wishes[0].fields | wish.fields:
                want, got = (fields.get(name, "nothing") for fields in (wishes[0].fields, wish.fields))
                if want != got:
                    raise ConfigError(name, f"{want} as on rank 0", f"{got} on rank {rank}")
        return wishes


def _fields(call: Any, communicator: str) -> dict[str, str]:
    """Parameters in their order; the last one tells calls apart that are alike."""
    return {name: str(value) for name, value in call._asdict().items()} | {"communicator": communicator}


def _watch(agreement: weakref.ref[Agreement], stop: threading.Event) -> None:
    """Look until the Buffer is gone, or the store is."""
    while not stop.wait(LOOK_S):
        held = agreement()
        if held is None:
            return
        try:
            held.look()
        except EpError:
            continue  # a rank did not come: its own calls, and ours, end by their deadlines
        except RuntimeError as error:
            _log.info(f"crossdock: the store of the process group is gone: {error}")
            return
        except Exception:  # this thread must survive: it alone answers
            _log.exception("crossdock: cannot look whether other ranks ask for another communicator")
        del held
