"""The plugin in vLLM: found, silent, selected, refused."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest

import crossdock
from tests import tools

tools.require("vllm")

SHOW = """
import sys
from vllm.plugins import load_general_plugins
load_general_plugins(); load_general_plugins()
from crossdock import vllm_plugin
{before}
vllm_plugin.register(); vllm_plugin.register()
import torch
from vllm.distributed.device_communicators import all2all
from vllm.model_executor.layers.fused_moe import all2all_utils
from vllm.utils.import_utils import has_deep_ep
print(getattr(all2all.DeepEPLLAll2AllManager, '__module__'), hasattr(all2all_utils, 'DeepEPLLPrepareAndFinalize'),
      has_deep_ep(), torch.cuda.is_initialized())
"""


def vllm(chosen: str, before: str = "", path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """What a process of vLLM's sees with CROSSDOCK_VLLM so chosen."""
    env = {**os.environ, "CROSSDOCK_VLLM": chosen, "VLLM_LOGGING_LEVEL": "ERROR"}
    if path is not None:
        env["PYTHONPATH"] = f"{path}{os.pathsep}{env.get('PYTHONPATH', '')}"
    return subprocess.run(
        [sys.executable, "-c", SHOW.format(before=before)],
        env=env, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip


def test_vllm_finds_the_entry_point() -> None:
    found = {entry.name: entry.value for entry in importlib.metadata.entry_points(group="vllm.general_plugins")}
    assert found["crossdock"] == "crossdock.vllm_plugin:register"


@pytest.mark.parametrize(
    ("chosen", "says"),
    [
        ("", "vllm.distributed.device_communicators.all2all False False False"),
        ("off", "vllm.distributed.device_communicators.all2all False False False"),
        ("deep_ep", "vllm.distributed.device_communicators.all2all False True False"),
        ("native", "crossdock.vllm_plugin.managers True False False"),
    ],
)
def test_it_does_what_is_chosen(chosen: str, says: str) -> None:
    done = vllm(chosen)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == says


def test_a_word_that_it_does_not_know_is_refused() -> None:
    done = vllm("yes")
    assert done.returncode != 0
    assert "Invalid enum value 'yes' - at `$.vllm`" in done.stderr


@pytest.mark.parametrize(
    ("broken", "named"),
    [
        ("import vllm.distributed.device_communicators.all2all as m; del m.DeepEPHTAll2AllManager",
         "all2all.DeepEPHTAll2AllManager"),
        ("import vllm.model_executor.layers.fused_moe.all2all_utils as m; m.maybe_make_prepare_finalize = len",
         "all2all_utils.maybe_make_prepare_finalize looks DeepEPLLPrepareAndFinalize up as a global"),
        ("import vllm.model_executor.layers.fused_moe.modular_kernel as m\n"
         "m.FusedMoEPrepareAndFinalizeModular.prepare_async = lambda self, a1, more: None",
         "FusedMoEPrepareAndFinalizeModular.prepare_async takes"),
    ],
)  # fmt: skip
def test_a_missing_hook_is_refused_by_name_and_version(broken: str, named: str) -> None:
    done = vllm("native", f"import os\nos.environ['CROSSDOCK_VLLM'] = 'native'\n{broken}")
    assert done.returncode != 0
    version = importlib.metadata.version("vllm")
    assert f"CROSSDOCK_VLLM=native: vLLM {version} lacks what the plugin needs: " in done.stderr
    assert named in done.stderr


def test_a_real_deep_ep_is_not_hidden(tmp_path: Path) -> None:
    (tmp_path / "deep_ep").mkdir()
    (tmp_path / "deep_ep" / "__init__.py").write_text("")
    done = vllm("deep_ep", path=tmp_path)
    assert done.returncode != 0
    assert f"expected no other deep_ep, got {tmp_path}" in done.stderr
    done = vllm("deep_ep", path=Path(crossdock.__file__).parent / "deep_ep" / "path")
    assert done.returncode == 0, done.stderr


COUNT = """
from crossdock.deep_ep.exporter import _WatchedCommunicator, telemetry
from ep_kernels import LatencySample
from ep_kernels.telemetry import Samples
sample = LatencySample("dispatch", "ll", 1, 7, 0, 1000, (0, 2000), 4000)
telemetry()._count(_WatchedCommunicator(("decode", "3"), []), Samples.of([sample]))
"""
SCRAPE = """
from prometheus_client import generate_latest
from vllm.v1.metrics.prometheus import get_prometheus_registry
print(generate_latest(get_prometheus_registry()).decode())
"""


def test_a_workers_counts_are_on_the_page_that_vllm_serves(tmp_path: Path) -> None:
    env = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path), "VLLM_LOGGING_LEVEL": "ERROR"}
    pages = [
        subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=600, check=True)
        for code in (COUNT, SCRAPE)
    ]
    page = pages[-1].stdout
    assert 'crossdock_ep_tokens_total{group="decode",mode="ll",op="dispatch",rank="3"} 7.0' in page
    assert 'crossdock_ep_peer_wait_seconds_total{group="decode",op="dispatch",peer="1",rank="3"} 2' in page
