"""Every MoE family of the installed `transformers`: served with equal tokens, or listed with the reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from crossdock.client import attach
from crossdock.demo.every import VOCAB_SIZE, config_keys, known_to_transformers, next_tokens, tiny_model
from crossdock.worker.checkpoints.checkpoint import Checkpoint, CheckpointError
from crossdock.worker.checkpoints.families import FAMILIES, NOT_SERVED, NUM_EXPERTS, TOPK
from tests.services import families_page
from tests.services.fakes import FakeWorker, worker_of
from tests.services.outer_models import OUTER, outer_model

ALIASES = {"kimi_k2"}
"""Families whose checkpoints name another model_type than `transformers` has."""
_HEADS = "positions of a head of 16 are split in parts; a head of 72 / 4 columns has others"
NOT_BUILT = {
    ("glm4v_moe_text", "odd, top 1"): _HEADS,
    ("glm4v_moe_text", "odd, all"): _HEADS,
    ("zaya", "odd, all"): "top 1 only",
}
"""Sizes that `transformers` does not build of a family, and why."""
SHORT_OUTER = ("diffusion_gemma_text", "qwen3_vl_moe_text")
SHORT = ("aria_text", "gpt_oss", "granitemoe", "llama4_text", "nemotron_h", "olmoe")
"""In every run; the others with `make test-families`."""


@pytest.fixture(autouse=True)
def _quiet() -> None:
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)


def test_every_family_is_served_or_listed() -> None:
    hint = "add them to FAMILIES of services/crossdock/worker/checkpoints/families.py, or to NOT_SERVED with the reason"
    known = set(known_to_transformers())
    assert known <= {*FAMILIES, *NOT_SERVED}, hint
    assert set(FAMILIES) - known <= ALIASES, "families that transformers does not know (any more)"
    assert set(NOT_SERVED) <= known | {"dbrx"}
    assert not set(FAMILIES) & set(NOT_SERVED)


def test_the_page_is_what_the_recorded_run_says() -> None:
    """`python -m tests.services.families_page --write` after a run with --record-families."""
    page = families_page.PAGE.read_text()
    assert families_page.between(page) == families_page.table(families_page.RECORDED.read_text())


def test_a_family_that_is_not_served_is_refused_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "longcat_flash"}')
    with pytest.raises(CheckpointError, match="got 'longcat_flash', which is not served: some of the routed experts"):
        Checkpoint.open(tmp_path)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`family`: a few, or every one that `transformers` can build; so for `outer`, those with a model around them."""
    every = metafunc.config.getoption("--all-families")
    if "family" in metafunc.fixturenames:
        metafunc.parametrize("family", sorted(set(FAMILIES) - ALIASES) if every else SHORT)
        metafunc.parametrize("sizes", ("even", "odd, top 1", "odd, all") if every else ("even",))
    if "outer" in metafunc.fixturenames:
        metafunc.parametrize("outer", OUTER if every else SHORT_OUTER)


def fields_of(family: str, sizes: str) -> dict[str, int]:
    """Fields of the family's config: "even" as `tiny_model` has them, or E 7, H 72, I 24."""
    if sizes == "even":
        return {}
    topk = 1 if sizes == "odd, top 1" else 7
    wanted = dict.fromkeys(NUM_EXPERTS, 7) | dict.fromkeys(TOPK, topk) | {FAMILIES[family].inner: 24}
    wanted |= {"hidden_size": 72, "n_group": 1, "topk_group": 1, "num_expert_group": 1}
    return {key: size for key, size in wanted.items() if key in config_keys(family)}


@pytest.mark.parametrize("original", [True, False], ids=["published", "transformers-5"])
def test_equal_tokens(tmp_path: Path, family: str, sizes: str, original: bool, request: pytest.FixtureRequest) -> None:
    if (family, sizes) in NOT_BUILT:
        pytest.skip(NOT_BUILT[family, sizes])
    model = tiny_model(family, **fields_of(family, sizes))
    difference = assert_equal_tokens(tmp_path, model, family, original)
    record(request.config, family=family, model=family, sizes=sizes, published=original, difference=difference)


@pytest.mark.parametrize("original", [True, False], ids=["published", "transformers-5"])
def test_equal_tokens_inside_of_another_model(
    tmp_path: Path, outer: str, original: bool, request: pytest.FixtureRequest
) -> None:
    difference = assert_equal_tokens(tmp_path, outer_model(outer), outer, original)
    record(request.config, family=outer, model=OUTER[outer], sizes="even", published=original, difference=difference)


def record(config: pytest.Config, **line: object) -> None:
    """Add a line to the file of --record-families."""
    path = config.getoption("--record-families")
    if path:
        with Path(path).open("a") as file:
            file.write(json.dumps(line | {"transformers": transformers.__version__}) + "\n")


def assert_equal_tokens(tmp_path: Path, model: Any, family: str, original: bool) -> float:
    """A model says the same with its experts in another process' hands. Returns the largest difference of a logit."""
    model.save_pretrained(tmp_path, save_original_format=original)
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.spec.family == family
    worker: FakeWorker = worker_of(checkpoint, torch.float32)
    ids = torch.randint(3, VOCAB_SIZE, (2, 24))
    talks = getattr(model, "language_model", model) if family == "llama4_text" else model
    two_stacks = model.config.model_type == "diffusion_gemma"  # its encoder has the same weights in modules of its own
    part = model.model.decoder if two_stacks else model
    try:
        torch.manual_seed(1)  # a diffusion model draws its canvas
        logits, tokens = next_tokens(talks, ids)
        with attach(part, worker.address) as attached:
            assert attached.layers == checkpoint.spec.moe_layers
            before = len(worker.seen)
            torch.manual_seed(1)
            remote_logits, remote_tokens = next_tokens(talks, ids)
            assert len(worker.seen) > before
        assert attached.num_freed_bytes > 0
        torch.testing.assert_close(remote_logits, logits, rtol=1e-4, atol=1e-4)
        assert torch.equal(remote_tokens, tokens)
        return float((remote_logits - logits).abs().max())
    finally:
        worker.kill()
