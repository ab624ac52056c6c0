"""Parts of DeepEP that Crossdock does not offer. Each call raises an error with its name and the alternative."""

from __future__ import annotations

from typing import Any, NoReturn

from ep_kernels import ArgumentError

CLASSES = {
    "ElasticBuffer": "it is DeepEP V2's; in vLLM CROSSDOCK_VLLM=native serves the backend deepep_v2",
    "HybridEPBuffer": "it is another interface; use Buffer",
}
"""Classes of other DeepEP interfaces, and the alternatives."""
MASKS = "a lost rank ends in PeerTimeout, it is not masked; in vLLM CROSSDOCK_VLLM=native answers fault queries"
WAITS = "crossdock_ep_peer_wait_seconds_total shows the awaited ranks, without it"


def refuse(name: str, why: str) -> NoReturn:
    """Raise ArgumentError: this call is not offered, with the reason."""
    raise ArgumentError(name, f"no call of it ({why})", "one")


def without(**arguments: tuple[Any, str]) -> None:
    """Arguments that are accepted only with their neutral value. ArgumentError otherwise.

    Args:
        arguments: name -> (value, why it is not offered).
    """
    for name, (value, why) in arguments.items():
        if value is not None and value is not False:
            raise ArgumentError(name, f"{False if value is True else None} ({why})", type(value).__name__)


class Unsupported:
    """The methods; `Buffer` inherits them."""

    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """ArgumentError."""
        refuse("low_latency_update_mask_buffer", MASKS)

    def low_latency_query_mask_buffer(self, mask_status: Any) -> None:
        """ArgumentError."""
        refuse("low_latency_query_mask_buffer", MASKS)

    def low_latency_clean_mask_buffer(self) -> None:
        """ArgumentError."""
        refuse("low_latency_clean_mask_buffer", MASKS)

    def get_local_buffer_tensor(
        self, dtype: Any, size: Any = None, offset: int = 0, use_rdma_buffer: bool = False
    ) -> NoReturn:
        """ArgumentError."""
        refuse("get_local_buffer_tensor", "regions are made for the shapes that come; nothing in them is the caller's")
