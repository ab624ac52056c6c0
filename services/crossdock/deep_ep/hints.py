"""Sizes that callers query before they make a Buffer. Regions are sized by actual use; these are only hints."""

from __future__ import annotations

from dataclasses import dataclass

NUM_SMS = 20
"""Multiprocessors that callers are told an operation fills; as DeepEP's default."""


@dataclass(frozen=True, slots=True)
class Config:
    """DeepEP's tuning record. Accepted and readable, but not used: the plan of a launch follows from its sizes.

    Attributes:
        num_sms: multiprocessors; not used, unlike the number given to `Buffer.set_num_sms`.
        num_max_nvl_chunked_send_tokens, num_max_nvl_chunked_recv_tokens, num_max_rdma_chunked_send_tokens,
        num_max_rdma_chunked_recv_tokens: chunk sizes of DeepEP's queues, of which Crossdock has none.
    """

    num_sms: int = NUM_SMS
    num_max_nvl_chunked_send_tokens: int = 6
    num_max_nvl_chunked_recv_tokens: int = 256
    num_max_rdma_chunked_send_tokens: int = 6
    num_max_rdma_chunked_recv_tokens: int = 256

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """0: regions are made, and grow, with the steps that come."""
        return 0

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """0: no RDMA here."""
        return 0


def low_latency_bytes(max_tokens: int, hidden: int, num_ranks: int, num_experts: int) -> int:
    """Approximate bytes per rank of a bf16 low-latency communicator of these sizes, with two steps in flight."""
    row = 2 * hidden + 16
    received = -(-num_experts // num_ranks) * num_ranks * max_tokens * row
    travelling = 2 * num_ranks * max_tokens * row
    return 2 * (received + travelling)


def elastic_bytes(max_tokens: int, hidden: int, num_ranks: int, use_fp8_dispatch: bool) -> int:
    """Approximate bytes per rank of steps of DeepEP V2 of these sizes, two in flight, in units of 2 MiB."""
    dispatched = hidden + hidden // 32 if use_fp8_dispatch else 2 * hidden
    size = 2 * num_ranks * max_tokens * (dispatched + 2 * hidden + 256)
    return -(-size >> 21) << 21
