"""One typed, frozen config per program: a YAML file, then `--set path=value`, then the checks of the types. The only
readers of the environment in the repository are `Identity.from_env` and `FrameworkConfig.from_env`, and nothing writes
it. Unknown keys are refused with their path. The chart's schema is generated from these types."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import msgspec
import yaml

from crossdock.common.addresses import EVERY_INTERFACE, MAX_PORT, count_up, format_address, split_address, split_targets
from crossdock.common.settings import (
    DockerConfig,
    ElectionConfig,
    KubernetesConfig,
    Rate,
    SecurityConfig,
    TracingConfig,
    WorkerNetworkConfig,
)
from crossdock.common.small_files import parse_yaml, read_small

Seconds = Annotated[float, msgspec.Meta(gt=0, le=86400)]
Count = Annotated[int, msgspec.Meta(ge=1)]
GroupName = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9._:/-]{1,128}\Z")]
MemoryHandle = Literal["auto", "fabric", "posix_fd", "cuda_ipc"]
DEFAULT_GROUP = "default"
DEFAULT_WORLD = 4
"""Ranks of a group whose size is not configured."""
_ADDRESSES = frozenset({"listen", "http_listen", "control", "advertise"})


class _Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base: frozen, keyword-only, unknown fields refused; addresses checked, and brackets kept around IPv6 hosts only,
    since the writer of a config may not know the address family."""

    def __post_init__(self) -> None:
        for field in msgspec.structs.fields(self):
            name, address = field.name, getattr(self, field.name)
            if name not in _ADDRESSES or not isinstance(address, str) or address == field.default == "":
                continue
            try:
                if name == "control":
                    split_targets(address)
                else:
                    host, port = split_address(address)
                    if name == "advertise" and host in EVERY_INTERFACE:
                        raise ValueError(f"expected an address that others reach, got every interface ({address})")
                    msgspec.structs.force_setattr(self, name, format_address(host, port))
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None


class LogConfig(_Config, frozen=True, kw_only=True):
    """How a process logs: one line per event on stderr, and to a file if named."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """Least level of the lines that are written."""
    file: str = ""
    """Also write here; a full disk is reported once and never stops the service. Empty: stderr only."""
    max_file_bytes: Annotated[int, msgspec.Meta(ge=0)] = 64 << 20
    """At this size `file` is renamed to `file`.1, .1 to .2, and so on. 0: never; another program rotates it, like
    logrotate, and a file that was renamed or removed is opened anew."""
    old_files: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 3
    """Renamed files that are kept."""


class PlacementConfig(_Config, frozen=True, kw_only=True):
    """Which rank holds which experts."""

    redundant_experts: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Slots beyond one for each expert, over all ranks, in every layer: copies of the experts with most load."""
    min_copies: Count = 1
    """Minimum copies of each expert, as far as there are slots: with 2, the loss of one rank loses no expert. Needs
    `redundant_experts` >= (min_copies - 1) * experts."""
    rebalance_s: Annotated[float, msgspec.Meta(ge=0, le=86400)] = 0.0
    """Interval of automatic rebalancing. 0: only by `crossdock rebalance`."""
    min_gain: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.05
    """Relative gain in imbalance that starts an automatic move."""
    load_half_life_s: Seconds = 300.0
    """Half-life of the expert load."""
    move_timeout_s: Seconds = 600.0
    """Time limit of a move, after which it is rolled back."""


