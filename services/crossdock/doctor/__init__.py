"""`crossdock doctor`: looks for what would keep a group from working here, before it does.

findings   what a finding is
hardware   the facts of a host, judged (pure)
system     limits of this process and of the kernel, read and judged
reach      the control plane, its members, other hosts; the network of the workers' config
trial      a real dispatch and combine between processes, of one host or of two; rank: one of them
run        all of it, in order, and how it is shown
"""
