"""AUTO's crossover: the rule on curves of every kind, the ladder, the key, and the file in all its states."""

from __future__ import annotations

import json
import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from ep_kernels import ArgumentError, Layout, Mode, MoEConfig, transports, tuning
from tests.groups import LonelyGroup

STEPS = tuning.ladder(4096)
FIELDS: dict[str, Any] = {
    "num_experts": 8, "hidden_size": 64, "topk": 2, "max_tokens_per_rank": 32, "mode": Mode.AUTO,
}  # fmt: skip


def config(**changes: Any) -> MoEConfig:
    return MoEConfig(**({"group": LonelyGroup()} | FIELDS | changes))


def record(crossover: int = 64, device: str = "a device", **changes: Any) -> tuning.Record:
    return tuning.Record(
        key=tuning.key_of(config(**changes), device), ll_max_tokens=crossover, tokens=(32, 64, 128),
        ll_us=(1.0, 2.0, 4.0), ht_us=(2.0, 2.5, 3.0), measured_at="2026-01-01T00:00:00+00:00", crossdock="0.1.0",
    )  # fmt: skip


# The rule.


def curves(crossing: float, noise: float = 0.0, seed: int = 0) -> tuple[list[float], list[float]]:
    """LL costs 10 us and its tokens, HT more at first and less per token; they meet at `crossing`."""
    draw = random.Random(seed)
    ll = [(10 + 0.3 * t) * (1 + draw.uniform(-noise, noise)) for t in STEPS]
    ht = [(10 + 0.1 * crossing + 0.2 * t) * (1 + draw.uniform(-noise, noise)) for t in STEPS]
    return ll, ht


@pytest.mark.parametrize("crossing", [20, 70, 250, 700, 1500])
def test_curves_that_cross_once(crossing: int) -> None:
    ll, ht = curves(crossing)
    ahead = [t for t, a, b in zip(STEPS, ll, ht, strict=True) if a * (1 + tuning.MARGIN) < b]
    assert tuning.crossover(STEPS, ll, ht) == ahead[-1] <= crossing


@pytest.mark.parametrize("seed", range(20))
def test_noise_moves_the_crossover_only_where_it_costs_little(seed: int) -> None:
    true_ll, true_ht = curves(400)
    ll, ht = curves(400, noise=0.02, seed=seed)
    chosen = tuning.crossover(STEPS, ll, ht)
    for t, a, b in zip(STEPS, true_ll, true_ht, strict=True):
        taken = a if t <= chosen else b
        assert taken <= min(a, b) * 1.06, f"crossover {chosen} loses at {t}"


@pytest.mark.parametrize("odd", [8, 64, 2048])
def test_a_single_step_that_noise_turned_round_moves_nothing(odd: int) -> None:
    ll, ht = curves(400)
    place = STEPS.index(odd)
    wanted = tuning.crossover(STEPS, ll, ht)
    ll[place], ht[place] = ht[place], ll[place]
    assert tuning.crossover(STEPS, ll, ht) == wanted


def test_never_and_at_once() -> None:
    fast, slow = [1.0] * len(STEPS), [2.0] * len(STEPS)
    assert tuning.crossover(STEPS, fast, slow) == 4096, "nothing is known of larger steps"
    assert tuning.crossover(STEPS, slow, fast) == 0
    assert tuning.crossover((5,), [1.0], [2.0]) == 5
    assert tuning.crossover((5,), [2.0], [1.0]) == 0


def test_ll_must_be_worth_its_buffers() -> None:
    assert tuning.crossover((1, 2), [1.0, 1.0], [1.0, 1.0]) == 0
    assert tuning.crossover((1, 2), [1.0, 1.0], [2.0, 1.0 + tuning.MARGIN / 2]) == 1
    assert tuning.crossover((1, 2), [1.0, 1.0], [2.0, 1.0 + tuning.MARGIN * 2]) == 2


@pytest.mark.parametrize(
    ("tokens", "ll", "ht"),
    [
        ((), (), ()),
        ((2, 1), (1.0, 1.0), (1.0, 1.0)),
        ((1, 1), (1.0, 1.0), (1.0, 1.0)),
        ((1,), (0.0,), (1.0,)),
        ((1,), (1.0,), (float("nan"),)),
        ((1,), (float("inf"),), (1.0,)),
    ],
)
def test_curves_that_say_nothing_are_refused(tokens: Any, ll: Any, ht: Any) -> None:
    with pytest.raises(ArgumentError):
        tuning.crossover(tokens, ll, ht)


def test_the_ladder() -> None:
    assert tuning.ladder(1) == (1,)
    assert tuning.ladder(100) == (1, 2, 4, 8, 16, 32, 48, 64, 96, 100)
    assert tuning.ladder(128) == (1, 2, 4, 8, 16, 32, 48, 64, 96, 128)
    assert STEPS[-5:] == (1024, 1536, 2048, 3072, 4096)


# The key.


@pytest.mark.parametrize(
    "change",
    [
        {"num_experts": 16},
        {"hidden_size": 128},
        {"topk": 3},
        {"layout": Layout.FLAT},
        {"dtype": torch.float16},
        {"quantize": True},
        {"combine_dtype": torch.float8_e4m3fn},
        {"exact_combine": True},
        {"num_sms": 24},
        {"dispatch_sms": 24},
        {"combine_sms": 24},
        {"transport": "nvlink"},
        {"group": LonelyGroup(0, 2)},
    ],
)
def test_what_shifts_the_curves_is_in_the_key(change: dict[str, Any]) -> None:
    assert tuning.key_of(config(**change), "d") != tuning.key_of(config(), "d")


