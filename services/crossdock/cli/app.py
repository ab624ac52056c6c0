"""The command `crossdock`. Parses, loads a config, calls one function; each command imports what it needs when it runs.

Exit status: 0 done, 1 failed, 2 bad usage, configuration or model, 3 no server at the address. Of a worker also: 3 the
group does not accept it now, 4 its GPU was lost, 5 the group can never accept it.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import crossdock
from crossdock.cli.console import (
    DEFAULT_TARGET,
    KNOWN,
    Ask,
    ConfigFile,
    Json,
    Overrides,
    ParentPid,
    SecurityFile,
    Target,
    Timeout,
    console,
    load_security,
    security_of,
    security_override,
    show_json,
)  # fmt: skip
from crossdock.cli.doctor import doctor
from crossdock.cli.orders import cordon, drain, scale, uncordon
from crossdock.cli.orders import load as load_checkpoint
from crossdock.cli.postmortem import postmortem
from crossdock.cli.top import top
from crossdock.cli.trace import trace
from crossdock.cli.tune import tune

if TYPE_CHECKING:
    from crossdock.common.settings import SecurityConfig

EXIT_FAILED, EXIT_USAGE, EXIT_UNREACHABLE = 1, 2, 3
_USAGE_ERRORS = (
    "AddressError", "CheckpointError", "ConfigError", "HopelessError", "ListenError", "OptionError", "SecurityError",
)  # fmt: skip

_FILE_ERRORS = frozenset(
    {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT}
)

app = typer.Typer(
    name="crossdock",
    help="Expert parallelism for mixture-of-experts models: serve the experts, measure, inspect and repair a group.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@contextlib.contextmanager
def _gc_paused() -> Iterator[None]:
    """Import torch in this: its objects are many and none is garbage, but a tenth of its import is a search for some.
    What was made by the end is never searched again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


def _show_version(asked: bool) -> None:
    if asked:
        print(f"crossdock {crossdock.__version__}")
        raise typer.Exit


