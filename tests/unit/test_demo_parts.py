"""The demo's pure parts: each criterion can fail, quantiles are Prometheus', text is always found."""

from __future__ import annotations

import io
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from http.client import BadStatusLine
from pathlib import Path

import pytest
import torch
from prometheus_client import generate_latest
from rich.console import Console

from crossdock.common.config import ConfigFileError
from crossdock.common.metrics import WorkerMetrics
from crossdock.demo import compare, hosts, report, run
from crossdock.demo.models import FAMILIES, VOCAB_SIZE, build, write_checkpoint
from crossdock.demo.report import Row, notes, shorten, table
from crossdock.demo.stage import Stage
from crossdock.protocol.v1.control_pb2 import Member
from crossdock.worker.checkpoints.checkpoint import Checkpoint
from tests import tools

SMALL = {"num_layers": 2, "hidden_size": 64, "intermediate_size": 32, "num_experts": 8, "topk": 2}


def _logits() -> torch.Tensor:
    return torch.randn(3, 40, 64) * 3


def test_fp32_criteria() -> None:
    tokens, plain = torch.randint(0, 64, (3, 8)), _logits()
    good = compare.judge_fp32(tokens, tokens.clone(), plain, plain + 1e-5)
    assert (good.tokens, good.failures) == ("24/24", ())
    other = tokens.clone()
    other[1, 2] += 1
    assert compare.judge_fp32(tokens, other, plain, plain).failures == ("1 of 24 generated tokens differ",)
    far = plain.clone()
    far[0, 0, 0] += 0.01
    (reason,) = compare.judge_fp32(tokens, tokens, plain, far).failures
    assert reason == "logits differ by 0.01, expected at most 0.001"
    assert compare.judge_fp32(tokens, tokens, plain, plain * math.nan).failures


def test_bf16_criteria() -> None:
    exact = _logits()
    plain = exact + (torch.rand_like(exact) - 0.5) * 0.1
    good = compare.judge_bf16(exact, plain, exact + (plain - exact) * 0.9)
    assert good.failures == ()
    num_clear = int(good.tokens.split("/")[1])
    assert 120 >= num_clear >= 60
    assert good.tokens == f"{num_clear}/{num_clear}"

    (reason,) = compare.judge_bf16(exact, plain, exact + (plain - exact) * 1.01).failures
    assert reason.startswith("rms logit error ")

    wrong = exact.clone()
    margins = plain.topk(2, -1).values
    row, column = divmod(int((margins[..., 0] - margins[..., 1]).argmax()), 40)
    wrong[row, column] = exact[row, column].roll(1)
    assert f"1 of {num_clear} clear tokens differ" in compare.judge_bf16(exact, plain, wrong).failures[0]
    assert compare.judge_bf16(exact, plain, exact * math.nan).failures


def test_bf16_needs_positions_that_are_clear() -> None:
    exact = _logits()
    plain = exact.clone()
    plain[0, 0, 0] += 50
    assert "positions are clear of noise" in compare.judge_bf16(exact, plain, exact).failures[0]


@pytest.mark.parametrize(
    ("buckets", "share", "expected"),
    [
        ({1.0: 0, 2.0: 10, math.inf: 10}, 0.5, 1.5),
        ({1.0: 10, 2.0: 10, math.inf: 10}, 0.5, 0.5),
        ({1.0: 5, 2.0: 10, math.inf: 10}, 0.99, 1.98),
        ({1.0: 5, 2.0: 5, math.inf: 10}, 0.99, 2.0),
        ({1.0: 0, math.inf: 0}, 0.5, math.nan),
        ({}, 0.5, math.nan),
    ],
)
def test_quantile(buckets: dict[float, float], share: float, expected: float) -> None:
    assert report.quantile(buckets, share) == pytest.approx(expected, nan_ok=True)


def test_phases_of_several_workers_are_summed() -> None:
    pages = []
    for seconds in (0.0015, 0.0045):
        metrics = WorkerMetrics()
        for phase in report.PHASES:
            metrics.step_phase_duration_seconds.labels(phase=phase).observe(seconds)
        pages.append(generate_latest(metrics.registry).decode())
    buckets = report.phase_buckets(pages)["experts"]
    assert (buckets[1e-3], buckets[2e-3], buckets[6e-3], buckets[math.inf]) == (0, 1, 2, 2)
    assert report.quantile(buckets, 0.5) == pytest.approx(0.0015)


