"""The experts that a rank holds: room for them, loading, products."""
