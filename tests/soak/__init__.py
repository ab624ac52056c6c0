"""Reconnects, re-formed groups and moved experts for minutes; nothing may grow: `make soak`."""
