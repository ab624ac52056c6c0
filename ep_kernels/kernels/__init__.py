"""One file per kernel; `ls` is the index. Read `ll_dispatch.cuh` first. Compiled by `ep_kernels.jit`."""
