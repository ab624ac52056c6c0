"""GPUs of one NVLink domain: peer-mapped memory, one kernel launch per operation.

`transport` is the face, `engine` one rank's operations, `plan` pure arithmetic, `memory` and `sharing` the region and
how peers map it, `mailbox` the hosts' small exchange, `driver` the CUDA driver's calls.
"""
