"""Config of security, election and containers: certificates, tokens, roles, the Lease, Docker.

Only paths of secrets are configured, never secrets: a config may be logged, dumped and shown.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

Count = Annotated[int, msgspec.Meta(ge=1)]
Rate = Annotated[float, msgspec.Meta(ge=0)]


class AccessConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Roles of callers at a server. A name is a URI or DNS name of the caller's certificate (its common name if it has
    none of these); `*` in a pattern matches anything, `{uid}` the uid that the caller acts for. A token file
    holds one token per line, of 16 characters or more; old and new ones may both be in it."""

    worker_names: tuple[str, ...] = ("crossdock-worker", "crossdock://worker/{uid}")
    """May register, send heartbeats, and see the regions of the group. `{uid}` binds a certificate to one worker."""
    client_names: tuple[str, ...] = ("*",)
    """May call Forward and Describe, and watch the group without its regions. Workers and operators may too."""
    operator_names: tuple[str, ...] = ("crossdock-operator",)
    """May drain workers."""
    worker_tokens: str = ""
    """File of the tokens of workers. If any of the three is set, every call needs a token."""
    client_tokens: str = ""
    operator_tokens: str = ""

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
    """Its private key, not encrypted."""
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
    def requires_certs(self) -> bool:
        """Whether a server asks callers for certificates."""
        return bool(self.cert_file and self.ca_file and self.require_client_cert)

    @property
    def is_on(self) -> bool:
        """Whether anything is configured."""
        return bool(self.cert_file or self.ca_file)


class ElectionConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Several control planes for one group: the holder of a Kubernetes Lease leads, the others are standbys."""

    lease_name: str = "crossdock"
    namespace: str = ""
    """Of the Lease. Empty: the pod's own, or `default` outside of one."""
    kubeconfig: str = ""
    """Path of a kubeconfig file. Empty: the pod's service account, which must be allowed to get and update the Lease,
    and to create it unless something else does (the chart does)."""
    lease_s: Annotated[int, msgspec.Meta(ge=1, le=300)] = 6
    """Seconds without a renewal after which another replica may take over. It is renewed five times in that time; a
    leader that cannot renew it for two thirds of that time stops."""
    identity: str = ""
    """Name in the Lease. Empty: the pod's name, or host and process id."""


class DockerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`crossdock up --runtime docker`: containers of our images, kept by a daemon that speaks Docker's API."""

    host: str = ""
    """URL of the daemon, like unix:///run/docker.sock. Empty: as the `docker` command finds it."""
    name: str = "crossdock-up"
    """Of the network; containers are called `<name>-control` and `<name>-worker`. One run per name."""
    control_image: str = "crossdock-control"
    worker_image: str = "crossdock-worker"
    gpus: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """GPUs of the workers' container. Null: one per worker with `worker.transport` nvlink, else none."""
    shm_bytes: Count = 1 << 30
    """Size of /dev/shm in the containers. Crossdock itself does not use it, NCCL does."""
    user: str = ""
    """UID:GID that runs them; it must be able to read model and certificates. Empty: the images' own, 10001."""
    environment: dict[str, str] = {}
    """Of the containers, as NCCL_DEBUG: INFO."""
    mounts: dict[str, str] = {}
    """More to mount read-only: path on this host -> path in the containers."""
    ulimits: dict[str, int] = {}
    """Limits, soft and hard alike, as memlock: -1."""
