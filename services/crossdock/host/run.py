"""`crossdock up`: the processes or containers of a host as people see them. Shows progress, changes, until stopped."""

from __future__ import annotations

import ctypes
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
from rich.console import Console
from rich.text import Text

from crossdock.common import log, transports
from crossdock.common.addresses import is_loopback
from crossdock.common.config import ConfigFileError, HostConfig, LogConfig
from crossdock.common.hangup import at_hangup
from crossdock.common.http import serve_http
from crossdock.common.settings import DockerConfig
from crossdock.host.group_table import as_address_table, format_bytes, plain_text_warning
from crossdock.host.pages import HostMetricsPage, readiness
from crossdock.host.supervisor import Supervisor, Watched, describe
from crossdock.protocol.v1.control_pb2 import SERVING, GroupView

_POLL_S = 5.0
_JOIN_TIMEOUT_S = float("inf")
"""Joining waits for hosts that may come any time; a group of this host alone has `form_timeout_s`."""


def num_gpus() -> int:
    """CUDA devices as the driver counts them, CUDA_VISIBLE_DEVICES regarded; 0 without a driver."""
    count = ctypes.c_int(0)
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return 0
    return count.value


def on_runtime(config: HostConfig, runtime: str) -> HostConfig:
    """The config for `--runtime`: process, docker, or "" for what the config itself says. Raises ConfigFileError."""
    if runtime not in ("", "process", "docker"):
        raise ConfigFileError(f"--runtime: expected process or docker, got {runtime!r}")
    if runtime == "process":
        return msgspec.structs.replace(config, docker=None)
    return msgspec.structs.replace(config, docker=config.docker or (DockerConfig() if runtime else None))


def run_host(config: HostConfig, console: Console) -> int:
    """Run the host's processes or containers until SIGINT, SIGTERM or hang-up, then drain them; the exit status.

    Raises:
        ConfigFileError: the model, the transport or a GPU is not there, or an image or the SDK for containers; or
            `log_dir` cannot be written.
        ConnectionError: no daemon answers that could run containers.
        SupervisorError: the group could not come up; HopelessError: it never can, with this configuration or model.
        ListenError: `http_listen` cannot be listened on.
    """
    check_transport(config)
    check_network(config)
    if not Path(config.worker.model, "config.json").is_file():
        wanted = "a directory of a checkpoint, with its config.json"
        raise ConfigFileError(f"worker.model: expected {wanted}, got {config.worker.model!r}")
    log.setup(LogConfig(level="warning"))
    _interrupt_at_signals()
    log_dir = _log_dir_of(config)
    supervisor = _containers(config, log_dir) if config.docker else _processes(config, log_dir)
    timeout_s = config.control.form_timeout_s if config.control else _JOIN_TIMEOUT_S
    try:
        with _health(config, supervisor):
            supervisor.start()
            view = _wait(supervisor, timeout_s, console)
            _show(supervisor, view, "stderr" if config.log_to_stderr else str(log_dir), console)
            for line in plain_text_warning(exposed(config)):
                console.print(line, soft_wrap=True)
            _follow(supervisor, view, console)
    except KeyboardInterrupt:
        _print_if_open("draining; Ctrl-C again kills", console)
    finally:
        _stop(supervisor, config.stop_timeout_s)
    if not config.log_dir:  # ours, and nothing in it says more than that all ended as it should
        shutil.rmtree(log_dir, ignore_errors=True)
    _print_if_open("stopped", console)
    return 0


