"""Crossdock: a mixture-of-experts model's experts, served expert-parallel."""

__version__ = "0.1.0"
