"""Every MoE family of the installed `transformers`: served with equal tokens, or listed with the reason."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from crossdock.client import attach
from crossdock.demo.tiny import TOPK, VOCAB_SIZE, known_to_transformers, missing, next_tokens, tiny_model
from crossdock.worker.checkpoint import Checkpoint, CheckpointError
from crossdock.worker.families import FAMILIES, NOT_SERVED
from tests.services.fakes import FakeWorker, worker_of

ALIASES = {"kimi_k2"}
"""Families whose checkpoints name another model_type than `transformers` has."""
SHORT = ("aria_text", "gpt_oss", "granitemoe", "llama4_text", "nemotron_h", "olmoe")
"""In every run; the others with `make test-families`."""


@pytest.fixture(autouse=True)
def _quiet() -> None:
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)


def test_every_family_is_served_or_listed() -> None:
    hint = "add them to FAMILIES of services/crossdock/worker/families.py, or to NOT_SERVED with the reason"
    assert not missing(), hint
    known = set(known_to_transformers())
    assert set(FAMILIES) - known <= ALIASES, "families that transformers does not know (any more)"
    assert set(NOT_SERVED) <= known | {"dbrx"}
    assert not set(FAMILIES) & set(NOT_SERVED)


def test_the_page_names_every_family() -> None:
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    assert [name for name in FAMILIES if f"`{name}`" not in page] == []
    assert [name for name, why in NOT_SERVED.items() if f"| `{name}` | {why} |" not in page] == []


def test_a_family_that_is_not_served_is_refused_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "longcat_flash"}')
    with pytest.raises(CheckpointError, match="got 'longcat_flash', which is not served: some of the routed experts"):
        Checkpoint.open(tmp_path)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`family`: a few, or every one that `transformers` can build."""
    if "family" in metafunc.fixturenames:
        every = metafunc.config.getoption("--all-families")
        metafunc.parametrize("family", sorted(set(FAMILIES) - ALIASES) if every else SHORT)


@pytest.mark.parametrize("original", [True, False], ids=["published", "transformers-5"])
def test_equal_tokens(tmp_path: Path, family: str, original: bool) -> None:
    assert_equal_tokens(tmp_path, family, original)


def assert_equal_tokens(tmp_path: Path, family: str, original: bool) -> None:
    """A model of the family says the same with its experts in another process' hands."""
    model = tiny_model(family)
    model.save_pretrained(tmp_path, save_original_format=original)
    checkpoint = Checkpoint.open(tmp_path)
    assert (checkpoint.spec.family, checkpoint.spec.num_experts) == (family, 8)
    worker: FakeWorker = worker_of(checkpoint, torch.float32)
    ids = torch.randint(0, VOCAB_SIZE, (2, 24))
    try:
        logits, tokens = next_tokens(model, ids)
        with attach(model, worker.address) as attached:
            before = len(worker.seen)
            remote_logits, remote_tokens = next_tokens(model, ids)
            assert len(worker.seen) > before
        assert attached.num_freed_bytes > 0
        torch.testing.assert_close(remote_logits, logits, rtol=1e-4, atol=1e-4)
        assert torch.equal(remote_tokens, tokens)
        assert checkpoint.spec.topk <= TOPK
    finally:
        worker.kill()
