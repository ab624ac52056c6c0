"""How much memory experts take is known before any is loaded; what does not fit is refused with a number of ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from crossdock.cli import app
from crossdock.common.config import WorkerConfig
from crossdock.common.free_memory import free_memory
from crossdock.worker.checkpoints.checkpoint import Checkpoint, CheckpointError
from crossdock.worker.experts import memory_need
from crossdock.worker.experts.expert_mlps import ExpertMLPs
from crossdock.worker.experts.placement import Placement
from crossdock.worker.group import model as model_module
from crossdock.worker.group.model import Model
from tests.unit.moe_files import Sizes, draw_weights, write_files

SIZES = Sizes(num_experts=6, hidden=256, inner=128, layers=2)
ONE = 3 * 256 * 128
"""Elements of an expert."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_files(tmp_path / "m", "deepseek_v3", SIZES, draw_weights(SIZES), fp8=True)


def test_bytes_of_a_rank_are_those_that_are_held(path: Path) -> None:
    checkpoint = Checkpoint.open(path)
    for widen, dtype in ((False, torch.bfloat16), (True, torch.bfloat16), (True, torch.float32)):
        held = ExpertMLPs.load(checkpoint, [1, 4], dtype=dtype, widen=widen).num_bytes
        assert memory_need.rank_bytes(checkpoint, 2, dtype, widen=widen) == held
    assert memory_need.rank_bytes(checkpoint, 2, torch.bfloat16) == 2 * 2 * (ONE + 4 * ONE // 128**2)
    assert held == 2 * 2 * ONE * 4


def test_the_least_number_of_ranks(path: Path) -> None:
    checkpoint, dtype = Checkpoint.open(path), torch.bfloat16
    one = memory_need.rank_bytes(checkpoint, 1, dtype)
    for slots, ranks in ((1, 6), (2, 3), (3, 2), (4, 2), (5, 2), (6, 1), (600, 1)):
        assert memory_need.least_ranks(checkpoint, slots * one, dtype) == ranks
    assert memory_need.least_ranks(checkpoint, one - 1, dtype) is None


def test_a_worker_refuses_before_it_loads(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = Checkpoint.open(path)
    one = memory_need.rank_bytes(checkpoint, 1, checkpoint.spec.dtype)
    monkeypatch.setattr(memory_need, "available_bytes", lambda device: 2 * one)
    monkeypatch.setattr(checkpoint, "read_expert", lambda *args: pytest.fail("nothing is loaded"))
    model = Model(WorkerConfig(model=str(path)), checkpoint)
    words = "6 experts in each of 2 layers take .* GiB are free on cpu: 3 ranks with as much each would be enough"
    with pytest.raises(CheckpointError, match=words):
        model.load(Placement.blocks(6, 1, (0, 1)), 0, lambda done, total: None)
    monkeypatch.setattr(memory_need, "available_bytes", lambda device: one - 1)
    with pytest.raises(CheckpointError, match="not even one expert of each layer fits"):
        model.load(Placement.blocks(6, 6, (0, 1)), 0, lambda done, total: None)


@pytest.mark.parametrize("room", [True, False], ids=["room", "no room"])
@pytest.mark.parametrize(("ranks", "after"), [(3, 2), (2, 3), (2, 6), (3, 3)])
def test_what_was_prepared_for_another_size_is_not_read_at_the_switch(
    path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, after: int, room: bool
) -> None:
    """All of the rank's experts where there is room, else those that it lacks. Nothing that is served changes."""
    checkpoint = Checkpoint.open(path)
    one = memory_need.rank_bytes(checkpoint, 1, checkpoint.spec.dtype)
    model, read = Model(WorkerConfig(model=str(path)), checkpoint), list[int]()
    held = model.load(Placement.blocks(6, ranks, (0, 1)), 1, lambda *_: None)
    assert held is not None
    before, reader = dict(held.ids), checkpoint.read_expert
    monkeypatch.setattr(
        checkpoint, "read_expert", lambda layer, expert, *to: (read.append(expert), reader(layer, expert, *to))
    )
    monkeypatch.setattr(model_module, "available_bytes", lambda device: 1 << 40 if room else 0)
    monkeypatch.setattr(memory_need, "available_bytes", lambda device: 6 * one)
    placement = Placement(2, after, dict.fromkeys((0, 1), (5, 4, 3, 2, 1, 0)))
    row = placement.of_rank(0, 1)
    model.prepare(placement, 1, lambda *_: None)
    assert sorted(read) == sorted(2 * [expert for expert in row if expert not in before[0]])
    assert held.ids == before
    read.clear()
    loaded = model.load(placement, 1, lambda *_: None)
    assert loaded is held
    assert not read, "all of it was here"
    wanted = ExpertMLPs.load(checkpoint, row, dtype=checkpoint.spec.dtype)
    assert (loaded.ids, loaded.num_experts, loaded.num_bytes) == (wanted.ids, len(row), wanted.num_bytes)
    tokens, counts = torch.randn(len(row), 256).to(wanted.dtype), torch.ones(len(row), dtype=torch.int32)
    offsets = torch.arange(len(row) + 1, dtype=torch.int32)
    for layer in (0, 1):
        same = loaded.forward(layer, tokens, offsets, counts), wanted.forward(layer, tokens, offsets, counts)
        assert torch.equal(*same)


def test_what_a_container_leaves(tmp_path: Path) -> None:
    """By cgroup v2, then v1."""
    assert free_memory(tmp_path, tmp_path) is None
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:   8 kB\n")
    assert free_memory(tmp_path, tmp_path) == 8192
    (tmp_path / "memory.stat").write_text("anon 1000\nfile 70000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert free_memory(tmp_path, tmp_path) == 8192
    (tmp_path / "memory.max").write_text("5000\n")
    assert free_memory(tmp_path, tmp_path) == 4000
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory/memory.stat").write_text("cache 70000\nrss 1\ntotal_rss 1500\n")
    (tmp_path / "memory/memory.limit_in_bytes").write_text(f"{(1 << 63) - 4096}\n")
    assert free_memory(tmp_path, tmp_path) == 4000
    (tmp_path / "memory/memory.limit_in_bytes").write_text("4500\n")
    assert free_memory(tmp_path, tmp_path) == 3000


def test_the_command_shows_it(path: Path) -> None:
    def run(*args: str) -> tuple[int, str]:
        done = CliRunner().invoke(app.app, ["memory", "--model", str(path), *args])
        return done.exit_code, done.output

    status, words = run("--ranks", "4", "--rank-gib", "1")
    assert status == 0
    assert "deepseek_v3: 2 layers of 6 experts in fp8, a scale per block of 128 x 128" in words
    assert "fits; least number of ranks: 1" in words
    status, words = run("--ranks", "4", "--rank-gib", "0.0002", "--json")
    found = json.loads(words)
    assert (status, found["fits"], found["least_ranks"], found["experts_per_rank"]) == (1, False, 6, 2)
    assert found["rank_bytes"] == 2 * found["moving_bytes"] == 4 * found["expert_bytes"]
    wide = json.loads(run("--expert-dtype", "float32", "--json")[1])
    assert (wide["format"], wide["expert_bytes"]) == ("float", 4 * ONE)
    for args, error in (
        (["--expert-dtype", "int8"], "got 'int8', 8"),
        (["--ranks", "0"], "at least 1, got '', 0"),
    ):
        done = CliRunner().invoke(app.app, ["memory", "--model", str(path), *args])
        assert done.exit_code != 0
        assert error in done.output + str(done.exception)


@pytest.mark.parametrize(
    ("sizes", "config", "words"),
    [
        (Sizes(40, 32, 8, 1), {"num_experts_per_tok": 33}, "topk: expected an int in 1..32, got 33"),
        (Sizes(2, 66, 8, 1), {}, "rows of a multiple of 16 bytes as dtype, got '264 bytes'"),
        (Sizes(2, 32, 8, 1), {"num_experts_per_tok": 3}, "topk: expected at most num_experts = 2, got 3"),
    ],
)
def test_what_no_transport_carries(tmp_path: Path, sizes: Sizes, config: dict[str, int], words: str) -> None:
    """Said before a worker starts."""
    path = write_files(tmp_path, "qwen3_moe", sizes, draw_weights(sizes), config=config)
    done = CliRunner().invoke(app.app, ["memory", "--model", str(path)])
    assert done.exit_code != 0
    assert words in done.output + str(done.exception)
