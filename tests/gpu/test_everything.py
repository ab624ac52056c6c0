"""The runner of the GPU tests says what it needs, and its summary tells the truth. Needs no GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu import everything, summary

FACTS = summary.Facts("NVIDIA H200", "sm_90a", ("commit    abc", "driver    580"))
TESTS = """
import pytest

@pytest.mark.parametrize("n", [1, 2])
def test_fine(n):
    pass

@pytest.mark.skip(reason="needs 9 CUDA devices")
def test_elsewhere():
    pass

def test_broken():
    assert {broken}, "rows out of order"

@pytest.fixture
def torn():
    yield
    assert {broken}

def test_teardown(torn):
    pass
"""


def stage(folder: Path, name: str, text: str, *more: str) -> int:
    (folder / f"test_{name}.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-q", "-ra", "-p", "no:cacheprovider", "--rootdir=.", *more]
    with (folder / f"{name}.log").open("w") as log:
        return subprocess.run(
            [*command, f"test_{name}.py", f"--junitxml={name}.xml"],
            cwd=folder,
            check=False,
            timeout=60,
            stdout=log,
            env=os.environ | {"PYTHONPATH": str(everything.ROOT)},
        ).returncode


def test_summary_of_a_good_and_a_bad_run(tmp_path: Path) -> None:
    good = stage(tmp_path, "good", TESTS.format(broken="1"))
    assert summary.one_line(tmp_path, "good").startswith("good: 4 passed, 1 skipped, ")
    assert summary.write(tmp_path / "out", tmp_path, {"good": good}, FACTS, ["no kernels"], 12.0)
    text = (tmp_path / "out" / summary.SUMMARY).read_text()
    assert text.startswith("make test-gpu: 4 passed, 1 skipped, 12 s in all\n\ncommit    abc\n")
    assert "1 x needs 9 CUDA devices" in text
    assert "FAILED" not in text
    bad = stage(tmp_path, "bad", TESTS.format(broken="0"))
    assert not summary.write(tmp_path / "out", tmp_path, {"good": good, "bad": bad}, FACTS, ["no kernels"], 12.0)
    text = (tmp_path / "out" / summary.SUMMARY).read_text()
    assert "6 passed, 2 failed, 2 skipped" in text
    assert "FAILED test_bad::test_broken: AssertionError: rows out of order" in text
    assert "FAILED test_bad::test_teardown" in text
    log = (tmp_path / "out" / summary.LOG).read_text()
    assert "==== good\n" in log
    assert "rows out of order" in log


@pytest.mark.parametrize(("report", "status"), [(None, 0), ("", 0), (None, -9), ("<testsuites/>", 2)])
def test_a_stage_that_broke_off_is_not_green(tmp_path: Path, report: str | None, status: int) -> None:
    good = stage(tmp_path, "good", TESTS.format(broken="1"))
    if report is not None:
        (tmp_path / "lost.xml").write_text(report)
    (tmp_path / "lost.now").write_text("test_lost.py::test_slow")
    assert not summary.write(tmp_path, tmp_path, {"good": good, "lost": status}, FACTS, ["no kernels"], 1.0)
    text = (tmp_path / summary.SUMMARY).read_text()
    assert "lost: broke off in test_lost.py::test_slow, the rest was not run" in text


def test_the_test_that_runs_is_on_record(tmp_path: Path) -> None:
    text = "def test_one(tmp_path):\n    import os, pathlib\n    os._exit(3)\n"
    plugin = ("-p", "tests.gpu.shard", f"--now={tmp_path / 'slow.now'}")
    assert stage(tmp_path, "slow", text, *plugin) == 3
    assert (tmp_path / "slow.now").read_text() == "test_slow.py::test_one"


@pytest.mark.parametrize("broken", ["0", "1"])
def test_a_stage_that_runs_out_of_time_is_not_green(tmp_path: Path, broken: str) -> None:
    text = "import time\n" + TESTS.format(broken=broken) + "\n\n@pytest.mark.parametrize('n', [1, 2, 3])\n"
    late = stage(tmp_path, "late", text + "def test_long(n):\n    time.sleep(2)\n", "--session-timeout=1")
    assert not summary.write(tmp_path, tmp_path, {"late": late}, FACTS, ["no kernels"], 1.0)
    assert "late: ended early, the rest was not run" in (tmp_path / summary.SUMMARY).read_text()


def test_shards_share_the_tests(tmp_path: Path) -> None:
    names: list[str] = []
    for number in ("1/3", "2/3", "3/3"):
        assert stage(tmp_path, "part", TESTS.format(broken="1"), "-p", "tests.gpu.shard", f"--shard={number}") == 0
        names += [o.name for o in summary.outcomes(tmp_path / "part.xml") or ()]
    assert sorted(names) == ["test_broken", "test_elsewhere", "test_fine[1]", "test_fine[2]", "test_teardown"]


def test_without_gpus_it_says_what_it_needs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(everything, "visible_gpus", list)
    assert everything.main([]) == 2
    assert "needs NVIDIA GPUs" in capsys.readouterr().err


def test_stages_share_the_gpus() -> None:
    gpus = ["4", "5", "6", "7"]
    assert everything.share(gpus, everything.LAST) == ["7"]
    assert everything.share(gpus, everything.FIRST_HALF) == ["4", "5"]
    assert everything.share(gpus, everything.SECOND_HALF) == ["6", "7"]
    assert everything.share(gpus[:2], everything.SECOND_HALF) == ["4", "5"]
    assert {s.devices for s in everything.ONE_HOST.stages} <= {
        everything.ALL, everything.LAST, everything.FIRST_HALF, everything.SECOND_HALF,
    }  # fmt: skip


def test_folders_stand_for_their_gpu_tests() -> None:
    found = everything.expanded(["tests/services?", "tests/transports"])
    assert found[-1] == "tests/transports"
    assert "tests/services/test_gpu.py" in found
    assert "tests/services/test_rpc.py" not in found


def test_names_narrow_what_a_stage_chooses(tmp_path: Path) -> None:
    """`make test-gpu ARGS="-k collectives"`; the stage's own choice holds, too."""
    assert everything.parse(["-k", "collectives"]).keyword == "collectives"
    chosen = {stage.name: everything.narrowed(stage, "a or b") for stage in everything.ONE_HOST.stages}
    assert chosen["collectives"].keyword == "(not ten_thousand) and (a or b)"
    command = everything.command_of(chosen["memory"], 1, 9.0, tmp_path, [])
    assert command[command.index("-k") + 1] == "(a or b)"
    assert all(
        "-k" not in everything.command_of(s, 1, 9.0, tmp_path, []) for s in everything.ONE_HOST.stages if not s.keyword
    )


