"""Request connections of a guarded group: TLS, certificates, tokens and roles, on UNIX sockets and TCP alike."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import ssl
from pathlib import Path

import msgspec
import pytest
import torch

from crossdock.cli import certs
from crossdock.client import AsyncClient, NotAllowed, Unavailable, dialling
from crossdock.common.security import Security, load_security
from crossdock.common.settings import AccessConfig, SecurityConfig
from crossdock.protocol import frames
from crossdock.protocol.frames import Error, FrameKind
from crossdock.worker.requests import greeter
from tests.services.cluster import Batch
from tests.services.control_world import TIMEOUT_S, until
from tests.services.request_world import ENDED, UNAUTHENTICATED, Guest, World, tensors, world
from tests.tools import needs

pytestmark = needs("openssl")
TOKEN, WORKER_TOKEN = "client-token-0123456789", "worker-token-0123456789"
DENIED = 7


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `crossdock certs` makes, and tokens of clients and workers."""
    made: Path = tmp_path_factory.mktemp("certs")
    certs.make_all(made)
    certs.issue(made, certs.CertificateRole("stranger", ("somebody-else",), serves=False))
    (made / "client-tokens").write_text(TOKEN)
    (made / "worker-tokens").write_text(WORKER_TOKEN)
    return made


def of_worker(folder: Path, **access: object) -> SecurityConfig:
    return msgspec.structs.replace(load_security(folder / "host.yaml"), access=AccessConfig(**access))  # type: ignore[arg-type]


@pytest.fixture(params=["near", "far"])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "far":
        monkeypatch.setattr(dialling, "_own_host", str)
    return str(request.param)


def behind_tls(made: World, config: SecurityConfig, near: bool = False) -> Guest:
    """A guest that has shaken hands."""
    guest, context = Guest(made, near), Security(config).request_caller()
    assert context is not None
    guest.sock = context.wrap_socket(guest.sock, server_hostname="crossdock-worker")
    return guest


async def test_rows_come_from_who_is_known_on_either_kind_of_socket(tmp_path: Path, folder: Path, place: str) -> None:
    config = load_security(folder / "client.yaml")
    async with (
        world(tmp_path, security=of_worker(folder)) as made,
        AsyncClient(made.address, security=config) as asking,
    ):
        for num_tokens in (1, 3, 64, 3000, 2):
            batch = Batch.random(num_tokens)
            assert torch.equal(await asking.forward(1, *tensors(batch)), 2 * batch.x)
        batches = [Batch.random(1 + 40 * number) for number in range(60)]
        answers = await asyncio.gather(*(asking.forward(1, *tensors(each)) for each in batches))
        assert all(torch.equal(answer, 2 * each.x) for answer, each in zip(answers, batches, strict=True))
        (connection,) = made.connections
        assert isinstance(connection.line.sock, ssl.SSLSocket) is (place == "far")
        assert (connection.line.sock.family == socket.AF_UNIX) is (place == "near")
        assert connection.client == ("crossdock-client",)
    await until(lambda: made.budget.num_bytes == 0)


@pytest.mark.parametrize("near", [True, False])
async def test_without_a_certificate_of_the_authority_nobody_is_heard(tmp_path: Path, folder: Path, near: bool) -> None:
    async with world(tmp_path, security=of_worker(folder)) as made:
        async with Guest(made, near) as plain:
            plain.sock.sendall(plain.hello())
            with pytest.raises(ENDED):
                await plain.frame()
        nameless = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        nameless.check_hostname, nameless.verify_mode = False, ssl.CERT_NONE
        guest = Guest(made, near)
        with contextlib.suppress(ssl.SSLError, *ENDED), guest.sock:
            guest.sock = nameless.wrap_socket(guest.sock)
            guest.sock.sendall(guest.hello())
            with pytest.raises((ssl.SSLError, *ENDED)):
                await guest.frame()
        assert not made.connections
        assert not made.engine.seen


async def test_who_lacks_the_role_is_told_so_and_no_request_is_read(tmp_path: Path, folder: Path) -> None:
    names = {"client_names": ("crossdock-client",)}
    async with world(tmp_path, security=of_worker(folder, **names)) as made:
        stranger = behind_tls(made, load_security(folder / "stranger.yaml"))
        stranger.sock.sendall(frames.hello("") + frames.plain(FrameKind.PING))
        number, got = await stranger.answer()
        assert isinstance(got, Error)
        assert (number, got.code, "expected a caller that is" in got.message) == (0, DENIED, True)
        with pytest.raises(ENDED):
            await stranger.frame()
        stranger.sock.close()
        async with AsyncClient(made.address, security=load_security(folder / "stranger.yaml")) as asking:
            with pytest.raises(NotAllowed):
                await asking.forward(1, *tensors(Batch.random(3)))
        assert not made.connections
        assert not made.engine.seen


