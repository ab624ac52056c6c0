"""What `crossdock status` makes of a group view."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from rich.console import Console

from crossdock.cli.status import as_dict, as_table, plain_text
from crossdock.host.group_table import format_bytes
from crossdock.host.supervisor import describe
from crossdock.protocol.v1.control_pb2 import FORMING, SERVING, GroupView, Member, WorkerId, WorkerStats
from crossdock.protocol.v1.topology_pb2 import Network


def view() -> GroupView:
    stats = WorkerStats(tokens_total=1234567, tokens_per_s=98.7, first_expert=4, num_experts=4, expert_bytes=3 << 30)
    first = Member(rank=0, worker=WorkerId(uid="a/0", incarnation=1 << 60), address="a:1", ready=True, stats=stats)
    third = Member(rank=2, worker=WorkerId(uid="a/2"), address="a:3", heartbeat_age_s=0.52, region=b"secret")
    return GroupView(
        epoch=7, state=FORMING, world_size=3, members=[third, first], lost_ranks=[1], reason="rank 1 lost", version=9
    )


def rendered(what: GroupView, exposed: Sequence[str] = (), width: int = 160) -> str:
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(as_table(what, "a:7400", exposed, width))
    return capture.get()


def test_the_table_has_a_row_per_rank_in_order_and_says_why() -> None:
    lines = rendered(view()).splitlines()
    assert "FORMING  epoch 7  2/3 ranks  control plane a:7400" in lines[0]
    rows = [line.split() for line in lines[3:6]]
    assert [row[0] for row in rows] == ["0", "1", "2"]
    assert [row[1] for row in rows] == ["ready", "lost", "joining"]
    assert "4-7" in lines[3]
    assert "3 GiB" in lines[3]
    assert "1,234,567" in lines[3]
    assert "0.5 s" in lines[5]
    assert "rank 1 lost" in lines[-1]


def test_ranks_that_share_memory_are_told_from_those_that_a_network_joins() -> None:
    what = view()
    assert "shared memory" not in rendered(what)
    assert as_dict(what)["members"][0]["network"] is None  # type: ignore[index]
    members = [
        Member(rank=rank, hostname=f"node-{host}", network=Network(provider="tcp", address="x:7700", domain=f"d{host}"))
        for rank, host in enumerate((0, 0, 0, 1, 0))
    ]
    group = GroupView(state=SERVING, world_size=5, members=members)
    assert "shared memory among ranks 0, 1, 2, 4 on node-0; 3 on node-1, tcp between" in rendered(group)
    told = json.loads(json.dumps(as_dict(group)))["members"][3]["network"]
    assert told == {"provider": "tcp", "address": "x:7700", "domain": "d1"}
    alone = GroupView(state=SERVING, world_size=3, members=members[:3])
    assert "shared memory among ranks 0-2 on node-0; no rank is reached by tcp" in rendered(alone)


def test_workers_that_are_kept_out_are_named_with_the_reason_and_for_how_long() -> None:
    what = view()
    what.barred.add(uid="b/0", hostname="b", cause="cordoned", reason="new memory")
    what.barred.add(uid="c/0", hostname="c", cause="quarantined", reason="silent in epoch 6", left_s=59.4)
    words = rendered(what)
    assert "b/0 on b: cordoned: new memory, until `crossdock uncordon b/0`" in words
    assert "c/0 on c: quarantined: silent in epoch 6, for 59 s more" in words


def test_the_ways_of_clients_are_counted() -> None:
    what = view()
    assert "clients:" not in rendered(what)
    what.members[0].stats.streams, what.members[1].stats.request_connections = 2, 5
    assert "clients: 5 request connections, 2 gRPC streams" in " ".join(rendered(what).split())
    names, told = ("request_connections", "streams"), as_dict(what)["members"]
    assert [[one[name] for name in names] for one in told] == [[0, 2], [5, 0]]  # type: ignore[attr-defined]


def test_weights_of_another_checkpoint_are_named() -> None:
    what = view()
    what.model = "f00d" * 8
    for member in what.members:
        member.stats.models.add(fingerprint="f00d" * 8, layers=3)
    assert "weights:" not in rendered(what)
    what.members[1].stats.models[0].layers = 1
    what.members[1].stats.models.add(fingerprint="beef" * 8, layers=2)
    assert "f00df00df00d in 1 layers, beefbeefbeef in 2 layers" in rendered(what)
    assert as_dict(what)["members"][1]["models"] == {"f00d" * 8: 1, "beef" * 8: 2}  # type: ignore[index]


def test_the_digest_of_all_weights_is_shown_once_all_ranks_were_compared() -> None:
    what = view()
    assert "rank 0's files" not in rendered(what)
    what.members[0].stats.weights = "0123456789abcdef"
    assert "weights of all ranks are those of rank 0's files: 0123456789abcdef" in " ".join(rendered(what).split())
    assert as_dict(what)["members"][0]["weights"] == "0123456789abcdef"  # type: ignore[index]


def test_addresses_in_plain_text_that_other_hosts_reach_are_named() -> None:
    what = view()
    assert sorted(plain_text(what, "127.0.0.1:7400")) == ["a:1", "a:3"]
    for member in what.members:
        member.address = "127.0.0.1:1"
    assert plain_text(what, "127.0.0.1:7400") == []
    exposed = plain_text(what, "127.0.0.1:7400,10.0.0.7:7400")
    assert exposed == ["10.0.0.7:7400"]
    assert json.loads(json.dumps(as_dict(what, exposed)))["plain_text"] == exposed
    said = rendered(what, exposed)
    assert "WARNING: plain text without authentication at 10.0.0.7:7400: every host" in said
    assert "10.0.0.1:1, 10.0.0.2:1 and 3 more" in rendered(what, [f"10.0.0.{i}:1" for i in range(1, 6)])
    assert "plain text" not in rendered(what)


def large(num_ranks: int, uid: str) -> GroupView:
    stats = WorkerStats(
        tokens_total=10**10, tokens_per_s=123456, first_expert=1000, num_experts=24, expert_bytes=9 << 34
    )
    members = [
        Member(rank=i, worker=WorkerId(uid=f"{uid}/{i}"), address=f"10.120.130.{i}:7500", ready=True, stats=stats)
        for i in range(num_ranks)
    ]
    return GroupView(epoch=7, state=SERVING, world_size=num_ranks, members=members, version=9)


@pytest.mark.parametrize("num_ranks", [4, 64])
@pytest.mark.parametrize("uid", ["gpu-1", "node-0123456789.cluster.example", "x" * 200])
def test_at_80_columns_no_head_and_no_number_is_cut(num_ranks: int, uid: str) -> None:
    said = rendered(large(num_ranks, uid), width=80)
    lines = said.splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert "…" not in said
    heads = lines[2].split()
    left_out = next(line for line in lines if line.startswith("not shown: "))
    assert heads[:3] == ["rank", "state", "worker"]
    assert {"tokens/s", "queued"} <= set(heads)
    for title in ("address", "experts", "memory", "tokens", "heartbeat"):
        assert (title in heads) != (title in left_out.partition(" (")[0].replace(",", " ").split())
    shown = [line.split() for line in lines[3:] if line.split()[1:2] == ["ready"]]
    assert [row[0] for row in shown] == [str(rank) for rank in range(num_ranks)]
    assert all("123,456" in row for row in shown)


def test_where_there_is_room_every_column_is_shown() -> None:
    assert "not shown" not in rendered(view(), width=160)
    console = Console(width=160, color_system=None)
    with console.capture() as capture:
        console.print(as_table(view(), "a:7400", (), 160))
    assert "not shown" not in capture.get()
    assert "heartbeat" in capture.get()


def test_a_hostile_uid_is_shown_as_it_is() -> None:
    what = GroupView(state=SERVING, members=[Member(worker=WorkerId(uid="[bold]x[/bold]"))])
    assert "[bold]x[/bold]" in rendered(what)


def test_the_dict_is_json_with_whole_numbers_and_no_region() -> None:
    said = json.loads(json.dumps(as_dict(view())))
    assert said["epoch"] == 7
    assert said["members"][1]["incarnation"] == 1 << 60
    assert said["members"][1]["tokens_total"] == 1234567
    assert "secret" not in json.dumps(said)


def test_a_view_in_a_few_words() -> None:
    assert describe(view()) == "FORMING, 2/3 registered, 1 ready (rank 1 lost)"


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 << 20, "5 MiB"), (1 << 50, "1024 TiB")]
)
def test_bytes_for_people(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text
