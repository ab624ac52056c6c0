"""RDMA without a NIC: a QEMU guest with two Soft-RoCE devices, in which the network's tests and yardsticks run."""