def _interrupt_at_signals() -> None:
    """SIGTERM and the end of the terminal act as Ctrl-C."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    at_hangup(lambda: signal.raise_signal(signal.SIGTERM))


def _print_if_open(words: str, console: Console) -> None:
    """Print, unless the terminal is closed."""
    with suppress(OSError):
        console.print(words)


def _log_dir_of(config: HostConfig) -> Path:
    """Made if missing. Raises ConfigFileError: no file can be made there."""
    try:
        folder = Path(config.log_dir or tempfile.mkdtemp(prefix="crossdock-"))
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        given = repr(config.log_dir) if config.log_dir else "none, and a new one cannot be made"
        raise ConfigFileError(f"log_dir: expected a directory to write files in, got {given} ({error})") from error
    return folder


def check_transport(config: HostConfig) -> None:
    """Raises ConfigFileError for a transport that is not installed here (where none is, containers bring theirs), and
    for more ranks than it has, or than GPUs are here: their group would fail once all of them have started."""
    name, known = config.worker.transport, transports.installed()
    if not known:
        return
    if name not in known:
        raise ConfigFileError(f"worker.transport: expected one of {', '.join(transports.names())}, got {name!r}")
    most, control = known[name].max_ranks, config.control_config()
    asked = {"num_workers": config.num_workers}
    if control is not None:
        asked |= {"control.world_size": control.num_ranks, "control.max_workers": control.most_workers}
    for field, ranks in asked.items():
        if ranks > most:
            raise ConfigFileError(f"{field}: expected at most {most}, the most ranks of transport {name}, got {ranks}")
    if known[name].needs_gpu and config.docker is None:
        _check_gpus(config, num_gpus())


def _check_gpus(config: HostConfig, found: int) -> None:
    """Raises ConfigFileError where there is no GPU for each worker."""
    first = config.worker.local_rank if config.worker.device is None else config.worker.device
    if first + config.most_workers > found:
        wanted = f"a GPU for each of {config.most_workers} workers, from device {first} on"
        raise ConfigFileError(f"worker.transport {config.worker.transport}: expected {wanted}, got {found} here")


def check_network(config: HostConfig) -> None:
    """Raises ConfigFileError for a network that the transport cannot use, and for a group of several hosts of which a
    part listens where no other host reaches it. A data port on loopback is a group of several domains on one host."""
    network, facts = config.worker.network, transports.installed().get(config.worker.transport)
    if network is None:
        return
    if facts is not None and not facts.cross_host:
        wanted = f"expected null, or transport {' or '.join(transports.cross_host_names())}"
        raise ConfigFileError(f"worker.network: {wanted}, got transport {facts.name}, which joins ranks of one host")
    control = config.control_config()
    if is_loopback(network.listen) or (control is not None and control.num_ranks == config.num_workers):
        return
    parts = {"worker.listen": config.worker.advertise or config.worker.listen}
    if control is not None:
        parts = {"control.listen": control.listen, **parts}
    if network.advertise:
        parts["worker.network.advertise"] = f"[{network.advertise}]:0"
    closed = [f"{field} {address}" for field, address in parts.items() if is_loopback(address)]
    if closed:
        raise ConfigFileError(
            f"worker.network: expected addresses that other hosts reach beside it, got {', '.join(closed)}; set for "
            "example control.listen=0.0.0.0:7400 and worker.listen=0.0.0.0:0 (plain text unless `security` is set)"
        )


def exposed(config: HostConfig) -> list[str]:
    """Addresses at which the processes of this host listen without TLS and other hosts may reach them."""
    servers = [server for server in (config.control, config.worker) if server is not None]
    plain = [server.listen for server in servers if not server.security.is_on]
    return [listen for listen in plain if not is_loopback(listen)]


def _processes(config: HostConfig, log_dir: Path) -> Watched:
    to_stderr, most = config.log_to_stderr, config.log_max_bytes
    control, workers = config.control_config(), config.worker_configs()
    first = config.num_workers if config.scales else None
    return Supervisor(control, workers, log_dir, log_to_stderr=to_stderr, log_max_bytes=most, num_workers=first)


def _containers(config: HostConfig, log_dir: Path) -> Watched:
    try:
        from crossdock.host.docker import Containers
    except ModuleNotFoundError as error:
        if error.name != "docker":
            raise
        raise ConfigFileError(
            'runtime docker: expected the docker SDK, got none (pip install "crossdock[docker]")'
        ) from None
    return Containers(config, log_dir)


def _stop(supervisor: Watched, timeout_s: float) -> None:
    try:
        supervisor.stop(timeout_s)
    except KeyboardInterrupt:
        supervisor.stop(0)


def _wait(supervisor: Watched, timeout_s: float, console: Console) -> GroupView:
    said = ""
    with console.status("starting") as status:

        def progress(view: GroupView) -> None:
            nonlocal said
            words = _progress(view)
            if not console.is_terminal and words != said:
                console.print(Text(words))
            status.update(Text(words))  # workers have written parts of them: no markup
            said = words

        return supervisor.wait_serving(timeout_s, progress)


def _progress(view: GroupView) -> str:
    if not view.version:
        return "waiting for the control plane"
    loaded = sum(member.stats.expert_bytes for member in view.members)
    words = describe(view)
    return f"{words}, {format_bytes(loaded)} of experts loaded" if loaded else words


def _show(supervisor: Watched, view: GroupView, logs: str, console: Console) -> None:
    target = supervisor.control_address
    console.print(as_address_table(view, target))
    console.print()
    lines = {
        "clients": f'crossdock.client.attach(model, "{target}")',
        "status": f"crossdock status --target {target}",
        "logs": logs,
    }
    for title, text in lines.items():
        console.print(Text.assemble((f"{title:<9}", "dim"), text), soft_wrap=True)
    console.print("Ctrl-C drains and stops", style="dim")


def _follow(supervisor: Watched, view: GroupView, console: Console) -> None:
    """Print every change of the group until interrupted."""
    said = (view.epoch, view.state)
    for new in supervisor.views(_POLL_S):
        if new.version and (new.epoch, new.state) != said:
            said = (new.epoch, new.state)
            style = "green" if new.state == SERVING else "yellow"
            console.print(Text.assemble(f"epoch {new.epoch}: ", (describe(new), style)))


@contextmanager
def _health(config: HostConfig, supervisor: Watched) -> Iterator[None]:
    """The host's pages. With containers they are those of the workers' container, which are published."""
    server = None
    if config.http_listen and isinstance(supervisor, Supervisor):
        children = supervisor

        def ready() -> tuple[bool, str]:
            names, where = children.names, children.addresses()
            return readiness(names, {name: where[name] for name in names if name in where}, children.security)

        def names() -> list[str]:
            return [child.name for child in children.children]

        page = HostMetricsPage(children.metrics, names, children.addresses, children.security, config.worker.group)
        server = serve_http(config.http_listen, page, ready, children.security)
    try:
        yield
    finally:
        if server is not None:
            server.close()