def test_the_table_shows_every_row() -> None:
    good = compare.Comparison("8/8", 1e-6, "tolerance one", ())
    bad = compare.Comparison("7/8", 1e-6, "tolerance two", ("1 of 8 generated tokens differ",))
    empty = report.phase_buckets([])
    urls = ["http://127.0.0.1:4711/metrics", "http://127.0.0.1:4712/metrics"]
    slow = {phase: {0.0: 0.0, 1.3: 99.0, float("inf"): 100.0} for phase in report.PHASES}
    rows = [Row("deepseek_v3", "bfloat16", good, slow, 99999, urls), Row("x", "y", bad, empty, 1, urls)]
    console = Console(record=True, width=80, file=io.StringIO())
    console.print(table(rows))
    console.print(notes(rows), soft_wrap=True)
    words = console.export_text()
    for part in ("deepseek_v3", "bfloat16", "8/8", "7/8", "1e-06", "tokens/s", " 99999", "657/1300", "-/-"):
        assert part in words
    assert "x y: tolerance two" in words
    assert shorten(urls) == ["http://127.0.0.1:4711/metrics", ":4712"]


def test_text_is_always_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(run.find_text(1024)[1]) >= 1024
    monkeypatch.setattr(run, "_checkout", lambda: b"too short")
    monkeypatch.setattr(run, "_distribution", lambda: b"")
    name, page = run.find_text(5000)
    assert name == "packaged text"
    assert len(page) >= 5000
    ids = run.token_ids(page, 3, 50)
    assert bytes(ids[1].tolist()) == page[50:100]
    assert int(ids.max()) < VOCAB_SIZE


@pytest.mark.parametrize("family", FAMILIES)
def test_checkpoints_are_reproducible(tmp_path: Path, family: str) -> None:
    paths = [
        write_checkpoint(family, tmp_path / str(n), seed=seed, **SMALL)  # type: ignore[arg-type]
        for n, seed in enumerate((3, 3, 4))
    ]
    first, same, other = ((path / "model.safetensors").read_bytes() for path in paths)
    assert first == same
    assert first != other
    assert Checkpoint.open(paths[0]).spec.fingerprint != Checkpoint.open(paths[2]).spec.fingerprint


def test_unknown_family(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"family: expected one of .* got 'llama'"):
        write_checkpoint("llama", tmp_path)


@pytest.mark.parametrize("family", FAMILIES)
def test_routing_survives_bf16_and_uses_every_expert(family: str) -> None:
    sizes = {"layers": 3, "hidden": 128, "inner": 32, "experts": 16, "k": 4}
    chosen: list[list[torch.Tensor]] = []
    for dtype in (torch.float32, torch.bfloat16):
        model, seen = build(family, sizes, 0).to(dtype), []
        for name, module in model.named_modules():
            if name.endswith("mlp.experts"):
                module.register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[1].sort(-1).values))
        with torch.no_grad():
            logits = model(torch.arange(VOCAB_SIZE).view(2, 128)).logits.float()
        assert 1.5 < float(logits.std()) < 6
        chosen.append(seen)
    for exact, rounded in zip(*chosen, strict=True):
        assert torch.equal(exact, rounded)
        assert len(exact.unique()) == 16


def test_a_page_that_is_refused_is_no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "ask_http", lambda *args: (503, "too many connections\n"))
    with pytest.raises(OSError, match="rank 3: a:1/metrics: expected its page, got 503: too many connections"):
        report.fetch([Member(rank=3, http_address="a:1")])


