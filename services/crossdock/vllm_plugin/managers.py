"""What vLLM asks for handles: one manager per engine process, over the expert-parallel group that vLLM made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from crossdock.common.config import FrameworkConfig
from crossdock.deep_ep.pool import Pool
from crossdock.vllm_plugin import PluginError, compat

_Base: Any = compat.find("All2AllManagerBase")


@dataclass(frozen=True, slots=True, eq=False)
class Link:
    """What the prepare/finalize objects of all layers share.

    Attributes:
        pool: communicators by shape.
        settings: deadline and metrics.
        max_tokens: M, most tokens of a step per rank; 0 where it is not bounded.
        num_experts: E, physical ones; 0 where each call says it.
        topk: K, likewise.
    """

    pool: Pool
    settings: FrameworkConfig
    max_tokens: int = 0
    num_experts: int = 0
    topk: int = 0


class Manager(_Base):  # type: ignore[misc]
    """Base of the three. Raises PluginError where the group spans several hosts."""

    def __init__(self, cpu_group: Any, tcp_store_group: Any = None, device_group: Any = None) -> None:
        super().__init__(cpu_group, tcp_store_group)
        self._settings = FrameworkConfig.from_env()
        on_gpus = torch.cuda.is_available() and self._settings.transport != "cpu"
        if self.internode:
            where = "nvlink" if on_gpus else "cpu"
            raise PluginError(f"crossdock: transport {where} joins the ranks of one host, this group has several")
        self._pool = Pool(cpu_group, self._settings)

    def get_handle(self, kwargs: dict[str, Any]) -> Link:
        """What vLLM's factory hands to the prepare/finalize class."""
        return Link(self._pool, self._settings)

    def destroy(self) -> None:
        """Free every communicator."""
        self._pool.close()


class LowLatencyManager(Manager):
    """In the place of `deepep_low_latency`."""

    def get_handle(self, kwargs: dict[str, Any]) -> Link:
        """Of vLLM's sizes M and E matter, and only where the layers do not say them."""
        return Link(self._pool, self._settings, kwargs["max_num_tokens_per_dp_rank"], kwargs["num_global_experts"])


class HighThroughputManager(Manager):
    """In the place of `deepep_high_throughput`."""


class GraphManager(Manager):
    """In the place of `deepep_v2`."""

    def get_handle(self, kwargs: dict[str, Any]) -> Link:
        """M bounds the rows that the experts get in a CUDA graph."""
        return Link(
            self._pool, self._settings, kwargs["num_max_tokens_per_rank"], kwargs["num_experts"], kwargs["num_topk"]
        )