class _ServerConfig(_Config, frozen=True, kw_only=True):
    """Base of the configs of servers: `security` is complete, or not set at all."""

    group: GroupName = DEFAULT_GROUP
    """Name of the group: the label `group` of every metric. Its control planes and workers have the same one, groups of
    one Prometheus different ones."""
    security: SecurityConfig = SecurityConfig()
    """TLS, tokens and roles. The default is plain text; anything else needs `cert_file`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.security.check_server()


class ControlConfig(_ServerConfig, frozen=True, kw_only=True):
    """The control plane."""

    listen: str = "127.0.0.1:7400"
    """host:port of the gRPC server; port 0 = any free one. Loopback, since it has no `security` by default."""
    http_listen: str = ""
    """host:port of /metrics, /livez, /readyz. Empty: on loopback, the port after `listen`'s."""
    world_size: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)] | None = None
    """Ranks in the group until `crossdock scale`. The slot of a lost rank stays empty until it is replaced. Null: 4;
    under `crossdock up` as many as it has workers, and a larger number waits for workers of other hosts."""
    min_workers: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)] = 1
    """Least number of ranks that `crossdock scale` takes."""
    max_workers: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)] | None = None
    """Largest number of ranks that `crossdock scale` takes. Null: `world_size`."""
    follow_workers: bool = False
    """The group grows by every worker that waits, and shrinks by every one that is stopped in order (SIGTERM), within
    `min_workers` and `max_workers`: for autoscalers. False: only `crossdock scale` changes its size."""
    lease_s: Seconds = 3.0
    """Lease of a worker: it is lost after this time without a heartbeat. Workers send one every third of it."""
    form_timeout_s: Seconds = 600.0
    """Time limit of EXCHANGING (weights are loaded there), after which the epoch ends and the late ranks are named."""
    quarantine_s: Annotated[float, msgspec.Meta(ge=0, le=86400)] = 600.0
    """Quarantine of a worker that others reported silent, or that loaded too late: long enough for an alert and a look.
    Only if a spare replaces it, or the group is elastic. 0: no quarantine."""
    quarantine_slow_s: Annotated[float, msgspec.Meta(ge=0, le=86400)] = 0.0
    """A rank that the latency verdict has called slow for so long is quarantined, if a spare replaces it. 0: never; its
    host is drained by an operator."""
    blame_epochs: Count = 3
    """Failed epochs in which two or more members report a rank silent, before it counts as sick: one or two may be a
    pause. If a spare waits, reports of two members in one epoch are enough."""
    blame_window_s: Seconds = 600.0
    """Window of these epochs: a rank that fails more rarely costs less than a replacement."""
    recover_s: Seconds = 5.0
    """Recovery period after a restart, in which a serving group can report itself."""
    max_message_bytes: Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)] = 1 << 20
    """Largest message accepted from a worker: heartbeats of 15,616 expert slots take 200 KiB, facts and regions 64."""
    max_calls_per_s: Rate = 100.0
    """Calls of one caller (of workers: one uid at one host) per second; more end with RESOURCE_EXHAUSTED. 0: any."""
    advertise: str = ""
    """host:port under which workers and clients reach `listen`; needed with an election. Empty: as listened."""
    election: ElectionConfig | None = None
    """Leader election among replicas by a Kubernetes Lease. Null: a single control plane."""
    elastic: bool = False
    """Continue without a lost rank, and readmit its successor once it has loaded its experts. Requests for experts
    whose only copies are lost fail until then (see `placement.min_copies`). False: all ranks wait for the successor."""
    placement: PlacementConfig = PlacementConfig()
    """Copies of experts, and their moves."""
    kubernetes: KubernetesConfig | None = None
    """Watch the labels of Kubernetes nodes, for NVLink domains and the order of ranks. Null: facts of hosts only."""
    log: LogConfig = LogConfig()
    """How this process logs."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.http_listen:
            after = count_up(f"127.0.0.1:{split_address(self.listen)[1]}", 1)
            if split_address(self.listen)[1] == MAX_PORT:
                raise ValueError(f"http_listen: expected one beside listen {self.listen}, the last port, got none")
            msgspec.structs.force_setattr(self, "http_listen", after)
        if self.world_size is not None and not self.min_workers <= self.world_size <= self.most_workers:
            got = f"{self.min_workers} and {self.most_workers} around {self.world_size}"
            raise ValueError(f"min_workers, max_workers: expected world_size between them, got {got}")

    @property
    def most_workers(self) -> int:
        """`max_workers`, the default resolved."""
        return self.num_ranks if self.max_workers is None else self.max_workers

    @property
    def num_ranks(self) -> int:
        """Ranks in the group, the default resolved."""
        return DEFAULT_WORLD if self.world_size is None else self.world_size


class WorkerConfig(_ServerConfig, frozen=True, kw_only=True):
    """One expert worker: one process, one device, one rank."""

    model: str
    """Directory of a Hugging Face MoE checkpoint (config.json + safetensors)."""
    control: str = "127.0.0.1:7400"
    """host:port of the control plane; of several replicas, separated by commas."""
    uid: str = ""
    """Stable identity over restarts. Empty: <host>/<local_rank>."""
    local_rank: Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)] = 0
    """Number of this worker on its host."""
    device: Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)] | None = None
    """GPUs: index of the CUDA device, as this process sees them. Null: local_rank."""
    listen: str = "127.0.0.1:0"
    """host:port of the ExpertService; port 0 = any free one (the control plane learns it)."""
    advertise: str = ""
    """host:port under which clients reach `listen`. Empty: as listened, on this host's name for every interface."""
    http_listen: str = "127.0.0.1:0"
    """host:port of /metrics, /livez, /readyz. Announced for every interface: `advertise`'s host or this host's name."""
    transport: str = "cpu"
    """Folder name under `ep_kernels/transports`: cpu, or nvlink for GPUs."""
    network: WorkerNetworkConfig | None = None
    """How ranks of other hosts are reached. Null: the group is one host."""
    memory_handle: MemoryHandle = "auto"
    """GPUs: how peers map a rank's memory: auto (the first that works), fabric, posix_fd or cuda_ipc alone."""
    kernel_cache_dir: str = ""
    """GPUs: folder for kernels compiled at first use. Empty: `.cache/crossdock/kernels` in the user's home."""
    dtype: Literal["", "float32", "bfloat16", "float16"] = ""
    """Computation dtype: float32 | bfloat16 | float16. Empty: the checkpoint's own."""
    expert_dtype: Literal["", "float32", "bfloat16", "float16"] = ""
    """Hold experts in `dtype`, or float32 on a CPU. Empty: as stored if quantised, else in `dtype`."""
    combine_dtype: Literal["", "float32", "bfloat16", "float16"] = ""
    """Dtype of rows in combine. Empty: float32 on a CPU; on GPUs `dtype`: half the bytes, partial sums are rounded."""
    combine_order: Literal["rank", "domain"] = "rank"
    """Sums over hosts. rank: the same bits wherever ranks run; domain: each host's own first, so that one row per token
    returns of a host. Equal on all workers."""
    two_hop_tokens: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """`combine_order: domain`: from so many tokens of a rank on a step returns that one row, below it a row per rank, a
    hop less and the same bits. Equal on all workers. Null: from 256 KiB of rows on."""
    max_tokens_per_step: Count = 512
    """M: larger requests are split. Sizes the regions (R * M rows per buffer) and bounds a step's latency."""
    ll_max_tokens: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """Steps of at most this many tokens per rank use LL, larger ones HT: `crossdock tune` prints it. Equal on all
    workers. Null: the transport's built-in crossover."""
    dispatch_sms: Count | None = None
    """GPUs: multiprocessors that a dispatch may fill; the others are the experts'. Results do not depend on it. Equal
    on all workers. Null: all for LL, for HT as many as keep the links busy."""
    combine_sms: Count | None = None
    """GPUs: as `dispatch_sms`, of combines."""
    step_timeout_s: Seconds = 10.0
    """Deadline of every wait for a peer inside a step."""
    peer_weights_timeout_s: Annotated[float, msgspec.Meta(ge=0)] = 10.0
    """Time for another worker of the group to give the weights of one expert; then the next one that holds it is asked,
    and the checkpoint last. 0: weights are read from the checkpoint alone, and given to nobody."""
    request_timeout_s: Seconds = 60.0
    """Default deadline of a request."""
    max_queued_bytes_per_client: Count = 16 << 20
    """Limit of a client's bytes (its certificate's names, or its host): requests and answers not yet written. Above it
    its streams are not read (flow control), except one request of each, up to twice this."""
    max_queued_bytes: Count = 256 << 20
    """Limit of the bytes of all clients together; above it requests are refused with RESOURCE_EXHAUSTED."""
    request_port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 0
    """TCP port beside `listen` for rows of clients (docs/request-protocol.md). 0: any, named by `Describe`."""
    max_message_bytes: Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)] = 2 << 20
    """Largest gRPC message; a larger one ends its stream."""
    max_calls_per_s: Rate = 100.0
    """Calls (streams, not requests) of one client per second; more end with RESOURCE_EXHAUSTED. 0: any."""
    max_requests_per_s: Rate = 0.0
    """Requests of one client per second; more are answered RESOURCE_EXHAUSTED. 0: any."""
    drain_timeout_s: Seconds = 30.0
    """Time limit for queued requests after SIGTERM."""
    torch_threads: Annotated[int, msgspec.Meta(ge=1, le=4096)] | None = None
    """Threads of the expert GEMMs on a CPU. Null: 1; under `crossdock up` the host's processors per worker less one, at
    least 1. More threads than processors cost most of a host's throughput."""
    tracing: TracingConfig | None = None
    """Spans of requests for an OpenTelemetry collector. Null: none."""
    log: LogConfig = LogConfig()
    """How this process logs."""


