"""Random harm to a group under load: `make chaos`."""
