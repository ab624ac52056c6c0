"""Orders to a group that serves: `crossdock drain`, `cordon`, `uncordon`, `load` and `scale`."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from crossdock.cli.console import DEFAULT_TARGET, Json, SecurityFile, Target, Timeout, security_of, show_json

if TYPE_CHECKING:
    from crossdock.protocol.v1.control_pb2 import Barred, GroupView, LoadRequest

Name = Annotated[str, typer.Argument(help="A rank, a worker (uid), or a host: every worker there.")]
Reason = Annotated[str, typer.Option("--reason", help="Shown as the reason.")]
POLL_S = 0.25
T = TypeVar("T")


def drain(
    name: Name,
    reason: Reason = "",
    target: Target = DEFAULT_TARGET,
    wait_s: Annotated[float, typer.Option("--wait", min=0, help="Seconds to wait until all have left.")] = 60.0,
    as_json: Json = False,
    timeout_s: Timeout = 5.0,
    security: SecurityFile = None,
) -> None:
    """Let workers finish what is queued and leave; they stay out until `uncordon`. Exit status 1 if some stayed."""
    barred = _cordon(name, reason, target, timeout_s, security, drain_too=True)

    def staying() -> list[str]:
        return sorted({one.uid for one in barred} & set(_members(target, timeout_s, security)))

    stayed = _polled(staying, lambda found: not found, wait_s)
    _print(barred, "left" if not stayed else "asked to leave", as_json=as_json, stayed=stayed)
    raise typer.Exit(1 if stayed else 0)


def cordon(
    name: Name,
    reason: Reason = "",
    target: Target = DEFAULT_TARGET,
    as_json: Json = False,
    timeout_s: Timeout = 5.0,
    security: SecurityFile = None,
) -> None:
    """Refuse workers that register; those that are members continue to serve."""
    _print(_cordon(name, reason, target, timeout_s, security, drain_too=False), "cordoned", as_json=as_json)


def uncordon(
    name: Name,
    target: Target = DEFAULT_TARGET,
    as_json: Json = False,
    timeout_s: Timeout = 5.0,
    security: SecurityFile = None,
) -> None:
    """Accept workers again that were cordoned, drained or quarantined."""
    from crossdock.common.control_channel import ask_leader
    from crossdock.protocol.v1.control_pb2 import UncordonRequest

    request = UncordonRequest(name=name)
    answer = ask_leader(target, security_of(security), "Uncordon", request, timeout_s)
    _print(list(answer.barred), "may come back", as_json=as_json)


def _cordon(
    name: str, reason: str, target: str, timeout_s: float, security: Path | None, *, drain_too: bool
) -> list[Barred]:
    from crossdock.common.control_channel import ask_leader
    from crossdock.protocol.v1.control_pb2 import CordonRequest

    request = CordonRequest(name=name, reason=reason, drain=drain_too)
    answer = ask_leader(target, security_of(security), "Cordon", request, timeout_s)
    return list(answer.barred)


def _polled(
    fetch: Callable[[], T], is_over: Callable[[T], bool], wait_s: float, show: Callable[[T], None] = lambda _: None
) -> T:
    """The first that `is_over`, else the last within `wait_s`; one each POLL_S. show: called before each pause."""
    deadline, found = time.monotonic() + wait_s, fetch()
    while not is_over(found) and time.monotonic() < deadline:
        show(found)
        time.sleep(POLL_S)
        found = fetch()
    return found


def _members(target: str, timeout_s: float, security: Path | None) -> list[str]:
    from crossdock.cli.top import fetch

    return [member.worker.uid for member in fetch(target, timeout_s, security).members]


def _print(barred: list[Barred], done: str, *, as_json: bool, stayed: list[str] | None = None) -> None:
    if as_json:
        workers = [
            {"uid": one.uid, "hostname": one.hostname, "cause": one.cause, "reason": one.reason, "drain": one.drain}
            for one in barred
        ]
        show_json({"workers": workers, **({} if stayed is None else {"stayed": stayed})})
        return
    for one in barred:
        print(f"{one.uid} on {one.hostname}: {'still a member' if one.uid in (stayed or ()) else done}")


def load(
    model: Annotated[Path, typer.Option("--model", help="Checkpoint of the same shapes, at a path of all workers.")],
    target: Target = DEFAULT_TARGET,
    wait_s: Annotated[float, typer.Option("--wait", min=0, help="Seconds to wait until all layers have it.")] = 600.0,
    as_json: Json = False,
    timeout_s: Timeout = 5.0,
    security: SecurityFile = None,
) -> None:
    """Load another checkpoint while the group serves, layer by layer. Exit status 1 unless all of it was loaded."""
    from crossdock.common.control_channel import ask_leader
    from crossdock.protocol.v1.control_pb2 import ExpertsRequest, ExpertsResponse

    request, guards = _load_request(model.resolve()), security_of(security)

    def experts() -> ExpertsResponse:
        found: ExpertsResponse = ask_leader(target, guards, "Experts", ExpertsRequest(), timeout_s)
        return found

    ask_leader(target, guards, "Load", request, timeout_s)
    over = _polled(
        experts, lambda found: bool(found.last_change) and not found.last_change.startswith("loading"), wait_s
    )
    loaded = over.last_change.startswith("loaded")
    if as_json:
        show_json({"loaded": loaded, "fingerprint": request.fingerprint, "last_change": over.last_change})
    else:
        print(f"{request.fingerprint}: {over.last_change}")
    raise typer.Exit(0 if loaded else 1)


def _load_request(path: Path) -> LoadRequest:
    """The request for the checkpoint in this folder, whose fingerprint is read here."""
    from crossdock.protocol.v1.control_pb2 import LoadRequest
    from crossdock.worker.checkpoints.checkpoint import Checkpoint

    checkpoint = Checkpoint.open(path)
    try:
        return LoadRequest(path=str(path), fingerprint=checkpoint.spec.fingerprint)
    finally:
        checkpoint.close()


def scale(
    workers: Annotated[int, typer.Option("--workers", min=1, help="How many workers the group is to have.")],
    target: Target = DEFAULT_TARGET,
    wait_s: Annotated[float, typer.Option("--wait", min=0, help="Seconds to wait until it serves with them.")] = 600.0,
    as_json: Json = False,
    timeout_s: Timeout = 5.0,
    security: SecurityFile = None,
) -> None:
    """Change the number of workers while the group serves. Exit status 1 unless it then serves with that number."""
    from crossdock.cli.top import fetch
    from crossdock.common.control_channel import ask_leader
    from crossdock.protocol.v1.control_pb2 import SERVING, ScaleRequest

    def has_all(view: GroupView) -> bool:
        return view.state == SERVING and view.world_size == workers and not view.active_ranks

    ask_leader(target, security_of(security), "Scale", ScaleRequest(workers=workers), timeout_s)
    said = ""

    def is_over(view: GroupView) -> bool:
        return has_all(view) or view.wanted.workers != workers

    def show(view: GroupView) -> None:
        nonlocal said
        if view.scaling != said and not as_json:
            print(said := view.scaling, flush=True)

    view = _polled(lambda: fetch(target, timeout_s, security), is_over, wait_s, show)
    state = {"workers": view.world_size, "wanted": view.wanted.workers, "epoch": view.epoch, "waits_for": view.scaling}
    if as_json:
        show_json(state)
    else:
        print(f"epoch {view.epoch}: {view.world_size} workers" + (f", {view.scaling}" if view.scaling else ""))
    raise typer.Exit(0 if has_all(view) else 1)
