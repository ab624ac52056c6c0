"""One folder = one backend. `base.py` is the contract; a new backend touches its own folder only."""

from ep_kernels.transports.base import create, names

__all__ = ["create", "names"]
