"""What a thread does while its process has no free file descriptor."""

from __future__ import annotations

import os
import resource
import threading
import time
from collections.abc import Callable

_FOR_S = 0.5


def processor_s(thread: threading.Thread, act: Callable[[], object]) -> float:
    """Processor time that the thread takes in half a second after `act`, seconds. There are descriptors again then."""
    limits, clock = resource.getrlimit(resource.RLIMIT_NOFILE), time.pthread_getcpuclockid(thread.ident or 0)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, limits[1]))
    try:
        act()
        began_s = time.clock_gettime(clock)
        time.sleep(_FOR_S)
        return time.clock_gettime(clock) - began_s
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
