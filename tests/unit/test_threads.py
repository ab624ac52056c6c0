"""Threads of a worker: how many a product uses in a thread beside the event loop, and what the default is."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import pytest

from crossdock.common.config import WorkerConfig
from crossdock.host.supervisor import share_cpus, usable_cpus
from crossdock.worker.group.threads import in_thread

_PRODUCT = """
import asyncio, os, torch
from crossdock.worker.group.threads import in_thread

def product():
    before = len(os.listdir("/proc/self/task"))
    x = torch.randn(64, 64)
    torch.mm(x, x)
    return len(os.listdir("/proc/self/task")) - before, torch.get_num_threads()

async def main():
    return await in_thread("engine", product)

torch.set_num_threads({num_threads})
print(asyncio.run(main()))
"""


@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_product_beside_the_event_loop_uses_the_configured_threads(num_threads: int) -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("expected 2 processors, on which a product would start a second thread, got 1")
    script = _PRODUCT.format(num_threads=num_threads)  # a process of its own: this one may have a team already
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.strip() == str((num_threads - 1, num_threads)), done.stdout + done.stderr


_END = """
import sys, threading, torch
from crossdock.cli import main
from crossdock.worker import process

def spin():
    x = torch.randn(64, 64)
    while True:
        x.clone()

def run_worker(config):
    for _ in range(8):
        threading.Thread(target=spin, daemon=True).start()
    print("stopped")
    {last}

process.run_worker = run_worker
sys.argv = ["crossdock", "worker", "--set", "model=/m"]
main()
"""


_ENDS = [("return 0", 0, ""), ("raise OSError('no room')", 1, "error: no room\n")]


@pytest.mark.parametrize(("last", "code", "said"), _ENDS)
def test_a_worker_ends_orderly_while_threads_are_in_torch(last: str, code: int, said: str) -> None:
    """As while experts load: the interpreter's own end would abort the process. Its last words are the error."""
    script = _END.format(last=last)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (code, "stopped\n", said)


class _Memory:
    """What the frame of a function holds."""


def test_what_raised_beside_the_event_loop_is_freed_without_the_cycle_collector() -> None:
    held: list[weakref.ref[_Memory]] = []

    def fail() -> None:
        memory = _Memory()
        held.append(weakref.ref(memory))
        raise ValueError("broken")

    async def ask() -> None:
        try:
            await in_thread("connect-test", fail)
        except ValueError:
            return
        raise AssertionError("did not raise")

    async def main() -> bool:
        await ask()
        for thread in threading.enumerate():
            if thread.name == "connect-test":
                thread.join()
        await asyncio.sleep(0)
        return held[0]() is None

    gc.collect()
    gc.disable()
    try:
        assert asyncio.run(main())
    finally:
        gc.enable()


@pytest.mark.parametrize(("num_cpus", "num_workers", "share"), [(2, 4, 1), (2, 1, 1), (64, 4, 15), (7, 2, 2)])
def test_workers_of_a_host_share_its_processors(num_cpus: int, num_workers: int, share: int) -> None:
    workers = [WorkerConfig(model="m", local_rank=rank) for rank in range(num_workers)]
    assert [worker.torch_threads for worker in share_cpus(workers, num_cpus)] == [share] * num_workers


def test_configured_threads_and_workers_on_gpus_get_no_share() -> None:
    chosen = [WorkerConfig(model="m", torch_threads=5), WorkerConfig(model="m", transport="nvlink")]
    assert [worker.torch_threads for worker in share_cpus(chosen, 64)] == [5, 1]


def test_a_quota_of_the_cgroup_or_of_a_parent_bounds_the_processors(tmp_path: Path) -> None:
    everything = len(os.sched_getaffinity(0))
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    assert usable_cpus(proc, cgroups) == everything  # neither is mounted
    (proc / "self").mkdir(parents=True)
    (proc / "self/cgroup").write_text("0::/pods/mine\n")
    own = cgroups / "pods/mine"
    own.mkdir(parents=True)
    (own / "cpu.max").write_text("max 100000\n")
    assert usable_cpus(proc, cgroups) == everything
    (cgroups / "pods/cpu.max").write_text("150000 100000\n")
    assert usable_cpus(proc, cgroups) == 1
    (cgroups / "pods/cpu.max").write_text("50000 100000\n")
    assert usable_cpus(proc, cgroups) == 1
