"""How a region's handle kind is chosen and told; that the kinds work is tests/gpu/test_memory.py."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace

import pytest

from ep_kernels.collectives import CollectiveConfig
from ep_kernels.config import MEMORY_HANDLES, MoEConfig
from ep_kernels.errors import ConfigError, TransportError

pytest.importorskip("cuda.bindings.driver")
from ep_kernels.transports.nvlink.memory import memory
from ep_kernels.transports.nvlink.memory.memory import HandleKind


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> dict[HandleKind, str]:
    """Why each kind is refused on this machine; absent = it works."""
    refusals: dict[HandleKind, str] = {}
    monkeypatch.setattr(memory, "_probed", lambda kind, device: refusals.get(kind, ""))
    return refusals


def test_the_choice_and_its_reason_are_logged(machine: dict[HandleKind, str], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    machine[HandleKind.FABRIC] = "cuMemCreate: CUDA_ERROR_NOT_PERMITTED: operation not permitted"
    for _ in range(2):  # each communicator says so
        assert memory.choose_kind(3) == (HandleKind.POSIX_FD, machine)
    want = (
        f"nvlink: device 3 shares its region by posix_fd handles; refused before: fabric: {machine[HandleKind.FABRIC]}"
    )
    assert caplog.messages == [want, want]
    machine.clear()
    assert memory.choose_kind(0) == (HandleKind.FABRIC, {})
    assert caplog.messages[-1].endswith("by fabric handles; refused before: nothing")


def test_a_kind_may_be_asked_for(machine: dict[HandleKind, str]) -> None:
    assert memory.choose_kind(0, "cuda_ipc") == (HandleKind.CUDA_IPC, {})
    machine[HandleKind.CUDA_IPC] = "no"
    with pytest.raises(TransportError, match="memory_handle='cuda_ipc' does not work on device 3: cuda_ipc: no"):
        memory.choose_kind(3, "cuda_ipc")
    assert memory.choose_kind(3, "auto")[0] is HandleKind.FABRIC


def test_configurations_name_the_kinds_in_their_order() -> None:
    assert ("auto", *(kind.value for kind in HandleKind)) == MEMORY_HANDLES
    group = SimpleNamespace(rank=0, size=1, epoch=0, all_gather=lambda *_: [])
    for make in (
        lambda **fields: CollectiveConfig(group=group, **fields),
        lambda **fields: MoEConfig(group=group, num_experts=4, hidden_size=64, topk=2, max_tokens_per_rank=8, **fields),
    ):
        assert [make(memory_handle=name).memory_handle for name in MEMORY_HANDLES] == list(MEMORY_HANDLES)
        with pytest.raises(ConfigError, match=r"memory_handle: expected one of .*, got 'ipc'"):
            make(memory_handle="ipc")


def test_no_kind_at_all_gives_every_reason(machine: dict[HandleKind, str]) -> None:
    machine.update({kind: f"no {kind.name}" for kind in HandleKind})
    with pytest.raises(TransportError, match="fabric: no FABRIC; posix_fd: no POSIX_FD; cuda_ipc: no CUDA_IPC"):
        memory.choose_kind(0)


@pytest.mark.parametrize("kind", list(HandleKind))
def test_a_region_that_does_not_fit_is_told_with_its_size(monkeypatch: pytest.MonkeyPatch, kind: HandleKind) -> None:
    def call(name: str, *args: object) -> object:
        if name in ("cuMemCreate", "cuMemAlloc"):
            raise TransportError(f"{name}: CUDA_ERROR_OUT_OF_MEMORY: out of memory")
        return {"cuMemGetAllocationGranularity": 2 << 20, "cuMemGetInfo": (3 << 30, 80 << 30)}[name]

    monkeypatch.setattr(memory, "call", call)
    with pytest.raises(TransportError, match=r"of 4\.5 GiB .* device 2, where 3\.0 of 80\.0 GiB are free; be small"):
        memory.allocate(kind, 9 << 29, 2, "be small")


def test_a_handle_that_opens_nowhere_is_told() -> None:
    with pytest.raises(TransportError, match=r"\w"):  # the driver's words: no driver, no device, or a bad handle
        memory._open_elsewhere(bytes(64), 0)


def test_a_process_that_cannot_start_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(memory.sys, "executable", str(tmp_path / "none"))
    with pytest.raises(TransportError, match=r"a process of its own: .*none"):
        memory._open_elsewhere(bytes(64), 0)
