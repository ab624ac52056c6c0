"""mTLS, tokens and roles between real processes and real servers, with certificates made here by openssl."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import socket
import ssl
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import msgspec
import pytest

from crossdock.cli import certs
from crossdock.cli.app import app
from crossdock.client import Client, NotAllowed
from crossdock.common import rpc
from crossdock.common.access import ANYBODY, METHODS, Caller, RateLimiter, Role, authorizer_of, matches
from crossdock.common.addresses import split_address
from crossdock.common.announce import metrics_url
from crossdock.common.call_errors import (
    AlreadyExists,
    CallError,
    PermissionDenied,
    ResourceExhausted,
    Unauthenticated,
    Unavailable,
    error_of,
)
from crossdock.common.config import ConfigFileError, ControlConfig
from crossdock.common.control_channel import LEASE_KEY, SERVICE_NAME, ControlPlaneChannel, call_leader, current_view
from crossdock.common.http import ask_http
from crossdock.common.metrics import ControlMetrics
from crossdock.common.security import Security, SecurityError, TokenFile, load_security
from crossdock.common.settings import AccessConfig, SecurityConfig
from crossdock.control.server.server import ControlPlane
from crossdock.host.pages import HostMetricsPage, readiness
from crossdock.protocol.v1 import control_pb2 as pb
from crossdock.protocol.v1 import control_pb2_grpc, expert_pb2, expert_pb2_grpc
from tests.services.cluster import ANSWER_S, TEST_S, Batch, Cluster, cluster
from tests.services.control_world import TIMEOUT_S, FakeWorker, newest_view, spawn
from tests.tools import needs

pytestmark = [
    needs("openssl"),
    pytest.mark.timeout(TEST_S),
]

WORKER_TOKEN, CLIENT_TOKEN = "worker-token-0123456789", "client-token-0123456789"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `crossdock certs` makes, and two workers that have a certificate each."""
    made: Path = tmp_path_factory.mktemp("certs")
    certs.make_all(made, ["here.test", "10.1.2.3"])
    for uid in ("w0", "w1"):
        certs.issue(made, certs.CertificateRole(uid, (f"crossdock://worker/{uid}",), serves=False))
    return made


def security(folder: Path, part: str, **fields: object) -> Security:
    return Security(msgspec.structs.replace(load_security(folder / f"{part}.yaml"), **fields))


@contextlib.asynccontextmanager
async def served(guard: Security, rate: float = 0.0) -> AsyncIterator[tuple[str, ControlMetrics]]:
    """A guarded control plane on this event loop."""
    metrics = ControlMetrics()
    service = ControlPlane(ControlConfig(world_size=2), metrics)
    authorizer = authorizer_of(guard, rate, metrics)
    authorizer._rate_limiter = RateLimiter(rate, lambda: 0.0)  # however long it takes to make the calls
    server = await rpc.server(1 << 16, rpc.Health([SERVICE_NAME]), authorizer=authorizer)
    control_pb2_grpc.add_ControlPlaneServicer_to_server(service, server)
    address = rpc.bind(server, "127.0.0.1:0", guard)
    await server.start()
    try:
        yield address, metrics
    finally:
        service.stop()
        await server.stop(0)


@contextlib.asynccontextmanager
async def stub_of(address: str, guard: Security | None) -> AsyncIterator[control_pb2_grpc.ControlPlaneStub]:
    name = guard.config.control_name if guard is not None else ""
    async with rpc.aio_channel(address, security=guard, name=name) as channel:
        yield control_pb2_grpc.ControlPlaneStub(channel)


