"""One typed, frozen config per program: a YAML file, then `--set path=value`, then the checks of the types.

The only reader of the environment in the repository is `Identity.from_env`, and nothing writes it.
Unknown keys are refused with their path. `helm/crossdock/values.schema.json` is generated from these types.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
import yaml

Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]
Seconds = Annotated[float, msgspec.Meta(gt=0, le=86400)]
Count = Annotated[int, msgspec.Meta(ge=1)]


class _Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base: frozen, keyword-only, unknown fields refused."""


class LogConfig(_Config):
    """How a process logs: one line per event on stderr, and to a file if named."""

    level: str = "info"
    """debug | info | warning | error."""
    file: str = ""
    """Also write here; a full disk is reported once and never stops the service. Empty: stderr only."""


class ControlConfig(_Config):
    """The control plane."""

    listen: str = "127.0.0.1:7400"
    """host:port of the gRPC server; port 0 = any free one. Loopback by default: without mTLS nothing else is safe."""
    http_listen: str = "127.0.0.1:7401"
    """host:port of /metrics, /livez, /readyz."""
    world_size: Count = 4
    """Ranks in the group. Fixed: slots are stable, a lost rank leaves a hole until it is replaced."""
    lease_s: Seconds = 3.0
    """A worker silent for so long is lost. Workers beat every third of it."""
    form_timeout_s: Seconds = 600.0
    """Longest stay in EXCHANGING (weights load there) before the epoch is raised and the laggards are named."""
    recover_s: Seconds = 5.0
    """After a restart: how long to wait for a serving group to report itself before it counts as broken."""
    max_message_bytes: Count = 4 << 20
    log: LogConfig = LogConfig()


class WorkerConfig(_Config):
    """One expert worker: one process, one device, one rank."""

    model: str
    """Directory of a Hugging Face MoE checkpoint (config.json + safetensors)."""
    control: str = "127.0.0.1:7400"
    """host:port of the control plane."""
    uid: str = ""
    """Stable identity over restarts. Empty: <host>/<local_rank>."""
    local_rank: Annotated[int, msgspec.Meta(ge=0)] = 0
    listen: str = "127.0.0.1:0"
    """host:port of the ExpertService; port 0 = any free one (it is told to the control plane)."""
    advertise: str = ""
    """host:port under which clients reach `listen`. Empty: as listened."""
    http_listen: str = "127.0.0.1:0"
    """host:port of /metrics, /livez, /readyz."""
    transport: str = "cpu"
    dtype: str = ""
    """Computation dtype: float32 | bfloat16 | float16. Empty: the checkpoint's own."""
    max_tokens_per_step: Count = 512
    """M: larger requests are split. Sizes the regions (R * M rows per buffer) and bounds a step's latency."""
    step_timeout_s: Seconds = 10.0
    """Deadline of every wait for a peer inside a step."""
    request_timeout_s: Seconds = 60.0
    """Deadline of a request that brings none of its own."""
    max_queued_bytes_per_client: Count = 64 << 20
    """Past this, a client's stream is not read any further (it feels gRPC's flow control)."""
    max_queued_bytes: Count = 512 << 20
    """Past this, requests are refused with RESOURCE_EXHAUSTED."""
    max_message_bytes: Count = 64 << 20
    drain_timeout_s: Seconds = 30.0
    """Longest that SIGTERM waits for queued requests."""
    torch_threads: Count = 1
    log: LogConfig = LogConfig()


class Identity(_Config):
    """What the platform tells a process about itself. Read from the environment here and nowhere else."""

    hostname: str = ""
    pod_name: str = ""
    worker_index: int | None = None
    """LWS_WORKER_INDEX of a LeaderWorkerSet."""
    leader_address: str = ""
    """LWS_LEADER_ADDRESS of a LeaderWorkerSet."""

    @staticmethod
    def from_env(environ: Mapping[str, str] | None = None) -> Identity:
        """Read the identity; `environ` replaces the process environment in tests."""
        import os
        import socket

        env = os.environ if environ is None else environ
        index = env.get("LWS_WORKER_INDEX")
        return Identity(
            hostname=env.get("NODE_NAME") or socket.gethostname(),
            pod_name=env.get("POD_NAME", ""),
            worker_index=int(index) if index else None,
            leader_address=env.get("LWS_LEADER_ADDRESS", ""),
        )


ConfigType = TypeVar("ConfigType", bound=_Config)


class ConfigFileError(ValueError):
    """A config file or `--set` is wrong; the message names file, path, expected and got."""


def load(kind: type[ConfigType], path: str | Path | None, overrides: Sequence[str] = ()) -> ConfigType:
    """Read a YAML file (None: all defaults), apply `a.b=value` overrides, check the types.

    Raises:
        ConfigFileError: unreadable file, bad YAML, unknown key (with its path), wrong type, malformed override.
    """
    data = _read(path)
    for override in overrides:
        _apply(data, override)
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        raise ConfigFileError(f"{path or '<defaults>'}: {error}") from error


def _read(path: str | Path | None) -> dict[str, object]:
    if path is None:
        return {}
    try:
        data = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigFileError(f"{path}: {error}") from error
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigFileError(f"{path}: expected a mapping at the top, got {type(data).__name__}")
    return data


def _apply(data: dict[str, object], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise ConfigFileError(f"--set {override!r}: expected path=value")
    *parents, leaf = key.split(".")
    for parent in parents:
        child = data.setdefault(parent, {})
        if not isinstance(child, dict):
            raise ConfigFileError(f"--set {override!r}: {parent} is not a mapping")
        data = child
    data[leaf] = yaml.safe_load(text)
