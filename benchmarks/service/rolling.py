"""Another checkpoint for the group that is measured."""

from __future__ import annotations

import time
from pathlib import Path

from crossdock.common import rpc
from crossdock.protocol.v1 import control_pb2, control_pb2_grpc
from crossdock.worker.checkpoints.checkpoint import Checkpoint

BEGIN_S, POLL_S, DEADLINE_S = 1.0, 0.05, 120.0


def load_checkpoint(target: str, model: Path) -> float:
    """Load it a second after the clients have begun; seconds until all layers have it. Raises RuntimeError."""
    checkpoint = Checkpoint.open(model)
    request = control_pb2.LoadRequest(path=str(model), fingerprint=checkpoint.spec.fingerprint)
    checkpoint.close()
    time.sleep(BEGIN_S)
    began = time.monotonic()
    with rpc.channel(target) as channel:
        stub = control_pb2_grpc.ControlPlaneStub(channel)
        rpc.call_sync(stub.Load, request, timeout_s=10)
        while time.monotonic() - began < DEADLINE_S:
            time.sleep(POLL_S)
            change = rpc.call_sync(stub.Experts, control_pb2.ExpertsRequest(), timeout_s=10).last_change
            if change.startswith("loaded"):
                return time.monotonic() - began
            if not change.startswith("loading"):
                raise RuntimeError(change)
    raise RuntimeError(f"not loaded within {DEADLINE_S:g} s")
