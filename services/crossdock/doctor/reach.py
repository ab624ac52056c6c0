"""Reachability from this host: the control plane of a group, its members, other addresses."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Sequence

import grpc

from crossdock.common import rpc
from crossdock.common.addresses import split_address
from crossdock.common.control_channel import call_leader
from crossdock.common.security import Security
from crossdock.doctor.findings import Finding, fail, judge, ok, warn
from crossdock.protocol.v1 import control_pb2 as pb
from crossdock.protocol.v1 import control_pb2_grpc

_SLOW_MS = 50.0
_SOON_S = 7 * 86400.0
_CURE = "check address and listen setting, network policies and firewalls between; it must listen on more than loopback"


def judge_addresses(addresses: Sequence[str], timeout_s: float) -> Iterator[Finding]:
    """A TCP connection to each host:port."""
    for address in addresses:
        yield _connect("reachable", address, timeout_s)


def judge_certificate(security: Security) -> Iterator[Finding]:
    """How long the certificate of this process is valid."""
    if not security.config.cert_file:
        return
    left_s = security.not_after - time.time()
    words = f"{security.config.cert_file}: ends {time.strftime('%Y-%m-%d %H:%M', time.gmtime(security.not_after))} UTC"
    cure = "renew it: running processes take a new one up by themselves"
    if left_s <= 0:
        yield fail("certificate", words, "it is no longer accepted", cure)
    elif left_s < _SOON_S:
        yield warn("certificate", words, "it ends within a week", cure)
    else:
        yield ok("certificate", words)


def judge_group(target: str, timeout_s: float, security: Security | None = None) -> Iterator[Finding]:
    """The control plane at `target`, its view of the group, and a connection to each member."""
    try:
        view = call_leader(target, security, lambda channel: _view(channel, timeout_s))
    except rpc.CallError as error:
        known = isinstance(error, rpc.Unauthenticated | rpc.PermissionDenied)
        cure = (
            "give certificate and token of a caller that is known there: --security; docs/security.md"
            if known
            else _CURE
        )
        yield fail("control-plane", f"{target}: {error}", "workers cannot register, clients find no worker", cure)
        return
    state = pb.GroupState.Name(view.state)
    words = f"{target}: {state}, epoch {view.epoch}, {len(view.members)}/{view.world_size} ranks"
    cure = "look at the log of the members that are missing or not ready; docs/group-protocol.md lists the states"
    yield judge("control-plane", view.state == pb.SERVING, words, view.reason or "the group does not serve", cure)
    for member in view.members:
        yield _connect(f"rank-{member.rank}", member.address, timeout_s)


def _view(channel: grpc.Channel, timeout_s: float) -> pb.GroupView:
    call = control_pb2_grpc.ControlPlaneStub(channel).Watch(pb.WatchRequest(), timeout=timeout_s, wait_for_ready=False)
    try:
        view: pb.GroupView = next(iter(call))
        return view
    except grpc.RpcError as error:
        raise rpc.error_of(error) from None
    except StopIteration:
        raise rpc.Unavailable("the stream ended before a view came") from None
    finally:
        call.cancel()


def _connect(check: str, address: str, timeout_s: float) -> Finding:
    started = time.monotonic()
    try:
        with socket.create_connection(split_address(address), timeout_s):
            milliseconds = (time.monotonic() - started) * 1e3
    except (OSError, ValueError) as error:
        return fail(check, f"{address}: {error}", "it cannot be reached from here", _CURE)
    words = f"{address}: {milliseconds:.1f} ms"
    if milliseconds > _SLOW_MS:
        return warn(check, words, "connecting takes long", "check name service and routes")
    return ok(check, words)
