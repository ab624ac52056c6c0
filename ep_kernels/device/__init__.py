"""What kernels are made of (`*.cuh`, no `__global__`), and `abi`: the byte maps that host and GPU share."""
