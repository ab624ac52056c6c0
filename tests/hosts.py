"""Groups over several hosts, in one suite: transports by names that say the network and who lives where.

"cpu" is the transport alone. "cpu-tcp-halves": a group over two hosts, the provider `tcp` between them. The hosts are
labels of one machine's ranks (`NetworkConfig.domain`), which share nothing but the loop-back device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ep_kernels.network import NetworkConfig
from ep_kernels.types import CombineOrder
from tests.tools import lack

SPLITS: dict[str, Callable[[int, int], int]] = {
    "halves": lambda rank, size: 2 * rank // size,
    "first": lambda rank, size: min(rank, 1),
    "odd": lambda rank, size: rank % 2,
    "each": lambda rank, size: rank,
}
"""Host of a rank: two halves; rank 0 alone; ranks that alternate; a host for each."""
PROVIDERS = {"tcp": "tcp", "shuffle": "shuffle(tcp)", "libfabric": "libfabric(tcp;ofi_rxm)"}
NEEDS = {"libfabric": ["libfabric"]}
"""What the machine must have for a provider (tests/tools.py)."""
FAKE = {"verbs": "verbs", "shuffled_verbs": "shuffle(verbs)"}
"""In ranks that have loaded the fake libibverbs (tests/fake_verbs), and in no suite of its own."""
LANES = {"lanes": 3}
"""Names of providers with several lanes: how many, over TCP."""
SHORT = ("cpu-shuffle-halves",)
GPUS = ("nvlink-tcp-halves", "nvlink-shuffle-halves")
HERE = [provider for provider in PROVIDERS if not lack(*NEEDS.get(provider, ()))]
FULL = tuple(f"cpu-{provider}-{split}" for provider in HERE for split in SPLITS)


def is_over_hosts(name: str) -> bool:
    """Whether a transport's name says a group over several hosts."""
    return "-" in name


def lacks(name: str, overrides: dict[str, Any]) -> bool:
    """Whether the options ask for what GPUs do not do over a network."""
    return name in GPUS and overrides.get("combine_order", CombineOrder.RANK) is not CombineOrder.RANK


def overrides_of(name: str, rank: int, size: int, seed: int = 0) -> dict[str, Any]:
    """Fields of a MoEConfig for the transport of this name."""
    transport, _, rest = name.partition("-")
    if not rest:
        return {"transport": transport}
    provider, _, split = rest.partition("-")
    return {
        "transport": transport,
        "network": NetworkConfig(
            provider={**PROVIDERS, **FAKE}.get(provider, "tcp"),
            lanes=LANES.get(provider, 1),
            listen="127.0.0.1:0",
            domain=f"host {SPLITS[split](rank, size)}",
            seed=seed,
        ),
    }
