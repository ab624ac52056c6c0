"""Which of our classes take which places in vLLM. What those are called, and whether they are there: compat.py."""

from __future__ import annotations

from crossdock.vllm_plugin import compat


def install() -> None:
    """Put our classes in the places of the slots. Idempotent. Raises PluginError where a hook is missing: nothing has
    been changed then."""
    compat.check()
    from crossdock.vllm_plugin import high_throughput, low_latency, managers  # they need what was checked

    compat.put(
        {
            "deepep_low_latency": (managers.LowLatencyManager, low_latency.LowLatencyFinalizer),
            "deepep_high_throughput": (managers.HighThroughputManager, high_throughput.HighThroughputFinalizer),
            "deepep_v2": (managers.GraphManager, high_throughput.GraphFinalizer),
        }
    )
