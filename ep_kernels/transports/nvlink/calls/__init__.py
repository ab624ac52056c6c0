"""Dispatch and combine on GPUs: plans, arguments, outputs, streams, and repeated calls."""
