"""Tests with SGLang's own dispatchers, on the CPU: `make test-sglang`. Skipped where its wheel is not on the path."""
