"""What this host reaches, and what reaches it: the control plane, its members, other addresses, its data port."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Sequence

from crossdock.common.addresses import family_of, format_address, split_address
from crossdock.common.call_errors import CallError, PermissionDenied, Unauthenticated
from crossdock.common.control_channel import call_leader, current_view
from crossdock.common.security import Security
from crossdock.common.settings import WorkerNetworkConfig
from crossdock.doctor import rdma
from crossdock.doctor.findings import Finding, fail, judge, ok, warn
from crossdock.protocol.v1 import control_pb2 as pb
from ep_kernels import TransportError
from ep_kernels.network import NetworkConfig
from ep_kernels.network.address import advertised

_SLOW_MS = 50.0
_SOON_S = 7 * 86400.0
_CURE = "check address and listen setting, network policies and firewalls between; it must listen on more than loopback"


def judge_addresses(addresses: Sequence[str], timeout_s: float) -> Iterator[Finding]:
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
        view = call_leader(target, security, lambda channel: current_view(channel, timeout_s))
    except CallError as error:
        known = isinstance(error, Unauthenticated | PermissionDenied)
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


def judge_network(network: WorkerNetworkConfig, num_workers: int) -> Iterator[Finding]:
    """Findings about the network of this host's workers."""
    yield _ports(network, num_workers)
    if network.devices and not rdma_devices(network):
        yield _devices(network.devices)
    yield _address(network)
    yield rdma.judge_memlock(network.provider, rdma.read())


def rdma_devices(network: WorkerNetworkConfig | None) -> tuple[str, ...]:
    """The RDMA ports that are configured; those of tcp are network interfaces."""
    return () if network is None or "tcp" in network.provider else network.devices


def rdma_gid_index(network: WorkerNetworkConfig | None) -> int:
    """The entry of the GID table that is configured; -1: none, or of a provider that takes none."""
    if network is None or "verbs" not in network.provider or "libfabric" in network.provider:
        return -1
    return network.gid_index


def address_towards(host: str, port: int) -> str:
    """The address from which this host speaks to another one; "" without a route. Sends nothing."""
    with socket.socket(family_of(host), socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, port))
        except OSError:
            return ""
        return str(probe.getsockname()[0])


def _ports(network: WorkerNetworkConfig, num_workers: int) -> Finding:
    cause = "the worker could not start: a peer would wait for a port that nothing listens on"
    cure = "another port or address in worker.network.listen; `ss -ltnp` shows what holds it"
    for local_rank in range(num_workers if split_address(network.listen)[1] else 1):
        address = network.of_worker(local_rank).listen
        host, port = split_address(address)
        try:
            with socket.create_server((host, port), family=family_of(host)):
                pass
        except OSError as error:
            reason = str(error.strerror or error).partition(" (while")[0]  # that is `create_server`'s
            return fail("data-port", f"{address}: {reason}", cause, cure)
    first, last = split_address(network.listen)[1], split_address(network.of_worker(num_workers - 1).listen)[1]
    ports = f"ports {first} to {last}" if last > first else f"port {first}" if first else "any port"
    return ok("data-port", f"{ports} of {split_address(network.listen)[0]} can be listened on")


def _devices(devices: tuple[str, ...]) -> Finding:
    known = [name for _, name in socket.if_nameindex()]
    missing = [name for name in devices if name not in known]
    what = f"no {', '.join(missing)} here, but {', '.join(known)}" if missing else ", ".join(devices)
    cure = "name interfaces of this host in worker.network.devices, or none"
    return judge("data-devices", not missing, what, "the data port would have no address", cure)


def _address(network: WorkerNetworkConfig) -> Finding:
    cure = "set worker.network.advertise to the address at which other hosts reach this one"
    try:
        chosen = advertised(NetworkConfig(**network.data_plane_fields()))
    except TransportError as error:
        return fail("data-address", str(error), "the worker could not start", cure)
    host = chosen.address
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(found[0]) as probe:
            probe.bind(found[4])
    except OSError as error:
        cause = "others connect to it, and reach this host only if something forwards them"
        return warn("data-address", f"{host} is none of this host's: {error.strerror or error}", cause, cure)
    shown = str(found[4][0])
    if shown.startswith("127.") or shown == "::1":
        return warn("data-address", f"{host} is loopback: {chosen.why}", "no other host reaches it", cure)
    return ok("data-address", f"{host}: {chosen.why}")


def trial_network(network: WorkerNetworkConfig | None, at: str, *, listens: bool) -> WorkerNetworkConfig:
    """The network of this host's rank in a trial with another host.

    Args:
        network: as configured; None: any port at the address by which this host and the other one meet.
        at: host:port where they meet; `listens`: here, else there.
    """
    if network is not None:
        return network
    host, port = split_address(at)
    own = host if listens else address_towards(host, port)
    return WorkerNetworkConfig(listen=format_address(own or "0.0.0.0", 0))
