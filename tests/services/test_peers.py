"""Experts from other workers: a group that grows while nobody can read the checkpoint, and who may read weights."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from crossdock.cli import certs
from crossdock.common import rpc
from crossdock.common.security import Security, load_security
from crossdock.common.settings import AccessConfig, SecurityConfig
from crossdock.protocol.v1 import control_pb2 as pb
from crossdock.protocol.v1 import control_pb2_grpc
from crossdock.worker.checkpoints.checkpoint import Checkpoint
from crossdock.worker.checkpoints.expert_sources import Sources
from crossdock.worker.experts.expert_mlps import ExpertMLPs
from crossdock.worker.experts.placement import Holder
from crossdock.worker.peers import weight_lines
from crossdock.worker.peers.giving import WeightGiver
from crossdock.worker.peers.messages import WeightLine
from crossdock.worker.peers.reading import Peers
from tests.services.cluster import ANSWER_S, TEST_S, Batch, Cluster, E, check, cluster
from tests.services.request_world import World, world
from tests.tools import needs
from tests.unit.test_peers import Shelf

pytestmark = pytest.mark.timeout(TEST_S)
GROWN = 6


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Four workers, and two that wait beside them."""
    yield from cluster(tmp_path_factory.mktemp("group"), spares=GROWN - 4, lease_s=15.0, max_tokens_per_step=64)


def read_bytes(group: Cluster, rank: int) -> dict[str, float]:
    """Bytes of experts that a worker has read, by source."""
    lines = group.page(rank, "metrics").splitlines()
    found = [line for line in lines if line.startswith("crossdock_expert_read_bytes_total{")]
    return {line.split('source="')[1].split('"')[0]: float(line.split()[-1]) for line in found}


def test_a_group_grows_without_its_checkpoint(group: Cluster) -> None:
    """Its files are written over: who reads them now is told that they have changed, and could not load."""
    compared = group.until(lambda view: bool(view.members) and bool(view.members[0].stats.weights))
    before = {member.worker.uid: read_bytes(compared, member.rank) for member in compared.view.members}
    (file,) = Path(group.supervisor._configs[0].model).glob("*.safetensors")
    file.write_bytes(bytes(file.stat().st_size))
    with rpc.channel(group.supervisor.control_address) as channel:
        control_pb2_grpc.ControlPlaneStub(channel).Scale(pb.ScaleRequest(workers=GROWN), timeout=ANSWER_S)
    grown = group.until(lambda view: view.world_size == GROWN and view.state == pb.SERVING)
    for rank in range(GROWN):
        with grown.caller(rank) as caller:
            batch = Batch.random(40)
            check(caller.forward(batch), batch, group.tensors)
    for member in grown.view.members:
        read = read_bytes(grown, member.rank)
        disk, peer = read.get("disk", 0), read.get("peer", 0)
        assert disk == before.get(member.worker.uid, {}).get("disk", 0), "nobody has read a file since"
        assert peer > 0 or member.worker.uid in before
    assert group.until(lambda view: bool(view.members[0].stats.weights)), "all bytes were compared again"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `crossdock certs` makes, and tokens of clients and workers."""
    made: Path = tmp_path_factory.mktemp("certs")
    certs.make_all(made)
    for role in ("client", "worker"):
        (made / f"{role}-tokens").write_text(f"{role}-token-0123456789")
    return made


async def dial(made: World, config: SecurityConfig | None) -> WeightLine:
    """As a worker that reads weights."""
    place = made.requests.holder
    holder = Holder(made.address, place.port, place.socket, place.host)
    return await asyncio.to_thread(weight_lines.dial, holder, Security(config) if config is not None else None)


@needs("openssl")
@pytest.mark.parametrize("near", [True, False], ids=["near", "far"])
@pytest.mark.parametrize("by", ["certificate", "token"])
async def test_only_workers_read_weights(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, near: bool, by: str
) -> None:
    """A client's certificate or token opens requests and no weights, and none opens nothing. What a worker gets are the
    bytes of the files."""
    if not near:
        monkeypatch.setattr(weight_lines, "_own_host", str)
    access, given = AccessConfig(), list[socket.socket]()
    worker, client = load_security(folder / "host.yaml"), load_security(folder / "client.yaml")
    if by == "token":
        files = {role: str(folder / f"{role}-tokens") for role in ("client", "worker")}
        access = AccessConfig(client_tokens=files["client"], worker_tokens=files["worker"], worker_names=("*",))
        client = msgspec.structs.replace(client, token_file=files["client"])
        worker = msgspec.structs.replace(client, token_file=files["worker"])
    guard = msgspec.structs.replace(load_security(folder / "host.yaml"), access=access)
    async with world(tmp_path, security=guard) as made:
        checkpoint = Checkpoint.open(tmp_path)
        files_have = ExpertMLPs.load(checkpoint, range(E), dtype=torch.float32)
        giver = WeightGiver(Shelf(checkpoint, files_have), ANSWER_S)

        def give(sock: socket.socket) -> None:
            given.append(sock)
            giver.give(sock)

        made.requests._give = give
        with pytest.raises(weight_lines.Withheld, match="expected a caller that is worker"):
            await dial(made, client)
        with pytest.raises((OSError, EOFError)):
            await dial(made, None)
        assert not given
        (await dial(made, worker)).close()
        loaded = await asyncio.to_thread(load, made, Security(worker), checkpoint)
        for layer, held in files_have.layers.items():
            for one, other in zip(held.weights, loaded.held(layer).weights, strict=True):
                assert all(map(torch.equal, one.tensors, other.tensors))
        assert len(given) == 2
        assert {isinstance(sock, ssl.SSLSocket) for sock in given} == {not near}
        assert not made.connections, "a reader is no client"
        giver.close()


def load(made: World, security: Security, checkpoint: Checkpoint) -> ExpertMLPs:
    """All experts of a worker, from it alone."""
    place = made.requests.holder
    holder = Holder(made.address, place.port, place.socket, place.host)
    peers = Peers("own", security, ANSWER_S)
    with peers.source([holder], 0, torch.device("cpu")) as source:
        loaded = ExpertMLPs.load(checkpoint, range(E), dtype=torch.float32, sources=Sources([source]))
    peers.close()
    return loaded
