"""Hostile callers against real processes, while a well-behaved client compares every answer: `make attack`."""