def test_parts_and_shards_share_the_tests(tmp_path: Path) -> None:
    """`--part 2/2` of a stage of four shards: numbers 5 to 8 of 8."""
    stage = everything.ONE_HOST.stages[0]
    commands = [
        everything.command_of(stage, shard, 9.0, tmp_path, [], everything.part_of(f"{number}/2"))
        for number in (1, 2)
        for shard in range(1, stage.shards + 1)
    ]
    assert [word for words in commands for word in words if "--shard" in word] == [
        f"--shard={number}/8" for number in range(1, 9)
    ]


@pytest.mark.parametrize("text", ["0/2", "3/2", "2", "a/b", "1/2/3"])
def test_parts_that_are_none(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        everything.parse(["--part", text])
    assert f"argument --part: invalid part_of value: '{text}'" in capsys.readouterr().err


def test_every_suite_is_whole() -> None:
    """Each file of a stage is there, and each wave has its share of the time."""
    for suite in (everything.ONE_HOST, everything.TWO_HOSTS):
        assert {stage.wave for stage in suite.stages} == set(suite.weights)
        assert sum(suite.weights.values()) == pytest.approx(1.0)
        for stage in suite.stages:
            files = [name for name in everything.expanded(stage.arguments) if not name.startswith("--")]
            assert all((everything.ROOT / name.partition("::")[0]).exists() for name in files)
