"""As over_hosts, where a host adds its own partials first and returns one row per token."""

from __future__ import annotations

from benchmarks.backends import Setup
from benchmarks.backends.crossdock import Crossdock
from benchmarks.backends.over_hosts import network_of
from ep_kernels import CombineOrder


def create(setup: Setup) -> Crossdock:
    """See `backends.load`."""
    network = network_of(setup.rank, setup.case.ranks)
    return Crossdock(setup, network, combine_order=CombineOrder.DOMAIN, two_hop_tokens=0)
