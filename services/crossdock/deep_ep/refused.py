"""Parts of DeepEP that Crossdock does not offer. Each call raises an error with its name and the alternative."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, NoReturn

from ep_kernels import ArgumentError, ConfigError

CLASSES = {"HybridEPBuffer": "it is another interface; use Buffer or ElasticBuffer"}
"""Classes of other DeepEP interfaces, and the alternatives."""
MASKS = "a lost rank ends in PeerTimeout, it is not masked; in vLLM CROSSDOCK_VLLM=native answers fault queries"
ENGRAM = "rows of a store are not moved; keep the store in the engine"
PIPELINE = "it moves no activations between pipeline stages; use torch.distributed.send and recv"
SESSIONS = "use ep_kernels.Collectives.all_gather and reduce_scatter, which need no sessions"
BUFFERS = "regions are made for the shapes that come; nothing in them is the caller's"
WAITS = "crossdock_ep_peer_wait_seconds_total shows the awaited ranks, without it"


def refuse(name: str, why: str) -> NoReturn:
    """Raise ArgumentError: this call is not offered, with the reason."""
    raise ArgumentError(name, f"no call of it ({why})", "one")


def unknown(call: str, keywords: Iterable[str]) -> NoReturn:
    """Raise ConfigError: the caller, an engine newer than this module, passes keywords that this call has not."""
    caller = sys._getframe(2).f_globals.get("__name__", "?")
    names = ", ".join(sorted(keywords))
    cure = f"switch off what passes it in {caller}, or take a release of the engine or of Crossdock that fit together"
    raise ConfigError(f"{call}({names})", f"no such keyword: {cure} (docs/engines.md)", f"one from {caller}")


def without(**arguments: tuple[Any, str]) -> None:
    """Arguments that are accepted only with their neutral value. ArgumentError otherwise.

    Args:
        arguments: name -> (value, why it is not offered).
    """
    for name, (value, why) in arguments.items():
        if value is not None and value is not False:
            raise ArgumentError(name, f"{False if value is True else None} ({why})", type(value).__name__)


class RefusedCall:
    """A method that only says why it is not offered: ArgumentError at each call, whatever its arguments."""

    def __init__(self, why: str) -> None:
        self._why = why

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        def call(*_: Any, **__: Any) -> NoReturn:
            refuse(self._name, self._why)

        call.__doc__ = f"ArgumentError: {self._why}."
        return call


class Unsupported:
    """Methods of DeepEP's `Buffer`; ours inherits them."""

    low_latency_update_mask_buffer = RefusedCall(MASKS)
    low_latency_query_mask_buffer = RefusedCall(MASKS)
    low_latency_clean_mask_buffer = RefusedCall(MASKS)
    get_local_buffer_tensor = RefusedCall(BUFFERS)


class UnsupportedElastic:
    """Methods of DeepEP's `ElasticBuffer`; ours inherits them."""

    engram_write = RefusedCall(ENGRAM)
    engram_fetch = RefusedCall(ENGRAM)
    get_engram_storage_size_hint = RefusedCall(ENGRAM)
    pp_set_config = RefusedCall(PIPELINE)
    pp_send = RefusedCall(PIPELINE)
    pp_recv = RefusedCall(PIPELINE)
    get_pp_buffer_size_hint = RefusedCall(PIPELINE)
    create_agrs_session = RefusedCall(SESSIONS)
    destroy_agrs_session = RefusedCall(SESSIONS)
    agrs_new_session = RefusedCall(SESSIONS)
    agrs_set_config = RefusedCall(SESSIONS)
    agrs_get_inplace_tensor = RefusedCall(SESSIONS)
    all_gather = RefusedCall(SESSIONS)
    get_agrs_num_max_session_bytes = RefusedCall(SESSIONS)
    get_agrs_buffer_size_hint = RefusedCall(SESSIONS)
