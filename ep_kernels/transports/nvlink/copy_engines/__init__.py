"""Collectives, by kernels or copy engines."""
