"""Processes that a long run restarts load the product of its begin, in any working directory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.frozen import PRODUCT, frozen
from tests.services.control_world import spawn, wait_announced

ROOT = Path(__file__).resolve().parents[2]


def run(words: list[str], cwd: Path) -> str:
    return subprocess.run(
        [sys.executable, *words], cwd=cwd, check=True, capture_output=True, text=True, timeout=120
    ).stdout.strip()


def test_an_edit_during_the_run_reaches_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    live = tmp_path / "live"
    package = live / "edited"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text("print('before')")
    monkeypatch.syspath_prepend(str(live))
    (live / "beside.py").write_text("print('beside')")
    with frozen(tmp_path / "code", ["edited"]):
        assert run(["-m", "beside"], tmp_path) == "beside"
        (package / "__main__.py").write_text("print('after')")
        assert run(["-m", "edited"], live) == "before"
        assert run(["-c", "import edited.__main__"], live) == "before"
    assert run(["-m", "edited"], live) == "after", "and the working directory comes first again"


def test_the_whole_product_is_copied(tmp_path: Path) -> None:
    """The commands are those of the supervisor (`-m`, `-c`) and of `spawn`, which makes its own environment."""
    before = dict(os.environ), list(sys.path)
    code = tmp_path / "code"
    with frozen(code):
        ask = "import crossdock.worker, ep_kernels.transports; print(crossdock.__file__, ep_kernels.__file__)"
        files = run(["-c", ask], ROOT).split()
        assert [Path(file).parent for file in files] == [code / name for name in PRODUCT]
        process = spawn("listen=127.0.0.1:0")
        wait_announced(process)
        environ = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
        process.kill()
        process.communicate()
        assert f"PYTHONPATH={code}{os.pathsep}".encode() in b"\0".join(environ)
    assert (dict(os.environ), list(sys.path)) == before
