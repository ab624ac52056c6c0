"""The CUDA kernels on the CPU: their own source, compiled as C++ and run thread by thread, so that a machine without
a GPU tests what they compute and that they do not wait for ever.

A block is a thread of the machine; its CUDA threads are fibers, which go on until they need one another. Shared memory
is poisoned; bulk copies happen as late as they may. What it does not show: speed, memory order between GPUs, tearing.

`build` compiles kernels, `machine` and `direct` run those of a loop-back group, `silent` is a driver that launches
nothing, `cuda` a GPU for programs that ask torch for one.
"""
