"""The test bed's programs are built by one run at a time."""

from __future__ import annotations

import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.deploy.bed import tools
from tests.waiting import until

GO = """\
#!/bin/sh -e
while [ "$1" != -o ]; do shift; done
mkdir -p "$GOCACHE"
echo "$2" >> {log}
while [ ! -e {go_on} ]; do sleep 0.02; done
rmdir "$GOCACHE"
echo built > "$2"
"""
"""Go, as far as the bed asks it: it needs its cache until it has written the program."""


@pytest.fixture
def go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a Go that builds nothing: `log` has a line of each build that began; they wait for `go_on`."""
    script = tmp_path / "go"
    script.write_text(GO.format(log=tmp_path / "log", go_on=tmp_path / "go_on"))
    script.chmod(0o755)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tools, "program", lambda _: str(script))
    return tmp_path


@pytest.mark.parametrize("second", ["helm4", "helm3"])
def test_a_second_run_waits_for_the_first_and_builds_only_what_it_has_not(
    second: str, go: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = threading.Event()
    monkeypatch.setattr(tools, "say", lambda text: waits.set() if "waiting" in text else None)
    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(tools.need, "helm3")]
        until((go / "log").exists)
        runs.append(pool.submit(tools.need, second))
        told = waits.wait(60)
        (go / "go_on").touch()
        made = [path for run in runs for path in run.result().values()]
    assert told
    assert all(path.read_text() == "built\n" for path in made)
    assert len((go / "log").read_text().splitlines()) == len({"helm3", second})
    assert not (tools.cache() / "work").exists()


def test_what_is_built_needs_no_lock_and_no_go(go: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (go / "go_on").touch()
    built = tools.need("helm3")
    monkeypatch.setattr(tools, "program", lambda _: None)
    with tools._alone():
        assert tools.need("helm3") == built
        shutil.rmtree(built["helm3"].parent)
    with pytest.raises(tools.Missing, match=r"go >= 1\.26"):
        tools.need("helm3")