@app.callback()
def root(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", "-v", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Expert parallelism for mixture-of-experts models: serve the experts, measure, inspect and repair a group."""


@app.command()
def up(
    model: Annotated[str, typer.Option("--model", "-m", help="Directory of a Hugging Face MoE checkpoint.")] = "",
    workers: Annotated[int | None, typer.Option("--workers", "-n", help="Workers on this host; by default 4.")] = None,
    listen: Annotated[str, typer.Option("--listen", "-l", help="host:port of the control plane started here.")] = "",
    join: Annotated[str, typer.Option("--join", help="host:port of a control plane that runs elsewhere.")] = "",
    world_size: Annotated[int | None, typer.Option("--world-size", help="Ranks of all hosts.")] = None,
    network: Annotated[str, typer.Option("--network", help="Between hosts: tcp, verbs or libfabric.")] = "",
    transport: Annotated[str, typer.Option("--transport", help=f"How ranks reach each other: {KNOWN}.")] = "",
    dtype: Annotated[str, typer.Option("--dtype", help="float32, bfloat16 or float16; else the checkpoint's.")] = "",
    log_dir: Annotated[str, typer.Option("--log-dir", help="Directory of the log files.")] = "",
    runtime: Annotated[str, typer.Option("--runtime", help="process, or docker: containers of our images.")] = "",
    security: SecurityFile = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
    ask: Ask = "",
) -> None:
    """Run a control plane and its workers on this host. Ctrl-C drains them."""
    from crossdock.common.config import ConfigFileError, HostConfig, load
    from crossdock.host.run import on_runtime, run_host

    _refuse_beside_join(join, {"--listen": listen, "--world-size": world_size})
    chosen = {
        "worker.model": model,
        "worker.transport": transport,
        "worker.dtype": dtype,
        "worker.control": join,
        "worker.network.provider": network,
        "num_workers": workers,
        "control.world_size": world_size,
        "log_dir": log_dir,
        "control.listen": listen,
    }
    if not (model or config or overrides):
        raise ConfigFileError("--model: expected the directory of a Hugging Face MoE checkpoint, got none")
    flags = [f"{path}={value}" for path, value in chosen.items() if value not in ("", None)]
    flags += ["control=null"] if join else []
    if security:
        flags += [f"{part}.security={security_override(security)}" for part in ("worker", "control")[: 2 - bool(join)]]
    loaded = on_runtime(load(HostConfig, config, [*flags, *(overrides or [])]), runtime)
    raise typer.Exit(_answer(ask, loaded.http_listen, loaded.worker.security) if ask else run_host(loaded, console()))


@app.command()
def control(config: ConfigFile = None, overrides: Overrides = None, parent_pid: ParentPid = 0, ask: Ask = "") -> None:
    """Run the control plane: membership and ranks of the group. Needs no torch."""
    from crossdock.common.config import ControlConfig, load

    loaded = load(ControlConfig, config, overrides or [])
    if ask:
        raise typer.Exit(_answer(ask, loaded.http_listen, loaded.security))
    _die_with(parent_pid)
    from crossdock.control.process import run_control

    raise typer.Exit(run_control(loaded))


@app.command()
def worker(config: ConfigFile = None, overrides: Overrides = None, parent_pid: ParentPid = 0, ask: Ask = "") -> None:
    """Run one expert worker: one process, one device, one rank."""
    from crossdock.common.config import WorkerConfig, load

    loaded = load(WorkerConfig, config, overrides or [])
    if ask:
        raise typer.Exit(_answer(ask, loaded.http_listen, loaded.security))
    _die_with(parent_pid)
    with _gc_paused():
        from crossdock.worker.process import end_process, run_worker

    try:
        code = run_worker(loaded)
    except Exception as error:
        code = _failed(error)
    end_process(code)


@app.command()
def ready(
    pid: Annotated[int, typer.Option("--pid", min=1, help="Its process id; in a container 1.")] = 1,
    as_json: Json = False,
) -> None:
    """Ask the `crossdock up`, `control` or `worker` that runs here as a process whether it is ready. Exit status 1: no.

    Where it listens, and whether with TLS, is read from its own command line and configuration.
    """
    from crossdock.cli.ready import words_of

    app([*words_of(pid), "--ask", "json" if as_json else "text"], prog_name="crossdock")


@app.command("deep-ep")
def deep_ep(
    engines: Annotated[bool, typer.Option("--engines", help="Print which engines were tried, and with what.")] = False,
    as_json: Json = False,
) -> None:
    """Print the folder of our `deep_ep` module: PYTHONPATH="$(crossdock deep-ep)" PROGRAM imports it as DeepEP."""
    path = Path(crossdock.__file__).parent / "deep_ep"
    recorded = json.loads((path / "tried.json").read_bytes()) if as_json or engines else []
    if as_json:
        show_json({"path": str(path / "path"), "engines": recorded})
    elif engines:
        for each in recorded:
            print(f"{each['engine']} {each['version']}: {', '.join(each['calls'])}")
    else:
        print(path / "path")


@app.command()
def status(
    target: Target = DEFAULT_TARGET,
    as_json: Json = False,
    timeout_s: Timeout = 5.0,
    security: SecurityFile = None,
) -> None:
    """Show ranks, epoch, states, experts and rates of a group. Exit status 1 unless it is serving."""
    from crossdock.cli.status import as_dict, as_table, plain_text
    from crossdock.cli.top import fetch
    from crossdock.protocol.v1.control_pb2 import SERVING

    view = fetch(target, timeout_s, security)
    exposed = plain_text(view, target) if security_of(security) is None else []
    if as_json:
        show_json(as_dict(view, exposed))
    else:
        printer = console()
        printer.print(as_table(view, target, exposed, printer.width if printer.is_terminal else 0))
    raise typer.Exit(0 if view.state == SERVING else EXIT_FAILED)


@app.command()
def experts(
    target: Target = DEFAULT_TARGET,
    layer: Annotated[int | None, typer.Option("--layer", help="The experts of this MoE layer, by load.")] = None,
    most: Annotated[int, typer.Option("--most", min=1, help="With --layer: number of experts.")] = 32,
    as_json: Json = False,
    timeout_s: Timeout = 60.0,
    security: SecurityFile = None,
) -> None:
    """Show each expert's load and copies, how balanced the ranks are, and what `rebalance` would move."""
    from crossdock.cli.experts import as_dict, as_tables
    from crossdock.common.config import ConfigFileError
    from crossdock.common.control_channel import ask_leader
    from crossdock.protocol.v1.control_pb2 import ExpertsRequest

    found = ask_leader(target, security_of(security), "Experts", ExpertsRequest(), timeout_s)
    known = [one.layer for one in found.layers]
    if layer is not None and found.version and layer not in known:
        raise ConfigFileError(f"--layer: expected one of {known}, got {layer}")
    if as_json:
        show_json(as_dict(found, layer))
    else:
        console().print(as_tables(found, target, layer, most))


@app.command()
def rebalance(
    target: Target = DEFAULT_TARGET,
    as_json: Json = False,
    timeout_s: Timeout = 60.0,
    security: SecurityFile = None,
) -> None:
    """Move experts between ranks while they serve, as `crossdock experts` shows. Exit status 1 if refused."""
    from crossdock.common.control_channel import ask_leader
    from crossdock.protocol.v1.control_pb2 import RebalanceRequest

    started = ask_leader(target, security_of(security), "Rebalance", RebalanceRequest(), timeout_s)
    if as_json:
        show_json({"version": started.version, "moves": started.moves})
    elif started.moves:
        print(f"placement {started.version}: loading {started.moves} copies; `crossdock experts` shows how far it is")
    else:
        print(f"placement {started.version}: balanced well enough, nothing moves")


@app.command()
def demo(
    transport: Annotated[str, typer.Option("--transport", help=f"{KNOWN}; on GPUs one worker on each.")] = "cpu",
    workers: Annotated[int | None, typer.Option("--workers", "-n", min=1, help="By default 4, or one per GPU.")] = None,
    family: Annotated[
        list[str] | None, typer.Option("--family", "--families", help="A model family, or all. Repeatable.")
    ] = None,
    hosts: Annotated[int, typer.Option("--hosts", min=1, help="2: workers in two network namespaces.")] = 1,
    as_json: Json = False,
    security: SecurityFile = None,
    in_namespace: Annotated[bool, typer.Option("--in-namespace", hidden=True)] = False,
) -> None:
    """Serve small random models here and compare them with plain `transformers`, token by token."""
    from crossdock.demo import FAMILIES, check_names
    from crossdock.demo.hosts import become

    families = family or tuple(FAMILIES)
    check_names(transport, families)
    why_not = None if in_namespace else become([*sys.argv[1:], "--in-namespace"]) if hosts > 1 else "one host"
    chosen = {"transport": transport, "num_workers": workers, "security": load_security(security), "as_json": as_json}
    chosen |= {"num_hosts": hosts, "no_namespaces": why_not}
    from crossdock.demo.run import run_demo

    raise typer.Exit(run_demo(families, **chosen))


@app.command()
def topo(
    files: Annotated[list[Path] | None, typer.Argument(help="Output of `topo --facts` on other hosts.")] = None,
    target: Annotated[str, typer.Option("--target", "-t", help="host:port of a control plane: show its group.")] = "",
    as_json: Json = False,
    as_dot: Annotated[bool, typer.Option("--dot", help="Print a graph for Graphviz.")] = False,
    as_svg: Annotated[bool, typer.Option("--svg", help="Print an SVG picture.")] = False,
    only_facts: Annotated[bool, typer.Option("--facts", help="Print this host's facts, for FILES.")] = False,
    timeout_s: Timeout = 5.0,
    security: SecurityFile = None,
) -> None:
    """Show the connections between GPUs, their transport and speed, each GPU's NIC, and why a transport is off.

    By default of this host; of other hosts from files, or of a running group.
    """
    from crossdock.common.config import ConfigFileError
    from crossdock.topo import listing, picture, sources

    if bool(files) + bool(target) + only_facts > 1 or as_json + as_dot + as_svg > 1:
        raise ConfigFileError("expected at most one of FILES, --target, --facts, and of --json, --dot, --svg")
    if target:
        found = sources.of_group(target, timeout_s, security_of(security))
    elif files:
        found = sources.of_hosts(sources.read_facts(files), None, "from files")
    else:
        from crossdock.topo.facts import host_facts

        host = host_facts()
        if only_facts:
            print(sources.write_facts(host))
            return
        found = sources.of_hosts([host], None, "this host")
    if as_json:
        show_json(listing.as_dict(found))
    elif as_dot or as_svg:
        print(picture.as_dot(found) if as_dot else picture.as_svg(found), end="")
    else:
        console().print(listing.as_tables(found), soft_wrap=True)


@app.command()
def memory(
    as_json: Json = False,
    num_experts: Annotated[int, typer.Option("--num-experts", help="Experts of a layer (E).")] = 256,
    hidden_size: Annotated[int, typer.Option("--hidden-size", help="Hidden size (H).")] = 7168,
    topk: Annotated[int, typer.Option("--topk", help="Experts per token (K).")] = 8,
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="Most tokens per rank.")] = 128,
    ranks: Annotated[int, typer.Option("--ranks", help="Ranks of the group, over all hosts.")] = 8,
    mode: Annotated[str, typer.Option("--mode", help="ll, ht or auto.")] = "ll",
    layout: Annotated[str, typer.Option("--layout", help="expert_major, grouped, rank_major or flat.")] = "",
    dtype: Annotated[str, typer.Option("--dtype", help="bfloat16, float16, float32, fp8.")] = "bfloat16",
    transport: Annotated[str, typer.Option("--transport", help="cpu or nvlink; by default nvlink.")] = "",
    hosts: Annotated[int, typer.Option("--hosts", help="Hosts of the group; ranks are spread evenly.")] = 1,
    model: Annotated[Path | None, typer.Option("--model", help="Checkpoint: show its experts' bytes instead.")] = None,
    expert_dtype: Annotated[str, typer.Option("--expert-dtype", help="With --model: as in a worker's config.")] = "",
    rank_gib: Annotated[float | None, typer.Option("--rank-gib", help="With --model: memory of each rank.")] = None,
) -> None:
    """Show how much memory the transport takes on one rank, array by array, with the buffers for other hosts.

    With --model: the bytes of its experts on each rank, whether they fit, and the least number of ranks that would do.
    """
    from crossdock.cli import memory as regions

    if model is not None:
        from crossdock.worker.experts import memory_need

        found = memory_need.describe(model, ranks, expert_dtype, rank_gib)
        show_json(found) if as_json else console().print(regions.experts_table(found))
        raise typer.Exit(not found["fits"])

    config = regions.config_of(num_experts, hidden_size, topk, max_tokens, ranks, mode, layout, dtype, transport)
    if as_json:
        show_json(regions.as_dict(config, hosts))
    else:
        console().print(regions.as_table(config, hosts))


