"""The well-behaved client, in a process of its own: it asks without a pause and compares every answer.

    python -m tests.attack.witness TARGET SECURITY_FILE|- WAY MODEL_FOLDER [MODEL_FOLDER...]

Writes one line per event to stdout: the monotonic time at its end, a kind, its duration in seconds, words (of an error,
or the number of the model). Kinds: `right`, `failed` and `wrong` are requests of a client that stays connected (by gRPC
until one fails, for a foreign client follows no worker); `new` and `shut` are requests of a client that has just
connected, answered rightly or not. An answer is right if all of it is of one model.
"""

from __future__ import annotations

import contextlib
import itertools
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast, get_args

import torch
from safetensors.torch import load_file

from benchmarks.service.foreign import ForeignClient
from benchmarks.service.load import Way, choose
from crossdock.client import Client
from crossdock.common.security import load_security
from crossdock.common.settings import SecurityConfig
from tests.services.cluster import Batch

REQUEST_S = 30.0
NEW_EVERY_S = 0.5
_STARTS_S = 60.0


@dataclass(frozen=True, slots=True)
class Event:
    """One line.

    Attributes:
        at: monotonic seconds, when it ended.
        kind: see above.
        took_s: since it began.
        words: of an error, or the number of the model that the answer is of.
    """

    at: float
    kind: str
    took_s: float
    words: str


@dataclass
class Witness:
    """The process, and what it has written. Use in `with`.

    Args:
        target: the control plane.
        security: file of the client's certificates; None: plain text.
        models: folders of the checkpoints that may be served.
        way: by which it asks.
    """

    target: str
    security: Path | None
    models: Sequence[Path]
    way: Way = "auto"
    events: list[Event] = field(default_factory=list)

    def __enter__(self) -> Witness:
        guard = str(self.security) if self.security is not None else "-"
        command = [sys.executable, "-m", "tests.attack.witness", self.target, guard, self.way]
        command += map(str, self.models)
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self._changed = threading.Condition()
        threading.Thread(target=self._read, daemon=True).start()
        self.wait_for("right", 0.0, _STARTS_S)
        self.wait_for("new", 0.0, _STARTS_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def wait_for(self, kind: str, since: float, timeout_s: float) -> bool:
        """Wait for an event of that kind which began after `since`; False: there was none in time."""
        with self._changed:
            return self._changed.wait_for(lambda: self._seen(kind, since), timeout_s)

    def between(self, begin: float, end: float, *kinds: str) -> list[Event]:
        """Events that ended between two moments."""
        return [event for event in list(self.events) if begin <= event.at <= end and event.kind in kinds]

    def longest_gap_s(self, begin: float, end: float) -> float:
        """The longest time without a right answer between two moments."""
        moments = [begin, *(event.at for event in self.between(begin, end, "right")), end]
        return max(after - before for before, after in itertools.pairwise(moments))

    def _seen(self, kind: str, since: float) -> bool:
        return any(event.kind == kind and event.at - event.took_s >= since for event in self.events[-200:])

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            at, kind, took, words = [*line.rstrip("\n").split(" ", 3), ""][:4]
            with self._changed:
                self.events.append(Event(float(at), kind, float(took), words))
                self._changed.notify_all()


class _Asker:
    """Requests with fresh random tokens, and what each should give."""

    def __init__(self, target: str, security: SecurityConfig | None, way: Way, models: Sequence[Path]) -> None:
        self._target, self._security, self._is_foreign = target, security, way == "grpc"
        choose(way)
        known = [load_file(model / "model.safetensors") for model in models]
        self._batches = [Batch.random(1 + 9 * number, 1 + number % 2) for number in range(8)]
        self._expected = [[batch.expected(tensors) for tensors in known] for batch in self._batches]
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def client(self) -> Iterator[Client | ForeignClient]:
        """A new one."""
        if self._is_foreign:
            with contextlib.closing(ForeignClient(self._target)) as foreign:
                yield foreign
            return
        with Client(self._target, min_tokens_per_worker=16, security=self._security) as client:
            yield client

    def ask(self, client: Client | ForeignClient, number: int) -> str:
        """The number of the model that the answer is of; "" of none."""
        index = number % len(self._batches)
        batch = self._batches[index]
        y = client.forward(batch.layer, batch.x, batch.ids, batch.weights, timeout_s=REQUEST_S).double()
        same = [torch.allclose(y, expected, rtol=1e-4, atol=1e-5) for expected in self._expected[index]]
        return str(same.index(True)) if any(same) else ""

    def tell(self, right: str, failed: str, attempt: Callable[[], str]) -> bool:
        """Make an attempt, and write its line. Whether it was answered."""
        began, words = time.monotonic(), ""
        try:
            words = attempt()
            kind = right if words else "wrong"
        except Exception as error:
            kind, words = failed, f"{type(error).__name__} {error}".replace("\n", " ")
        now = time.monotonic()
        with self._lock:
            print(f"{now:.4f} {kind} {now - began:.4f} {words}", flush=True)
        return kind != failed

    def stay(self) -> None:
        """Ask without a pause, as one client."""
        numbers = itertools.count()
        while True:
            with contextlib.suppress(Exception), self.client() as client:  # there is no view at the moment
                while self.tell("right", "failed", lambda: self.ask(client, next(numbers))) or not self._is_foreign:
                    pass
            time.sleep(NEW_EVERY_S)

    def come_anew(self) -> None:
        """Connect, ask once, hang up, again and again."""

        def attempt(number: int) -> str:
            with self.client() as client:
                return self.ask(client, number)

        for number in range(1 << 62):
            self.tell("new", "shut", lambda turn=number: attempt(turn))  # type: ignore[misc]
            time.sleep(NEW_EVERY_S)


def main() -> None:
    """Ask until killed."""
    torch.set_num_threads(1)
    target, guard, way, *models = sys.argv[1:]
    assert way in get_args(Way)
    security = None if guard == "-" else load_security(guard)
    asker = _Asker(target, security, cast(Way, way), [Path(model) for model in models])
    threading.Thread(target=asker.come_anew, daemon=True).start()
    asker.stay()


if __name__ == "__main__":
    main()
