"""Hosts, their links, and the transport that reaches all ranks."""
