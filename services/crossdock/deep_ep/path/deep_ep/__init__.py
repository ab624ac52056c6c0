"""`import deep_ep`, for programs that have this folder's parent on their path: Crossdock behind DeepEP's names."""

from typing import NoReturn

from crossdock import deep_ep
from crossdock.deep_ep import *  # noqa: F403
from crossdock.deep_ep import __all__, __version__

__all__ = [*__all__]  # noqa: PLE0604


def __getattr__(name: str) -> NoReturn:
    """AttributeError, in the words of `crossdock.deep_ep`."""
    getattr(deep_ep, name)
    raise AttributeError(name)
