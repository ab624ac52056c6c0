"""What the expert service costs beside its experts: see `__main__.py`."""
