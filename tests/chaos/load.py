"""Clients that ask without a pause and compare every answer with the dense model."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from crossdock.client import Client, DeadlineExceeded, Overloaded, Unavailable
from tests.services.cluster import Batch

DEADLINE_S = 30.0
"""Of a request; clients try again until then."""
HANG_S = 5.0
"""A call that returns so much later than its deadline hung."""
GAP_S = 0.5
"""So long without a good answer is no outage yet."""
NUM_BATCHES = 24


@dataclass
class Tally:
    """What all clients saw.

    Attributes:
        good, failed: requests that were answered rightly, and that ended in an error which clients are told to expect.
        slowest_s: longest time until a right answer.
        wrong: answers that were not right, errors that nobody expects, calls that hung: each one is a fault of ours.
        good_at: when each right answer came, monotonic seconds.
    """

    good: int = 0
    failed: int = 0
    slowest_s: float = 0.0
    wrong: list[str] = field(default_factory=list)
    good_at: list[float] = field(default_factory=list)


class Load:
    """`num_clients` threads with a client each.

    Args:
        target: control planes.
        tensors: the model's, by name.
        num_clients: how many.
    """

    def __init__(self, target: str, tensors: Mapping[str, torch.Tensor], num_clients: int) -> None:
        self.tally = Tally()
        self._target = target
        self._batches = [Batch.random(1 + 7 * number, 1 + number % 2) for number in range(NUM_BATCHES)]
        self._expected = [batch.expected(dict(tensors)) for batch in self._batches]
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(i,), daemon=True) for i in range(num_clients)]

    def __enter__(self) -> Load:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Begin to ask."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Stop asking; a thread that does not end hangs, and is a fault."""
        self._stop.set()
        deadline = time.monotonic() + DEADLINE_S + HANG_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                self.tally.wrong.append("a client hangs at the end")

    def outage_s(self, since: float, until: float) -> float:
        """Seconds without service between two moments: gaps between right answers, as far as they are beyond GAP_S."""
        with self._lock:
            inside = [moment for moment in self.tally.good_at if since <= moment <= until]
        moments = [since, *inside, until]
        gaps = (after - before for before, after in itertools.pairwise(moments))
        return sum(gap for gap in gaps if gap > GAP_S)

    def _run(self, number: int) -> None:
        with Client(self._target, min_tokens_per_worker=16) as client:
            turn = number
            while not self._stop.is_set():
                self._ask(client, turn % NUM_BATCHES)
                turn += 1

    def _ask(self, client: Client, number: int) -> None:
        batch, began = self._batches[number], time.monotonic()
        error: Exception | None = None
        try:
            y = client.forward(batch.layer, batch.x, batch.ids, batch.weights, timeout_s=DEADLINE_S)
        except Exception as raised:
            error = raised
        now = time.monotonic()
        wrong = ""
        if error is None:
            wrong = self._judge(number, y)
        elif not isinstance(error, Unavailable | DeadlineExceeded | Overloaded):
            wrong = f"unexpected {type(error).__name__}: {error}"
        if now - began > DEADLINE_S + HANG_S:
            wrong = f"hung for {now - began:.1f} s"
        with self._lock:
            if wrong:
                self.tally.wrong.append(wrong)
            elif error is not None:
                self.tally.failed += 1
            else:
                self.tally.good += 1
                self.tally.slowest_s = max(self.tally.slowest_s, now - began)
                self.tally.good_at.append(now)

    def _judge(self, number: int, y: torch.Tensor) -> str:
        """Why an answer is not right, "" = it is."""
        same = torch.allclose(y.double(), self._expected[number], rtol=1e-4, atol=1e-5)
        return "" if same else f"batch {number}: other rows than the dense model's"
