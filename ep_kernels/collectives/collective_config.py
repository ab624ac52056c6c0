"""Every knob of the collectives, with unit, default and reason. Reads no environment and no file."""

from __future__ import annotations

from typing import Any

import msgspec

from ep_kernels.config import MEMORY_HANDLES, Group
from ep_kernels.errors import ConfigError

_OWN = ("group", "kernel_cache_dir")
_MAX_BYTES = 1 << 46


class CollectiveConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Configuration of one Collectives object. Checked when built; raises ConfigError naming the field.

    All ranks of a group must give equal values, `group` and `kernel_cache_dir` apart; a mismatch is refused at
    bring-up.
    """

    group: Any
    """A `Group`: `ep_kernels.groups.TorchGroup`, `StoreGroup`, or the caller's own. Only a group with a process group
    (`TorchGroup`) can fall back to torch.distributed."""
    transport: str = "cpu"
    """Folder name under `ep_kernels/transports`."""
    pool_bytes: int = 256 << 20
    """Bytes of registered memory that `Collectives.empty` hands out. GPUs allocate all of it at bring-up; the CPU only
    what is touched. 0: no registered memory."""
    staging_bytes: int = 32 << 20
    """Bytes of each of the `max_in_flight` staging slots, through which shards of unregistered tensors travel. A larger
    shard travels in several rounds, which costs one handshake each. At least 4096."""
    max_in_flight: int = 2
    """Operations that may be under way at once, 1..16. One more first completes the oldest. 2 overlaps one operation
    with the next."""
    timeout_s: float = 10.0
    """Deadline of every wait, seconds. A healthy operation takes micro- to milliseconds; 10 s forgives a host that
    pages."""
    memory_handle: str = "auto"
    """GPUs: how peers map a region: see `MoEConfig.memory_handle`. Where the one that is asked for does not work,
    torch.distributed serves (`fallback`)."""
    num_sms: int | None = None
    """GPUs: default of the operations' `num_sms`, the multiprocessors that one operation may fill. 0: copy engines
    alone (all-gather). None: as many as keep the links busy. Results do not depend on it."""
    fallback: bool = True
    """Whether torch.distributed serves what the transport cannot. False: a TransportError or ArgumentError instead."""
    exact_sums: bool = True
    """Whether all sums have the bits of the definition (fp32, ascending rank, rounded once) and the deadline. False:
    with `fallback` and a process group, torch.distributed makes those for which it was measured faster, its own way."""
    kernel_cache_dir: str | None = None
    """Folder for kernels that GPUs compile at first use, shared by processes. None: `.cache/crossdock/kernels` in the
    home of this process's user."""

    def __post_init__(self) -> None:
        group = self.group
        _require(isinstance(group, Group), "group", "an object like `Group`", type(group).__name__)
        _require(0 <= group.rank < group.size, "group", "0 <= rank < size", (group.rank, group.size))
        _require(isinstance(self.transport, str), "transport", "a str", self.transport)
        for name, low, high in (
            ("pool_bytes", 0, _MAX_BYTES),
            ("staging_bytes", 4096, _MAX_BYTES),
            ("max_in_flight", 1, 16),
        ):
            value = getattr(self, name)
            _require(type(value) is int and low <= value <= high, name, f"an int in {low}..{high}", value)
        timed = isinstance(self.timeout_s, int | float) and 0 < self.timeout_s <= 3600
        _require(timed, "timeout_s", "seconds in (0, 3600]", self.timeout_s)
        handles = f"one of {MEMORY_HANDLES}"
        _require(self.memory_handle in MEMORY_HANDLES, "memory_handle", handles, self.memory_handle)
        counted = self.num_sms is None or (type(self.num_sms) is int and 0 <= self.num_sms < 1 << 16)
        _require(counted, "num_sms", "None or an int in 0..65535", self.num_sms)
        for name in ("fallback", "exact_sums"):
            _require(type(getattr(self, name)) is bool, name, "a bool", getattr(self, name))
        folder = self.kernel_cache_dir is None or isinstance(self.kernel_cache_dir, str)
        _require(folder, "kernel_cache_dir", "None or a path as str", self.kernel_cache_dir)

    def shared_fields(self) -> dict[str, str]:
        """Every field that must be equal on all ranks, as text."""
        return {name: str(getattr(self, name)) for name in self.__struct_fields__ if name not in _OWN}


def _require(ok: bool, field: str, expected: str, got: object) -> None:
    if not ok:
        raise ConfigError(field, expected, got)
