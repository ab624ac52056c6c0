"""`crossdock tune` as people meet it: processes, tables, JSON, and what it says when a rank fails."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from crossdock.common.transports import CPU_RANKS
from crossdock.tune import run
from crossdock.tune.request import PAYLOADS, TuneRequest
from ep_kernels import ConfigError, Layout, tuning
from ep_kernels.groups import PaperGroup
from ep_kernels.transports.nvlink.calls import plan
from tests.services.cluster import FORM_S, TEST_S

pytestmark = pytest.mark.timeout(TEST_S)

SMALL = [
    "--transport", "cpu", "--hidden-size", "128", "--num-experts", "6", "--topk", "2", "--max-tokens", "4",
    "--runs", "1",
]  # fmt: skip


def command(*args: str, launcher: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, *launcher, "-m", "crossdock", "tune", *args]
    return subprocess.run(line, capture_output=True, text=True, timeout=FORM_S, check=False)


def records_of(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((folder / tuning.FILE_NAME).read_text())["records"]
    return found


def test_it_measures_prints_and_writes(tmp_path: Path) -> None:
    done = command(*SMALL, "-n", "2", "--cache-dir", str(tmp_path))
    assert done.returncode == 0, done.stderr
    kept = records_of(tmp_path)
    assert [record["key"]["layout"] for record in kept] == ["grouped", "flat"]
    assert all(record["key"]["num_ranks"] == 2 for record in kept)
    for record in kept:
        crossover = f"{record['key']['layout']}: AUTO runs LL up to {record['ll_max_tokens']} tokens per rank"
        assert crossover in done.stdout
    assert str(tmp_path) in done.stdout.replace("\n", "")


def test_json_and_torchrun(tmp_path: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    done = command(*SMALL, "--layout", "flat", "--json", "--cache-dir", str(tmp_path), launcher=launcher)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said == {"file": str(tmp_path / tuning.FILE_NAME), "records": records_of(tmp_path)}, (
        "and rank 0 alone says it"
    )
    assert said["records"][0]["key"]["num_ranks"] == 2


REQUEST = TuneRequest(transport="cpu", layouts=("flat",), num_experts=6, hidden_size=128, topk=2, max_tokens=2, runs=1)


@pytest.mark.parametrize(
    ("change", "error", "word"),
    [
        ({"layouts": ("flat", "round")}, run.OptionError, "--layout: expected one of expert_major.*got 'round'"),
        ({"dtype": "int3"}, run.OptionError, "--dtype: expected one of .*fp8-rows, got 'int3'"),
        ({"hidden_size": 13}, ConfigError, "hidden_size"),
        ({"topk": 7}, ConfigError, "topk"),
        ({"max_tokens": 1 << 24}, ConfigError, "max_tokens_per_rank"),
    ],
)
def test_what_no_rank_could_measure_starts_none(
    change: dict[str, Any], error: type[Exception], word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "run_ranks", lambda *args: pytest.fail("ranks were started"))
    with pytest.raises(error, match=word):
        run.tune(msgspec.structs.replace(REQUEST, **change), 2, lambda *step: None)


def test_gpus_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    assert run.chosen("auto", None) == ("nvlink", 4)
    assert run.chosen("nvlink", 2) == ("nvlink", 2)
    assert run.chosen("cpu", None) == ("cpu", CPU_RANKS)
    for ranks in (5, 0):
        with pytest.raises(run.OptionError, match=f"got {ranks} ranks and 4 GPUs"):
            run.chosen("nvlink", ranks)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    assert run.chosen("auto", 3) == ("cpu", 3)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    with pytest.raises(run.OptionError, match="--transport nvlink: expected a CUDA device for each rank, got none"):
        run.chosen("nvlink", None)


@pytest.mark.parametrize("dtype", PAYLOADS)
def test_every_payload_is_a_configuration(dtype: str) -> None:
    for transport in ("cpu", "nvlink"):
        layouts = tuple(layout.value for layout in Layout)
        run.check(TuneRequest(transport=transport, layouts=layouts, dtype=dtype, max_tokens=8, hidden_size=256), 4)


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("exit 7", "rank 0: exit status 7"),
        ("echo no luck >&2; exit 1", "rank 0: no luck"),
        ('echo \'{"failed": "TransportError: gone"}\'; exec sleep 600', "rank 0: TransportError: gone"),
        ("exec sleep 600", r"expected figures of 1 ranks, got no word in 0\.2 s"),
    ],
)
def test_a_rank_that_fails_or_hangs_ends_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str, said: str
) -> None:
    program = tmp_path / "rank"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    if "no word" in said:
        monkeypatch.setattr(run, "SILENCE_S", 0.2)
    with pytest.raises(RuntimeError, match=said):
        run.run_ranks(REQUEST, 1, lambda *step: None)


def test_a_file_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    request = msgspec.structs.replace(REQUEST, cache_dir=str(tmp_path / "file"))
    with pytest.raises(RuntimeError, match=r"rank 0: .*exists"):
        run.run_ranks(request, 1, lambda *step: None)


# What is shown.


def shown(crossover: int) -> str:
    request = TuneRequest(transport="nvlink", layouts=("grouped",), max_tokens=1024, cache_dir="somewhere")
    key = tuning.key_of(request.config("grouped", PaperGroup(0, 8)), "a GPU")
    record = tuning.Record(
        key=key, ll_max_tokens=crossover, tokens=(256, 512, 1024),
        ll_us=(50.0, 100.0, 210.5), ht_us=(100.0, 125.0, 200.0),
        measured_at="2026-01-01T00:00:00+00:00", crossdock="0.1.0",
    )  # fmt: skip
    console = Console(width=160, color_system=None)
    with console.capture() as capture:
        console.print(run.as_tables(request, [record]))
    return capture.get()


def test_the_table_says_what_follows_and_what_it_costs() -> None:
    text = shown(512)
    assert "8 ranks on a GPU, rows of 7168 x bfloat16, combine in bfloat16, top 8 of 256 experts" in text
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if line.startswith("│")]
    assert rows == [
        ["256", "50.0", "100.0", "-50.0%", "LL"],
        ["512", "100.0", "125.0", "-20.0%", "LL"],
        ["1,024", "210.5", "200.0", "+5.2%", "HT"],
    ]
    assert f"AUTO runs LL up to 512 tokens per rank (built in: {plan.LL_MAX_TOKENS[Layout.GROUPED]:,})" in text
    assert "MiB on each GPU" in text
    assert "written to somewhere/tuning.json" in text
    assert "ahead to the end" not in text
    assert "ahead to the end: --max-tokens measures larger steps" in shown(1024)


def test_a_user_without_a_home_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "cache_dir", lambda configured: None)
    assert "written nowhere" in shown(512)
