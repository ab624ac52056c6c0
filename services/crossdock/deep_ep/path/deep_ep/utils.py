"""`deep_ep.utils`: where training frameworks look for the events."""

from crossdock.deep_ep import EventHandle, EventOverlap

__all__ = ["EventHandle", "EventOverlap"]
