"""`crossdock up --runtime docker`: the group of one host in containers of our images instead of processes.

A network, a container of the control plane, and one of all ranks, which share memory and so must share its namespaces.
A config means the same as for processes: each `listen` is where this host listens, and is published there; the model's
folder and each file that `security` names are mounted read-only under their own paths. What is made carries labels, by
which it is found and removed again, after a run that was killed too.
"""

from __future__ import annotations

import contextlib
import math
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import docker
from docker.errors import DockerException, NotFound
from docker.types import DeviceRequest, Mount, Ulimit

from crossdock.common.config import ConfigFileError, HostConfig, dump
from crossdock.common.log import get
from crossdock.common.security import security_of
from crossdock.common.settings import DockerConfig
from crossdock.common.small_files import write_text
from crossdock.host.child import EXITS_FOR_GOOD, bound_log
from crossdock.host.container_specs import ContainerSpec, Owner, changed, control_address, parts_of, with_ports
from crossdock.host.supervisor import HopelessError, SupervisorError, Watched

log = get(__name__)

LABEL, OWNER = "crossdock.up", "crossdock.up.owner"
"""Labels of what is made: the config's `docker.name`, and the process that keeps it."""

_PING_S, _CALL_S = 5.0, 60.0
_SPARE_S = 10.0
"""A container is given longer to stop than the supervisor inside takes."""
_LOG_PAUSE_S, _LOG_JOIN_S = 0.2, 10.0
_FIRST_DELAY_S, _LONGEST_DELAY_S, _HEALTHY_S = 0.5, 30.0, 30.0
_EARLY_ENDS = 3
"""A container that ends so often without having run for _HEALTHY_S is given up."""
_TAIL_LINES = 8
_ENDED = ("exited", "dead")


