"""vLLM gets its handles from a manager: one per engine process, over vLLM's expert-parallel group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from crossdock.common.config import FrameworkConfig
from crossdock.common.log import get
from crossdock.common.transports import installed, of_device
from crossdock.deep_ep.pool import Pool
from crossdock.vllm_plugin import compat
from crossdock.vllm_plugin.errors import PluginError
from ep_kernels import EpError, PeerTimeout

log = get(__name__)

_Base: Any = compat.find("All2AllManagerBase")


@dataclass(frozen=True, slots=True, eq=False)
class LayerContext:
    """Shared by the prepare/finalize objects of all layers.

    Attributes:
        settings: deadline and metrics.
        max_tokens: M, most tokens of a step per rank.
        num_experts: E, physical ones; 0 where each call says it.
        topk: K, likewise.
    """

    pool: Pool
    settings: FrameworkConfig
    max_tokens: int = 0
    num_experts: int = 0
    topk: int = 0


class FaultWord:
    """What vLLM takes for a scalar on the device, whose copy to the host it starts behind a step and reads when that
    has ended. Kernels write what has failed to pinned memory, so nothing is copied: it is read then."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def to(self, *_: object, **__: object) -> FaultWord:
        """Itself: nothing is launched."""
        return self

    def item(self) -> bool:
        """Whether an operation has failed so far."""
        return any(comm.fault() is not None for comm in self._pool.communicators())

    __bool__ = item


class Manager(_Base):  # type: ignore[misc]
    """Base of the three. Raises PluginError where the group spans several hosts and no network joins them.

    Attributes:
        slower: what was measured of this backend where another one was faster (docs/vllm.md); rank 0 logs it at start.
    """

    slower: ClassVar[str] = ""

    def __init__(self, cpu_group: Any, tcp_store_group: Any = None, device_group: Any = None) -> None:
        super().__init__(cpu_group, tcp_store_group)
        self._settings = FrameworkConfig.from_env()
        named = self._settings.transport
        facts = installed().get(named) if named else of_device("cuda" if torch.cuda.is_available() else "cpu")
        if self.internode and facts is not None and not (facts.cross_host and self._settings.network):
            cure = "set `network` in the file that CROSSDOCK_CONFIG names" if facts.cross_host else "use one host"
            raise PluginError(
                f"crossdock: transport {facts.name} joins ranks of one host, this group has several: {cure}"
            )
        self._pool = Pool(cpu_group, self._settings)
        if self.slower and self._pool.rank == 0:
            log.warning(f"crossdock: {self.slower}")
        self.support_fault_tolerance = True  # vLLM's runner asks `query_fault` after each step, graphs or not

    def get_handle(self, kwargs: dict[str, Any]) -> LayerContext:
        """Arguments that vLLM's factory passes to the prepare/finalize class; the model and its attention exist by
        then."""
        for builder in compat.part_halves():
            log.info(f"crossdock: {builder} makes attention metadata anew for each half of a batch")
        return LayerContext(self._pool, self._settings, *self._sizes(kwargs))

    def _sizes(self, kwargs: dict[str, Any]) -> tuple[int, ...]:
        return ()

    def query_fault(self) -> FaultWord:
        """vLLM's runner asks behind each step, and reads the answer when the step has ended: it then discards the
        step's tokens and raises."""
        return FaultWord(self._pool)

    def query_active_mask(self) -> torch.Tensor:
        """int32 [R], 1 = a rank that was lost or silent. Logs the reason; vLLM then handles the failure."""
        lost = [0] * self._pool.size
        for comm in self._pool.communicators():
            try:
                comm.check()
            except PeerTimeout as error:
                log.error(f"crossdock: rank {self._pool.rank}: {error}")  # vLLM's log shows the text alone
                lost[error.peer] = 1
            except EpError as error:
                log.error(f"crossdock: rank {self._pool.rank}: {error}")
        return torch.tensor(lost, dtype=torch.int32, device="cpu")

    def clean_buffers(self) -> None:
        """Make all communicators usable again after a fault that all ranks have survived. Collective; captured
        graphs stay valid. PeerTimeout where a rank does not take part."""
        self._pool.recover()

    def destroy(self) -> None:
        self._pool.close()


class LowLatencyManager(Manager):
    """Replaces `deepep_low_latency`."""

    slower = (
        "deepep_low_latency: --all2all-backend deepep_v2 was faster: a decode step 3.96 ms against 4.42, "
        "a prefill of 32,768 tokens per rank 330 ms against 5199 (2 H200, Qwen3-30B-A3B shapes, 16 layers)"
    )

    def _sizes(self, kwargs: dict[str, Any]) -> tuple[int, ...]:
        """M and E from vLLM's sizes, where the layers do not give them."""
        return kwargs["max_num_tokens_per_dp_rank"], kwargs["num_global_experts"]


class HighThroughputManager(Manager):
    """Replaces `deepep_high_throughput`."""

    slower = (
        "deepep_high_throughput runs without CUDA graphs; --all2all-backend deepep_v2 has them and was faster: "
        "a decode step 3.96 ms against 35.5 (2 H200, Qwen3-30B-A3B shapes, 16 layers)"
    )

    def _sizes(self, kwargs: dict[str, Any]) -> tuple[int, ...]:
        """M; vLLM's factory gives none here."""
        return (compat.most_tokens(),)


class GraphManager(Manager):
    """Replaces `deepep_v2`."""

    def _sizes(self, kwargs: dict[str, Any]) -> tuple[int, ...]:
        """M bounds the rows that the experts get in a CUDA graph."""
        return kwargs["num_max_tokens_per_rank"], kwargs["num_experts"], kwargs["num_topk"]
