"""In a process with the fake libibverbs: ranks on emulated GPUs of two hosts by `verbs`. Boxes in host memory and in
the GPUs', by each way; what is registered; flushes. Run by test_fake_verbs.py."""

from __future__ import annotations

import ctypes
import errno
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from ep_kernels import jit
from ep_kernels.errors import PeerTimeout, TransportError
from ep_kernels.network import NetworkConfig
from ep_kernels.transports.nvlink import gpu_direct
from ep_kernels.transports.nvlink.boxes import Flush
from ep_kernels.transports.nvlink.gpu_direct import Way
from ep_kernels.types import Layout, Mode
from tests import fake_verbs
from tests.cases import RoutingCase, draw_seed
from tests.emulator.build import build
from tests.emulator.direct import Direct, DirectGpu
from tests.emulator.machine import without_driver
from tests.fake_verbs import Fake
from tests.gpu import loopback
from tests.gpu.loopback_check import check
from tests.gpu.loopback_network import TCP, Joined

pytestmark = pytest.mark.timeout(300)
VERBS = msgspec.structs.replace(TCP, provider="verbs")
FAR_BOXES = 4 * 2 * 2
"""Of two hosts of two ranks: each has an outbox and an inbox for two ranks of the other host, and none of its own."""


@pytest.fixture(autouse=True)
def _no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    without_driver(monkeypatch)


@pytest.fixture(autouse=True)
def fake() -> Iterator[Fake]:
    with fake_verbs.healed() as made:
        yield made


@pytest.fixture(scope="module", autouse=True)
def _kernels() -> None:
    def is_wanted(of: dict[str, str]) -> bool:
        plain = of.get("X", "u8") == "u8" and (of.get("Y", "bf16"), of.get("C", "bf16")) == ("bf16", "bf16")
        return plain and of.get("LAYOUT", "0") == "0"

    wanted = [v for v in jit.network_variants() if is_wanted(dict(v.constants))]
    with ThreadPoolExecutor() as pool:
        list(pool.map(build, (replace(v, loopback=True) for v in wanted)))


class Calls:
    """C functions of a driver that flushes; what they were called with."""

    def __init__(self, status: int = 0) -> None:
        self.entered, self.flushed = list[int](), list[tuple[int, int]]()
        self.status = status
        self._enter = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(self._on_enter)
        self._run = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_int)(self._on_flush)

    def flush(self) -> Flush:
        enter, run = (ctypes.cast(one, ctypes.c_void_p).value for one in (self._enter, self._run))
        assert enter is not None
        assert run is not None
        return Flush(enter, 1234, run)

    def _on_enter(self, context: int) -> int:
        self.entered.append(context)
        return 0

    def _on_flush(self, target: int, scope: int) -> int:
        self.flushed.append((target, scope))
        return self.status


Steps = Callable[..., Any]


@pytest.fixture
def steps() -> Iterator[Steps]:
    """steps(machine, network): some, of a new group, against the reference; the group."""
    made: list[Joined] = []

    def run(machine: Direct, network: NetworkConfig, **fields: Any) -> Any:
        case = RoutingCase(9, 3, 520, (5, 0, 6, 2), "single_none", draw_seed(), max_tokens=6)
        made.append(Joined(machine, 2))
        loop = made[-1](case, mode=Mode.AUTO, layout=Layout.EXPERT_MAJOR, network=network, **fields)
        check(loop, case, Mode.LL)
        check(loop, replace(case, seed=draw_seed()), Mode.HT, phases=(1, 2), backward=True)
        return loop

    yield run
    for joined in made:
        joined.close()


@pytest.mark.parametrize(("provider", "way"), [*[("verbs", way) for way in Way], ("shuffle(verbs)", Way.DMA_BUF)])
def test_steps(provider: str, way: Way, steps: Steps, fake: Fake) -> None:
    """Boxes for ranks of other hosts are registered, and nothing else, in the way that was asked for."""
    machine = Direct()
    network = msgspec.structs.replace(VERBS, provider=provider, gpu_direct=way.value)
    loop = steps(machine, network)
    assert {chosen.way for chosen in machine.chosen} == {way}
    left = fake.left()
    assert left.regions == FAR_BOXES
    assert left.bytes == FAR_BOXES * loop.remotes[0].box_bytes
    assert left.dma_bufs == (FAR_BOXES if way is Way.DMA_BUF else 0)
    assert left.device_regions == (FAR_BOXES if way is Way.PEERMEM else 0)


def test_what_nics_wrote_is_flushed_before_kernels_are_told(steps: Steps) -> None:
    calls = Calls()
    steps(Direct(calls.flush()), VERBS)
    assert calls.flushed
    assert set(calls.flushed) == {(0, 100)}, "the current context, visible to the GPU that owns the memory"
    assert set(calls.entered) == {1234}


def test_without_a_flush_no_kernel_is_told(steps: Steps) -> None:
    """A GPU that is lost in the middle: the wait ends at its deadline, naming who."""
    calls = Calls(status=999)
    with pytest.raises(PeerTimeout) as caught:
        steps(Direct(calls.flush()), VERBS, timeout_s=0.1)
    assert caught.value.phase in ("counts", "payload")


def chosen(network: NetworkConfig = VERBS, **gpu: Any) -> gpu_direct.Chosen:
    boxes, found = gpu_direct.choose(network, 0, DirectGpu(**gpu))
    assert boxes.is_device == (found.way is not Way.STAGED)
    boxes.close()
    return found


def test_the_best_way_is_chosen_and_says_why(fake: Fake) -> None:
    found = chosen()
    assert (found.way, found.why) == (Way.DMA_BUF, "in order")
    assert str(found) == "boxes in GPU memory, by dma-buf (never run on a NIC by the authors): in order"
    fake.set(0, no_dma_buf=errno.EOPNOTSUPP)
    found = chosen(flush=Calls().flush())
    assert found.way is Way.PEERMEM
    words = "verbs: 2097152 bytes of GPU memory cannot be registered by dma-buf: Operation not supported"
    assert found.why == f"dma-buf: network: {words}; flushed"
    fake.set(0, no_peermem=errno.EFAULT)
    found = chosen()
    assert found.way is Way.STAGED
    assert "by dma-buf: Operation not supported; peermem: network: verbs: 2097152 bytes" in found.why
    assert "by address (nvidia-peermem): Bad address" in found.why
    assert str(found).startswith("boxes in pinned host memory: dma-buf: network: verbs")


def test_where_no_nic_reaches_the_gpu_boxes_are_staged() -> None:
    assert chosen(refuses="no order, no flush") == gpu_direct.Chosen(Way.STAGED, "no order, no flush")
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
        steps(Direct(), VERBS)
