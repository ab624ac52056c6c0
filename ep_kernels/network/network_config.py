"""What a rank needs to reach ranks of other hosts. Reads no environment and no file."""

from __future__ import annotations

import re

import msgspec

from ep_kernels.errors import ConfigError

_CARRIER = r"(tcp|verbs|libfabric(\([a-z0-9_;-]{1,40}\))?)"
PROVIDER_PATTERN = rf"^({_CARRIER}|shuffle\({_CARRIER}\))$"
"""What carries bytes between two hosts. `libfabric(p)` names libfabric's provider p, as `efa` or `tcp;ofi_rxm`;
`shuffle(p)` is `p` with writes delayed and reordered at random: for tests."""
MTUS = (0, 256, 512, 1024, 2048, 4096)
GPU_DIRECT = ("auto", "dma-buf", "peermem", "off")
MAX_LANES = 16
ACK_TIMEOUT, RETRIES = 14, 6
"""verbs: of a queue pair. 4.096 us << 14 until a packet is repeated, six times; not seven, which Soft-RoCE takes for
ever. By InfiniBand's rule each may take four times as long."""


class NetworkConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The network of one rank. Checked when built; raises ConfigError naming the field.

    Ranks of one group may differ in all but `provider`. Ranks of one `domain` use shared memory among themselves.
    """

    provider: str = "tcp"
    """tcp: sockets, nothing to install. verbs: InfiniBand and RoCE by libibverbs. libfabric: EFA, Slingshot (cxi), or
    what else libfabric finds; libfabric(NAME): this provider of it. shuffle(...): one of these, writes delayed and
    reordered, for tests."""
    listen: str = "0.0.0.0:0"
    """address:port of the data port. Port 0: any free one. The data port takes members of the group only; its bytes are
    neither encrypted nor authenticated: name an address of a network of its own (docs/security.md)."""
    advertise: str = ""
    """Address at which ranks of other hosts reach the data port. Empty: the one `listen` names; for every interface,
    the address of the interface of the default route."""
    devices: tuple[str, ...] = ()
    """Devices to use, the first that can be used wins. tcp: network interfaces, empty: chosen by `advertise`. verbs:
    RDMA devices, as mlx5_0 or mlx5_0:1 with a port, empty: the first active port. libfabric: names of its domains."""
    domain: str = ""
    """Name of the set of ranks that share memory. Empty: those of one boot of one host, one PID namespace and one
    user. Containers of one pod without a shared PID namespace are two domains."""
    lanes: int = 1
    """Connections for data to each peer, 1 to 16; of two ranks the smaller number is used. More help where one
    connection cannot fill the network."""
    spin_us: int = 20
    """How long the proxy thread looks for work before it sleeps, microseconds. 0: it sleeps at once. A sleeping proxy
    adds a wake-up to the next message. Where GPUs push it is awake for 500 at least; to what a graph pushes later it
    adds up to a quarter of the pause, a millisecond at most (4 after a second)."""
    cpus: tuple[int, ...] = ()
    """Processors that the proxy thread may run on. Empty: any."""
    gid_index: int = -1
    """verbs: index of the port's GID. -1: RoCE v2 with an IPv4 address if there is one; on InfiniBand the first."""
    traffic_class: int = 0
    """verbs: of the packets, 0 to 255; on RoCE its upper 6 bits are the DSCP, by which switches choose a lossless
    queue. 0: the default queue, since which one is lossless is the site's choice."""
    service_level: int = 0
    """verbs: 0 to 15; InfiniBand maps it to a virtual lane, RoCE with VLANs to a priority. 0: the default one."""
    mtu: int = 0
    """verbs: bytes of a packet, 256 to 4096. 0: the port's; the smaller one of two ends is used."""
    gpu_direct: str = "auto"
    """How NICs reach boxes of GPUs. auto: in GPU memory by dma-buf, else by nvidia-peermem, where provider and GPU can,
    else staged through pinned host memory. dma-buf, peermem: this way, or an error. off: staged."""
    seed: int = 0
    """shuffle: of its choices."""
    drop_after: int = 0
    """shuffle: number of writes, on average, after which a connection is dropped. 0: none is."""

    def __post_init__(self) -> None:
        expected = "tcp, verbs, libfabric, libfabric(NAME), or shuffle() around one"
        _require(re.fullmatch(PROVIDER_PATTERN, self.provider) is not None, "provider", expected, self.provider)
        _require(_is_endpoint(self.listen), "listen", "address:port, port 0 to 65535", self.listen)
        _require(not self.advertise or _is_host(self.advertise), "advertise", "an address without port", self.advertise)
        _require(0 < self.lanes <= MAX_LANES, "lanes", f"1 to {MAX_LANES}", self.lanes)
        _require(0 <= self.spin_us <= 1_000_000, "spin_us", "0 to 1000000 microseconds", self.spin_us)
        _require(all(0 <= cpu < 4096 for cpu in self.cpus), "cpus", "numbers of processors", self.cpus)
        _require(len(self.domain) <= 256, "domain", "at most 256 characters", self.domain)
        _require(len(",".join(self.devices).encode()) < 256, "devices", "at most 255 bytes", self.devices)
        _require(all(map(_is_device, self.devices)), "devices", "names without comma or space", self.devices)
        _require(-1 <= self.gid_index < 256, "gid_index", "-1 to 255", self.gid_index)
        _require(0 <= self.traffic_class < 256, "traffic_class", "0 to 255", self.traffic_class)
        _require(0 <= self.service_level < 16, "service_level", "0 to 15", self.service_level)
        _require(self.mtu in MTUS, "mtu", f"one of {MTUS}", self.mtu)
        _require(self.gpu_direct in GPU_DIRECT, "gpu_direct", f"one of {GPU_DIRECT}", self.gpu_direct)
        _require(0 <= self.seed < 1 << 63, "seed", "0 to 2^63-1", self.seed)
        _require(0 <= self.drop_after < 1 << 31, "drop_after", "0 to 2^31-1", self.drop_after)

    @property
    def is_shuffled(self) -> bool:
        """Whether writes are delayed and reordered."""
        return self.provider.startswith("shuffle(")

    @property
    def carrier(self) -> str:
        """The provider without `shuffle`."""
        return self.provider[len("shuffle(") : -1] if self.is_shuffled else self.provider

    @property
    def retry_s(self) -> float:
        """Most seconds for which a NIC repeats a packet before it ends the connection; 0: none does, or its provider
        alone knows."""
        return 4 * 4.096e-6 * 2**ACK_TIMEOUT * (1 + RETRIES) if self.carrier == "verbs" else 0.0


def split(endpoint: str) -> tuple[str, int]:
    """(address, port) of "address:port"; brackets around an IPv6 address are dropped."""
    host, _, port = endpoint.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _is_device(name: str) -> bool:
    return re.fullmatch(r"[^\s,]+", name) is not None


def _is_endpoint(text: str) -> bool:
    host, colon, port = text.rpartition(":")
    return bool(colon) and _is_host(host) and re.fullmatch(r"\d{1,5}", port) is not None and int(port) < 65536


def _is_host(text: str) -> bool:
    return re.fullmatch(r"\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+", text) is not None


def _require(ok: bool, field: str, expected: str, got: object) -> None:
    if not ok:
        raise ConfigError(f"network.{field}", expected, got)
