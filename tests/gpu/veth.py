"""Two processes that put themselves into network namespaces of their own, joined by one cable. No program is needed,
but the right to do so."""

from __future__ import annotations

import ctypes
import os
from typing import Any

from crossdock.demo.netlink import Netlink

_CLONE_NEWNET = 0x40000000
_CABLE = "cd0"


def join(rank: int, store: Any) -> str:
    """Into a namespace of this rank (0 or 1), with a cable to the other one's; this rank's address. Raises OSError
    where that is not allowed."""
    libc = ctypes.CDLL(None, use_errno=True)
    moved = libc.unshare(_CLONE_NEWNET) == 0
    reason = os.strerror(ctypes.get_errno())
    store.set(f"moved-{rank}", str(os.getpid() if moved else 0))
    pids = [int(store.get(f"moved-{other}")) for other in range(2)]
    if 0 in pids:
        raise OSError(f"unshare: {reason}")
    with Netlink() as line:
        if rank == 0:
            try:
                line.cable(_CABLE, _CABLE, pids[1])
            finally:
                store.set("plugged", "1")
        store.wait(["plugged"])
        address = f"10.79.0.{rank + 1}"
        line.address(_CABLE, f"{address}/24")
        line.up("lo")
        line.up(_CABLE)
    return address
