"""Everything works under plain torchrun: no services, no control plane."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.cases import draw_seed

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 240


def launch(transport: str, num_ranks: int) -> str:
    """What the ranks print; an AssertionError with all of it if one of them fails."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    command += ["-m", "tests.gpu.torchrun_steps", "--transport", transport, "--seed", str(draw_seed())]
    paths = [str(ROOT), str(ROOT / "services"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, text=True, timeout=DEADLINE_S, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}"
    return done.stdout


def test_cpu_under_torchrun() -> None:
    said = launch("cpu", 2)
    assert said.count("default group 2 ranks") == said.count(": ok") - said.count("every second rank") == 12


@pytest.mark.gpu(2)
def test_nvlink_under_torchrun() -> None:
    size = min(8, torch.cuda.device_count())
    said = launch("nvlink", size)
    assert said.count(f"default group {size} ranks") == said.count(": ok") - said.count("every second rank") == 15
