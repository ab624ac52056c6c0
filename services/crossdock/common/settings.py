"""Config of security, election, network and containers: certificates, tokens, roles, the Lease, sockets, Docker.

Only paths of secrets are configured, never secrets: a config may be logged, dumped and shown.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from crossdock.common.addresses import EVERY_INTERFACE, AddressError, count_up, format_address, is_host, split_address

Count = Annotated[int, msgspec.Meta(ge=1)]
Rate = Annotated[float, msgspec.Meta(ge=0)]
Config = TypeVar("Config", bound=msgspec.Struct)


class AccessConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Roles of callers at a server. A name is a URI or DNS name of the caller's certificate (its common name if it has
    none of these); `*` in a pattern matches anything, `{uid}` the uid that the caller acts for. A token file
    holds one token per line, of 16 characters or more; old and new ones may both be in it."""

    worker_names: tuple[str, ...] = ("crossdock-worker", "crossdock://worker/{uid}")
    """May register, send heartbeats, and see the regions of the group. `{uid}` binds a certificate to one worker."""
    client_names: tuple[str, ...] = ("*",)
    """May call Forward and Describe, and watch the group without its regions. Workers and operators may too."""
    operator_names: tuple[str, ...] = ("crossdock-operator",)
    """May drain, cordon and uncordon workers, read traces, and do everything else that changes a group."""
    worker_tokens: str = ""
    """File of the tokens of workers. If any of the three is set, every call needs a token."""
    client_tokens: str = ""
    """File of the tokens of clients."""
    operator_tokens: str = ""
    """File of the tokens of operators."""

    @property
    def token_files(self) -> dict[str, str]:
        """Role -> file, those that are set."""
        named = {"worker": self.worker_tokens, "client": self.client_tokens, "operator": self.operator_tokens}
        return {role: path for role, path in named.items() if path}


class SecurityConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """TLS and tokens of one process, as a server and as a caller. Every file is PEM (tokens: text), and is read again
    when it changes. The default, nothing, is plain text without any check."""

    cert_file: str = ""
    """Certificate chain of this process. A server needs one; a caller too, unless servers ask for none."""
    key_file: str = ""
    """Private key of the certificate, not encrypted."""
    ca_file: str = ""
    """Certificates of the authorities by which other parties are checked."""
    require_client_cert: bool = True
    """A server accepts only callers with a certificate of `ca_file` (mTLS). False: tokens alone identify callers."""
    control_name: str = ""
    """Name that the control plane's certificate must carry. Empty: the host that is dialled."""
    worker_name: str = ""
    """Name that workers' certificates must carry. Empty: the host that is dialled."""
    token_file: str = ""
    """File whose first line is sent with every call as a bearer token."""
    http: Literal["plain", "tls", "mtls"] = "plain"
    """How a server offers /metrics, /livez and /readyz: in plain text, behind its certificate, or behind it and
    /metrics only to callers with a certificate of `ca_file`. Probes need none: a kubelet has none."""
    access: AccessConfig = AccessConfig()
    """Roles of callers, by their certificates' names or by tokens."""

    def __post_init__(self) -> None:
        if bool(self.cert_file) != bool(self.key_file):
            raise ValueError("cert_file, key_file: expected both or none, got one")
        if self.token_file and not self.ca_file:
            raise ValueError("token_file: expected ca_file beside it (a token on a plain line is no secret), got none")
        if self.access.token_files and not self.cert_file:
            raise ValueError("access: expected cert_file beside tokens (on a plain line they are no secrets), got none")
        if self.cert_file and not self.requires_certs and not self.access.token_files:
            raise ValueError("cert_file: expected ca_file (certificates of callers) or tokens in access, got neither")
        if self.http != "plain" and not self.cert_file:
            raise ValueError(f"http: expected cert_file beside {self.http}, got none")
        if self.http == "mtls" and not self.ca_file:
            raise ValueError("http: expected ca_file beside mtls (it authenticates scrapers), got none")

    def check_server(self) -> None:
        """Raises ValueError if a server with this config would listen in plain text although something is set."""
        if self.cert_file:
            return
        fields = msgspec.structs.fields(self)
        if given := [field.name for field in fields if getattr(self, field.name) != field.default]:
            wanted = f"security: expected cert_file and key_file beside {', '.join(given)}"
            raise ValueError(f"{wanted} (without a certificate a server listens in plain text), got none")

    @property
    def files(self) -> list[str]:
        """The paths that are set."""
        named = (self.cert_file, self.key_file, self.ca_file, self.token_file, *self.access.token_files.values())
        return [path for path in named if path]

    def with_paths(self, change: Callable[[str], str]) -> SecurityConfig:
        """With each path that is set changed."""

        def changed(config: Config, *names: str) -> Config:
            paths = {name: getattr(config, name) for name in names}
            return msgspec.structs.replace(config, **{name: change(path) for name, path in paths.items() if path})

        access = changed(self.access, "worker_tokens", "client_tokens", "operator_tokens")
        return msgspec.structs.replace(changed(self, "cert_file", "key_file", "ca_file", "token_file"), access=access)

    @property
    def requires_certs(self) -> bool:
        """Whether a server asks callers for certificates."""
        return bool(self.cert_file and self.ca_file and self.require_client_cert)

    @property
    def is_on(self) -> bool:
        """Whether anything is configured."""
        return bool(self.cert_file or self.ca_file)


class ElectionConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Several control planes for one group: the holder of a Kubernetes Lease leads, the others stand by."""

    lease_name: str = "crossdock"
    """Name of the Lease."""
    namespace: str = ""
    """Namespace of the Lease. Empty: the pod's own, or `default` outside of one."""
    kubeconfig: str = ""
    """Path of a kubeconfig file. Empty: the pod's service account, which must be allowed to get and update the Lease,
    and to create it unless something else does (the chart does)."""
    lease_s: Annotated[int, msgspec.Meta(ge=1, le=300)] = 6
    """Seconds without a renewal after which another replica may take over. It is renewed five times in that time; a
    leader that cannot renew it for two thirds of that time stops."""
    identity: str = ""
    """Name in the Lease. Empty: the pod's name, or host and process id."""


class KubernetesConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Labels of Kubernetes nodes as facts about hosts. Of each list of keys the first label that a node has is used; a
    missing label means unknown."""

    kubeconfig: str = ""
    """Path of a kubeconfig file. Empty: the pod's service account, which must be allowed to list and watch nodes."""
    clique_labels: tuple[str, ...] = ("nvidia.com/gpu.clique", "accelerator.topograph.run/domain")
    """NVLink domain of the node's GPUs, if they do not report it themselves."""
    product_labels: tuple[str, ...] = ("nvidia.com/gpu.product",)
    """Kind of the node's GPUs."""
    zone_labels: tuple[str, ...] = ("topology.kubernetes.io/zone",)
    """Zone of the node."""
    block_labels: tuple[str, ...] = (
        "fabric.topograph.run/tier-2",
        "network.topology.nvidia.com/spine",
        "cloud.google.com/gce-topology-block",
        "topology.k8s.aws/network-node-layer-2",
    )
    """Block of racks of the node."""
    rack_labels: tuple[str, ...] = (
        "fabric.topograph.run/tier-1",
        "network.topology.nvidia.com/leaf",
        "cloud.google.com/gce-topology-subblock",
        "topology.k8s.aws/network-node-layer-3",
    )
    """Rack of the node."""


_CARRIER = r"(tcp|verbs|libfabric(\([a-z0-9_;-]{1,40}\))?)"
PROVIDER_PATTERN = rf"^({_CARRIER}|shuffle\({_CARRIER}\))$"


class WorkerNetworkConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a worker reaches ranks of other hosts. The fields of `ep_kernels.network.NetworkConfig`, where no torch is.

    Workers of one group may differ in everything but `provider`. Workers of one `domain` share memory among themselves.
    """

    provider: Annotated[str, msgspec.Meta(extra_json_schema={"pattern": PROVIDER_PATTERN})] = "tcp"
    """tcp: sockets, nothing to install. verbs: InfiniBand and RoCE by libibverbs. libfabric: EFA, Slingshot (cxi), or
    what else libfabric finds; libfabric(NAME): this provider of it. shuffle(...): one of these, writes delayed and
    reordered, for tests."""
    listen: str = "0.0.0.0:0"
    """address:port of the data port; a fixed port counts up by local rank, port 0 is any free one. Its
    bytes are neither encrypted nor authenticated, with `security` too: name an address of a network of its own."""
    advertise: str = ""
    """Address, without port, at which ranks of other hosts reach the data port. Empty: the one `listen` names; for
    every interface, the address of the interface of the default route."""
    devices: tuple[str, ...] = ()
    """Devices to choose from. tcp: network interfaces, the first with an address; empty: chosen by `advertise`. verbs:
    RDMA devices, as mlx5_0 or mlx5_0:1 with a port; empty: the port nearest to the rank's GPU. libfabric: its
    domains."""
    domain: Annotated[str, msgspec.Meta(max_length=256)] = ""
    """Name of the set of ranks that share memory. Empty: those of one boot of one host, one PID namespace and one
    user. Containers of one pod without a shared PID namespace are two domains."""
    lanes: Annotated[int, msgspec.Meta(ge=1, le=16)] = 1
    """Connections for data to each peer; of two ranks the smaller number is used. More help where one connection
    cannot fill the network."""
    spin_us: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)] = 20
    """How long the proxy thread looks for work before it sleeps, microseconds. 0: it sleeps at once. A sleeping proxy
    adds a wake-up to the next message."""
    cpus: tuple[Annotated[int, msgspec.Meta(ge=0, lt=4096)], ...] = ()
    """Processors that the proxy thread may run on. Empty: any."""
    gid_index: Annotated[int, msgspec.Meta(ge=-1, le=255)] = -1
    """verbs: index of the port's GID. -1: RoCE v2 with an IPv4 address if there is one; on InfiniBand the first."""
    traffic_class: Annotated[int, msgspec.Meta(ge=0, le=255)] = 0
    """verbs: of the packets; on RoCE its upper 6 bits are the DSCP, by which switches choose a lossless queue. 0: the
    default queue, since which one is lossless is the site's choice."""
    service_level: Annotated[int, msgspec.Meta(ge=0, le=15)] = 0
    """verbs: InfiniBand maps it to a virtual lane, RoCE with VLANs to a priority. 0: the default one."""
    mtu: Literal[0, 256, 512, 1024, 2048, 4096] = 0
    """verbs: bytes of a packet. 0: the port's; the smaller one of two ends is used."""
    gpu_direct: Literal["auto", "dma-buf", "peermem", "off"] = "auto"
    """How NICs reach boxes of GPUs. auto: in GPU memory by dma-buf, else by nvidia-peermem, where provider and GPU can,
    else staged through pinned host memory. dma-buf, peermem: this way, or an error. off: staged."""
    seed: Annotated[int, msgspec.Meta(ge=0)] = 0
    """shuffle: of its choices."""
    drop_after: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)] = 0
    """shuffle: number of writes, on average, after which a connection is dropped. 0: none is."""

    def __post_init__(self) -> None:
        if not re.fullmatch(PROVIDER_PATTERN, self.provider):
            expected = "tcp, verbs, libfabric, libfabric(NAME), or shuffle() around one"
            raise ValueError(f"network.provider: expected {expected}, got {self.provider!r}")
        try:
            msgspec.structs.force_setattr(self, "listen", format_address(*split_address(self.listen)))
        except AddressError as error:
            raise ValueError(f"network.listen: {error}") from None
        if self.advertise and not is_host(self.advertise):
            raise ValueError(f"network.advertise: expected an address without port, got {self.advertise!r}")
        if self.advertise in EVERY_INTERFACE:
            raise ValueError(f"network.advertise: expected an address that others reach, got {self.advertise!r}")

    def data_plane_fields(self) -> dict[str, Any]:
        """Arguments of `ep_kernels.network.NetworkConfig`, which takes an IPv6 address in brackets."""
        bare = self.advertise.removeprefix("[").removesuffix("]")
        return {**msgspec.structs.asdict(self), "advertise": f"[{bare}]" if ":" in bare else bare}

    def of_worker(self, local_rank: int) -> WorkerNetworkConfig:
        """The network of the worker `local_rank` places after this one: a fixed port plus `local_rank`."""
        return msgspec.structs.replace(self, listen=count_up(self.listen, local_rank))


_ENDPOINT = re.compile(r"https?://(\S+)")


class TracingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Spans of requests, exported to an OpenTelemetry collector. Needs the extra `otlp`."""

    endpoint: str
    """Address of the collector's OTLP over gRPC: http://HOST:PORT in plain text, https://HOST:PORT with TLS."""
    ca_file: str = ""
    """https: PEM of the authorities of the collector's certificate. Empty: those that gRPC brings."""
    ratio: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    """Share of the requests without a W3C `traceparent` that are traced. One with it is traced if its caller is."""

    def __post_init__(self) -> None:
        found = _ENDPOINT.fullmatch(self.endpoint)
        if found is None:
            raise ValueError(f"tracing.endpoint: expected http://HOST:PORT or https://HOST:PORT, got {self.endpoint!r}")
        try:
            split_address(found[1])
        except AddressError as error:
            raise ValueError(f"tracing.endpoint: {error}") from None
        if self.ca_file and not self.endpoint.startswith("https:"):
            raise ValueError("tracing.ca_file: expected an endpoint of https beside it, got http")


class DockerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`crossdock up --runtime docker`: containers of our images, kept by a daemon that speaks Docker's API."""

    host: str = ""
    """URL of the daemon, like unix:///run/docker.sock. Empty: as the `docker` command finds it."""
    name: str = "crossdock-up"
    """Name of the network; containers are called `<name>-control` and `<name>-worker`. One run per name."""
    control_image: str = "crossdock-control"
    """Image of the control plane."""
    worker_image: str = "crossdock-worker"
    """Image of the workers."""
    gpus: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """GPUs of the workers' container. Null: one per worker with `worker.transport` nvlink, else none."""
    shm_bytes: Count = 1 << 30
    """Size of /dev/shm in the containers. Crossdock itself does not use it, NCCL does."""
    user: str = ""
    """UID:GID that runs them; it must be able to read model and certificates. Empty: the images' own, 10001."""
    environment: dict[str, str] = {}
    """Environment of the containers, like NCCL_DEBUG: INFO."""
    mounts: dict[str, str] = {}
    """More to mount read-only: path on this host -> path in the containers."""
    ulimits: dict[str, int] = {}
    """Limits, soft and hard alike, as memlock: -1."""
