"""`import deep_ep`, for programs that have this folder's parent on their path: Crossdock behind DeepEP's names."""

from typing import NoReturn

from crossdock import deep_ep
from crossdock.deep_ep import *  # noqa: F403

__all__ = list(deep_ep.__all__)


def __getattr__(name: str) -> NoReturn:
    """AttributeError, in the words of `crossdock.deep_ep`."""
    getattr(deep_ep, name)
    raise AttributeError(name)
