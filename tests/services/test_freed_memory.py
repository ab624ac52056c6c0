"""Memory that a worker frees: a burst goes back to the system, and a steady load costs no page faults."""

from __future__ import annotations

import subprocess
import sys

from crossdock.worker.telemetry.freed_memory import KEPT_BYTES, Watch

CODE = """
import resource, time
from crossdock.worker.telemetry.freed_memory import KEPT_BYTES, bound_freed_memory, resident_bytes

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def message():
    return bytes(memoryview(bytearray(1 << 20)))

bound_freed_memory()
small = [bytearray(100) for _ in range(10_000)]
for _ in range(20):
    message()
before = faults()
for _ in range(200):
    message()
print((faults() - before) / 200)
start = resident_bytes()
held = []
for _ in range(96):
    held.append(message())
    held.append(bytearray(2000))
burst = resident_bytes() - start
del held[::2]
until = time.monotonic() + 20
while resident_bytes() - start > KEPT_BYTES and time.monotonic() < until:
    time.sleep(0.05)
print(burst >> 20, (resident_bytes() - start) <= KEPT_BYTES)
"""


def test_a_burst_is_given_back_and_a_steady_load_reuses_its_blocks() -> None:
    ended = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=60, check=True)
    faults, burst, given_back = ended.stdout.split()
    assert float(faults) < 32  # of 512 where each block is new
    assert int(burst) >= 90  # of 96 and a little, some in blocks that were free
    assert given_back == "True"


def test_what_a_burst_still_used_when_it_came_is_given_back_later() -> None:
    """Five times after the last growth, at growing distances; and nothing more."""
    given_back: list[int] = []
    now = 100 << 20
    watch = Watch(lambda: given_back.append(number), now)
    for number in range(10):  # noqa: B007  (which of them)
        watch.check(lambda: now)
    assert given_back == []
    grown = now + KEPT_BYTES + 1
    for number in range(400):  # noqa: B007
        watch.check(lambda: grown)
    assert given_back == [0, 8, 16, 32, 64, 128]