async def test_a_certificate_of_the_authority_is_let_in_and_no_other(folder: Path, tmp_path: Path) -> None:
    certs.make_all(tmp_path)
    strangers = [None, security(tmp_path, "worker"), security(folder, "worker", cert_file="", key_file="")]
    strangers.append(security(folder, "worker", ca_file=str(tmp_path / "ca.pem")))
    async with served(security(folder, "control")) as (address, _):
        async with stub_of(address, security(folder, "worker")) as stub:
            assert (await FakeWorker(stub, "a/0").register()).lease_s == 3.0
        for stranger in strangers:
            async with stub_of(address, stranger) as stub:
                with pytest.raises(Unavailable):
                    await rpc.call(stub.Topology, pb.TopologyRequest(), timeout_s=TIMEOUT_S)
        async with stub_of(address, security(folder, "client", control_name="crossdock-worker")) as stub:
            with pytest.raises(Unavailable):  # the server is not who was asked for
                await rpc.call(stub.Topology, pb.TopologyRequest(), timeout_s=TIMEOUT_S)


async def test_clients_watch_but_neither_join_nor_see_regions(folder: Path) -> None:
    async with served(security(folder, "control")) as (address, metrics), contextlib.AsyncExitStack() as stack:
        worker = await stack.enter_async_context(stub_of(address, security(folder, "worker")))
        client = await stack.enter_async_context(stub_of(address, security(folder, "client")))
        await FakeWorker(worker, "a/0").register()
        intruder = FakeWorker(client, "a/0", epoch=1, rank=0)
        for call in (intruder.register, intruder.beat, intruder.get_ready, intruder.leave):
            with pytest.raises(PermissionDenied, match="expected a caller that is worker, got client"):
                await call()
        with pytest.raises(PermissionDenied, match="worker a/0: expected its own certificate"):
            await _first(client, intruder.id)
        assert [member.worker.uid for member in (await newest_view(client)).members] == ["a/0"]
        assert metrics.registry.get_sample_value("crossdock_rpc_refusals_total", {"reason": "permission"}) == 4


async def test_a_worker_speaks_for_its_own_uid_only(folder: Path) -> None:
    async with served(security(folder, "control")) as (address, _), contextlib.AsyncExitStack() as stack:
        first = await stack.enter_async_context(stub_of(address, security(folder, "w0")))
        second = await stack.enter_async_context(stub_of(address, security(folder, "w1")))
        await FakeWorker(first, "w0").register()
        await FakeWorker(second, "w1").register()
        stolen = FakeWorker(second, "w0", incarnation=2)
        for call in (stolen.register, stolen.beat, stolen.leave, FakeWorker(second, "w0").beat):
            with pytest.raises(PermissionDenied, match="worker w0: expected its own certificate"):
                await call()
        with pytest.raises(PermissionDenied, match="worker w0"):
            await _first(second, stolen.id)
        assert len((await newest_view(first)).members) == 2


async def test_a_lease_belongs_to_the_process_that_brought_its_key(folder: Path) -> None:
    """Workers that share a certificate cannot beat, leave or read for each other."""
    worker = pb.WorkerId(uid="a/0", incarnation=7)
    key = {"metadata": ((LEASE_KEY, "k" * 32),)}
    register = pb.RegisterRequest(worker=worker, address="a:1", http_address="a:2", transport="cpu", abi="a", model="m")
    async with served(security(folder, "control")) as (address, _):
        guard = security(folder, "worker")
        async with stub_of(address, guard) as stub:
            await rpc.call(stub.Register, register, timeout_s=TIMEOUT_S, **key)
            for other in ({}, {"metadata": ((LEASE_KEY, "x" * 32),)}):
                for method, request in (
                    (stub.Register, register),
                    (stub.Heartbeat, pb.HeartbeatRequest(worker=worker)),
                    (stub.Leave, pb.LeaveRequest(worker=worker)),
                ):
                    with pytest.raises(PermissionDenied, match="worker a/0: expected the key of its lease"):
                        await rpc.call(method, request, timeout_s=TIMEOUT_S, **other)
            await rpc.call(stub.Heartbeat, pb.HeartbeatRequest(worker=worker), timeout_s=TIMEOUT_S, **key)
            newer = pb.WorkerId(uid="a/0", incarnation=8)
            register.worker.CopyFrom(newer)
            await rpc.call(stub.Register, register, timeout_s=TIMEOUT_S, metadata=((LEASE_KEY, "n" * 32),))
            with pytest.raises(AlreadyExists):
                await rpc.call(stub.Heartbeat, pb.HeartbeatRequest(worker=worker), timeout_s=TIMEOUT_S, **key)
            with pytest.raises(PermissionDenied):
                await rpc.call(stub.Heartbeat, pb.HeartbeatRequest(worker=newer), timeout_s=TIMEOUT_S, **key)


