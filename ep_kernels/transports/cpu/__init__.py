"""The `cpu` transport: R processes of one host over POSIX shared memory. A real backend, not a mock."""
