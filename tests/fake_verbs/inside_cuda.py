"""In a process with the fake libibverbs, on a GPU: boxes in its memory, which the fake reads and writes by copies of
the driver beside the kernels, in place of a NIC; dma-bufs that the driver exports; its flush. Run by
tests/gpu/test_gpu_direct.py."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import msgspec
import pytest
import torch

from ep_kernels.errors import TransportError
from ep_kernels.network import NetworkConfig
from ep_kernels.transports.nvlink.gpu.driver import call
from ep_kernels.transports.nvlink.network import gpu_direct
from ep_kernels.transports.nvlink.network.boxes import Boxes, Flush
from ep_kernels.transports.nvlink.network.gpu_boxes import CudaBoxes, CudaGpu, flush_of
from ep_kernels.transports.nvlink.network.gpu_direct import BoxAccess, Chosen
from ep_kernels.types import Layout, Mode
from tests import fake_verbs
from tests.cases import cases, draw_seed
from tests.fake_verbs import Counts, Driver
from tests.gpu.loopback import Gpu
from tests.gpu.loopback_check import check
from tests.gpu.loopback_network import TCP, Joined

pytestmark = pytest.mark.gpu(1)
_UNIT = 2 << 20
_REFUSALS = ("cuMemGetHandleForAddressRange", "GPU_DIRECT_RDMA", "order of writes")
"""Of a driver, or of a GPU, that does not do it."""


def driver() -> Driver:
    """Of the current context."""
    library = ctypes.CDLL("libcuda.so.1")
    enter, copy, wait = (
        ctypes.cast(getattr(library, name), ctypes.c_void_p).value
        for name in ("cuCtxSetCurrent", "cuMemcpyAsync", "cuStreamSynchronize")
    )
    beside = 1  # CU_STREAM_NON_BLOCKING
    return Driver(enter, int(call("cuCtxGetCurrent")), copy, wait, int(call("cuStreamCreate", beside)))


class ToldBoxes(CudaBoxes):
    """The fake knows them as a device's."""

    def take(self, address: int, num_bytes: int) -> int:
        """See `Boxes`."""
        fd = super().take(address, num_bytes)
        fake_verbs.load().device(address, num_bytes, driver())
        self._told = [*getattr(self, "_told", []), address]
        return fd

    def close(self) -> None:
        """See `Boxes`."""
        for address in getattr(self, "_told", []):
            fake_verbs.load().no_device(address)
        super().close()


class ToldGpu(CudaGpu):
    """Flushes even where the GPU promises order, if it is asked to."""

    def __init__(self, flushes: bool) -> None:
        super().__init__(0)
        self._flushes = flushes

    def order(self) -> tuple[Flush | None, str]:
        """See `GpuMemory`."""
        return (flush_of(), "flushed") if self._flushes else super().order()

    def boxes(self, access: BoxAccess, flush: Flush | None) -> Boxes:
        """See `GpuMemory`."""
        return super().boxes(access, flush) if access is BoxAccess.STAGED else ToldBoxes(0, access, flush)


class Machine(Gpu):
    """The GPU, and how its ranks' boxes were chosen."""

    def __init__(self, flushes: bool) -> None:
        self.device = torch.device("cuda", 0)
        self.num_sms = torch.cuda.get_device_properties(0).multi_processor_count
        self._compiler = jit_compiler()
        self._gpu, self.chosen = ToldGpu(flushes), list[Chosen]()

    def boxes(self, network: NetworkConfig, rank: int) -> Boxes:
        """See `Machine`."""
        boxes, chosen = gpu_direct.choose(network, rank, self._gpu)
        self.chosen.append(chosen)
        return boxes


def jit_compiler() -> object:
    from ep_kernels import jit
    from ep_kernels.tuning import cache_dir

    return jit.Compiler(cache_dir(None))


@pytest.fixture(autouse=True)
def _context() -> Iterator[None]:
    torch.zeros(1, device="cuda")
    yield
    assert fake_verbs.load().left() == Counts()


def test_what_the_gpu_says() -> None:
    """Shown: it differs from GPU to GPU."""
    print("order of writes by NICs:", CudaGpu(0).order())
    print("look:", CudaGpu(0).probe())


@pytest.mark.parametrize("access", [BoxAccess.PEERMEM, BoxAccess.DMA_BUF])
def test_boxes_in_gpu_memory(access: BoxAccess) -> None:
    """Zeros, anywhere in the range; the driver's dma-buf is a descriptor."""
    boxes = CudaBoxes(0, access, None)
    address = boxes.reserve(4 * _UNIT)
    with closing(boxes):
        try:
            fd = boxes.take(address + 2 * _UNIT, _UNIT)
        except TransportError as error:
            pytest.skip(str(error))
        assert (fd >= 0) == (access is BoxAccess.DMA_BUF)
        seen = (ctypes.c_uint8 * 16)(*[7] * 16)
        call("cuMemcpyDtoH", ctypes.addressof(seen), address + 2 * _UNIT, 16)
        assert bytes(seen) == bytes(16)
    boxes.close()


@pytest.mark.parametrize("layout", [Layout.EXPERT_MAJOR, Layout.RANK_MAJOR, Layout.FLAT])
@pytest.mark.parametrize("flushes", [False, True])
@pytest.mark.parametrize("access", BoxAccess)
def test_steps(access: BoxAccess, flushes: bool, layout: Layout) -> None:
    machine = Machine(flushes)
    joined = Joined(machine)
    network = msgspec.structs.replace(TCP, provider="verbs", gpu_direct=access.value)
    steps = cases(4, 9, hidden_size=136, num_experts=9, topk=3)
    try:
        loop = joined(steps[0], mode=Mode.AUTO, layout=layout, network=network)
        assert {chosen.access for chosen in machine.chosen} == {access}
        for case in steps:
            check(loop, case, Mode.LL)
        check(loop, replace(steps[0], seed=draw_seed()), Mode.HT, phases=(1, 2), backward=True)
    except TransportError as error:
        if access is BoxAccess.STAGED or not any(word in str(error) for word in _REFUSALS):
            raise
        pytest.skip(str(error))
    finally:
        joined.close()
