"""probe() on fixture file systems: facts as they lie, nothing raised for what is absent."""

from __future__ import annotations

from pathlib import Path

import pytest

from ep_kernels.topology import Nic, NumaNode, parse_cpu_list, peers, probe


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_facts_of_a_two_socket_host(tmp_path: Path) -> None:
    proc = write(
        tmp_path / "proc",
        {
            "sys/kernel/hostname": "node-7\n",
            "sys/kernel/random/boot_id": "b-1\n",
            "meminfo": "MemTotal:       1048576 kB\nMemFree: 5 kB\n",
        },
    )
    port = "class/infiniband/mlx5_0/ports/1"
    sys = write(
        tmp_path / "sys",
        {
            "devices/system/node/node0/cpulist": "0-1,4\n",
            "devices/system/node/node0/meminfo": "Node 0 MemTotal:  512 kB\n",
            "devices/system/node/node10/cpulist": "2-3\n",
            "devices/system/node/node2/cpulist": "\n",
            f"{port}/link_layer": "InfiniBand\n",
            f"{port}/state": "4: ACTIVE\n",
            f"{port}/rate": "400 Gb/sec (4X NDR)\n",
            "class/infiniband/mlx5_0/device/numa_node": "1\n",
            "class/infiniband/rxe0/ports/1/rate": "odd",
        },
    )
    facts = probe(proc, sys)
    assert (facts.hostname, facts.boot_id, facts.memory_bytes) == ("node-7", "b-1", 1 << 30)
    assert facts.numa_nodes == (NumaNode(0, (0, 1, 4), 512 * 1024), NumaNode(2, (), 0), NumaNode(10, (2, 3), 0))
    assert facts.nics == (
        Nic("mlx5_0", 1, "InfiniBand", "ACTIVE", 400.0, 1),
        Nic("rxe0", 1, "", "", 0.0, -1),
    )
    assert facts.num_cpus >= 1
    assert bool(facts.gpus) != bool(facts.no_gpus_reason)


def test_a_host_that_tells_nothing(tmp_path: Path) -> None:
    facts = probe(tmp_path / "no-proc", tmp_path / "no-sys")
    assert facts.hostname
    assert (facts.boot_id, facts.memory_bytes, facts.numa_nodes, facts.nics) == ("", 0, (), ())


def test_this_host() -> None:
    facts = probe()
    assert len(facts.boot_id) == 36
    assert facts.memory_bytes > 1 << 20


@pytest.mark.parametrize(
    ("text", "cpus"),
    [("", ()), ("0", (0,)), ("0-3", (0, 1, 2, 3)), ("1,5-6\n", (1, 5, 6)), ("x,2", (2,)), ("3-", ())],
)
def test_cpu_lists(text: str, cpus: tuple[int, ...]) -> None:
    assert parse_cpu_list(text) == cpus


def test_what_lies_behind_an_address_is_no_part_of_it() -> None:
    """cuda-bindings fill the buffer with blanks before the driver writes into it."""
    for raw in (b"0000:1B:00.0\0" + 19 * b" ", b"00000000:1B:00.0\0\0\0", b"0000:1b:00.0"):
        assert peers.address_of(raw) == "0000:1b:00.0"
