"""`crossdock experts` and `crossdock rebalance` as people and programs meet them: text, JSON, exit status, errors. The
control plane is a real server with answers that the test wrote."""

# ruff: noqa: N802  (the methods of a servicer are named in control.proto)

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest

from crossdock.cli import app as cli
from crossdock.protocol.v1 import control_pb2_grpc
from crossdock.protocol.v1.control_pb2 import ExpertsResponse, LayerExperts, RebalanceResponse

KNOWN = ExpertsResponse(
    version=7, num_experts=4, num_slots=6, world_size=2, last_change="moved in 1.5 s",
    imbalance=1.2, imbalance_if_moved=1.0123, would_move=3, domain_imbalance=1.1,
    rank_loads=[0.6, 0.4], domains=[0, 1],
    layers=[
        LayerExperts(
            layer=1, slots=[0, 1, 2, 3, 0, 1], slots_if_moved=[0, 1, 3, 2, 0, 1],
            load=[1000.0, 250.0, 0.0, 12.5], imbalance=1.4, imbalance_if_moved=1.01,
        ),
        LayerExperts(
            layer=3, slots=[0, 1, 2, 3, 0, 1], slots_if_moved=[0, 1, 2, 3, 0, 1],
            load=[0.0, 0.0, 0.0, 0.0], imbalance=1.0, imbalance_if_moved=1.0,
        ),
    ],
)  # fmt: skip


class Answers(control_pb2_grpc.ControlPlaneServicer):
    """A control plane that says what it is told to say."""

    def __init__(self) -> None:
        self.experts: ExpertsResponse | tuple[grpc.StatusCode, str] = KNOWN
        self.rebalance: RebalanceResponse | tuple[grpc.StatusCode, str] = RebalanceResponse(version=8, moves=3)

    def Experts(self, request: Any, context: Any) -> Any:
        """See control.proto."""
        return _answer(self.experts, context)

    def Rebalance(self, request: Any, context: Any) -> Any:
        """See control.proto."""
        return _answer(self.rebalance, context)


def _answer(said: Any, context: Any) -> Any:
    if isinstance(said, tuple):
        context.abort(*said)
    return said


@dataclass
class World:
    """The command, in this process, against that control plane."""

    capsys: pytest.CaptureFixture[str]
    monkeypatch: pytest.MonkeyPatch
    target: str
    answers: Answers = field(default_factory=Answers)

    def run(self, *words: str, timeout_s: float = 60) -> tuple[int, str, str]:
        """Exit status, stdout, stderr."""
        command = [*words, "--target", self.target, "--timeout", str(timeout_s)]
        self.monkeypatch.setattr(sys, "argv", ["crossdock", *command])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        said = self.capsys.readouterr()
        return int(ended.value.code or 0), said.out, said.err