def test_what_ends_the_demo_is_told_word_for_word(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def breaks(*_: object) -> None:
        raise BadStatusLine("[/b] [lost]")

    monkeypatch.setattr(run, "_run_family", breaks)
    monkeypatch.setattr(run.tempfile, "mkdtemp", lambda prefix: str(tmp_path))
    console = Console(record=True, width=200, file=io.StringIO())
    assert run._play(["mixtral"], Stage.of("cpu", 1, 0), hosts.LOOPBACK, console, as_json=False) == 1
    assert "failed BadStatusLine: [/b] [lost]" in console.export_text()


def test_the_workers_of_two_hosts_share_memory_inside_and_a_network_between() -> None:
    where = Stage.of("cpu", 4, 0).on_hosts(2)
    places = (hosts.HostPlace("10.0.0.1"), hosts.HostPlace("10.0.0.2", ("in",)))
    first, second = where.workers("m", "float32", places)
    assert [one.uid for one in (*first, *second)] == ["host-0/0", "host-0/1", "host-1/0", "host-1/1"]
    assert [one.listen for one in (*first, *second)] == ["10.0.0.1:0"] * 2 + ["10.0.0.2:0"] * 2
    networks = [one.network for one in (*first, *second) if one.network]
    assert [(one.listen, one.domain) for one in networks] == [("10.0.0.1:0", "host-0")] * 2 + [
        ("10.0.0.2:0", "host-1")
    ] * 2
    (alone,) = Stage.of("cpu", 2, 0).on_hosts(1).workers("m", "float32", hosts.LOOPBACK)
    assert [(one.network, one.uid, one.listen) for one in alone] == [(None, "", "127.0.0.1:0")] * 2


@pytest.mark.parametrize(
    ("stage", "num_hosts", "words"),
    [
        (Stage.of("cpu", 3, 0), 2, "--workers: expected a multiple of --hosts 2, got 3"),
        (Stage.of("cpu", 4, 0), 3, "--hosts: expected 1 or 2, got 3"),
        (Stage.of("nvlink", 4, 4), 2, "--hosts 2: expected --transport cpu, got nvlink"),
    ],
)
def test_hosts_that_cannot_be_are_refused(stage: Stage, num_hosts: int, words: str) -> None:
    with pytest.raises(ConfigFileError, match=words):
        stage.on_hosts(num_hosts)


def test_more_workers_than_a_group_has_ranks_are_refused() -> None:
    with pytest.raises(ConfigFileError, match=r"--workers: expected at most 64, the most ranks of .* cpu, got 100000"):
        Stage.of("cpu", 100_000, 0)


def test_why_there_are_no_namespaces_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(command: Sequence[str]) -> None:
        raise ConfigFileError(f"{command[0]}: Operation not permitted{' for users' * ('--user' in command)}")

    monkeypatch.setattr(hosts, "_run", refused)
    assert hosts.become(["demo"]) == "unshare: Operation not permitted"


def test_the_program_goes_on_in_a_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    became: list[Sequence[str]] = []
    monkeypatch.setattr(hosts, "_run", lambda command: None)
    monkeypatch.setattr("os.execvp", lambda file, command: became.append(command))
    hosts.become(["demo", "--hosts", "2"])
    assert became[0][:2] == ["unshare", "--net"]
    assert became[0][-7:] == [sys.executable, "-P", "-m", "crossdock", "demo", "--hosts", "2"]


_INSIDE = """
import socket, subprocess, sys
from crossdock.demo.hosts import namespaces
code = "import socket; print(socket.create_connection((sys.argv[1], int(sys.argv[2])), 10).getsockname()[0])"
with namespaces() as (here, there), socket.create_server((here.address, 0)) as server:
    place = [here.address, str(server.getsockname()[1])]
    command = [*there.enter, sys.executable, "-c", "import sys;" + code, *place]
    said = subprocess.run(command, capture_output=True, text=True)
    print(said.stdout.strip() == there.address, said.stderr)
"""


def test_two_namespaces_reach_each_other_by_their_addresses() -> None:
    """In a network namespace of its own, as `become` makes it."""
    start = ["unshare", "--user", "--map-root-user", "--net"] if os.geteuid() else ["unshare", "--net"]
    up = [*start, sys.executable, "-m", "crossdock.demo.netlink"]
    try:
        subprocess.run([*up, "unshare", "--net", "true"], check=True, capture_output=True, timeout=30)
    except (OSError, subprocess.CalledProcessError) as error:
        tools.skip("network namespaces", error)
    done = subprocess.run([*up, sys.executable, "-c", _INSIDE], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.strip() == "True", done.stdout + done.stderr