def test_one_number_for_both_operations_is_one_number() -> None:
    """As files of versions that had only that one."""
    one = tuning.key_of(config(num_sms=24), "d")
    assert one == tuning.key_of(config(dispatch_sms=24, combine_sms=24), "d")
    assert b"_sms" not in msgspec.json.encode(one).replace(b"num_sms", b"")


@pytest.mark.parametrize("change", [{"max_tokens_per_rank": 64}, {"timeout_s": 3.0}, {"output_dtype": torch.bfloat16}])
def test_what_does_not_is_not(change: dict[str, Any]) -> None:
    assert tuning.key_of(config(**change), "d") == tuning.key_of(config(), "d")


def test_a_device_is_named_without_asking_for_memory() -> None:
    transport = transports.create(config())
    assert transport.device_name() == tuning.cpu_name()
    assert " cores" in tuning.cpu_name()


# The file.


@pytest.fixture(autouse=True)
def warned() -> Iterator[None]:
    """Warnings are errors here, but where a test expects one; and each test is the first to be warned."""
    tuning._warn.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def test_what_is_remembered_is_recalled(tmp_path: Path) -> None:
    path = tmp_path / "made" / tuning.FILE_NAME
    assert tuning.recall(path.parent, record().key) is None
    tuning.remember(path, record(64))
    tuning.remember(path, record(7, topk=3))
    tuning.remember(path, record(8, device="another"))
    assert tuning.recall(path.parent, record().key) == record(64)
    tuning.remember(path, record(128))
    assert [tuning.recall(path.parent, r.key) for r in (record(), record(topk=3), record(device="another"))] == [
        record(128), record(7, topk=3), record(8, device="another"),
    ]  # fmt: skip
    assert tuning.recall(path.parent, record(topk=4).key) is None, "only what was measured itself"
    assert [p.name for p in path.parent.iterdir()] == [tuning.FILE_NAME], "nothing temporary is left"


def test_no_folder_knows_nothing() -> None:
    assert tuning.recall(None, record().key) is None


def test_a_file_in_the_place_of_the_folder_counts_as_absent(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert tuning.recall(tmp_path / "file", record().key) is None


def _whole() -> dict[str, Any]:
    return {"version": 1, "records": [msgspec.to_builtins(record())]}


BROKEN = {
    "empty": "",
    "torn": json.dumps(_whole())[:100],
    "of another program": '{"blocks": [1, 2]}',
    "of a later version": json.dumps(_whole() | {"version": 2}),
    "with a field more": json.dumps(_whole() | {"more": 1}),
    "with a negative crossover": json.dumps(_whole()).replace('"ll_max_tokens": 64', '"ll_max_tokens": -1'),
    "with words for numbers": json.dumps(_whole()).replace('"ll_max_tokens": 64', '"ll_max_tokens": "many"'),
    "of bytes": "\udcff\udcfe",
}


@pytest.mark.parametrize("text", BROKEN.values(), ids=BROKEN)
def test_a_file_that_cannot_be_read_is_warned_of_once_and_counts_as_absent(tmp_path: Path, text: str) -> None:
    path = tmp_path / tuning.FILE_NAME
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.warns(RuntimeWarning, match=r"tuning\.json.*crossdock tune.*built-in"):
        assert tuning.recall(tmp_path, record().key) is None
    assert tuning.recall(tmp_path, record().key) is None, "and without a warning, which would be an error here"


def test_tuning_again_repairs_it_and_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / tuning.FILE_NAME
    path.write_text("somebody's own")
    tuning.remember(path, record())
    assert tuning.recall(tmp_path, record().key) == record()
    assert (tmp_path / "tuning.json.unread").read_text() == "somebody's own"


def test_a_folder_in_the_place_of_the_file(tmp_path: Path) -> None:
    (tmp_path / tuning.FILE_NAME).mkdir()
    with pytest.warns(RuntimeWarning, match="directory"):
        assert tuning.recall(tmp_path, record().key) is None
    with pytest.raises(OSError, match="directory"):
        tuning.remember(tmp_path / tuning.FILE_NAME, record())


def test_a_file_larger_than_any_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "MAX_BYTES", 10)
    (tmp_path / tuning.FILE_NAME).write_text(json.dumps(_whole()))
    with pytest.warns(RuntimeWarning, match="more than 10 bytes"):
        assert tuning.recall(tmp_path, record().key) is None


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / tuning.FILE_NAME
    tuning.remember(path, record(1))

    def full(fd: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="no space"):
        tuning.remember(path, record(2))
    assert tuning.recall(tmp_path, record().key) == record(1)
    assert [p.name for p in tmp_path.iterdir()] == [tuning.FILE_NAME]


def test_where_it_lies() -> None:
    assert tuning.cache_dir("some/folder") == Path("some/folder")
    home = tuning.cache_dir(None)
    assert home is None or home.parts[-3:] == (".cache", "crossdock", "kernels")
