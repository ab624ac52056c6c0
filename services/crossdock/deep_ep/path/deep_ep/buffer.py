"""`deep_ep.buffer`: where some programs look for `Buffer`."""

from crossdock.deep_ep import Buffer, Config, EventHandle, EventOverlap

__all__ = ["Buffer", "Config", "EventHandle", "EventOverlap"]
