"""Which of several control planes decides: election by a Kubernetes Lease."""