@pytest.mark.parametrize("token", ["", "another-token-0123456789", "x" * 3000])
async def test_a_token_is_checked_before_anything_else(tmp_path: Path, folder: Path, token: str) -> None:
    tokens = {"client_tokens": str(folder / "client-tokens"), "worker_tokens": str(folder / "worker-tokens")}
    async with world(tmp_path, security=of_worker(folder, **tokens)) as made:
        guest = behind_tls(made, load_security(folder / "client.yaml"))
        guest.sock.sendall(frames.hello(token))
        if len(token) < frames.MAX_TOKEN_BYTES:
            number, got = await guest.answer()
            assert isinstance(got, Error)
            assert (number, got.code) == (0, UNAUTHENTICATED)
            assert TOKEN not in got.message
        with pytest.raises(ENDED):
            await guest.frame()
        guest.sock.close()
        known = msgspec.structs.replace(load_security(folder / "client.yaml"), token_file=str(folder / "client-tokens"))
        async with AsyncClient(made.address, security=known) as asking:
            batch = Batch.random(5)
            assert torch.equal(await asking.forward(1, *tensors(batch)), 2 * batch.x)


async def test_a_worker_of_another_name_is_not_spoken_to(tmp_path: Path, folder: Path) -> None:
    wrong = msgspec.structs.replace(load_security(folder / "client.yaml"), worker_name="crossdock-elsewhere")
    async with world(tmp_path, security=of_worker(folder)) as made:
        async with AsyncClient(made.address, security=wrong, retry=False) as asking:
            with pytest.raises(Unavailable):
                await asking.forward(1, *tensors(Batch.random(3)))
        assert not made.engine.seen


async def test_new_certificates_count_from_the_next_request_of_an_idle_client(tmp_path: Path, folder: Path) -> None:
    here = tmp_path / "certs"
    shutil.copytree(folder, here)
    config = load_security(here / "client.yaml")
    async with world(tmp_path, security=of_worker(here)) as made, AsyncClient(made.address, security=config) as asking:
        await asking.forward(1, *tensors(Batch.random(3)))
        (first,) = made.connections
        name = Path(config.cert_file).stem
        certs.issue(here, certs.CertificateRole(name, ("crossdock-client",), serves=False))
        await asking.forward(1, *tensors(Batch.random(3)))
        await until(lambda: first not in made.connections)
        certs.make_all(here)  # another authority, known to the worker too
        batch = Batch.random(3)
        assert torch.equal(await asking.forward(1, *tensors(batch)), 2 * batch.x)


async def test_frames_come_behind_each_other_in_records_of_any_size(tmp_path: Path, folder: Path) -> None:
    """What TLS has deciphered is in no socket any more: nothing says that it can be read."""
    async with world(tmp_path, security=of_worker(folder)) as made:
        guest = behind_tls(made, load_security(folder / "client.yaml"))
        guest.sock.sendall(frames.hello("") + frames.plain(FrameKind.PING, 5))
        assert (await guest.frame())[0].kind == FrameKind.WELCOME
        assert (await guest.frame())[0].id == 5
        guest.sock.sendall(b"".join(frames.plain(FrameKind.PING, number) for number in range(150)))
        for number in range(150):
            assert (await guest.frame())[0].id == number
        guest.sock.close()


async def test_a_handshake_that_never_ends_is_given_up(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(greeter, "GREETING_S", 0.2)
    async with world(tmp_path, security=of_worker(folder)) as made, Guest(made) as guest:
        guest.sock.sendall(b"\x16\x03\x01")
        with pytest.raises(ENDED):
            await guest.frame()


async def test_over_a_unix_socket_tls_ends_when_both_know_each_other(tmp_path: Path, folder: Path) -> None:
    """Whoever relays bytes to a worker has a socket of another name, and is told so before TLS ends."""
    async with world(tmp_path, security=of_worker(folder)) as made:
        relayed = behind_tls(made, load_security(folder / "client.yaml"), near=True)
        relayed.sock.sendall(frames.hello("", "crossdock-another"))
        number, got = await relayed.answer()
        assert isinstance(got, Error)
        assert (number, "expected this worker's socket" in got.message) == (0, True)
        with pytest.raises(ENDED):
            await relayed.frame()
        relayed.sock.close()
        for goes_on in (b"\x17\x03\x03\x00\x10" + bytes(16), frames.plain(FrameKind.PING)):  # TLS, or none, too early
            rude = behind_tls(made, load_security(folder / "client.yaml"), near=True)
            rude.sock.sendall(rude.hello())
            with contextlib.suppress(OSError):
                socket.socket.send(rude.sock, goes_on)
            with pytest.raises((ssl.SSLError, *ENDED)):
                await rude.frame()
            rude.sock.close()
        await until(lambda: not made.connections)
        guest = behind_tls(made, load_security(folder / "client.yaml"), near=True)
        guest.sock.sendall(guest.hello())
        guest.sock.unwrap()  # type: ignore[attr-defined]
        guest.sock = frames.plain_socket(guest.sock)
        guest.sock.settimeout(TIMEOUT_S)
        assert (await guest.frame())[0].kind == FrameKind.WELCOME
        batch = Batch.random(3)
        assert torch.equal(await guest.ask(1, batch), 2 * batch.x)  # type: ignore[arg-type]
        (connection,) = made.connections
        assert connection.client == ("crossdock-client",)
        guest.sock.close()