class HostConfig(_Config, frozen=True, kw_only=True):
    """`crossdock up`: the workers of one host, and optionally the control plane, under one supervisor."""

    worker: WorkerConfig
    """Config of all workers. Fixed ports and `device` count up by local rank: worker i listens on port + i."""
    num_workers: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)] = DEFAULT_WORLD
    """Workers on this host."""
    control: ControlConfig | None = ControlConfig()
    """The control plane to start here; its `world_size` is `num_workers`, or more where workers of other hosts join.
    Null joins the one at `worker.control`."""
    http_listen: str = ""
    """host:port of /metrics (of every process here), /livez, /readyz (ready = every worker here is). Empty: none."""
    log_dir: str = ""
    """Directory of one log file per process. Empty: a new temporary one, named at start, removed after a clean end."""
    log_max_bytes: Annotated[int, msgspec.Meta(ge=0)] = 64 << 20
    """A log file in `log_dir` of this size is copied to <name>.log.1 and emptied. 0: never."""
    log_to_stderr: bool = False
    """The processes log to this process's stderr (what a container's log is) instead of to files."""
    stop_timeout_s: Seconds = 40.0
    """Time limit for draining before processes are killed; more than `worker.drain_timeout_s`."""
    docker: DockerConfig | None = None
    """Run containers instead of processes (`--runtime docker`). Null: processes."""

    def __post_init__(self) -> None:
        super().__post_init__()
        world_size = None if self.control is None else self.control.world_size
        if world_size is not None and world_size < self.num_workers:
            raise ValueError(f"control.world_size: expected num_workers, {self.num_workers}, or more, got {world_size}")
        if world_size is not None and world_size > self.num_workers and self.worker.network is None:
            wanted = f"num_workers, {self.num_workers}, or worker.network for the ranks of other hosts"
            raise ValueError(f"control.world_size: expected {wanted}, got {world_size} without a network")
        if self.control is not None and self.control.group not in (DEFAULT_GROUP, self.worker.group):
            raise ValueError(f"control.group: expected worker.group, {self.worker.group}, got {self.control.group}")
        most = None if self.control is None else self.control.max_workers
        if most is not None and most < self.num_workers:
            raise ValueError(f"control.max_workers: expected num_workers, {self.num_workers}, or more, got {most}")
        if self.docker is not None and self.most_workers > self.num_workers:
            raise ValueError(f"control.max_workers: expected num_workers with containers, got {self.most_workers}")
        self._worker(self.most_workers - 1)  # its ports are the highest

    @property
    def scales(self) -> bool:
        """Whether workers are started and ended here by `crossdock scale`: the group is this host's alone."""
        control = self.control_config()
        return self.docker is None and control is not None and control.num_ranks == self.num_workers

    @property
    def most_workers(self) -> int:
        """The largest number of workers on this host."""
        control = self.control_config()
        return control.most_workers if control is not None and self.scales else self.num_workers

    def control_config(self) -> ControlConfig | None:
        """The control plane to start here, its `world_size` resolved, of the workers' group."""
        if self.control is None:
            return None
        world_size = self.control.world_size or self.num_workers
        return msgspec.structs.replace(self.control, world_size=world_size, group=self.worker.group)

    def worker_configs(self) -> list[WorkerConfig]:
        """One config per local rank, also of those that run only after `crossdock scale`."""
        return [self._worker(local_rank) for local_rank in range(self.most_workers)]

    def _worker(self, local_rank: int) -> WorkerConfig:
        shared, port = self.worker, self.worker.request_port
        return msgspec.structs.replace(
            shared,
            local_rank=shared.local_rank + local_rank,
            device=None if shared.device is None else shared.device + local_rank,
            uid=f"{shared.uid}/{local_rank}" if shared.uid else "",
            listen=count_up(shared.listen, local_rank),
            advertise=count_up(shared.advertise, local_rank),
            http_listen=count_up(shared.http_listen, local_rank),
            request_port=port and split_address(count_up(f"request_port:{port}", local_rank))[1],
            network=shared.network and shared.network.of_worker(local_rank),
        )