async def test_new_certificates_count_from_the_next_connection(folder: Path, tmp_path: Path) -> None:
    """The authority, the server's and the caller's certificates are replaced under running processes."""
    here = tmp_path / "live"
    shutil.copytree(folder, here)
    server, caller = security(here, "control"), security(here, "worker")
    channel: ControlPlaneChannel | None = None
    async with served(server) as (address, _):
        channel = ControlPlaneChannel(address, caller)
        stub = control_pb2_grpc.ControlPlaneStub(channel.grpc_channel)
        await FakeWorker(stub, "a/0").register()
        before = _serial(address, here)
        for old in ("ca.pem", "ca.key"):
            (here / old).unlink()
        certs.make_all(here)
        assert _serial(address, here) != before
        assert await channel.fail_over()
        await FakeWorker(control_pb2_grpc.ControlPlaneStub(channel.grpc_channel), "a/1").register()
        assert not await channel.fail_over()
        async with stub_of(address, security(folder, "worker")) as former:
            with pytest.raises(Unavailable):  # of an authority that is trusted no more
                await rpc.call(former.Topology, pb.TopologyRequest(), timeout_s=TIMEOUT_S)
        await channel.close()


async def test_a_pair_that_does_not_fit_leaves_the_former_in_force(folder: Path, tmp_path: Path) -> None:
    here = tmp_path / "live"
    shutil.copytree(folder, here)
    server = security(here, "control")
    async with served(server) as (address, metrics):

        def reloads(result: str) -> float | None:
            return metrics.registry.get_sample_value("crossdock_certificate_reloads_total", {"result": result})

        before = _serial(address, here)
        shutil.copy(here / "client.key", here / "control.key")
        assert _serial(address, here) == before
        assert (reloads("failed"), reloads("ok")) == (1, None)
        certs.issue(here, certs.PARTS[0])
        assert _serial(address, here) != before
        assert (reloads("failed"), reloads("ok")) == (1, 1)


async def test_tokens_give_roles_and_may_be_replaced(folder: Path, tmp_path: Path) -> None:
    files = {role: tmp_path / role for role in ("worker", "client")}
    files["worker"].write_text(f"# two at a time\n{WORKER_TOKEN}\nnext-worker-token-01234\n")
    files["client"].write_text(CLIENT_TOKEN)
    access = AccessConfig(worker_tokens=str(files["worker"]), client_tokens=str(files["client"]))
    guard = security(folder, "control", access=access, require_client_cert=False)
    bare = {"cert_file": "", "key_file": ""}
    mine = tmp_path / "mine"
    mine.write_text(WORKER_TOKEN)
    async with served(guard) as (address, metrics):
        with_token = security(folder, "worker", token_file=str(mine), **bare)
        async with stub_of(address, with_token) as stub:
            await FakeWorker(stub, "a/0").register()
            mine.write_text("wrong-" + WORKER_TOKEN)
            await asyncio.sleep(0.6)
            with pytest.raises(Unauthenticated, match="expected a known token"):
                await FakeWorker(stub, "a/0").register()
            mine.write_text("next-worker-token-01234")
            await asyncio.sleep(0.6)
            await FakeWorker(stub, "a/0").register()
        async with stub_of(address, security(folder, "worker", **bare)) as stub:
            with pytest.raises(Unauthenticated, match="expected `Bearer` and a token, got none"):
                await newest_view_error(stub)
        async with stub_of(address, security(folder, "client", token_file=str(files["client"]), **bare)) as stub:
            await newest_view(stub)
            with pytest.raises(PermissionDenied):
                await FakeWorker(stub, "a/0").register()
        sample = metrics.registry.get_sample_value
        assert sample("crossdock_rpc_refusals_total", {"reason": "unauthenticated"}) == 2


