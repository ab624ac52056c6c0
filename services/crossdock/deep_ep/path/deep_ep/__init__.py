"""`import deep_ep`, for programs that have this folder's parent on their path: Crossdock behind DeepEP's names."""

from crossdock.deep_ep import Buffer, Config, EventHandle, EventOverlap, __version__

__all__ = ["Buffer", "Config", "EventHandle", "EventOverlap", "__version__"]
