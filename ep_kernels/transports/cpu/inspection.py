"""What the transport asks of a host's memory, found out without a group: the bytes of a region and of a mirror."""

from __future__ import annotations

from ep_kernels.config import MoEConfig
from ep_kernels.transports.base import RegionArray, RegionMap
from ep_kernels.transports.cpu import native
from ep_kernels.transports.cpu.geometry import check_rows, geometry_of

HOLDS = {
    "words": "the event count, and how far this rank and its peers have come",
    "dispatch": "places, weights, rows and scales of this rank's tokens",
    "combine": "table, weights, partials and scales for every source",
    "outputs": "expert outputs that combine_input hands out",
}
"""What each array is for."""


def region_map(config: MoEConfig) -> RegionMap:
    """See `base.region_map`: the worst case; a page counts when it is touched. LL and HT share the buffers. Raises
    ConfigError, and TransportError without the native library."""
    geometry = geometry_of(config)
    check_rows(config, geometry)
    parts = native.region_parts(geometry)
    arrays = [RegionArray("words", 0, 1, parts.dispatch, HOLDS["words"])]
    for name in ("dispatch", "combine", "outputs"):
        offset, slot_bytes = getattr(parts, name), getattr(parts, f"{name}_slot")
        arrays.append(RegionArray(name, offset, config.max_in_flight, slot_bytes, HOLDS[name]))
    ll_tokens = config.max_tokens_per_rank if config.ll_max_tokens is None else config.ll_max_tokens
    return RegionMap(tuple(arrays), ll_tokens, parts.mirror)
