"""Requests become steps of the group, on the thread that owns the communicator."""
