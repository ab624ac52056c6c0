"""Collectives: one contract suite for every transport that has them, faults, fallback, FSDP."""
