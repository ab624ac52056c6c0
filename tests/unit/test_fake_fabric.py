"""Memory of GPUs by `libfabric`, in a process whose libfabric says that it reaches such memory; and on this machine."""

from __future__ import annotations

import platform

import pytest

from ep_kernels.network import NetworkConfig
from ep_kernels.transports.nvlink.network import gpu_direct
from ep_kernels.transports.nvlink.network.gpu_direct import BoxAccess
from tests import fake_fabric
from tests.emulator.direct import DirectGpu

pytestmark = pytest.mark.skipif(bool(fake_fabric.missing()), reason=fake_fabric.missing())


class NoNic:
    """None has to know the memory."""

    def device(self, address: int, num_bytes: int) -> None:
        """See `Nic`."""

    def no_device(self, address: int) -> None:
        """See `Nic`."""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="fibers are written for x86-64")
def test_ranks_on_emulated_gpus() -> None:
    fake_fabric.library().run("-m", "pytest", "-q", "tests/fake_fabric/inside.py")


def test_sockets_reach_no_gpu() -> None:
    network = NetworkConfig(provider=fake_fabric.PROVIDER, listen="127.0.0.1:0", advertise="127.0.0.1")
    found = gpu_direct.probe(network, DirectGpu(NoNic()))
    assert found.access is BoxAccess.STAGED
    assert "tcp;ofi_rxm does not reach memory of GPUs here (FI_HMEM: No data available)" in found.why
