"""vLLM's MoE layers over Crossdock: an entry point of `vllm.general_plugins`, without effect unless selected.

    CROSSDOCK_VLLM=deep_ep   vLLM finds our `deep_ep` where no other is installed; its own classes call it
    CROSSDOCK_VLLM=native    our classes stand in the places of vLLM's DeepEP backends

and then `--all2all-backend deepep_low_latency | deepep_high_throughput` (native: also `deepep_v2`, which is HT in CUDA
graphs). This package is the only one that imports vLLM, `compat.py` the only file that knows vLLM's private names.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from crossdock.vllm_plugin.errors import PluginError

__all__ = ["PluginError", "register"]


def register() -> None:
    """vLLM calls this in each of its processes, once or more. Touches no GPU. Raises PluginError, ConfigFileError."""
    from crossdock.common.config import FrameworkConfig

    chosen = FrameworkConfig.from_env().vllm
    if chosen == "deep_ep":
        _offer_deep_ep()
    elif chosen == "native":
        from crossdock.vllm_plugin.install import install

        install()


def _offer_deep_ep() -> None:
    """Append our `deep_ep` to the path. It never hides an installed one: that is an error."""
    folder = str(Path(__file__).parent.parent / "deep_ep" / "path")
    found = importlib.util.find_spec("deep_ep")
    if found is None:
        sys.path.append(folder)
    elif not str(found.origin).startswith(folder):
        raise PluginError(
            f"CROSSDOCK_VLLM=deep_ep: expected no other deep_ep, got {found.origin}; uninstall it, choose "
            f'CROSSDOCK_VLLM=native, or hide it by PYTHONPATH="$(crossdock deep-ep)"'
        )
