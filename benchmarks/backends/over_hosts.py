"""Crossdock with its ranks on two hosts: labels of one machine's processes, which share nothing but the loop-back
device. Half of the ranks on each."""

from __future__ import annotations

from benchmarks.backends import Setup
from benchmarks.backends.crossdock import Crossdock
from ep_kernels.network import NetworkConfig


def network_of(rank: int, ranks: int) -> NetworkConfig:
    """Of a rank of two hosts."""
    return NetworkConfig(listen="127.0.0.1:0", domain=f"host {2 * rank // ranks}")


def create(setup: Setup) -> Crossdock:
    """See `backends.load`."""
    return Crossdock(setup, network_of(setup.rank, setup.case.ranks))
