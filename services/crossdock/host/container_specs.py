"""What `crossdock up --runtime docker` starts, by its config alone: which containers, with which ports and folders.

Also the owner of a container, as a label. No calls of a daemon here.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from crossdock.common.addresses import (
    EVERY_INTERFACE,
    family_of,
    format_address,
    is_loopback,
    reachable_from_here,
    split_address,
    split_targets,
)
from crossdock.common.config import ConfigFileError, ControlConfig, HostConfig, WorkerConfig
from crossdock.common.settings import DockerConfig, WorkerNetworkConfig
from crossdock.common.transports import needs_gpu

CONTROL, WORKER = "control", "worker"
"""Names of the parts, and of their hosts in the network."""

_TRIES = 64
_IMAGES_OWN = frozenset("/ /app /bin /config /dev /etc /lib /lib64 /proc /run /sbin /sys /tmp /usr /var".split())  # noqa: SIM905


@dataclass(frozen=True, slots=True)
class ContainerSpec:
    """One container.

    Attributes:
        image: of which it is made.
        verb: the command of `crossdock` that runs in it.
        config: of that command.
        ports: published: port, inside and outside alike -> address of this host.
        mounts: files and folders of this host, mounted read-only under the same path.
        gpus: how many it needs.
    """

    name: str
    image: str
    verb: str
    config: ControlConfig | HostConfig
    ports: dict[int, str]
    mounts: tuple[str, ...]
    gpus: int = 0


def parts_of(config: HostConfig) -> list[ContainerSpec]:
    """The containers of a host, the control plane first.

    Args:
        config: without a port 0 (see `with_ports`), and its model a directory.

    Raises:
        ConfigFileError: an address that cannot be published, or a file or folder that is not to be mounted.
    """
    chosen, control = config.docker or DockerConfig(), config.control_config()
    _refuse_keys(chosen.mounts)
    parts, target = [], config.worker.control
    if control is not None:
        ports = _published([control.listen, control.http_listen])
        inside = msgspec.structs.replace(
            control,
            listen=_everywhere(control.listen),
            http_listen=_everywhere(control.http_listen),
            security=control.security.with_paths(os.path.abspath),
        )
        mounts = _mounts(inside.security.files)
        parts.append(ContainerSpec(CONTROL, chosen.control_image, "control", inside, ports, mounts))
        target = format_address(CONTROL, split_address(control.listen)[1])
    elif any(map(is_loopback, split_targets(target))):
        raise ConfigFileError(f"worker.control: expected an address that a container reaches too, got {target}")
    return [*parts, _worker_part(config, chosen, target)]


def control_address(config: HostConfig) -> str:
    """Address at which this host reaches the control plane."""
    return config.worker.control if config.control is None else reachable_from_here(config.control.listen)


def changed(config: msgspec.Struct) -> dict[str, object]:
    """The fields that are not as by default: an image may be of an older or newer version, and not know the others."""
    values = {field.name: (getattr(config, field.name), field.default) for field in msgspec.structs.fields(config)}
    return {
        name: changed(value) if isinstance(value, msgspec.Struct) else msgspec.to_builtins(value)
        for name, (value, default) in values.items()
        if value != default
    }


def _worker_part(config: HostConfig, chosen: DockerConfig, target: str) -> ContainerSpec:
    worker, model = config.worker, os.path.realpath(config.worker.model)
    inside = msgspec.structs.replace(
        config,
        docker=None,
        control=None,
        http_listen=_everywhere(config.http_listen),
        log_dir="/tmp/crossdock",
        log_to_stderr=True,
        worker=msgspec.structs.replace(
            worker,
            model=model,
            control=target,
            listen=_everywhere(worker.listen),
            advertise=worker.advertise or reachable_from_here(worker.listen),
            http_listen=_everywhere(worker.http_listen),
            network=_network(worker.network),
            security=worker.security.with_paths(os.path.abspath),
        ),
    )
    each = [address for one in config.worker_configs() for address in _listens(one)]
    gpus = (config.num_workers if needs_gpu(worker.transport) else 0) if chosen.gpus is None else chosen.gpus
    folders = [model, *_link_targets(Path(model), chosen.mounts)]
    _refuse_keys(folders)
    mounts = _mounts(inside.worker.security.files, folders)
    return ContainerSpec(
        WORKER, chosen.worker_image, "up", inside, _published([config.http_listen, *each]), mounts, gpus
    )


def _listens(worker: WorkerConfig) -> list[str]:
    requests = _request_address(worker) if worker.request_port else ""
    return [worker.listen, worker.http_listen, requests, *([worker.network.listen] if worker.network else [])]


def _request_address(worker: WorkerConfig) -> str:
    """Address at which the worker takes request connections."""
    return format_address(split_address(worker.listen)[0], worker.request_port)


def _network(network: WorkerNetworkConfig | None) -> WorkerNetworkConfig | None:
    """The network inside a container, which has addresses and interfaces of its own."""
    if network is None:
        return None
    advertise = network.advertise or split_address(network.listen)[0]
    if advertise in EVERY_INTERFACE:
        raise ConfigFileError("worker.network.advertise: expected this host's address for a container, got none")
    if network.devices:
        raise ConfigFileError(f"worker.network.devices: expected none for a container, got {network.devices}")
    return msgspec.structs.replace(network, listen=_everywhere(network.listen), advertise=advertise)


def with_ports(config: HostConfig) -> HostConfig:
    """The config with a free port in the place of each 0; workers' ports are consecutive."""
    with contextlib.ExitStack() as held:

        def fix(address: str, count: int = 1) -> str:
            host, port = split_address(address) if address else ("", 1)
            return address if port else format_address(host, _free(host, count, held))

        control = config.control and msgspec.structs.replace(
            config.control, listen=fix(config.control.listen), http_listen=fix(config.control.http_listen)
        )
        shared, count = config.worker, config.num_workers
        worker = msgspec.structs.replace(
            shared,
            listen=fix(shared.listen, count),
            http_listen=fix(shared.http_listen, count),
            request_port=split_address(fix(_request_address(shared), count))[1],
            network=shared.network
            and msgspec.structs.replace(shared.network, listen=fix(shared.network.listen, count)),
        )
        return msgspec.structs.replace(config, control=control, worker=worker, http_listen=fix(config.http_listen))


