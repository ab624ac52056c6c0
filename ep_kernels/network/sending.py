"""The wait until what was sent to ranks of other hosts has left this rank's memory."""

from __future__ import annotations

import time
from collections.abc import Callable

from ep_kernels.errors import PeerTimeout

STAYS = "what this rank has for it does not leave"
"""Why a wait for the own proxy has failed: its thread, or that rank, takes nothing."""
_NAP_S = 50e-6


def settled(is_quiet: Callable[[int], bool], ranks: int, timeout_s: float, is_over: Callable[[], bool]) -> int:
    """Wait until nothing is still to be sent to these ranks (a bit each), at most so long, and not once `is_over`.
    Those for which something is, at the deadline."""
    until = time.monotonic() + timeout_s
    while not is_quiet(ranks):
        if is_over():
            return 0
        if time.monotonic() > until:
            return sum(1 << rank for rank in range(ranks.bit_length()) if ranks >> rank & 1 and not is_quiet(1 << rank))
        time.sleep(_NAP_S)
    return 0


def require(unsent: int, op: str, timeout_s: float) -> None:
    """Raise PeerTimeout where `settled` has found a rank that takes nothing."""
    if unsent:
        peer = (unsent & -unsent).bit_length() - 1
        raise PeerTimeout(peer=peer, op=op, phase="credit", expected=0, seen=0, waited_s=timeout_s, end=STAYS)
