"""The examples of the documents run: each Python block with what it takes for granted, each YAML block as the config
that it is said to be."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from inspect import signature
from pathlib import Path
from textwrap import dedent
from types import MappingProxyType, SimpleNamespace
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
import torch
import torch.distributed as dist
import transformers
import yaml

from crossdock.client import Client
from crossdock.common.config import ControlConfig, FrameworkConfig, HostConfig
from crossdock.common.small_files import parse_yaml
from crossdock.demo.models import write_checkpoint
from crossdock.worker.checkpoints.checkpoint import Checkpoint
from ep_kernels import Mode, MoECommunicator, MoEConfig
from ep_kernels.groups import StoreGroup
from ep_kernels.network import NetworkConfig
from tests.house.tree import ROOT, files, name_of, text_of
from tests.services.fakes import worker_of

Names = dict[str, Any]
H, E, K, T = 64, 8, 2, 4
RECIPES = ROOT / "deploy" / "recipes"


def blocks(language: str) -> Iterator[tuple[str, int, str]]:
    """(page, number on it, text) of each block."""
    for page in (path for path in files() if path.suffix == ".md"):
        found = re.findall(rf"^ *```{language}\n(.*?)^ *```", text_of(page), re.DOTALL | re.MULTILINE)
        yield from ((name_of(page), number, dedent(text)) for number, text in enumerate(found))


def run(page: str, number: int, names: Names, instead: Mapping[str, str] = MappingProxyType({})) -> Names:
    """Run one block of a page with these names; `instead`: what replaces placeholders of the example."""
    (text,) = [text for where, at, text in blocks("python") if (where, at) == (page, number)]
    for old, new in instead.items():
        assert old in text, f"{page}: expected {old} in the example"
        text = text.replace(old, new)
    exec(compile(text, page, "exec"), names)
    return names


@pytest.fixture
def comm() -> Iterator[MoECommunicator]:
    group = StoreGroup(dist.HashStore(), 0, 1)
    config = MoEConfig(group=group, num_experts=E, hidden_size=H, topk=K, max_tokens_per_rank=T, dtype=torch.float32)
    with MoECommunicator(config) as made:
        yield made


def _step(comm: MoECommunicator | None = None) -> Names:
    ids = torch.stack([torch.randperm(E)[:K] for _ in range(T)])
    rows, weights = torch.randn(T, H), torch.full((T, K), 0.5)
    router, experts = (lambda _: (weights, ids)), (lambda out: out.tokens)
    return {
        "comm": comm, "x": rows, "topk_ids": ids, "topk_weights": weights, "router": router, "experts": experts,
        "torch": torch, "MoEConfig": MoEConfig, "MoECommunicator": MoECommunicator, "Mode": Mode,
    }  # fmt: skip


def test_every_python_block_is_run_here() -> None:
    """But the transport of a day, which test_toy.py runs."""
    assert [(page, number) for page, number, _ in blocks("python")] == [
        ("README.md", 0), ("docs/adding-a-transport.md", 0), ("docs/collectives.md", 0), ("docs/deploy.md", 0),
        ("docs/network.md", 0), ("docs/security.md", 0), ("docs/torch.md", 0), ("docs/torch.md", 1),
        ("docs/tracing.md", 0),
    ]  # fmt: skip


@pytest.mark.parametrize(("page", "path", "target"), [
    ("README.md", "path/to/checkpoint", "127.0.0.1:7400"),
    ("docs/deploy.md", "/models/my-checkpoint", "moe-control:7400"),
])  # fmt: skip
def test_attach(page: str, path: str, target: str, tmp_path: Path) -> None:
    folder = write_checkpoint(
        "mixtral", tmp_path, num_layers=1, hidden_size=H, intermediate_size=32, num_experts=E, topk=K
    )
    worker = worker_of(Checkpoint.open(folder), torch.float32)
    ids = torch.randint(0, 99, (1, 4))
    try:
        run(page, 0, {"ids": ids}, {path: str(folder), target: worker.address, "(...)": "(ids, max_new_tokens=2)"})
        assert worker.seen
    finally:
        worker.kill()


def test_program_of_the_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """That of deploy/recipes/transformers, on a checkpoint that has no tokenizer."""
    config_map, _ = yaml.safe_load((RECIPES / "transformers" / "values.yaml").read_text())["extraObjects"]
    folder = write_checkpoint(
        "mixtral", tmp_path, num_layers=1, hidden_size=H, intermediate_size=32, num_experts=E, topk=K
    )
    worker = worker_of(Checkpoint.open(folder), torch.float32)
    tokenizer = Mock(return_value={"input_ids": torch.randint(0, 99, (1, 4))})
    tokenizer.decode = lambda ids: f"{len(ids)} tokens"
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda _: tokenizer)
    monkeypatch.setattr(sys, "argv", ["generate.py", str(folder), worker.address])
    try:
        exec(compile(config_map["data"]["generate.py"], "generate.py", "exec"), {})
        assert worker.seen
    finally:
        worker.kill()
    assert capsys.readouterr().out.endswith(" tokens\n")


def test_security(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "certs").mkdir()
    (tmp_path / "certs/client.yaml").write_text("worker_name: moe\n")
    seen: list[Any] = []
    names: Names = {"model": None, "attach": lambda model, target, security: seen.append(security)}
    run("docs/security.md", 0, names)
    assert seen[0].worker_name == "moe"


def test_network() -> None:
    names = {"MoEConfig": lambda group, network: network, "NetworkConfig": NetworkConfig}
    run("docs/network.md", 0, names, {", ...)": ")"})


def test_torch(comm: MoECommunicator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "graph", nullcontext)
    names = run("docs/torch.md", 0, _step(comm) | {"graph": SimpleNamespace(replay=lambda: None)})
    assert names["z"].shape == (T, H)
    with torch.compiler.set_stance("force_eager"):
        names = run("docs/torch.md", 1, _step(comm))
        assert names["layer"](names["x"]).shape == (T, H)


def test_collectives(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        x, w = torch.randn(T, H, dtype=torch.bfloat16), torch.randn(H, H, dtype=torch.bfloat16)
        module = SimpleNamespace(set_custom_all_gather=lambda _: None)
        names: Names = {"pg": dist.group.WORLD, "n": T, "h": H, "x": x, "x1": x, "x2": w, "w": w, "w1": w, "w2": w}
        backend = type("Backend", (), {"all_gather_into_tensor": lambda *_: None})()
        deepspeed = SimpleNamespace(comm=SimpleNamespace(comm=SimpleNamespace(cdb=backend)))
        names |= {"module": module, "columns": x, "deepspeed": deepspeed}
        names = run("docs/collectives.md", 0, names, {"1 << 30": "1 << 20"})
        assert torch.equal(names["x_all"], x)
        assert torch.equal(names["part"], x @ w)
        assert not vars(backend), "DeepSpeed gathers by itself again"
        names["coll"].close()
    finally:
        dist.destroy_process_group()


def test_tracing() -> None:
    client = SimpleNamespace(forward=lambda *given: signature(Client.forward).bind(None, *given))
    tracer = SimpleNamespace(start_as_current_span=lambda name: nullcontext())
    run("docs/tracing.md", 0, _step() | {"tracer": tracer, "client": client, "layer": 0})


CONFIGS = {
    "docs/engines.md": FrameworkConfig,
    "docs/high-availability.md": ControlConfig,
    "docs/operations.md": ControlConfig,
    "docs/placement.md": ControlConfig,
    "docs/systemd.md": HostConfig,
    "docs/tracing.md": HostConfig,
}
"""Of which program a page's YAML is; docs/security.md has volumes of a pod."""


def test_yaml() -> None:
    found = {page: text for page, _, text in blocks("yaml")}
    assert set(found) - {"docs/security.md"} == set(CONFIGS)
    for page, kind in CONFIGS.items():
        data = parse_yaml(found[page])
        if kind is HostConfig:
            data["worker"]["model"] = "m"
        msgspec.convert(data, kind)
