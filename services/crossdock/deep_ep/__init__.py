"""DeepEP's Python interface over Crossdock: what vLLM, SGLang and Megatron call as `deep_ep`, on every transport.

    from crossdock.deep_ep import Buffer          # under its own name: hides nothing
    PYTHONPATH="$(crossdock deep-ep)" program     # as `deep_ep`, for programs that import that name

Tensors on a GPU travel by the `nvlink` transport, tensors on the CPU by `cpu`: the same code, so the second is the
executable specification of the first. Both of DeepEP's interfaces are here: `Buffer` (V1) and `ElasticBuffer` (V2).
What differs is listed in docs/engines.md. Names and arguments follow DeepEP (github.com/deepseek-ai/DeepEP, MIT);
nothing else does. Not here: shrink, Engram, pipeline stages, sessions (`refused.py`: each says so, and what to do
instead).
"""

from typing import NoReturn

import torch

import crossdock
from crossdock.deep_ep.buffer import Buffer
from crossdock.deep_ep.elastic_buffer import ElasticBuffer, EPHandle, get_logical_domain_size, get_physical_domain_size
from crossdock.deep_ep.events import EventHandle, EventOverlap
from crossdock.deep_ep.hints import Config
from crossdock.deep_ep.refused import CLASSES

__version__ = f"2.1.0+crossdock.{crossdock.__version__}"
"""The release of DeepEP whose interface this is, and our version."""

topk_idx_t = torch.int64
"""dtype of `topk_idx`."""

__all__ = [
    "Buffer", "Config", "EPHandle", "ElasticBuffer", "EventHandle", "EventOverlap", "__version__",
    "get_logical_domain_size", "get_physical_domain_size", "topk_idx_t",
]  # fmt: skip


def __getattr__(name: str) -> NoReturn:
    """AttributeError, as for any module; for names of DeepEP its message names the alternative."""
    instead = f": {CLASSES[name]}" if name in CLASSES else ""
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{instead}", name=name)