class Containers(Watched):
    """Keeps the containers of one host running; see above.

    Args:
        config: its `docker` says how; None: as by default. A port 0 is replaced by a free one.
        log_dir: gets `<part>.log` and `<part>.yaml` of each container; made if missing.

    Raises:
        ConfigFileError: an image is not there, an address cannot be published, a folder cannot be mounted.
        ConnectionError: no daemon answers.
        SecurityError: the workers' certificates cannot be used; the group is watched with them too.
    """

    def __init__(self, config: HostConfig, log_dir: Path) -> None:
        self._docker = config.docker or DockerConfig()
        config = with_ports(config)
        self._parts = parts_of(config)
        super().__init__(control_address(config), security_of(config.worker.security))
        self._log_dir, self._log_to_stderr = log_dir, config.log_to_stderr
        self._log_max_bytes = config.log_max_bytes
        self._owner = Owner.this_process()
        self._client = _connect(self._docker)
        with _sdk_errors("images"):
            self._require_images()
        self._kept: list[_Kept] = []

    def start(self) -> None:
        """Remove what a killed run left, then make and start every container."""
        self._log_dir.mkdir(parents=True, exist_ok=True)
        name = self._docker.name
        with _sdk_errors(f"network {name}"):
            self._clear_leftovers()
            self._client.networks.create(name, driver="bridge", check_duplicate=True, labels=self._labels())
        for part in self._parts:
            with _sdk_errors(f"container {name}-{part.name}"):
                container = self._create(part)
                container.start()
            self._kept.append(_Kept(container, None if self._log_to_stderr else self._log_dir / f"{part.name}.log"))

    def stop(self, timeout_s: float = 40.0) -> None:
        """The workers first, then the control plane. Removes all that this run has made."""
        deadline = time.monotonic() + timeout_s + (_SPARE_S if timeout_s else 0)
        with _sdk_errors(f"left behind, labelled {LABEL}={self._docker.name}"):
            for container in self._found(owner=True):
                with contextlib.suppress(NotFound):
                    container.stop(timeout=max(0, math.ceil(deadline - time.monotonic())))
            for kept in self._kept:
                kept.end_log()
            self._remove(owner=True)
            self._kept.clear()

    def check(self) -> None:
        """Starts a container again that has ended."""
        for part in self._parts:
            bound_log(self._log_dir / f"{part.name}.log", self._log_max_bytes)
        for kept in self._kept:
            kept.check()

    def silent(self) -> str:
        return "".join(f"\n{kept.container.name}, last lines:\n{kept.tail()}" for kept in self._kept)

    def _require_images(self) -> None:
        for part in self._parts:
            try:
                self._client.images.get(part.image)
            except NotFound:
                raise ConfigFileError(
                    f"docker.{part.name}_image: expected an image that the daemon has, got {part.image!r} "
                    f"(`make image` builds ours; or `docker pull`)"
                ) from None

    def _labels(self) -> dict[str, str]:
        return {LABEL: self._docker.name, OWNER: str(self._owner)}

    def _filters(self, *, owner: bool) -> dict[str, list[str]]:
        labels = self._labels()
        return {"label": [f"{key}={labels[key]}" for key in ((LABEL, OWNER) if owner else (LABEL,))]}

    def _found(self, *, owner: bool) -> list[Any]:
        """The containers of this name, the youngest first; `owner`: only what this process has made."""
        found = self._client.containers.list(all=True, filters=self._filters(owner=owner), ignore_removed=True)
        return sorted(found, key=lambda container: str(container.attrs["Created"]), reverse=True)

    def _remove(self, *, owner: bool) -> list[str]:
        """Remove containers and networks; their names."""
        names = []
        for container in self._found(owner=owner):
            with contextlib.suppress(NotFound):
                container.remove(force=True, v=True)
            names.append(str(container.name))
        for network in self._client.networks.list(filters=self._filters(owner=owner)):
            with contextlib.suppress(NotFound):
                network.remove()
        return names

    def _clear_leftovers(self) -> None:
        for container in self._found(owner=False):
            owner = Owner.of(container.labels.get(OWNER, ""))
            other = f"docker.name: {container.name} is there already"
            if owner.lives():
                raise ConfigFileError(f"{other}, kept by process {owner.pid}: expected another name")
            if owner.host != self._owner.host and container.status not in _ENDED:
                raise ConfigFileError(
                    f"{other}, kept from another host, {owner.host or 'unknown'}: expected another name, or "
                    f"`docker rm --force {container.name}`"
                )
        if removed := self._remove(owner=False):
            log.warning("removed what a killed run left", containers=", ".join(removed))

    def _create(self, part: ContainerSpec) -> Any:
        chosen, name = self._docker, f"{self._docker.name}-{part.name}"
        path = self._log_dir.resolve() / f"{part.name}.yaml"
        write_text(path, dump(changed(part.config)))
        path.chmod(0o644)  # the user in the container is another one; secrets are never in a config
        inside = f"/config/{part.name}.yaml"
        mounts = {inside: str(path), **{path: path for path in part.mounts}}
        mounts |= {there: here for here, there in chosen.mounts.items()}
        alias = self._client.api.create_endpoint_config(aliases=[part.name])
        return self._client.containers.create(
            part.image,
            [part.verb, "--config", inside],
            name=name,
            hostname=name,
            labels=self._labels(),
            user=chosen.user or None,
            environment=dict(chosen.environment),
            network=chosen.name,
            networking_config={chosen.name: alias},
            ports={f"{port}/tcp": (host, port) for port, host in part.ports.items()},
            mounts=[Mount(there, here, type="bind", read_only=True) for there, here in mounts.items()],
            read_only=True,
            tmpfs={"/tmp": ""},
            cap_drop=["ALL"],
            security_opt=["no-new-privileges"],
            shm_size=chosen.shm_bytes,
            ulimits=[Ulimit(name=limit, soft=value, hard=value) for limit, value in chosen.ulimits.items()],
            device_requests=[DeviceRequest(count=part.gpus, capabilities=[["gpu"]])] if part.gpus else [],
            healthcheck={"test": ["NONE"]},  # this process looks itself
        )


