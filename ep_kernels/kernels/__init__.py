"""The kernels, compiled by `ep_kernels.jit`. `ls` is the index; read `ll/dispatch.cuh` first.

    ll/, ht/      low latency, high throughput: a file per kernel (roles and `__global__`), one per phase
    routing/      where rows go: experts, positions, counts, the layout of what arrives
    layout/       where things lie in a region; low-latency lines
    common/       instructions, waits, signals, work shared among warps, numbers
    abi.py        the records and the byte map that host and GPU share

Includes are relative to this folder. Editors: clangd reads compile_flags.txt; `types.h` and `variant.h` (written by
`make editor`) stand in for those that `jit` writes for each variant, `editor.h` for what NVRTC knows by itself.
"""
