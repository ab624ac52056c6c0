"""Tests with the real Megatron-Core, on the CPU: `make test-megatron`. Skipped where it is not installed."""
