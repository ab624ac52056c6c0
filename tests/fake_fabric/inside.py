"""In a process whose libfabric reaches memory of GPUs: ranks on emulated GPUs of two hosts. Boxes in host memory and in
the GPUs', by each way; what is registered, what endpoints are told, flushes. Run by test_fake_fabric.py."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from ep_kernels.errors import TransportError
from ep_kernels.network import NetworkConfig
from ep_kernels.transports.nvlink.network import gpu_direct
from ep_kernels.transports.nvlink.network.gpu_direct import BoxAccess
from tests import fake_fabric
from tests.emulator.direct import Direct, DirectGpu
from tests.emulator.direct_steps import FAR_BOXES, Calls, Steps
from tests.fake_fabric import PROVIDER, Fake
from tests.gpu import loopback
from tests.gpu.loopback_network import TCP

pytest_plugins = ("tests.emulator.direct_steps",)
pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("no_driver", "built_kernels")]
FABRIC = msgspec.structs.replace(TCP, provider=PROVIDER)
LANES = 4 * 2
"""Of two hosts of two ranks: an endpoint for each rank of the other host."""


@pytest.fixture(autouse=True)
def fake() -> Iterator[Fake]:
    with fake_fabric.healed() as made:
        yield made


@pytest.mark.parametrize("access", BoxAccess)
def test_steps(access: BoxAccess, steps: Steps, fake: Fake) -> None:
    """Boxes for ranks of other hosts are registered as the GPU's, in the access that was asked for; no endpoint that
    carries them may call CUDA."""
    machine, before = Direct(fake), fake.left().endpoints
    steps(machine, msgspec.structs.replace(FABRIC, gpu_direct=access.value))
    assert {chosen.access for chosen in machine.chosen} == {access}
    left = fake.left()
    assert left.dma_bufs == (FAR_BOXES if access is BoxAccess.DMA_BUF else 0)
    assert left.device_regions == (FAR_BOXES if access is BoxAccess.PEERMEM else 0)
    assert left.endpoints - before == (0 if access is BoxAccess.STAGED else LANES)


def test_what_nics_wrote_is_flushed_before_kernels_are_told(steps: Steps, fake: Fake) -> None:
    calls = Calls()
    steps(Direct(fake, calls.flush()), FABRIC)
    assert calls.flushed
    assert set(calls.flushed) == {(0, 100)}


def chosen(network: NetworkConfig = FABRIC, **gpu: Any) -> gpu_direct.Chosen:
    return gpu_direct.probe(network, DirectGpu(fake_fabric.load(), **gpu))


def test_the_best_way_is_chosen_and_says_why(fake: Fake) -> None:
    found = chosen()
    assert (found.access, found.why) == (BoxAccess.DMA_BUF, "in order")
    fake.set(no_dma_buf=errno.EOPNOTSUPP)
    found = chosen(flush=Calls().flush())
    assert found.access is BoxAccess.PEERMEM
    words = (
        "libfabric: 2097152 bytes of GPU memory cannot be registered by dma-buf (libfabric 1.20 or newer): Operation"
    )
    assert found.why.startswith(f"dma-buf: network: {words}")
    assert found.why.endswith("; flushed")
    fake.set(no_address=errno.EFAULT)
    found = chosen()
    assert found.access is BoxAccess.STAGED
    assert (
        "peermem: network: libfabric: 2097152 bytes of GPU memory cannot be registered by address (FI_HMEM" in found.why
    )


@pytest.mark.parametrize(
    ("faults", "words"),
    [
        ({"no_hmem": 1}, "tcp;ofi_rxm does not reach memory of GPUs here (FI_HMEM: No data available)"),
        ({"is_old": 1}, "tcp;ofi_rxm may call CUDA while it moves bytes of a GPU, which can wait for ever ("),
        ({"calls_cuda": errno.EOPNOTSUPP}, "FI_OPT_CUDA_API_PERMITTED: Operation not supported"),
        ({"no_peer": errno.EOPNOTSUPP}, "tcp;ofi_rxm lets no NIC reach memory of GPUs (FI_OPT_FI_HMEM_P2P: Operation"),
    ],
)
def test_a_provider_that_does_not_reach_the_gpu_is_staged(faults: dict[str, int], words: str, fake: Fake) -> None:
    fake.set(**faults)
    found = chosen()
    assert found.access is BoxAccess.STAGED
    assert words in found.why
    with pytest.raises(TransportError, match=r"gpu_direct dma-buf cannot be had: dma-buf: network: libfabric: "):
        chosen(msgspec.structs.replace(FABRIC, gpu_direct="dma-buf"))


def test_an_option_that_a_provider_does_not_know_is_no_reason(fake: Fake) -> None:
    """It moves bytes without CUDA: how, is its own affair."""
    fake.set(no_peer=errno.ENOPROTOOPT)
    assert chosen().access is BoxAccess.DMA_BUF


def test_refused_memory_is_a_named_error(steps: Steps, fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loopback, "_CONNECT_S", 0.5)  # so long those whose memory is not refused wait
    fake.set(no_dma_buf=errno.ENOMEM, granted=4)  # those of the choices of four ranks
    with pytest.raises(
        TransportError, match=r"cannot be joined: libfabric: .* of GPU memory cannot be registered by dma-buf"
    ):
        steps(Direct(fake), FABRIC)
