"""What a transport of `Mode.AG` leaves to the collectives underneath: life, membership, meeting, measurements. Errors
and latency records have the names of dispatch and combine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from ep_kernels.collectives.collective_types import Algorithm
from ep_kernels.config import MoEConfig
from ep_kernels.errors import AbortedError, HandleError, PeerTimeout, TransportError
from ep_kernels.gather import gather_memory as memory
from ep_kernels.transports.collective_base import CollectiveTransport
from ep_kernels.types import LatencySample, Mode, PeerTraffic

_NAMES = {"all_gather": "dispatch", "reduce_scatter": "combine"}
_RINGS = {Algorithm.COPY_PUSH.value: "copies", Algorithm.COPY_PULL.value: "copies"}
"""Of the records of an algorithm, where not those of kernels or CPUs. The numbers of a ring leave none out."""


def renamed(error: TransportError | HandleError) -> TransportError | HandleError:
    """The error, with the name of the operation that the caller began."""
    name, _, text = str(error).partition(": ")
    if name not in _NAMES or isinstance(error, AbortedError):
        return error
    if isinstance(error, PeerTimeout):
        return PeerTimeout(
            peer=error.peer, op=_NAMES[name], phase=error.phase, expected=error.expected, seen=error.seen,
            waited_s=error.waited_s, gone=error.gone, given_up=error.given_up,
        )  # fmt: skip
    return type(error)(f"{_NAMES[name]}: {text}")


@contextmanager
def operation_errors() -> Iterator[None]:
    """Errors of collectives leave as those of dispatch and combine."""
    try:
        yield
    except (TransportError, HandleError) as error:
        other = renamed(error)
        if other is error:
            raise
        raise other from None


class GatherMember:
    """See `transports.base.MemberTransport`.

    Args:
        config: of the communicator.
        coll: the collectives underneath, which this object owns.
    """

    def __init__(self, config: MoEConfig, coll: CollectiveTransport) -> None:
        self._config, self._coll = config, coll
        self._active = (True,) * config.group.size
        self._epoch: int = config.group.epoch
        self._next_seq: dict[str, int] = {}

    @property
    def domains(self) -> tuple[int, ...]:
        """See `MemberTransport.domains`."""
        return self._coll.domains

    def import_regions(self, tickets: Sequence[bytes]) -> None:
        """See `MemberTransport.import_regions`."""
        self._coll.import_regions(tickets)

    def check(self, op: str = "check") -> None:
        """See `MemberTransport.check`."""
        with operation_errors():
            self._coll.check(op)

    def failed(self) -> torch.Tensor:
        """See `MemberTransport.failed`."""
        return self._coll.failed()

    def check_results(self) -> None:
        """See `MemberTransport.check_results`."""
        with operation_errors():
            self._coll.check_results()

    def barrier(self) -> None:
        """See `MemberTransport.barrier`."""
        with operation_errors():
            self._coll.barrier()

    def set_active(self, mask: Sequence[bool], epoch: int) -> None:
        """See `MemberTransport.set_active`."""
        self._coll.set_active(mask, epoch)
        self._active, self._epoch = tuple(mask), epoch
        self._next_seq.clear()

    def exchange(self, words: Sequence[int]) -> list[tuple[int, ...] | None]:
        """See `MemberTransport.exchange`."""
        return self._coll.exchange(words)

    def wait_for_peer(self, timeout_s: float) -> bool:
        """See `MemberTransport.wait_for_peer`."""
        return self._coll.wait_for_peer(timeout_s)

    def call_exchange(self) -> None:
        """See `MemberTransport.call_exchange`."""
        self._coll.call_exchange()

    def wake(self) -> None:
        """See `MemberTransport.wake`."""
        self._coll.wake()

    def samples(self) -> Sequence[LatencySample]:
        """See `MemberTransport.samples`. `tokens` is that of the step, S: S rows move for every rank. All collectives
        count on from each other, so a gap in the numbers of one operation says nothing: `missing` does."""
        size, config = self._config.group.size, self._config
        apart = memory.sends_rows_apart(config, self._coll.capabilities)
        row = size * config.hidden_size * config.resolved_output_dtype.itemsize
        found, missing = [], 0
        for sample in self._coll.samples():
            if sample.op not in _NAMES:
                continue
            missing += self._missing_before(sample)
            if apart and sample.op == "all_gather" and sample.mode not in _RINGS:
                continue  # metadata alone
            tokens = self._step_tokens(sample.tokens, apart) if sample.op == "all_gather" else sample.tokens // row
            if sample.op == "all_gather" or sample.tokens % row == 0:  # the rest carries gradients of weights
                op, mode = _NAMES[sample.op], Mode.AG.value
                found.append(replace(sample, op=op, mode=mode, tokens=tokens, missing=missing))
                missing = 0
        return found

    def _missing_before(self, sample: LatencySample) -> int:
        ring = _RINGS.get(sample.mode, "")
        expected, self._next_seq[ring] = self._next_seq.get(ring, 0), sample.seq + 1
        return sample.seq - expected if 0 < expected < sample.seq else 0

    def _step_tokens(self, num_bytes: int, alone: bool) -> int:
        """S of a dispatch that moved `num_bytes` of each rank; alone: of rows without metadata."""
        raise AssertionError("the transport knows")

    def traffic(self) -> list[PeerTraffic]:
        """See `MemberTransport.traffic`."""
        return self._coll.traffic()

    def peek(self, words: torch.Tensor) -> torch.Tensor | None:
        """See `MemberTransport.peek`."""
        return self._coll.peek(words)

    def device_name(self) -> str:
        """See `MemberTransport.device_name`."""
        return self._coll.device_name()

    def abort(self, reason: str) -> None:
        """See `MemberTransport.abort`."""
        self._coll.abort(reason)

    def give_up(self, ranks: Sequence[int]) -> None:
        """See `MemberTransport.give_up`."""
        self._coll.give_up(ranks)

    def drain(self, timeout_s: float) -> None:
        """See `MemberTransport.drain`."""
        self._coll.drain(timeout_s)

    def close_in_child(self) -> None:
        """See `MemberTransport.close_in_child`."""
        self._coll.close_in_child()

    def close(self) -> None:
        """See `MemberTransport.close`."""
        self._coll.close()
