"""Benchmarks: cases x backends -> csv + run.json + a table. `python -m benchmarks.run --help`."""
