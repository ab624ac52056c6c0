"""Where the host side of the data plane waits, and what ends each wait: a rank may not hang.

Kernels wait in common/wait.cuh alone. The host has the loops below; a new one goes through one of them, or is listed
here with its deadline.
"""

from __future__ import annotations

import re

from tests.house.tree import ROOT, files, text_of

WAITS = {
    "network/dialer.py": "2 x until the caller's deadline, abort, give_up",
    "network/listener.py": "3 x its own thread: connections that ask; a table of descriptors that is full; its end",
    "network/network.py": "2 x connect; what was sent leaves: until the caller's deadline, abort, give_up",
    "network/native/clock.hpp": "5 x the pauses themselves",
    "network/native/proxy.cpp": "8 x the proxy thread: waits for no rank; its end",
    "network/native/proxy.hpp": "2 x Hold: until its limit",
    "transports/cpu/native/group.cpp": "2 x look_for_peer: until its timeout, abort, signals",
    "transports/cpu/native/helper.cpp": "4 x the helper thread, which waits for no rank, and for its step",
    "transports/cpu/native/helper.hpp": "1 x the helper thread: until kHelperSpinNs",
    "transports/cpu/native/member.cpp": "4 x pauses of wait_any and wait_for_peer; a look at processes",
    "transports/cpu/native/member.hpp": "2 x wait_for_proxy: until the deadline, abort, give_up, signals",
    "transports/nvlink/copy_engines/copies.py": "4 x threads of copies: until the kernels' deadline; their end",
    "transports/nvlink/gpu/driver.py": "1 x the end of a stream: until its patience",
    "transports/nvlink/calls/left_out.py": "1 x leave_out: until SENDING_S",
    "transports/nvlink/memory/mailbox.py": "3 x until the deadline, abort, give_up; wait_for_peer: its timeout",
    "transports/nvlink/memory/sharing.py": "3 x until the deadline; its thread; a look at a descriptor",
    "transports/nvlink/memory/domain.py": "2 x its own thread; its end",
    "transports/nvlink/native/operation.cpp": "1 x numbers of a kernel: until that ends, which has the deadline",
}
"""By file below ep_kernels: how many, which, and what ends them. Benchmarks apart."""
FOLDERS = ("ep_kernels/network", "ep_kernels/transports")
NATIVE = re.compile(
    r"\b(?:nanosleep|nap|sched_yield|yield|relax|usleep|epoll_wait|wait_for|pthread_cond_wait|pthread_join)\("
    r"|SYS_futex, &mine|(?<![\w>.])poll\((?!int)|pthread_mutex_trylock\("
)
PYTHON = re.compile(r"time\.sleep\b|_(?:lock|woken)\.wait\(|select\.poll\(|\.select\(|(?<!\")\.join\(\)")


def waits_in(name: str, text: str) -> int:
    lines = [line.split("//")[0] if name.endswith("pp") else line for line in text.splitlines()]
    return sum(len((NATIVE if name.endswith("pp") else PYTHON).findall(line)) for line in lines)


def test_every_wait_of_the_host_is_listed() -> None:
    found = {}
    for path in files(*FOLDERS):
        if path.suffix in {".py", ".cpp", ".hpp"} and not path.name.startswith("bench"):
            found[str(path.relative_to(ROOT / "ep_kernels"))] = waits_in(path.name, text_of(path))
    listed = {name: int(text.split(" ")[0]) for name, text in WAITS.items()}
    assert {name: count for name, count in found.items() if count} == listed
