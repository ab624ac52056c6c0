"""The fault hooks of vLLM's managers: asked after each step, named, recovered from."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ep_kernels import PeerTimeout
from tests import tools
from tests.vllm.faults import one_misses_a_step
from tests.worlds import World

tools.require("vllm")


@pytest.mark.parametrize("backend", ["ll", "ht", "v2"])
def test_a_rank_that_missed_a_step_comes_back(four: World, backend: str) -> None:
    results = four.run(one_misses_a_step, backend, timeout_s=600)
    assert [before for before, _, _ in results] == [False] * 4
    assert [mask for _, mask, _ in results] == [[0, 1, 0, 0], [0, 0, 0, 0], [0, 1, 0, 0], [0, 1, 0, 0]]
    assert [after for _, _, after in results] == [False] * 4


def test_a_fault_is_what_the_host_knows_when_vllm_reads_it() -> None:
    """vLLM asks behind a step, copies what it gets to the host, and reads that when the step has ended."""
    from crossdock.vllm_plugin.managers import Manager

    words = [torch.zeros(1, dtype=torch.int64) for _ in range(3)]
    manager = Manager.__new__(Manager)
    lost = PeerTimeout(peer=2, op="combine", phase="payload", expected=2, seen=1, waited_s=1.0)

    def check() -> None:
        if words[1]:
            raise lost

    comms = [SimpleNamespace(fault=lambda word=word: lost if word else None, check=check) for word in words]
    manager._pool = SimpleNamespace(communicators=lambda: comms, size=4, rank=0)  # type: ignore[assignment]
    assert not manager.query_fault()
    asked = manager.query_fault().to("cpu", non_blocking=True)
    assert not asked.item()
    words[1][0] = 1
    assert asked.item() is True
    assert manager.query_fault()
    assert manager.query_active_mask().tolist() == [0, 0, 1, 0]
    comms.clear()
    assert not manager.query_fault()


@pytest.mark.parametrize(
    ("backend", "rank", "says"),
    [
        ("LowLatencyManager", 0, ["deepep_v2"]),
        ("LowLatencyManager", 1, []),
        ("HighThroughputManager", 0, ["deepep_v2"]),
        ("GraphManager", 0, []),
    ],
)
def test_a_backend_that_was_measured_slower_warns_at_start(
    monkeypatch: pytest.MonkeyPatch, backend: str, rank: int, says: list[str]
) -> None:
    from crossdock.vllm_plugin import managers

    warned: list[str] = []
    monkeypatch.setattr(managers._Base, "__init__", lambda self, *_: setattr(self, "internode", False))
    monkeypatch.setattr(managers, "Pool", lambda *_: SimpleNamespace(rank=rank))
    monkeypatch.setattr(managers.log, "warning", warned.append)
    chosen: Any = getattr(managers, backend)
    chosen(None)
    assert [word for line in warned for word in says if f"--all2all-backend {word}" in line] == says
    assert len(warned) == len(says)
