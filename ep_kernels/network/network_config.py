"""What a rank needs to reach ranks of other hosts. Reads no environment and no file."""

from __future__ import annotations

import re

import msgspec

from ep_kernels.errors import ConfigError

PROVIDERS = ("tcp", "shuffle(tcp)")
"""What carries bytes between two hosts. `shuffle(p)` is `p` with writes delayed and reordered at random: for tests."""
MAX_LANES = 16


class NetworkConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The network of one rank. Checked when built; raises ConfigError naming the field.

    Ranks of one group may differ in all but `provider`. Ranks of one `domain` use shared memory among themselves.
    """

    provider: str = "tcp"
    """tcp: sockets, nothing to install. shuffle(tcp): the same, writes delayed and reordered, for tests."""
    listen: str = "0.0.0.0:0"
    """address:port of the data port. Port 0: any free one. The data port takes members of the group only, and its bytes
    are plain text: keep it inside the cluster's network."""
    advertise: str = ""
    """Address at which ranks of other hosts reach the data port. Empty: the one `listen` names; for every interface,
    the address of the interface of the default route."""
    devices: tuple[str, ...] = ()
    """Network interfaces to use, the first that has an address wins. Empty: chosen by `advertise`."""
    domain: str = ""
    """Name of the set of ranks that share memory. Empty: those of one boot of one host, one PID namespace and one
    user. Containers of one pod without a shared PID namespace are two domains."""
    lanes: int = 1
    """Connections for data to each peer, 1 to 16. More help where one connection cannot fill the network."""
    spin_us: int = 20
    """How long the proxy thread looks for work before it sleeps, microseconds. 0: it sleeps at once. A sleeping proxy
    adds a wake-up to the next message."""
    cpus: tuple[int, ...] = ()
    """Processors that the proxy thread may run on. Empty: any."""
    seed: int = 0
    """shuffle: of its choices."""
    drop_after: int = 0
    """shuffle: number of writes, on average, after which a connection is dropped. 0: none is."""

    def __post_init__(self) -> None:
        _require(self.provider in PROVIDERS, "provider", f"one of {PROVIDERS}", self.provider)
        _require(_is_endpoint(self.listen), "listen", "address:port, port 0 to 65535", self.listen)
        _require(not self.advertise or _is_host(self.advertise), "advertise", "an address without port", self.advertise)
        _require(0 < self.lanes <= MAX_LANES, "lanes", f"1 to {MAX_LANES}", self.lanes)
        _require(0 <= self.spin_us <= 1_000_000, "spin_us", "0 to 1000000 microseconds", self.spin_us)
        _require(all(0 <= cpu < 4096 for cpu in self.cpus), "cpus", "numbers of processors", self.cpus)
        _require(len(self.domain) <= 256, "domain", "at most 256 characters", self.domain)
        _require(0 <= self.seed < 1 << 63, "seed", "0 to 2^63-1", self.seed)
        _require(0 <= self.drop_after < 1 << 31, "drop_after", "0 to 2^31-1", self.drop_after)


def split(endpoint: str) -> tuple[str, int]:
    """(address, port) of "address:port"; brackets around an IPv6 address are dropped."""
    host, _, port = endpoint.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _is_endpoint(text: str) -> bool:
    host, colon, port = text.rpartition(":")
    return bool(colon) and _is_host(host) and re.fullmatch(r"\d{1,5}", port) is not None and int(port) < 65536


def _is_host(text: str) -> bool:
    return re.fullmatch(r"\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+", text) is not None


def _require(ok: bool, field: str, expected: str, got: object) -> None:
    if not ok:
        raise ConfigError(f"network.{field}", expected, got)
