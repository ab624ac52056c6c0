"""The CUDA driver: modules, launches, streams, graphs of copies."""