for _command in (doctor, tune, drain, cordon, uncordon, scale, load_checkpoint, postmortem, top, trace):
    app.command()(_command)


@app.command()
def certs(
    folder: Annotated[Path, typer.Argument(help="Folder to write to; created if missing.")],
    host: Annotated[list[str] | None, typer.Option("--host", help="Name or address of a server. Repeatable.")] = None,
    days: Annotated[int, typer.Option("--days", min=1, help="Days until they expire.")] = 365,
    as_json: Json = False,
) -> None:
    """Make a certificate authority and certificates for every part of a group. A second run keeps the authority."""
    from crossdock.cli.certs import make_all

    made = [str(path) for path in make_all(folder, host or (), days)]
    show_json({"configs": made}) if as_json else print(*made, sep="\n")


@app.command("config")
def config_fields(as_json: Json = False) -> None:
    """List every field of every config with its type, limits, unit, default and meaning, as Markdown."""
    from crossdock.cli import config_page

    show_json(config_page.as_dict()) if as_json else print(config_page.page(), end="")


@app.command()
def version(as_json: Json = False) -> None:
    """Show the versions of Crossdock and of its main dependencies."""
    import platform
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as version_of

    found: dict[str, str | None] = {"crossdock": crossdock.__version__, "python": platform.python_version()}
    for name in ("grpcio", "protobuf", "torch", "transformers"):
        try:
            found[name] = version_of(name)
        except PackageNotFoundError:
            found[name] = None
    lines = (f"{name} {number or 'not installed'}" for name, number in found.items())
    show_json(found) if as_json else print(*lines, sep="\n")


