"""What transports say of themselves: it is what they can do, no torch is loaded for it, and a wrong word is refused."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from crossdock.common import transports
from crossdock.control.topology.discovery import path_kinds
from ep_kernels import Capabilities, MoEConfig
from ep_kernels.groups import PaperGroup
from ep_kernels.kernels import abi
from ep_kernels.network import NetworkConfig
from ep_kernels.transports import base
from ep_kernels.transports.cpu import native


@pytest.fixture
def fresh() -> Iterator[None]:
    """What is read is kept for the process."""
    transports.installed.cache_clear()
    yield
    transports.installed.cache_clear()


def planted(monkeypatch: pytest.MonkeyPatch, folder: Path, **texts: str) -> None:
    for name, text in texts.items():
        (folder / "transports" / name).mkdir(parents=True)
        (folder / "transports" / name / transports.FILE_NAME).write_text(text)
    found = SimpleNamespace(submodule_search_locations=[str(folder)])
    monkeypatch.setattr(transports, "find_spec", lambda _: found)


def capabilities_of(name: str, network: NetworkConfig | None) -> Capabilities:
    fields = {"num_experts": 4, "hidden_size": 128, "topk": 2, "max_tokens_per_rank": 8}
    transport = base.create(MoEConfig(group=PaperGroup(0, 2), transport=name, network=network, **fields))
    try:
        return transport.capabilities
    finally:
        transport.close()


@pytest.mark.parametrize("name", transports.names())
def test_they_say_what_they_can(name: str) -> None:
    can, said = capabilities_of(name, None), transports.installed()[name]
    assert can.device_type == said.device_type
    assert said.needs_gpu == (can.device_type != "cpu")
    assert not can.cross_host, "no network was given"


def test_the_most_ranks_are_those_of_the_data_plane() -> None:
    most = {name: facts.max_ranks for name, facts in transports.installed().items()}
    assert most == {"nvlink": abi.MAX_RANKS, "cpu": native.MAX_RANKS}


@pytest.mark.parametrize("name", transports.cross_host_names())
def test_with_a_network_they_join_several_hosts(name: str) -> None:
    assert capabilities_of(name, NetworkConfig()).cross_host


def test_all_of_the_data_plane_s_are_known_and_no_torch_is_loaded() -> None:
    assert transports.names() == base.names()
    code = (
        "import sys; from crossdock.common import transports as t; print(list(t.installed()), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == f"{list(transports.installed())} False"


def test_what_is_taken_where_nothing_is_said() -> None:
    found = transports.installed()
    assert transports.automatic(0).name == transports.automatic(1).name == "cpu"
    assert transports.automatic(2).name == transports.of_device("cuda").name == next(iter(found))
    assert transports.of_device("cpu").default_world(8) == transports.CPU_RANKS
    assert transports.of_device("cpu").default_world(8, 2) == 2
    assert transports.of_device("cuda").default_world(8) == 8
    assert not transports.needs_gpu("not-here")
    assert transports.cross_host_names() == ["nvlink", "cpu"]
    with pytest.raises(LookupError, match="'tpu'"):
        transports.of_device("tpu")


def test_the_regions_that_are_known_without_a_gpu() -> None:
    fields = {"group": PaperGroup(0, 2), "num_experts": 4, "hidden_size": 128, "topk": 2, "max_tokens_per_rank": 8}
    found = base.region_map(MoEConfig(transport="nvlink", **fields))
    assert found is not None
    assert found.num_bytes == sum(array.num_bytes for array in found.arrays) > 0
    assert found.mirror_bytes == 0, "a group of GPUs is one host"
    assert base.probe("cpu", 0) == {}


@pytest.mark.usefixtures("fresh")
def test_a_folder_is_all_that_a_new_one_needs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cable = 'device_type = "cuda"\nover = "gpu links"\ncross_host = true\nmax_ranks = 9\n'
    cable += "preference = 3\nlargest_step = 64\n[expected]\n"
    planted(monkeypatch, tmp_path, cable=cable + "pair_us = 9.0\n")
    assert transports.names() == ["cable"]
    assert transports.of_device("cuda").needs_gpu
    assert [kind.name for kind in path_kinds.__wrapped__()] == ["cable"]


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(
    ("text", "match"),
    [
        ('over = "pigeons"\n', r"cable/transport.toml: over: expected one of .*, got 'pigeons'"),
        ('over = "memory"\nspeed = 3\n', r"got \['speed'\]"),
        ('over = "memory"\n', "expected"),
        ('over = "memory"\n[expected]\npair_us = 1.0\n', "device_type"),
    ],
)
def test_a_wrong_word_is_refused(text: str, match: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    planted(monkeypatch, tmp_path, cable=text)
    with pytest.raises(ValueError, match=match):
        transports.installed()
