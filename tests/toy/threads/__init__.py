"""The toy of docs/adding-a-transport.md."""
