"""Checkpoints on disk: families, names, formats, one expert's bytes at a time."""
