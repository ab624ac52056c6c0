"""Grouped GEMMs over experts in fp8 and MXFP4, for GPUs: see `products.py`. Everything here but `support.py` imports
Triton, which torch brings on machines with NVIDIA GPUs."""
