"""The control plane as a process, torch forbidden: start, stop, ports in use, kill -9 and come back."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.error import HTTPError
from urllib.request import ProxyHandler, build_opener

import grpc
import pytest

from crossdock.common import rpc
from crossdock.common.call_errors import NotFound, Unavailable, error_of
from crossdock.control.group.recovery import MAX_LEAP
from crossdock.protocol.v1 import control_pb2 as pb
from crossdock.protocol.v1 import control_pb2_grpc
from tests.services.control_world import (
    TIMEOUT_S,
    ControlProcess,
    FakeWorker,
    exchange,
    form,
    newest_view,
    occupied_port,
    spawn,
    watch_until,
)


@pytest.fixture
def process() -> Iterator[ControlProcess]:
    with ControlProcess("world_size=2", "lease_s=60", "recover_s=60") as made:
        yield made


def get(process: ControlProcess, path: str) -> tuple[int, str]:
    try:
        url = f"http://{process.addresses.http_address}{path}"
        with build_opener(ProxyHandler({})).open(url, timeout=TIMEOUT_S) as response:
            return response.status, response.read().decode()
    except HTTPError as error:
        return error.code, error.read().decode()


async def test_it_serves_without_torch_and_stops_on_sigterm(process: ControlProcess) -> None:
    assert get(process, "/livez")[0] == 200
    assert get(process, "/readyz") == (200, "FORMING epoch 0, 0/2 members\n")
    async with rpc.aio_channel(process.addresses.address) as channel:
        stub = control_pb2_grpc.ControlPlaneStub(channel)
        workers = await form(stub, "a/0", "a/1")
        assert 'crossdock_group_state{group="default",state="SERVING"} 1.0' in get(process, "/metrics")[1]
        assert 'method="Register"' in get(process, "/metrics")[1]
        watch = stub.Watch(pb.WatchRequest(worker=workers[0].id))
        await watch.read()
        code, errors = process.terminate()
        with pytest.raises(grpc.RpcError) as raised:
            await watch_until(watch, pb.GROUP_STATE_UNSPECIFIED)
        assert isinstance(error_of(raised.value), Unavailable)
    assert code == 0
    assert "Traceback" not in errors


@pytest.mark.parametrize(("listen", "lines"), [("0.0.0.0:0", 1), ("127.0.0.1:0", 0)])
def test_plain_text_for_other_hosts_is_said_once(listen: str, lines: int) -> None:
    with ControlProcess(f"listen={listen}") as process:
        code, errors = process.terminate()
    warned = [line for line in errors.splitlines() if "plain text without authentication" in line]
    assert (code, len(warned)) == (0, lines)
    assert all(" warning " in line for line in warned)


async def test_kill_and_restart_while_serving_disturbs_nobody(process: ControlProcess) -> None:
    async with rpc.aio_channel(process.addresses.address) as channel:
        stub = control_pb2_grpc.ControlPlaneStub(channel)
        workers = await form(stub, "a/0", "a/1")
        await workers[0].beat(1)
        await exchange(stub, workers)
        for _ in range(3):
            watch = stub.Watch(pb.WatchRequest(worker=workers[0].id))
            assert (await watch.read()).epoch == 2
            process.kill()
            with pytest.raises(grpc.RpcError) as raised:
                await watch_until(watch, pb.GROUP_STATE_UNSPECIFIED)
            assert isinstance(error_of(raised.value), Unavailable)
            process.start(process.addresses.address)
            for worker in reversed(workers):
                with pytest.raises(NotFound):
                    await _beat(worker)
                await worker.register()
            view = await newest_view(stub, workers[1].id)
            assert (view.state, view.epoch) == (pb.SERVING, 2)
            assert [member.region for member in view.members] == [b"a/0 in 2", b"a/1 in 2"]


async def test_restart_with_one_missing_forms_above_what_is_remembered() -> None:
    with ControlProcess("world_size=2", "lease_s=60", "recover_s=0.3") as process:
        async with rpc.aio_channel(process.addresses.address) as channel:
            stub = control_pb2_grpc.ControlPlaneStub(channel)
            workers = await form(stub, "a/0", "a/1")
            process.kill()
            process.start(process.addresses.address)
            await workers[1].register()
            watch = stub.Watch(pb.WatchRequest(worker=workers[1].id), timeout=TIMEOUT_S)
            view = await watch.read()
            while view.epoch == 0:
                view = await watch.read()
            assert (view.state, list(view.lost_ranks)) == (pb.FORMING, [0])
            epoch = view.epoch
            assert 2 < epoch <= 2 + MAX_LEAP
            await FakeWorker(stub, "a/0", incarnation=2).register()
            view = await watch_until(watch, pb.EXCHANGING)
            assert (view.epoch, [member.worker.uid for member in view.members]) == (epoch, ["a/0", "a/1"])


async def test_the_real_clock_ends_leases() -> None:
    with ControlProcess("world_size=1", "lease_s=0.5") as process:
        async with rpc.aio_channel(process.addresses.address) as channel:
            stub = control_pb2_grpc.ControlPlaneStub(channel)
            await FakeWorker(stub, "a/0").register()
            view = await watch_until(stub.Watch(pb.WatchRequest(), timeout=TIMEOUT_S), pb.FORMING)
            assert view.reason == "rank 0 (a/0) lost: lease expired"


@pytest.mark.parametrize("field", ["listen", "http_listen"])
def test_a_port_in_use_is_one_clear_line_and_exit_2(field: str) -> None:
    with occupied_port() as address:
        other = "listen=127.0.0.1:0" if field == "http_listen" else "http_listen=127.0.0.1:0"
        process = spawn(other, f"{field}={address}")
        output, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 2
    assert output == ""
    assert "Traceback" not in errors
    assert any(address in line and "cannot listen" in line for line in errors.splitlines())


async def _beat(worker: FakeWorker) -> int:
    """A heartbeat as soon as the restarted process can be reached again."""
    request = pb.HeartbeatRequest(worker=worker.id, epoch=worker.epoch)
    return (await rpc.call(worker.stub.Heartbeat, request, timeout_s=TIMEOUT_S, retry_s=TIMEOUT_S)).epoch