class FrameworkConfig(_Config, frozen=True, kw_only=True):
    """Crossdock inside another program: the vLLM plugin, and whatever imports our `deep_ep`. Equal on all ranks."""

    vllm: Literal["off", "deep_ep", "native"] = "off"
    """Mode of the plugin in vLLM: off; provide our `deep_ep` if no other is installed; or replace vLLM's DeepEP
    backends by Crossdock's own classes."""
    transport: str = ""
    """Folder name under `ep_kernels/transports`. Empty: nvlink for tensors on GPUs, cpu for others."""
    network: WorkerNetworkConfig | None = None
    """How ranks reach those of other hosts; a fixed port counts up by rank. Null: the group is one host."""
    timeout_s: Annotated[float, msgspec.Meta(gt=0, le=3600)] = 100.0
    """Deadline of every wait for a peer. As long as DeepEP's, since engines compile and capture at different speeds."""
    memory_handle: MemoryHandle = "auto"
    """GPUs: how peers map a rank's memory: auto (the first that works), fabric, posix_fd or cuda_ipc alone."""
    kernel_cache_dir: str = ""
    """Folder for compiled kernels and what `crossdock tune` measured. Empty: `.cache/crossdock/kernels` at home."""
    exit_on_fault: bool = True
    """End the process if an operation failed and no call has raised it within a second, as in CUDA graph replays, whose
    results are NaN then. False: the caller must call `MoECommunicator.check`."""
    metrics: bool = True
    """Count tokens, times, waits; on the engine's own /metrics where PROMETHEUS_MULTIPROC_DIR is set."""
    group: GroupName = DEFAULT_GROUP
    """Name of the expert-parallel group: the label `group` of its metrics. Engines of one Prometheus have their own."""
    traffic: bool = False
    """Also count received tokens and bytes by source, for which a kernel after each dispatch adds [R] numbers."""
    http_listen: str = ""
    """host:port of an endpoint of our own for them; rank i listens on port + i. Empty: none."""

    @staticmethod
    def from_env(environ: Mapping[str, str] | None = None) -> FrameworkConfig:
        """CROSSDOCK_CONFIG names a YAML file with these fields; CROSSDOCK_VLLM is its field `vllm`. Raises
        ConfigFileError."""
        env = os.environ if environ is None else environ
        chosen = env.get("CROSSDOCK_VLLM", "")
        return load(FrameworkConfig, env.get("CROSSDOCK_CONFIG") or None, [f"vllm={chosen}"] if chosen else [])

    def listen_of(self, rank: int) -> str:
        """Address at which rank i serves its metrics; "" for none."""
        return count_up(self.http_listen, rank)


