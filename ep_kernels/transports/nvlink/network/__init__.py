"""Rows of ranks of other hosts: boxes, GPUDirect."""