class _Kept:
    """A container that is kept running, and its log, which is followed over restarts.

    Args:
        container: started.
        log_path: gets what it says, appended. None: this process's stderr.
    """

    def __init__(self, container: Any, log_path: Path | None) -> None:
        self.container = container
        self._log_path, self._copied = log_path, 0
        self._ends, self._delay_s = 0, _FIRST_DELAY_S
        self._begun, self._due = time.monotonic(), math.inf
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._follow, name=f"log-{container.name}", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Start it again if it has ended; raises SupervisorError where that is hopeless."""
        try:
            self.container.reload()
            if self.container.status in _ENDED:
                self._revive(int(self.container.attrs["State"]["ExitCode"]))
        except NotFound:
            raise SupervisorError(f"{self.container.name}: the container was removed") from None
        except (DockerException, OSError) as error:  # the group may continue to serve without the daemon
            log.warning("container not seen", container=self.container.name, why=error)

    def tail(self) -> str:
        """The last lines that it said, or "" if the daemon does not return them."""
        try:
            text: bytes = self.container.logs(tail=_TAIL_LINES)
            return text.decode(errors="replace").rstrip()
        except (DockerException, OSError):
            return ""

    def end_log(self) -> None:
        self._stopping.set()
        self._thread.join(_LOG_JOIN_S)

    def _revive(self, code: int) -> None:
        now, name = time.monotonic(), self.container.name
        if self._due == math.inf:  # the end is news
            if now - self._begun > _HEALTHY_S:
                self._ends, self._delay_s = 0, _FIRST_DELAY_S
            self._ends += 1
            hopeless = code in EXITS_FOR_GOOD
            if hopeless or self._ends >= _EARLY_ENDS:
                kind = HopelessError if hopeless else SupervisorError
                raise kind(f"{name} ended with exit status {code} and is not restarted:\n{self.tail()}")
            log.warning("container ended", container=name, exit_status=code, restart_in_s=self._delay_s)
            self._due = now + self._delay_s
            self._delay_s = min(2 * self._delay_s, _LONGEST_DELAY_S)
        if now >= self._due:
            self.container.start()
            self._begun, self._due = now, math.inf

    def _follow(self) -> None:
        """Copy the log until stopped. Its stream ends with the container and breaks with the daemon."""
        begun = ""
        while True:
            stopping = self._stopping.is_set()
            with contextlib.suppress(Exception):  # the SDK's errors, urllib3's, a full disk: tried again
                self.container.reload()
                started = str(self.container.attrs["State"]["StartedAt"])
                if started != begun:
                    self._copy()
                    begun = started
            if stopping:
                return
            self._stopping.wait(_LOG_PAUSE_S)

    def _copy(self) -> None:
        """Append what the log has beyond what was copied: its stream begins with the container's first start."""
        seen = 0
        with self._open() as sink:
            for chunk in self.container.logs(stream=True, follow=True):
                sink.write(chunk[max(0, self._copied - seen) :])
                sink.flush()
                seen += len(chunk)
                self._copied = max(self._copied, seen)

    @contextlib.contextmanager
    def _open(self) -> Iterator[IO[bytes]]:
        if self._log_path is None:
            yield sys.stderr.buffer
        else:
            with self._log_path.open("ab") as file:
                yield file


def _connect(config: DockerConfig) -> Any:
    """A client of a daemon that answers. Raises ConnectionError."""
    try:
        client = docker.DockerClient(config.host, timeout=_PING_S) if config.host else docker.from_env(timeout=_PING_S)
        client.ping()
        client.api.timeout = _CALL_S
    except (DockerException, OSError) as error:
        where = config.host or "DOCKER_HOST or the default socket"
        raise ConnectionError(f"docker.host: expected a daemon that answers at {where}, got: {error}") from None
    return client


@contextlib.contextmanager
def _sdk_errors(what: str) -> Iterator[None]:
    """Turns errors of the SDK into SupervisorError with the daemon's own words."""
    try:
        yield
    except (DockerException, OSError) as error:
        raise SupervisorError(f"{what}: {getattr(error, 'explanation', None) or error}") from None
