"""In a process with the fake libibverbs: ranks on emulated GPUs of two hosts by `verbs`. Boxes in host memory and in
the GPUs', by each way; what is registered; flushes. Run by test_fake_verbs.py."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from ep_kernels.errors import PeerTimeout, TransportError
from ep_kernels.network import NetworkConfig
from ep_kernels.transports.nvlink.network import gpu_direct
from ep_kernels.transports.nvlink.network.gpu_direct import BoxAccess
from tests import fake_verbs
from tests.emulator.direct import Direct, DirectGpu
from tests.emulator.direct_steps import FAR_BOXES, Calls, Steps
from tests.fake_verbs import Fake
from tests.gpu import loopback
from tests.gpu.loopback_network import TCP

pytest_plugins = ("tests.emulator.direct_steps",)
pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("no_driver", "built_kernels")]
VERBS = msgspec.structs.replace(TCP, provider="verbs")


@pytest.fixture(autouse=True)
def fake() -> Iterator[Fake]:
    with fake_verbs.healed() as made:
        yield made


@pytest.mark.parametrize(
    ("provider", "access"), [*[("verbs", access) for access in BoxAccess], ("shuffle(verbs)", BoxAccess.DMA_BUF)]
)
def test_steps(provider: str, access: BoxAccess, steps: Steps, fake: Fake) -> None:
    """Boxes for ranks of other hosts are registered, and nothing else, in the way that was asked for."""
    machine = Direct(fake)
    network = msgspec.structs.replace(VERBS, provider=provider, gpu_direct=access.value)
    loop = steps(machine, network)
    assert {chosen.access for chosen in machine.chosen} == {access}
    left = fake.left()
    assert left.regions == FAR_BOXES
    assert left.bytes == FAR_BOXES * loop.remotes[0].box_bytes
    assert left.dma_bufs == (FAR_BOXES if access is BoxAccess.DMA_BUF else 0)
    assert left.device_regions == (FAR_BOXES if access is BoxAccess.PEERMEM else 0)


def test_writes_are_as_short_as_the_device_wants(steps: Steps, fake: Fake) -> None:
    """Rows of 2 KB leave by descriptors of 4; of 2 KB a box would take more than an operation may have."""
    for device in (0, 1):
        fake.set(device, max_message=4096)
    assert steps(Direct(fake), VERBS).remotes[0].record().stripe == 4096
    for device in (0, 1):
        fake.set(device, max_message=4095)
    with pytest.raises(TransportError, match=r"writes 2048 bytes at once: 2097152 bytes for each rank .* 1048576"):
        steps(Direct(fake), VERBS)


def test_what_nics_wrote_is_flushed_before_kernels_are_told(steps: Steps) -> None:
    calls = Calls()
    steps(Direct(fake_verbs.load(), calls.flush()), VERBS)
    assert calls.flushed
    assert set(calls.flushed) == {(0, 100)}, "the current context, visible to the GPU that owns the memory"
    assert set(calls.entered) == {1234}


def test_without_a_flush_no_kernel_is_told(steps: Steps) -> None:
    """A GPU that is lost in the middle: the wait ends at its deadline, naming who."""
    calls = Calls(status=999)
    with pytest.raises(PeerTimeout) as caught:
        steps(Direct(fake_verbs.load(), calls.flush()), VERBS, timeout_s=0.1)
    assert caught.value.phase in ("counts", "payload")


def chosen(network: NetworkConfig = VERBS, **gpu: Any) -> gpu_direct.Chosen:
    boxes, found = gpu_direct.choose(network, 0, DirectGpu(fake_verbs.load(), **gpu))
    assert boxes.is_device == (found.access is not BoxAccess.STAGED)
    boxes.close()
    return found


def test_the_best_way_is_chosen_and_says_why(fake: Fake) -> None:
    found = chosen()
    assert (found.access, found.why) == (BoxAccess.DMA_BUF, "in order")
    assert str(found) == "boxes in GPU memory, by dma-buf (never run on a NIC by the authors): in order"
    fake.set(0, no_dma_buf=errno.EOPNOTSUPP)
    found = chosen(flush=Calls().flush())
    assert found.access is BoxAccess.PEERMEM
    words = "verbs: 2097152 bytes of GPU memory cannot be registered by dma-buf: Operation not supported"
    assert found.why == f"dma-buf: network: {words}; flushed"
    fake.set(0, no_peermem=errno.EFAULT)
    found = chosen()
    assert found.access is BoxAccess.STAGED
    assert "by dma-buf: Operation not supported; peermem: network: verbs: 2097152 bytes" in found.why
    assert "by address (nvidia-peermem): Bad address" in found.why
    assert str(found).startswith("boxes in pinned host memory: dma-buf: network: verbs")


def test_where_no_nic_reaches_the_gpu_boxes_are_staged() -> None:
    assert chosen(refuses="no order, no flush") == gpu_direct.Chosen(BoxAccess.STAGED, "no order, no flush")
    assert chosen(TCP).why == "provider tcp sends from host memory"
    off = msgspec.structs.replace(VERBS, gpu_direct="off")
    assert chosen(off).why == "network.gpu_direct is off"


@pytest.mark.parametrize(
    ("fields", "gpu", "words"),
    [
        ({"gpu_direct": "dma-buf"}, {}, "dma-buf cannot be had: dma-buf: network: verbs: 2097152 bytes of GPU memory"),
        ({"gpu_direct": "peermem"}, {"refuses": "no order"}, "peermem cannot be had: no order"),
        ({"gpu_direct": "peermem", "provider": "tcp"}, {}, "peermem cannot be had: provider tcp sends from host"),
    ],
)
def test_a_way_that_is_asked_for_and_not_there_is_an_error(
    fields: dict[str, Any], gpu: dict[str, Any], words: str, fake: Fake
) -> None:
    fake.set(0, no_dma_buf=errno.EOPNOTSUPP)
    with pytest.raises(TransportError, match=f"nvlink: network.gpu_direct {words}"):
        chosen(msgspec.structs.replace(VERBS, **fields), **gpu)


def test_refused_memory_is_a_named_error(steps: Steps, fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loopback, "_CONNECT_S", 0.5)  # so long those whose memory is not refused wait
    fake.set(0, refused=errno.ENOMEM, granted=4)  # those of the choices of four ranks
    with pytest.raises(
        TransportError, match=r"cannot be joined: verbs: .* of GPU memory cannot be registered by dma-buf"
    ):
        steps(Direct(fake), VERBS)