async def test_too_many_calls_of_one_are_refused_and_others_are_not(folder: Path) -> None:
    async with served(security(folder, "control"), rate=5.0) as (address, _), contextlib.AsyncExitStack() as stack:
        worker = await stack.enter_async_context(stub_of(address, security(folder, "worker")))
        client = await stack.enter_async_context(stub_of(address, security(folder, "client")))
        calls = [rpc.call(client.Topology, pb.TopologyRequest(), timeout_s=TIMEOUT_S) for _ in range(40)]
        refused = [
            error for error in await asyncio.gather(*calls, return_exceptions=True) if isinstance(error, Exception)
        ]
        assert len(refused) == 30
        assert {type(error) for error in refused} == {ResourceExhausted}
        assert "expected at most 5 a second of one caller, got more" in str(refused[0])
        await FakeWorker(worker, "a/0").register()


def test_every_method_names_who_may_call_it() -> None:
    services = [pb.DESCRIPTOR, expert_pb2.DESCRIPTOR]
    methods = {
        f"/{service.full_name}/{method.name}"
        for file in services
        for service in file.services_by_name.values()
        for method in service.methods
    }
    assert methods <= set(METHODS)


@pytest.mark.parametrize(
    ("pattern", "name", "uid", "fits"),
    [
        ("crossdock-worker", "crossdock-worker", "w0", True),
        ("crossdock-worker", "crossdock-workers", "w0", False),
        ("crossdock://worker/{uid}", "crossdock://worker/w0", "w0", True),
        ("crossdock://worker/{uid}", "crossdock://worker/w0", "w1", False),
        ("crossdock://worker/{uid}", "crossdock://worker/w0", None, True),
        ("crossdock://worker/{uid}", "crossdock://worker/", None, False),
        ("crossdock://worker/{uid}", "crossdock://worker/a.c", "a.c", True),
        ("crossdock://worker/{uid}", "crossdock://worker/abc", "a.c", False),
        ("*.workers.test", "a.workers.test", "x", True),
        ("*", "", None, True),
    ],
)
def test_patterns_of_names(pattern: str, name: str, uid: str | None, fits: bool) -> None:
    assert matches(pattern, name, uid) is fits


def test_a_caller_without_the_role_speaks_for_nobody() -> None:
    assert Caller((), ANYBODY, "h", guarded=False).speaks_for("a")
    assert Caller((), frozenset({Role.WORKER}), "h").speaks_for("a")
    assert not Caller((), frozenset({Role.CLIENT}), "h").speaks_for("a")


def test_the_limiter_refills_and_forgets() -> None:
    now = [0.0]
    limiter = RateLimiter(2.0, lambda: now[0])
    assert [limiter.allow("a") for _ in range(5)] == [True] * 4 + [False]
    assert limiter.allow("b")
    now[0] = 0.5
    assert [limiter.allow("a") for _ in range(2)] == [True, False]
    assert all(RateLimiter(0.0).allow("a") for _ in range(1000))
    for caller in range(10_000):
        limiter.allow(caller)
    assert len(limiter._left) <= 8192


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"cert_file": "a"}, "cert_file, key_file: expected both or none"),
        ({"token_file": "t"}, "token_file: expected ca_file beside it"),
        ({"access": {"client_tokens": "t"}}, "access: expected cert_file beside tokens"),
        ({"cert_file": "a", "key_file": "b"}, "cert_file: expected ca_file"),
        ({"certfile": "a"}, "certfile"),
        ({"http": "tls"}, "http: expected cert_file beside tls, got none"),
        (
            {"cert_file": "a", "key_file": "b", "http": "mtls", "access": {"client_tokens": "t"}},
            "http: expected ca_file",
        ),
        ({"http": "https"}, "http"),
    ],
)
def test_a_config_that_guards_less_than_it_seems_is_refused(
    fields: dict[str, object], words: str, tmp_path: Path
) -> None:
    path = tmp_path / "security.yaml"
    path.write_bytes(msgspec.json.encode(fields))
    with pytest.raises(ConfigFileError, match=words):
        load_security(path)