def _refuse_beside_join(join: str, options: dict[str, object]) -> None:
    from crossdock.common.config import ConfigFileError

    for option, given in options.items():
        if join and given:
            raise ConfigFileError(f"--join: expected no {option} beside it (the control plane then runs elsewhere)")


def _answer(ask: str, http_listen: str, security: SecurityConfig) -> int:
    """Say whether the server of a configuration is ready; the exit status."""
    from crossdock.cli.ready import readiness

    is_ready, said = readiness(http_listen, security)
    show_json({"ready": is_ready, "said": said}) if ask == "json" else print(said)
    return 0 if is_ready else EXIT_FAILED


def _die_with(parent_pid: int) -> None:
    if parent_pid:
        from crossdock.host.child import die_with

        die_with(parent_pid)


def main() -> None:
    """Run the command; an error becomes one line on stderr and an exit status."""
    try:
        app(prog_name="crossdock")
    except KeyboardInterrupt:
        sys.exit(128 + 2)
    except Exception as error:
        sys.exit(_failed(error))


def exit_status(error: Exception) -> int:
    """The exit status that stands for an error."""
    from crossdock.common.config import ConfigFileError

    if isinstance(error, ConfigFileError) or type(error).__name__ in _USAGE_ERRORS or _file_of(error):
        return EXIT_USAGE
    return EXIT_UNREACHABLE if isinstance(error, ConnectionError | TimeoutError) else EXIT_FAILED


def _file_of(error: Exception) -> str:
    """The file that cannot be read or written as the user named it; "" for any other error."""
    return str(error.filename) if isinstance(error, OSError) and error.errno in _FILE_ERRORS and error.filename else ""


def _failed(error: Exception) -> int:
    """Say so; the exit status."""
    if "--debug" in sys.argv:
        raise error
    from rich.console import Console
    from rich.text import Text

    words = str(error) or type(error).__name__
    if isinstance(error, OSError) and (file := _file_of(error)):
        words = f"{file}: expected a file or folder of this user's, got: {error.strerror}"
    if isinstance(error, ImportError):
        words += ' (is the extra installed? pip install "crossdock[worker]")'
    Console(stderr=True).print(Text.assemble(("error: ", "bold red"), words), soft_wrap=True)
    return exit_status(error)