class Identity(_Config, frozen=True, kw_only=True):
    """Identity of a process, from the platform. Read from the environment only here."""

    hostname: str = ""
    pod_name: str = ""

    @staticmethod
    def from_env(environ: Mapping[str, str] | None = None) -> Identity:
        """Read the identity; `environ` replaces the process environment in tests."""
        env = os.environ if environ is None else environ
        return Identity(hostname=env.get("NODE_NAME") or socket.gethostname(), pod_name=env.get("POD_NAME", ""))


ConfigType = TypeVar("ConfigType", bound=msgspec.Struct)


class ConfigFileError(ValueError):
    """A config file or `--set` is wrong; the message names file, path, expected and got."""


def load(kind: type[ConfigType], path: str | Path | None, overrides: Sequence[str] = ()) -> ConfigType:
    """Read a YAML file (None: all defaults), apply `a.b=value` overrides, check the types.

    Raises:
        ConfigFileError: unreadable file, bad YAML, unknown key (with its path), wrong type, malformed override.
    """
    data = _read(path)
    for override in overrides:
        _apply(data, override, kind)
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        raise ConfigFileError(f"{path or 'configuration'}: {_in_our_words(str(error), data, kind)}") from error


def _in_our_words(said: str, data: Any, kind: type[msgspec.Struct]) -> str:
    """What msgspec says, as `path.to.field: expected X, got Y`."""
    words, _, place = said.partition(" - at `")
    path = place.removeprefix("$").strip("`.")
    if found := re.fullmatch(r"Object contains unknown field `(.*)`", words):
        return f"{_under(path, found[1])}: expected a field that there is (`crossdock config`), got an unknown one"
    if found := re.fullmatch(r"Object missing required field `(.*)`", words):
        return f"{_under(path, found[1])}: expected a value, got none"
    if found := re.fullmatch(r"Invalid enum value (.*)", words):
        return f"{path}: expected one of {', '.join(map(repr, get_args(_type_at(kind, path))))}, got {found[1]}"
    if found := re.fullmatch(r"Expected (.*?)(, got .*)?", words, re.DOTALL):
        return f"{path or 'top'}: expected {found[1].replace('`', '')}, got {_value_at(data, path)!r}"
    return _under(path, words.removeprefix(f"{path.rpartition('.')[2]}."))  # of a check of our own


