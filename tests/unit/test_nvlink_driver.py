"""What a device is compiled for, and which one is refused before a compiler is asked."""

from __future__ import annotations

import pytest

pytest.importorskip("cuda.bindings.driver")

from ep_kernels import jit
from ep_kernels.errors import TransportError
from ep_kernels.transports.nvlink.gpu import driver


def as_capability(monkeypatch: pytest.MonkeyPatch, major: int, minor: int) -> None:
    """Devices answer with this compute capability."""

    def call(name: str, attribute: object, device: int) -> int:
        assert name == "cuDeviceGetAttribute"
        return major if "MAJOR" in str(attribute) else minor

    monkeypatch.setattr(driver, "call", call)


@pytest.mark.parametrize(("capability", "arch"), [((9, 0), "sm_90a"), ((10, 3), "sm_103a"), ((12, 0), "sm_120a")])
def test_the_architecture_of_a_device(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], arch: str) -> None:
    as_capability(monkeypatch, *capability)
    assert driver.architecture(0) == arch


def test_a_gpu_older_than_hopper_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    as_capability(monkeypatch, 8, 0)
    with pytest.raises(TransportError, match=r"device 3: expected compute capability 9.0 \(Hopper\) or newer, got 8.0"):
        driver.architecture(3)


def test_a_gpu_with_too_little_shared_memory_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A workstation's Blackwell: HT's combine fills a multiprocessor of a data centre's."""
    monkeypatch.setattr(driver, "call", lambda name, attribute, device: 99 << 10)
    compiler = jit.Compiler(None)
    wanted = "device 1: expected a device whose blocks may have 230000 bytes .* as ht_combine takes here, got one with"
    with pytest.raises(TransportError, match=wanted):
        driver.load(compiler, jit.combine_variant("ht", 1, "bf16", "bf16"), 1, 230_000)
