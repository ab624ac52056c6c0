"""In the guest: how many of so many lives of a pair of ends do not survive their close. Prints LIVES and DEATHS.

python tests/rxe/closing.py PROVIDER LIVES
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import inside  # noqa: F401  makes ep_kernels importable without torch

from tests.unit.network_ends import ARRIVED, End, join

MESSAGES = 40


def live(provider: str) -> None:
    """Two ends meet, speak both ways, and close: the first while the other still sends."""
    with End(0, provider=provider) as one, End(1, provider=provider) as two:
        join(one, two)
        for imm in range(MESSAGES):
            one.push(1, 0, 4096, imm)
            two.push(0, 0, 4096, imm)
        two.until(lambda events: (0, ARRIVED, MESSAGES - 1) in events)
        one.close()


def main(provider: str, lives: int) -> None:
    """Each in a process of its own."""
    statuses = []
    for number in range(lives):
        begun = time.monotonic()
        child = os.fork()
        if child == 0:
            status = 1
            try:
                live(provider)
                status = 0
            finally:
                os._exit(status)
        statuses.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        if number < 3 or statuses[-1]:
            print(f"life {number}: {statuses[-1]} after {time.monotonic() - begun:.1f} s", flush=True)
    print(f"LIVES {lives} DEATHS {sum(status != 0 for status in statuses)} {statuses}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
