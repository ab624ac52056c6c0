"""Threads beside the event loop of a server. None ends silently: `Liveness` names those that an error has ended."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

from crossdock.common import log as logs

log = logs.get(__name__)

_PAUSE_S = 0.25
"""After a turn that failed."""
_ended: list[str] = []


class HelperThread(threading.Thread):
    """A daemon thread that calls `target(*args)`; its end by an error is logged, and /livez fails from then on."""

    def __init__(self, name: str, target: Callable[..., object], *args: Any, **kwargs: Any) -> None:
        super().__init__(name=name, target=target, args=args, kwargs=kwargs, daemon=True)

    def run(self) -> None:
        try:
            super().run()
        except BaseException:
            _ended.append(self.name)
            log.exception("a thread ended; this is a bug", thread=self.name)


def ended() -> list[str]:
    return list(_ended)


def go_on(turn: Callable[[], object]) -> NoReturn:
    """Call `turn` for ever. One that fails, for want of a descriptor for instance, is logged; the next begins a while
    later."""
    while True:
        try:
            turn()
        except Exception as error:
            log.seldom("a thread continues after an error", thread=threading.current_thread().name, error=error)
            time.sleep(_PAUSE_S)
