"""`crossdock memory`: the bytes that the kernels' byte map says, shown and as JSON, without a GPU."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from crossdock.cli import app as cli
from crossdock.cli import memory as regions
from ep_kernels import ConfigError, Layout, Mode
from ep_kernels.kernels import abi
from ep_kernels.network import NetworkConfig
from ep_kernels.transports.cpu import native
from ep_kernels.transports.cpu.geometry import geometry_of
from ep_kernels.transports.nvlink.calls import plan
from ep_kernels.transports.nvlink.inspection import HOLDS, arrays

DEFAULTS = {
    "num_experts": 256, "hidden_size": 7168, "topk": 8, "max_tokens": 128, "ranks": 8, "mode": "ll", "layout": "",
    "dtype": "bfloat16",
}  # fmt: skip


def config(**changes: Any) -> Any:
    return regions.config_of(**(DEFAULTS | changes))


def shown(*words: str) -> str:
    done = CliRunner().invoke(cli.app, ["memory", *words])
    assert done.exit_code == 0, done.exception
    return done.output


@pytest.mark.parametrize("mode", [Mode.LL, Mode.HT, Mode.AUTO])
@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize("dtype", list(regions.PAYLOADS))
def test_arrays_are_the_whole_region(mode: Mode, layout: Layout, dtype: str) -> None:
    c = config(mode=mode.value, layout=layout.value, dtype=dtype)
    shared = abi.region_map(plan.sizes_of(c).shape)
    end = 0
    for array in arrays(c):
        assert array.offset == end == getattr(shared, array.name)
        end += array.num_bytes
    assert end == shared.num_bytes
    for array in arrays(c):
        only = HOLDS[array.name].partition(": ")[0]
        if only in ("LL", "HT") and mode not in (Mode(only.lower()), Mode.AUTO):
            assert array.num_bytes == 0, array.name


def test_each_array_is_explained() -> None:
    assert list(HOLDS) == ["flags", *abi.ARRAYS]


def test_sizes_by_hand() -> None:
    small = {"max_tokens": 16, "ranks": 4, "layout": "rank_major"}
    found = {array.name: array for array in arrays(config(**small))}
    assert (found["rows"].num_slots, found["rows"].slot_bytes) == (3, 4 * 16 * 7168 * 2)
    assert found["row_lines"].slot_bytes == 4 * 16 * 15 * 1024, "14336 bytes are 15 packets of 960"
    assert found["metadata_lines"].slot_bytes == 4 * 16 * 2 * 128
    assert found["count_lines"].slot_bytes == 0, "rows per rank: the head says all"
    assert (found["count_packets"].num_slots, found["count_packets"].slot_bytes) == (3, 256), "4 x 16, aligned"
    assert (found["routing_packets"].num_slots, found["routing_packets"].slot_bytes) == (3, 256)
    assert found["combine_lines"].num_bytes == 3 * 4 * 16 * 15 * 1024
    assert found["combine_rows"].num_bytes == found["scales"].num_bytes == 0
    grouped = {array.name: array for array in arrays(config(**small | {"layout": "expert_major"}))}
    assert grouped["count_lines"].slot_bytes == 4 * 3 * 128, "64 experts: 3 lines of 28"
    quantised = {array.name: array for array in arrays(config(**small, dtype="fp8"))}
    assert quantised["rows"].slot_bytes == 4 * 16 * 7168
    assert quantised["row_lines"].slot_bytes == 4 * 16 * 8 * 1024, "scales are inside"
    ht = {array.name: array for array in arrays(config(**small, mode="ht", dtype="fp8"))}
    assert ht["scales"].slot_bytes == 4 * 16 * (7168 // 128) * 4
    assert ht["combine_rows"].slot_bytes == 4 * 16 * 7168 * 2
    assert ht["row_lines"].num_bytes == 0


def test_auto_has_room_for_low_latency_up_to_its_crossover() -> None:
    most = plan.LL_MAX_TOKENS[Layout.GROUPED]
    for tokens, held in ((most - 1, most - 1), (8 * most, most)):
        found = {array.name: array for array in arrays(config(mode="auto", layout="grouped", max_tokens=tokens))}
        assert found["row_lines"].slot_bytes == found["combine_lines"].slot_bytes == 8 * held * 15 * 1024
        assert found["rows"].slot_bytes == 8 * tokens * 8 * 7168 * 2
        words = shown("--mode", "auto", "--layout", "grouped", "--max-tokens", str(tokens)).split()
        assert " ".join(words).find(f"auto (LL up to {held} tokens), grouped") > 0


def test_table_and_json_agree() -> None:
    words = ("--ranks", "4", "--mode", "ht", "--layout", "grouped", "--max-tokens", "4096", "--dtype", "fp8")
    facts = json.loads(shown(*words, "--json"))
    assert facts["num_bytes"] == sum(array["num_bytes"] for array in facts["arrays"])
    assert facts["arrays"][-1]["offset"] + facts["arrays"][-1]["num_bytes"] == facts["num_bytes"]
    said = [facts[name] for name in ("ranks", "mode", "layout", "payload_dtype")]
    assert said == [4, "ht", "grouped", "float8_e4m3fn"]
    table = shown(*words)
    assert "4 ranks, 4096 tokens of 7168 x float8_e4m3fn per rank, top 8 of 256 experts, ht, grouped" in table
    assert f"{facts['num_bytes']:,}" in table
    for array in facts["arrays"]:
        assert (f" {array['name']} " in table) == bool(array["num_bytes"])
        assert f" {array['num_bytes']:,} " in table or not array["num_bytes"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mode": "fast"}, r"--mode: expected one of ll, ht, auto, got 'fast'"),
        ({"layout": "square"}, r"--layout: expected one of expert_major, .*, got 'square'"),
        ({"dtype": "int4"}, r"--dtype: expected one of bfloat16, .*, got 'int4'"),
        ({"transport": "tin"}, r"--transport: expected one of nvlink, cpu, got 'tin'"),
    ],
)
def test_unknown_names_are_refused(changes: dict[str, str], words: str) -> None:
    with pytest.raises(regions.OptionError, match=words) as caught:
        config(**changes)
    assert cli.exit_status(caught.value) == cli.EXIT_USAGE


def test_what_can_never_work_is_refused() -> None:
    with pytest.raises(ConfigError, match="hidden_size") as caught:
        config(hidden_size=3)
    assert cli.exit_status(caught.value) == cli.EXIT_USAGE


def test_a_cpu_region_is_what_the_native_half_says() -> None:
    c = config(transport="cpu", ranks=4, mode="auto", layout="grouped")
    found = regions.map_of(c)
    assert found.num_bytes == native.region_parts(geometry_of(c)).total
    ends = [array.offset + array.num_bytes for array in found.arrays]
    assert [array.offset for array in found.arrays] == [0, *ends[:-1]]
    assert found.mirror_bytes == found.arrays[-1].offset, "all but the expert outputs"
    rows = 128 * 7168 * 2
    assert found.arrays[1].slot_bytes > rows
    assert found.arrays[2].slot_bytes > 4 * rows


@pytest.mark.parametrize(
    ("ranks", "hosts", "expected"), [(8, 1, 0), (8, 2, 1), (8, 4, 3), (8, 8, 7), (4, 3, 3), (5, 2, 2)]
)
def test_a_rank_has_mirrors_of_what_its_host_gets_through_it(ranks: int, hosts: int, expected: int) -> None:
    assert regions.num_mirrors(ranks, hosts) == expected


def test_mirrors_are_shown_when_there_are_several_hosts() -> None:
    words = ("--transport", "cpu", "--ranks", "4")
    facts = json.loads(shown(*words, "--hosts", "2", "--json"))
    assert (facts["hosts"], facts["num_mirrors"]) == (2, 1)
    assert 0 < facts["mirror_bytes"] < facts["num_bytes"]
    assert f" {facts['mirror_bytes']:,} " in shown(*words, "--hosts", "2")
    assert "mirrors" not in shown(*words)


@pytest.mark.parametrize(
    ("ranks", "hosts", "expected", "rows"), [(8, 2, 8, 2), (8, 8, 14, 14), (5, 2, 6, 3), (64, 8, 112, 14)]
)
def test_boxes_are_shown_for_gpus_of_several_hosts(ranks: int, hosts: int, expected: int, rows: int) -> None:
    """Two for each rank of another host, as the transport makes them, with rows of a dispatch in those of rails; HT's
    kernels are LL's then."""
    words = ("--ranks", str(ranks), "--mode", "ht")
    facts = json.loads(shown(*words, "--hosts", str(hosts), "--json"))
    assert (facts["num_boxes"], facts["num_mirrors"]) == (expected, 0)
    joined = msgspec.structs.replace(config(ranks=ranks, mode="ht"), network=NetworkConfig())
    assert facts["box_bytes"] == abi.box_bytes(plan.sizes_of(joined).shape)
    assert facts["box_bytes"] >= 3 * 128 * (15 + 15) * 1024, "dispatch and combine lines of 128 tokens, three slots"
    assert facts["num_row_boxes"] == rows
    assert 0 <= 3 * 128 * 15 * 1024 + 256 - facts["box_row_bytes"] < 4096, "three slots of 128 rows, in whole pages"
    table = shown(*words, "--hosts", str(hosts))
    assert f" {expected * (facts['box_bytes'] - facts['box_row_bytes']):,} " in table
    assert f" {rows * facts['box_row_bytes']:,} " in table
    assert "pinned" in table
    alone = json.loads(shown(*words, "--json"))
    assert (alone["num_boxes"], alone["box_bytes"]) == (0, 0)
    assert alone["num_bytes"] != facts["num_bytes"]


@pytest.mark.parametrize(
    ("transport", "hosts", "words"), [("cpu", 9, "1 to 8"), ("cpu", 0, "1 to 8"), ("nvlink", 9, "1 to 8")]
)
def test_hosts_that_cannot_be(transport: str, hosts: int, words: str) -> None:
    with pytest.raises(regions.OptionError, match=rf"--hosts: expected {words}.*, got {hosts}"):
        regions.as_table(config(transport=transport), hosts)
