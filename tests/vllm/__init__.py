"""Tests with the real vLLM, on the CPU: `make test-vllm`. Skipped where vLLM is not installed."""