def _under(path: str, words: str) -> str:
    return f"{path}.{words}" if path else words


def _value_at(data: Any, path: str) -> object:
    """The value at a path like `a.b[0].c`; what is not a mapping or a list has no parts."""
    for name in re.findall(r"[^.\[\]]+", path):
        if isinstance(data, dict):
            data = data.get(name)
        elif isinstance(data, list | tuple) and name.isdigit():
            data = data[int(name)]
    return data


def dump(config: msgspec.Struct | Mapping[str, object]) -> str:
    """The YAML text that `load` reads back as an equal config."""
    return yaml.safe_dump(msgspec.to_builtins(config), sort_keys=False)


def _read(path: str | Path | None) -> dict[str, Any]:
    try:
        data = None if path is None else parse_yaml(read_small(path).decode())
    except (OSError, ValueError) as error:
        raise ConfigFileError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    if isinstance(data, dict | None):
        return data or {}
    raise ConfigFileError(f"{path}: expected a mapping at the top, got {type(data).__name__}")


def _apply(data: dict[str, Any], override: str, kind: type[msgspec.Struct]) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise ConfigFileError(f"--set: expected path.to.field=value, got {override!r}")
    *parents, leaf = key.split(".")
    for parent in parents:
        data = data.setdefault(parent, {})
        if not isinstance(data, dict):
            raise ConfigFileError(f"--set {override!r}: expected {parent} to have fields, got a value")
    data[leaf] = text if _is_text(kind, key) else _parse(override, text)


def _is_text(kind: type[msgspec.Struct], key: str) -> bool:
    """Whether the field at this path holds text, so that `--set uid=7` means "7"."""
    bare = _type_at(kind, key)
    return bare is str or get_origin(bare) is Literal


def _type_at(kind: type[msgspec.Struct], key: str) -> Any:
    """The type of the field at this path, without its limits; None: there is no such field."""
    node: Any = kind
    for name in key.split("."):
        within = (node, *get_args(node))  # through "| None"
        record = next((one for one in within if isinstance(one, type) and issubclass(one, msgspec.Struct)), None)
        fields = {field.name: field.type for field in msgspec.structs.fields(record)} if record else {}
        node = fields.get(name)
    return get_args(node)[0] if get_origin(node) is Annotated else node


def _parse(override: str, text: str) -> object:
    try:
        return parse_yaml(text)
    except ValueError as error:
        raise ConfigFileError(f"--set {override!r}: expected a YAML value, got {text!r}") from error