def test_files_that_cannot_be_used_are_named_without_their_content(folder: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("short secret")
    with pytest.raises(SecurityError, match="expected tokens of 16 or more") as raised:
        TokenFile(str(secret))
    assert "short secret" not in str(raised.value)
    with pytest.raises(SecurityError, match="no such pair"):
        security(folder, "control", key_file=str(folder / "client.key"))
    with pytest.raises(SecurityError, match="cannot be read: No such file"):
        security(folder, "control", ca_file=str(tmp_path / "none"))
    with pytest.raises(SecurityError, match="expected certificates in PEM"):
        security(folder, "control", ca_file=str(secret))
    secret.write_text("")
    with pytest.raises(SecurityError, match="expected certificates in PEM"):
        security(folder, "control", ca_file=str(secret))
    left_s = security(folder, "control").not_after - time.time()
    assert 364 * 86400 < left_s < 366 * 86400


def test_a_control_plane_without_its_key_is_one_clear_line_and_exit_2(folder: Path, tmp_path: Path) -> None:
    gone = tmp_path / "gone.key"
    process = spawn(
        "listen=127.0.0.1:0",
        f"security.cert_file={folder / 'control.pem'}",
        f"security.key_file={gone}",
        f"security.ca_file={folder / 'ca.pem'}",
    )
    output, errors = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, output) == (2, "")
    assert "Traceback" not in errors
    assert f"{gone}: cannot be read: No such file" in errors