@dataclass(frozen=True, slots=True)
class Owner:
    """The process that keeps a container: one of this host, or of another one whose daemon is shared.

    Attributes:
        begun: start time of the process, in the kernel's ticks; distinguishes it from a later one with the same id.
    """

    host: str
    pid: int
    begun: str

    @staticmethod
    def this_process() -> Owner:
        return Owner(socket.gethostname(), os.getpid(), _begun(os.getpid()))

    @staticmethod
    def of(text: str) -> Owner:
        """The inverse of `str`; of another text an owner that does not live anywhere."""
        match text.split():
            case [host, pid, begun] if pid.isascii() and pid.isdigit():
                return Owner(host, int(pid), begun)
        return Owner("", 0, "")

    def __str__(self) -> str:
        return f"{self.host} {self.pid} {self.begun}"

    def lives(self) -> bool:
        return self.host == socket.gethostname() and bool(self.begun) and _begun(self.pid) == self.begun


def _begun(pid: int) -> str:
    """When a process started; "" where there is none, or only its exit status."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] == "Z" else fields[19]


def _free(host: str, count: int, held: contextlib.ExitStack) -> int:
    """The first of `count` consecutive free ports; they are reserved until `held` is closed."""
    family = family_of(host)
    for _ in range(_TRIES):
        with contextlib.ExitStack() as tried:
            first = 0
            try:
                for step in range(count):
                    one = tried.enter_context(socket.socket(family))
                    one.bind((host, first + step if first else 0))
                    first = first or one.getsockname()[1]
            except (OSError, OverflowError):
                continue
            held.push(tried.pop_all())
            return int(first)
    raise ConfigFileError(f"listen: expected {count} free ports in a row on {host}, found none")


def _published(addresses: list[str]) -> dict[int, str]:
    ports: dict[int, str] = {}
    for address in filter(None, addresses):
        host, port = split_address(address)
        try:
            ipaddress.ip_address(host)
        except ValueError:
            raise ConfigFileError(f"listen: expected an IP address of this host to publish, got {host!r}") from None
        if port in ports:
            raise ConfigFileError(f"listen: expected each port once, got {port} twice")
        ports[port] = host
    return ports


def _everywhere(address: str) -> str:
    return format_address("0.0.0.0", split_address(address)[1]) if address else ""


def _mounts(files: list[str], folders: list[str] | None = None) -> tuple[str, ...]:
    """Paths to mount: single files, since keys of others may lie beside a certificate, and whole folders."""
    found = [*files, *(folders or [])]
    places = {*map(os.path.dirname, files), *(folders or [])}
    if wrong := _IMAGES_OWN.intersection(places):
        raise ConfigFileError(f"mounts: expected files in a folder that the image does not have, got {sorted(wrong)}")
    return tuple(sorted(set(found)))


def _link_targets(model: Path, allowed: Iterable[str]) -> list[str]:
    """The folder `blobs` of a model cache, if the links of a checkpoint lead there (from `snapshots/REVISION`).

    Raises:
        ConfigFileError: a link leads anywhere else but into the checkpoint itself, or into one of `allowed`.
    """
    blobs = model.parent.parent / "blobs" if model.parent.name == "snapshots" else model
    used = False
    for path in model.iterdir():
        target = Path(os.path.realpath(path))
        if target.is_relative_to(model) or any(target.is_relative_to(os.path.realpath(one)) for one in allowed):
            continue
        if not target.is_relative_to(blobs):
            raise ConfigFileError(
                f"worker.model: expected links into {blobs}, got {path} -> {target} "
                "(docker.mounts allows another folder)"
            )
        used = True
    return [str(blobs)] if used else []


def _refuse_keys(folders: Iterable[str]) -> None:
    """Raises ConfigFileError where a folder that would be mounted whole holds a private key."""
    for folder in folders:
        keys = sorted(str(path) for path in Path(folder).glob("*.key"))
        if keys:
            raise ConfigFileError(f"mounts: expected a folder without private keys, got {', '.join(keys)}")
