"""Grouped GEMMs over quantised experts, for GPUs: see `products.py`. Everything here but `support.py` imports
Triton, which torch brings on machines with NVIDIA GPUs."""
