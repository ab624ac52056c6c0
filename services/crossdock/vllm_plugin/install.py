"""Which of our classes replace which of vLLM's. compat.py has the names and checks that they exist."""

from __future__ import annotations

from crossdock.vllm_plugin import compat


def install() -> None:
    """Bind our classes to the names of the slots. Idempotent. Raises PluginError where a hook is missing, before
    anything is changed."""
    compat.check()
    from crossdock.vllm_plugin import high_throughput, low_latency, managers  # they need what was checked

    compat.put(
        {
            "deepep_low_latency": (managers.LowLatencyManager, low_latency.LowLatencyFinalizer),
            "deepep_high_throughput": (managers.HighThroughputManager, high_throughput.HighThroughputFinalizer),
            "deepep_v2": (managers.GraphManager, high_throughput.GraphFinalizer),
        }
    )