@pytest.fixture(scope="module")
def group(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two workers behind mTLS (metrics too) and tokens, every line of their logs kept."""
    here = tmp_path_factory.mktemp("guarded")
    for role, token in (("worker", WORKER_TOKEN), ("client", CLIENT_TOKEN)):
        (here / role).write_text(token)
    access = AccessConfig(worker_tokens=str(here / "worker"), client_tokens=str(here / "client"))
    guard = load_security(folder / "host.yaml")
    guard = msgspec.structs.replace(guard, access=access, token_file=str(here / "worker"), http="mtls")
    yield from cluster(here, num_workers=2, max_tokens_per_step=64, guard=guard)


def _drain_in_vain(group: Cluster, client: SecurityConfig) -> None:
    with rpc.channel(group.address(0), security=Security(client), name="crossdock-worker") as channel:
        drain = expert_pb2_grpc.ExpertServiceStub(channel).Drain
        with pytest.raises(PermissionDenied, match="Drain: expected a caller that is operator"):
            rpc.call_sync(drain, expert_pb2.DrainRequest(), timeout_s=ANSWER_S)


def test_a_guarded_group_serves_who_is_known_and_nobody_else(
    group: Cluster, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    target = group.supervisor.control_address
    token = tmp_path_factory.mktemp("client") / "token"
    token.write_text(CLIENT_TOKEN)
    known = msgspec.structs.replace(load_security(folder / "client.yaml"), token_file=str(token))
    batch = Batch.random(150)
    with Client(target, security=known, min_tokens_per_worker=1) as client:
        y = client.forward(batch.layer, batch.x, batch.ids, batch.weights, timeout_s=ANSWER_S)
        assert (y.double() - batch.expected(group.tensors)).abs().max() < 1e-3
    nameless = load_security(folder / "client.yaml")
    with Client(target, security=nameless) as client, pytest.raises(NotAllowed, match="expected `Bearer`"):
        client.forward(batch.layer, batch.x, batch.ids, batch.weights, timeout_s=ANSWER_S)
    _drain_in_vain(group, known)
    with pytest.raises(CallError):
        call_leader(target, None, lambda plain: current_view(plain, ANSWER_S))


def test_its_metrics_are_behind_mtls_and_its_readiness_behind_tls(group: Cluster, folder: Path) -> None:
    known = Security(load_security(folder / "client.yaml"))
    for member in group.view.members:
        assert metrics_url(member.http_address, https=member.https) == f"https://{member.http_address}/metrics"
        page = ask_http(member.http_address, "/metrics", ANSWER_S, known.http_caller(), "crossdock-worker")[1]
        assert 'crossdock_serving{group="default"} 1.0' in page
    where = group.supervisor.addresses()
    own = group.supervisor
    assert readiness(list(where), where, own.security) == (True, "ready")
    page = HostMetricsPage(own.metrics, lambda: list(where), own.addresses, own.security, "g")("")[0].decode()
    assert all(f'crossdock_process_scraped{{group="g",process="{name}"}} 1.0' in page for name in where)
    nobody = security(folder, "client", cert_file="", key_file="").http_caller()
    for listens in where.values():
        assert ask_http(listens.http_address, "/livez", ANSWER_S, nobody)[0] == 200
        assert ask_http(listens.http_address, "/metrics", ANSWER_S, nobody)[0] == 403


def test_the_commands_take_a_security_file(
    group: Cluster, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "token").write_text(CLIENT_TOKEN)
    config = msgspec.structs.replace(load_security(folder / "client.yaml"), token_file=str(tmp_path / "token"))
    path = tmp_path / "client.yaml"
    path.write_bytes(msgspec.json.encode(config))
    target = ["--target", group.supervisor.control_address, "--security", str(path), "--timeout", str(ANSWER_S)]
    for command in (["status", *target], ["topo", *target, "--json"], ["doctor", "--no-pass", *target]):
        with contextlib.suppress(SystemExit):
            app(command, standalone_mode=False)
    printed = capsys.readouterr().out
    assert "SERVING" in printed
    assert "certificate" in printed
    assert '"ranks"' in printed or '"devices"' in printed


def test_no_secret_is_logged_or_dumped(
    group: Cluster, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Reads what the processes of this test and those above wrote, at level debug."""
    (tmp_path / "token").write_text(CLIENT_TOKEN)
    config = msgspec.structs.replace(load_security(folder / "client.yaml"), token_file=str(tmp_path / "token"))
    _drain_in_vain(group, config)
    caplog.set_level(logging.DEBUG)
    key = (folder / "host.key").read_text()
    secrets = [WORKER_TOKEN, CLIENT_TOKEN, *[line for line in key.splitlines() if "-----" not in line]]
    logs = list(group.supervisor._log_dir.iterdir())
    text = "\n".join(path.read_text() for path in logs) + caplog.text
    assert "listening" in text
    assert "call refused" in text
    assert LEASE_KEY not in text
    assert [secret for secret in secrets if secret in text] == []
    guard = Security(load_security(folder / "host.yaml"))
    assert [secret for secret in secrets if secret in repr((guard, guard._pems, guard.config))] == []


async def newest_view_error(stub: control_pb2_grpc.ControlPlaneStub) -> None:
    await _first(stub, pb.WorkerId())


async def _first(stub: control_pb2_grpc.ControlPlaneStub, worker: pb.WorkerId) -> None:
    """The first answer of a Watch. Raises CallError."""
    call = stub.Watch(pb.WatchRequest(worker=worker), timeout=TIMEOUT_S)
    try:
        await call.read()
    except grpc.RpcError as error:
        raise error_of(error) from None
    finally:
        call.cancel()


def _serial(address: str, folder: Path) -> bytes:
    """The certificate that a server shows on a new connection."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.load_cert_chain(folder / "worker.pem", folder / "worker.key")
    with socket.create_connection(split_address(address), TIMEOUT_S) as raw, context.wrap_socket(raw) as wrapped:
        shown = wrapped.getpeercert(binary_form=True)
    assert shown is not None
    return shown
