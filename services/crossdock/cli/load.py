"""The command `crossdock load`; see `cli`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from crossdock.cli.console import DEFAULT_TARGET, Json, SecurityFile, Target, Timeout, security_of, show_json

if TYPE_CHECKING:
    from crossdock.protocol.v1.control_pb2 import LoadRequest

LOOK_S = 0.25


def load(
    model: Annotated[Path, typer.Option("--model", help="Checkpoint of the same shapes, at a path of all workers.")],
    target: Target = DEFAULT_TARGET,
    wait_s: Annotated[float, typer.Option("--wait", min=0, help="Seconds to wait until all layers have it.")] = 600.0,
    as_json: Json = False,
    timeout_s: Timeout = 5.0,
    security: SecurityFile = None,
) -> None:
    """Load another checkpoint while the group serves, layer by layer. Exit status 1 unless all of it was loaded."""
    from crossdock.common import rpc
    from crossdock.common.control_channel import call_leader
    from crossdock.protocol.v1.control_pb2 import ExpertsRequest, ExpertsResponse
    from crossdock.protocol.v1.control_pb2_grpc import ControlPlaneStub

    request, guards = _request(model.resolve()), security_of(security)

    def experts() -> ExpertsResponse:
        found: ExpertsResponse = call_leader(
            target,
            guards,
            lambda channel: rpc.call_sync(ControlPlaneStub(channel).Experts, ExpertsRequest(), timeout_s=timeout_s),
        )
        return found

    call_leader(
        target, guards, lambda channel: rpc.call_sync(ControlPlaneStub(channel).Load, request, timeout_s=timeout_s)
    )
    deadline, found = time.monotonic() + wait_s, experts()
    while (not found.last_change or found.last_change.startswith("loading")) and time.monotonic() < deadline:
        time.sleep(LOOK_S)
        found = experts()
    loaded = found.last_change.startswith("loaded")
    if as_json:
        show_json({"loaded": loaded, "fingerprint": request.fingerprint, "last_change": found.last_change})
    else:
        print(f"{request.fingerprint}: {found.last_change}")
    raise typer.Exit(0 if loaded else 1)


def _request(path: Path) -> LoadRequest:
    """The request for the checkpoint in this folder, whose fingerprint is read here."""
    from crossdock.protocol.v1.control_pb2 import LoadRequest
    from crossdock.worker.checkpoints.checkpoint import Checkpoint

    checkpoint = Checkpoint.open(path)
    try:
        return LoadRequest(path=str(path), fingerprint=checkpoint.spec.fingerprint)
    finally:
        checkpoint.close()