@pytest.fixture
def world(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    server = grpc.server(ThreadPoolExecutor(2))
    made = World(capsys, monkeypatch, f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
    control_pb2_grpc.add_ControlPlaneServicer_to_server(made.answers, server)
    server.start()
    try:
        yield made
    finally:
        server.stop(None).wait()


def _rows(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


def test_text_shows_the_balance_the_ranks_and_each_layer(world: World) -> None:
    status, out, err = world.run("experts")
    assert (status, err) == (0, "")
    (headline, balance), rows = out.splitlines()[:2], _rows(out)
    assert headline == f"4 experts and 2 extra copies on 2 ranks  placement 7  control plane {world.target}"
    assert balance == "imbalance 1.200 (if 3 copies moved: 1.012; domains: 1.100)"
    assert ["0", "0", "60.00%", "1.200"] in rows
    assert ["1", "1", "40.00%", "0.800"] in rows
    assert ["1", "1,262", "0", "79.2%", "1.400", "1.010"] in rows
    assert ["3", "0", "0.0%", "1.000", "1.000"] in rows, "a layer without load has no hottest expert"
    assert "last move: moved in 1.5 s" in out


def test_text_of_one_layer_shows_its_experts_by_load(world: World) -> None:
    status, out, _ = world.run("experts", "--layer", "1")
    rows = _rows(out)
    assert status == 0
    first = rows.index(["0", "1,000", "2", "0,", "1"])
    others = [["1", "250", "2", "0,", "1"], ["3", "12", "1", "1", "0"], ["2", "0", "1", "0", "1"]]
    assert rows[first + 1 : first + 4] == others
    assert ["3", "0", "0.0%", "1.000", "1.000"] not in rows, "of the other layer nothing"


def test_most_cuts_the_list(world: World) -> None:
    _, out, _ = world.run("experts", "--layer", "1", "--most", "1")
    assert ["0", "1,000", "2", "0,", "1"] in _rows(out)
    assert ["1", "250", "2", "0,", "1"] not in _rows(out)


def test_text_says_how_far_a_move_is(world: World) -> None:
    moving = ExpertsResponse()
    moving.CopyFrom(KNOWN)
    moving.layers_switched, moving.layers_moving = 5, 58
    world.answers.experts = moving
    assert "moving: 5/58 layers" in world.run("experts")[1].splitlines()[0]


def test_json_has_every_layer_and_expert(world: World) -> None:
    status, out, err = world.run("experts", "--json")
    said = json.loads(out)
    assert (status, err) == (0, "")
    assert (said["version"], said["num_experts"], said["num_slots"], said["world_size"]) == (7, 4, 6, 2)
    assert (said["imbalance"], said["imbalance_if_moved"], said["domain_imbalance"]) == (1.2, 1.0123, 1.1)
    assert (said["would_move"], said["layers_switched"], said["layers_moving"]) == (3, 0, 0)
    assert (said["rank_loads"], said["domains"], said["last_change"]) == ([0.6, 0.4], [0, 1], "moved in 1.5 s")
    assert [layer["layer"] for layer in said["layers"]] == [1, 3]
    assert said["layers"][0]["imbalance"] == 1.4
    assert said["layers"][0]["experts"] == [
        {"expert": 0, "rows_per_s": 1000.0, "copies": 2, "ranks": [0, 1], "ranks_if_moved": [0, 1]},
        {"expert": 1, "rows_per_s": 250.0, "copies": 2, "ranks": [0, 1], "ranks_if_moved": [0, 1]},
        {"expert": 2, "rows_per_s": 0.0, "copies": 1, "ranks": [0], "ranks_if_moved": [1]},
        {"expert": 3, "rows_per_s": 12.5, "copies": 1, "ranks": [1], "ranks_if_moved": [0]},
    ]


def test_json_of_one_layer_has_that_one_only(world: World) -> None:
    said = json.loads(world.run("experts", "--json", "--layer", "3")[1])
    assert [layer["layer"] for layer in said["layers"]] == [3]


@pytest.mark.parametrize("words", [["experts"], ["experts", "--layer", "99"], ["experts", "--json"]])
def test_a_placement_that_is_not_known_yet_is_no_error(world: World, words: list[str]) -> None:
    world.answers.experts = ExpertsResponse(world_size=2)
    status, out, err = world.run(*words)
    assert (status, err) == (0, "")
    if "--json" in words:
        assert (json.loads(out)["version"], json.loads(out)["layers"]) == (0, [])
    else:
        assert "it is not known yet where the experts are" in out


def test_a_layer_without_experts_is_bad_usage(world: World) -> None:
    status, out, err = world.run("experts", "--layer", "2")
    assert (status, out) == (2, "")
    assert err == "error: --layer: expected one of [1, 3], got 2\n"


@pytest.mark.parametrize(
    "words", [["experts", "--most", "0"], ["experts", "--layer", "x"], ["rebalance", "--layer", "1"]]
)
def test_options_that_cannot_be_are_bad_usage(world: World, words: list[str]) -> None:
    status, out, err = world.run(*words)
    assert (status, out) == (2, "")
    assert words[1] in err


def test_rebalance_says_what_it_started(world: World) -> None:
    status, out, err = world.run("rebalance")
    assert (status, err) == (0, "")
    assert out == "placement 8: loading 3 copies; `crossdock experts` shows how far it is\n"


def test_rebalance_says_that_nothing_moves(world: World) -> None:
    world.answers.rebalance = RebalanceResponse(version=7)
    status, out, _ = world.run("rebalance")
    assert (status, out) == (0, "placement 7: balanced well enough, nothing moves\n")


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (grpc.StatusCode.FAILED_PRECONDITION, 1),
        (grpc.StatusCode.PERMISSION_DENIED, 1),
        (grpc.StatusCode.UNIMPLEMENTED, 1),
        (grpc.StatusCode.UNAVAILABLE, 3),
        (grpc.StatusCode.DEADLINE_EXCEEDED, 3),
    ],
)
@pytest.mark.parametrize("command", ["experts", "rebalance"])
def test_a_refusal_is_one_line_on_stderr_and_an_exit_status(
    world: World, command: str, code: grpc.StatusCode, expected: int
) -> None:
    world.answers.experts = world.answers.rebalance = code, "experts: the reason, in words"
    status, out, err = world.run(command)
    assert (status, out) == (expected, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert "the reason, in words" in err


@pytest.mark.parametrize("command", ["experts", "rebalance"])
def test_nobody_there_is_status_3(world: World, command: str) -> None:
    server = grpc.server(ThreadPoolExecutor(1))
    world.target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"  # ours, and never answered
    try:
        status, out, err = world.run(command, timeout_s=1)
        assert (status, out) == (3, "")
        assert err.startswith("error: ")
    finally:
        server.stop(None)
