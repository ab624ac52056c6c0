"""The command `crossdock doctor`; see `cli`."""

from __future__ import annotations

from typing import Annotated

import typer

from crossdock.cli.console import KNOWN, ConfigFile, Json, Overrides, SecurityFile, console, security_of, show_json

Listen = Annotated[str, typer.Option("--listen", "-l", help="host:port to wait at for another host's --peer.")]
Peer = Annotated[str, typer.Option("--peer", help="host:port where another host waits with --listen.")]
Wait = Annotated[float, typer.Option("--wait", min=1, help="With --listen, --peer: seconds to wait for the other.")]


def doctor(
    transport: Annotated[str, typer.Option("--transport", help=f"auto, {KNOWN}.")] = "auto",
    target: Annotated[str, typer.Option("--target", "-t", help="host:port of a control plane to check.")] = "",
    reach: Annotated[list[str] | None, typer.Option("--reach", help="host:port to connect to. Repeatable.")] = None,
    listen: Listen = "",
    peer: Peer = "",
    wait_s: Wait = 300.0,
    passes: Annotated[bool, typer.Option("--pass/--no-pass", help="Run a dispatch and a combine on this host.")] = True,
    strict: Annotated[bool, typer.Option("--strict", help="Exit status 1 for warnings, too.")] = False,
    as_json: Json = False,
    timeout_s: Annotated[
        float, typer.Option("--timeout", min=0, max=86400, help="Seconds to wait for each connection.")
    ] = 5.0,
    security: SecurityFile = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Check whether a group can run on this host; failures with cause and remedy. Exit status 1 if a check fails.

    Given the config of `crossdock up`, its network is checked, too.
    With --listen on one host and --peer on another, the two dispatch and combine over the network between them.
    """
    from crossdock.common.addresses import split_address
    from crossdock.common.config import ConfigFileError, HostConfig, load
    from crossdock.doctor import run

    if listen and peer:
        raise ConfigFileError("--listen: expected no --peer beside it (one host listens, the other connects), got both")
    if (meeting := listen or peer) and not split_address(meeting)[1]:
        raise ConfigFileError(f"{'--listen' if listen else '--peer'}: expected a port, got {meeting}")
    host = load(HostConfig, config, [*([] if config else ["worker.model=."]), *(overrides or [])])
    request = run.DoctorRequest(
        transport, target, tuple(reach or ()), passes, timeout_s, security_of(security),
        host.worker.network, host.num_workers, listen, peer, wait_s, host.worker.step_timeout_s,
    )  # fmt: skip
    findings = run.examine(request)
    kept = list(findings) if as_json else run.show(findings, console())
    if as_json:
        show_json(run.as_dict(kept, strict=strict))
    raise typer.Exit(run.exit_code(kept, strict=strict))
