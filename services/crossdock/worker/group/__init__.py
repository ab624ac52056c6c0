"""One worker's part in the group: its seat, epochs, leases, moves of experts, comparison of weights."""
