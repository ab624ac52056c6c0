"""Requests and answers of the engine: one `Work` per request, answered exactly once by a `Done` or a `Failure`.

Plain records; no queue, no thread, no gRPC server here.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

import grpc
import torch

from crossdock.common.tracing import RequestTrace
from ep_kernels.transports.base import StepInputs


class Timing(NamedTuple):
    """Time of a request by phase, nanoseconds; summed over its steps."""

    queue_ns: int = 0
    dispatch_ns: int = 0
    experts_ns: int = 0
    combine_ns: int = 0
    steps: int = 0

    def plus_step(self, dispatch_ns: int, experts_ns: int, combine_ns: int) -> Timing:
        return Timing(
            self.queue_ns,
            self.dispatch_ns + dispatch_ns,
            self.experts_ns + experts_ns,
            self.combine_ns + combine_ns,
            self.steps + 1,
        )


_NO_TIME = Timing()


class Done(NamedTuple):
    """The answer: y [T, H], dtype of x. `model`: fingerprint of the checkpoint that made it."""

    y: torch.Tensor
    timing: Timing
    model: str = ""


@dataclass(frozen=True, slots=True)
class Failure:
    """Error of a request. `lost_ranks` and `epoch`: of the broken group, if any."""

    code: grpc.StatusCode
    message: str
    lost_ranks: tuple[int, ...] = ()
    epoch: int = 0


class Refused(Exception):
    """A request was refused; `failure` has the reason."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


@dataclass(slots=True, eq=False)
class Kept:
    """What is made once of memory that requests have in turn: y [:, 0]; bytes of topk_ids, which may be others after
    the answer; the tensors as the communicator of the last step has checked them."""

    first_column: torch.Tensor
    ids_bytes: memoryview
    inputs: StepInputs | None = None


@dataclass(slots=True, eq=False)
class Work:
    """One request in the engine. Only the batcher and the engine change it, under the engine's lock.

    Attributes:
        client: of the request; clients take turns.
        x: [T, H] in the served dtype.
        topk_ids: int32 [T, K], -1 = no expert.
        topk_weights: float32 [T, K].
        deadline_ns: monotonic time after which the request expires.
        arrived_ns: monotonic time of admission.
        num_taken: tokens that were given to steps so far.
        y: [T, H] filled by the steps: where its sender wants it, or None until the first one has made it.
        kept: of the memory of its tensors and of y, where its sender gave that.
        stream: of the client; its requests are served in order within a layer, streams of one client take turns.
        answered: True once `reply` was called (or must not be any more).
        trace: of the request; None: not traced.
        model: fingerprint of the checkpoint that its sender expects, empty: any; of the layer's, once a step took it.
    """

    client: Hashable
    layer: int
    x: torch.Tensor
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor
    deadline_ns: int
    arrived_ns: int
    reply: Callable[[Done | Failure], None]
    stream: Hashable = None
    num_taken: int = 0
    y: torch.Tensor | None = None
    kept: Kept | None = None
    timing: Timing = _NO_TIME
    answered: bool = False
    trace: RequestTrace | None = None
    model: str = ""
    num_tokens: int = -1

    def __post_init__(self) -> None:
        if self.num_tokens < 0:
            self.num_tokens = self.x.shape[0]

    @property
    def num_waiting(self) -> int:
        """Tokens that no step has taken yet."""
        return self.num_tokens - self.num_taken


class Slice(NamedTuple):
    """Rows [start, stop) of one request, as part of one step."""

    work: Work
    start: int
    stop: int

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start

    @property
    def is_last(self) -> bool:
        return self.stop == self.work.num_tokens

    @property
    def is_whole(self) -> bool:
        return self.start == 0 and self.stop == self.work.num_tokens

    def tokens(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        parts = self.work.x, self.work.topk_ids, self.work.topk_weights
        if self.is_whole:
            return parts
        x, ids, weights = (part[self.start : self.stop] for part in parts)
        return x, ids, weights


@dataclass(frozen=True, slots=True)
class Fault:
    """Why an epoch failed, as seen by one rank. `silent_ranks`: those that it waited for in vain; `postmortem`: what it
    knew then, as JSON, or empty."""

    reason: str
    silent_ranks: tuple[int, ...] = ()
    postmortem: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class Left:
    """Normal end of an epoch: `ranks` left between two steps, as agreed by all."""

    ranks: tuple[int, ...]
