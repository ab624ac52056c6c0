"""A rank that was left out may live, and write to buffers that the survivors use again: what they do before they go on.
Why that suffices: kernels/barrier.cuh."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ep_kernels.errors import TransportError
from ep_kernels.kernels import abi

PAUSE_S = 0.01
"""Far longer than a store is on its way, or than blocks of one launch start apart; some time slices of a GPU."""
SENDING_S = 1.0
"""Far longer than the largest operation sends."""
_NAP_S = 1e-3


class Unsent(NamedTuple):
    """An operation that a rank has begun and not ended to send.

    Attributes:
        begun: its sequence number.
        sent: that of the last one that the rank has sent.
    """

    rank: int
    op: str
    begun: int
    sent: int


def unsent_in(flags: Sequence[Sequence[int]], mask: Sequence[bool], is_gone: Callable[[int], bool]) -> list[Unsent]:
    """What ranks outside `mask` have begun and not sent, by a rank's flags [FLAGS, R]; dead ranks aside."""
    found = []
    for rank, active in enumerate(mask):
        for op, begun, sent in (("dispatch", "STARTED", "SENT"), ("combine", "COMBINE_STARTED", "COMBINE_SENT")):
            words = flags[abi.FLAGS.index(begun)][rank], flags[abi.FLAGS.index(sent)][rank]
            if not active and words[0] > words[1] and not is_gone(rank):
                found.append(Unsent(rank, op, *words))
    return found


def leave_out(
    tell: Callable[[], None],
    unsent: Callable[[], list[Unsent]],
    is_alive: Callable[[int], bool],
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Take the permission to write here from the ranks that take no part, and wait until what they had begun is sent.

    Args:
        tell: launches the kernel that takes it back and reads what they have sent, and waits for its end.
        unsent: what they have begun and not sent, by what `tell` has read.
        is_alive: whether the process of a rank is known to live.

    Raises:
        TransportError: a rank that lives has stopped while it sends, and may go on at any time. Ranks that are not
            known to live are taken for dead by then.
    """
    tell()
    sleep(PAUSE_S)
    deadline = clock() + SENDING_S
    while True:
        tell()
        late = unsent()
        if late and clock() > deadline:
            late = [each for each in late if is_alive(each.rank)]
            if late:
                rank, op, begun, _ = late[0]
                raise TransportError(
                    f"set_active: rank {rank} was left out, but its {op} {begun} has not ended after {SENDING_S} s and "
                    "may still write to this rank; form a new group"
                )
        if not late:
            return
        sleep(_NAP_S)


def is_needed(mask: Sequence[bool], is_gone: Callable[[int], bool]) -> bool:
    """Whether a rank takes no part that is not known to be dead."""
    return any(not active and not is_gone(rank) for rank, active in enumerate(mask))
