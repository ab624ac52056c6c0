"""Communicators of this process beside each other on one GPU, on several streams.

Their kernels wait for peers while they hold multiprocessors. Where those of two do not fit together and one rank begins
with the one, its peer with the other, each waits for the other until its deadline. In which order peers begin is not
known here; what does not fit is, and one RuntimeWarning says so, where a communicator runs on another stream than
others do.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from typing import Any

_lock = threading.RLock()  # a garbage collection within may close a communicator, which forgets itself
_used: dict[int, weakref.WeakKeyDictionary[Any, tuple[int, int]]] = {}
_told: set[int] = set()


def note(communicator: Any, device: int, stream: int, num_blocks: int, num_sms: int) -> None:
    """A communicator launches kernels of up to `num_blocks` blocks, one on a multiprocessor, on this stream of a device
    with `num_sms`, and on no other at the same time. RuntimeWarning, once for a device."""
    with _lock:
        used = _used.setdefault(device, weakref.WeakKeyDictionary())
        used[communicator] = stream, num_blocks
        blocks = dict[int, int]()
        for where, count in list(used.data.values()):  # type: ignore[attr-defined]
            blocks[where] = max(count, blocks.get(where, 0))
        if len(blocks) < 2 or sum(blocks.values()) <= num_sms or device in _told:
            return
        _told.add(device)
    warnings.warn(
        f"cuda:{device}: communicators are used on {len(blocks)} streams, with kernels of up to "
        f"{' + '.join(map(str, blocks.values()))} blocks that wait for peers, on {num_sms} multiprocessors; where they "
        "may run at the same time, all ranks must launch them in the same order, or each waits for the other until its "
        "deadline: give them num_sms that fit together, or one stream (docs/torch.md, streams)",
        RuntimeWarning,
        stacklevel=2,
    )


def forget(communicator: Any, device: int) -> None:
    """It has no kernel under way, and is on no stream until its next one."""
    with _lock:
        if device in _used:
            _used[device].pop(communicator, None)
