"""`attach`: unchanged transformers models with remote experts give the same logits; everything else is refused."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.nn.utils import parametrize

from crossdock.client import Client, ClientError, InvalidRequest, ModelMismatch, RemoteExperts, attach, connection
from crossdock.client.sites import find_experts
from crossdock.demo.models import FAMILIES, VOCAB_SIZE, write_checkpoint
from crossdock.worker.checkpoints.checkpoint import Checkpoint
from crossdock.worker.experts.expert_mlps import ExpertMLPs
from tests.services.fakes import FakeWorker, refuse, worker_of

SIZES = {"num_layers": 2, "hidden_size": 64, "intermediate_size": 32, "num_experts": 8, "topk": 2}


def _write(family: str, path: Path, seed: int = 0, **sizes: int) -> Path:
    return write_checkpoint(family, path, seed=seed, **(SIZES | sizes))  # type: ignore[arg-type]


def _model(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()


def _worker(path: Path, dtype: torch.dtype = torch.float32) -> FakeWorker:
    return worker_of(Checkpoint.open(path), dtype)


def _ids(num_tokens: int = 24) -> torch.Tensor:
    return torch.randint(0, VOCAB_SIZE, (2, num_tokens))


@pytest.fixture(autouse=True)
def _seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same prompts each time; a worker that is only slow to say that it is there is not given up."""
    torch.manual_seed(0)
    monkeypatch.setattr(connection, "ALIVE_S", 120.0)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _write("mixtral", tmp_path_factory.mktemp("mixtral"))


@pytest.fixture
def worker(path: Path) -> Iterator[FakeWorker]:
    made = _worker(path)
    yield made
    made.kill()


@pytest.mark.parametrize("family", FAMILIES)
def test_same_logits_and_tokens(tmp_path: Path, family: str) -> None:
    path = _write(family, tmp_path)
    worker = _worker(path)
    plain, model, ids = _model(path), _model(path), _ids()
    with attach(model, worker.address, fingerprint=Checkpoint.open(path).spec.fingerprint) as attached:
        assert attached.layers == Checkpoint.open(path).spec.moe_layers
        assert attached.num_freed_bytes == len(attached.layers) * 3 * 8 * 64 * 32 * 4
        assert sum(isinstance(module, RemoteExperts) for module in model.modules()) == len(attached.layers)
        before = len(worker.seen)
        with torch.no_grad():
            torch.testing.assert_close(model(ids).logits, plain(ids).logits, rtol=1e-4, atol=1e-4)
        assert len(worker.seen) == before + len(attached.layers)
        tokens = [each.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=None) for each in (model, plain)]
        assert torch.equal(*tokens)
    worker.kill()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types(path: Path, dtype: torch.dtype) -> None:
    worker = _worker(path, dtype)
    plain, model, ids = _model(path, dtype), _model(path, dtype), _ids()
    with attach(model, worker.address), torch.no_grad():
        error = (model(ids).logits.float() - plain(ids).logits.float()).square().mean().sqrt()
    assert float(error) < 0.1
    worker.kill()


def test_local_weights_are_freed(path: Path, worker: FakeWorker) -> None:
    model = _model(path)
    references = [weakref.ref(site.module.gate_up_proj) for site in find_experts(model)]
    with attach(model, worker.address):
        gc.collect()
        assert [reference() for reference in references] == [None, None]


def test_detach_without_local_weights(path: Path, worker: FakeWorker) -> None:
    model = _model(path)
    attached = attach(model, worker.address)
    attached.detach()
    attached.detach()
    with pytest.raises(ClientError, match="layer 0: the model was detached"), torch.no_grad():
        model(_ids())


def test_detach_puts_kept_weights_back(path: Path, worker: FakeWorker) -> None:
    model, ids = _model(path), _ids()
    sites = find_experts(model)
    with torch.no_grad():
        expected = model(ids).logits
        with attach(model, worker.address, keep_local=True) as attached:
            assert attached.num_freed_bytes == 0
            model(ids)
            count = len(worker.seen)
        assert [site.module for site in find_experts(model)] == [site.module for site in sites]
        assert torch.equal(model(ids).logits, expected)
    assert len(worker.seen) == count


def test_an_attached_model_is_not_attached_again(path: Path, tmp_path: Path, worker: FakeWorker) -> None:
    other = _worker(_write("mixtral", tmp_path, seed=1))
    model, ids, again = _model(path), _ids(), f"layer 0: the model is attached already, to {worker.address}: detach"
    with torch.no_grad():
        expected = model(ids).logits
        with attach(model, worker.address, keep_local=True):
            for target, part in ((worker.address, model), (other.address, model), (worker.address, model.model)):
                with pytest.raises(ModelMismatch, match=again):
                    attach(part, target)
            torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-4)
        assert torch.equal(model(ids).logits, expected)
        attach(model, worker.address).detach()
    with pytest.raises(ModelMismatch, match=r"layer 0: the model was detached, .*: load the model again"):
        attach(model, other.address)
    other.kill()


def test_an_attached_model_is_not_saved_copied_or_pickled(path: Path, tmp_path: Path, worker: FakeWorker) -> None:
    model = _model(path)
    model.save_pretrained(tmp_path / "before")
    with attach(model, worker.address, keep_local=True):
        for save in (model.state_dict, lambda: model.save_pretrained(tmp_path / "attached")):
            with pytest.raises(ClientError, match=r"layer 0: .* a state_dict of the model would be without them"):
                save()
        for copies in (copy.deepcopy, pickle.dumps):
            with pytest.raises(ClientError, match=r"layer 0: .* neither copied nor pickled"):
                copies(model)
    assert not list((tmp_path / "attached").glob("*.safetensors"))
    model.save_pretrained(tmp_path / "after")
    before, after = (tmp_path / name / "model.safetensors" for name in ("before", "after"))
    assert before.read_bytes() == after.read_bytes()


class _Adapter(nn.Module):
    """Around experts, as LoRA's of peft for parameters: its forward passes on whatever it gets."""

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__()
        self.base_layer, self.rows = base_layer, nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return self.base_layer(x, *args, **kwargs)


class _SameArguments(_Adapter):
    def forward(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> Any:
        return self.base_layer(hidden_states, top_k_index, top_k_weights)


class _Scaled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 1.5 * x


def _parametrized(experts: nn.Module) -> nn.Module:
    parametrize.register_parametrization(experts, "down_proj", _Scaled())
    return experts


def _adapted_within(experts: nn.Module) -> nn.Module:
    experts.act_fn = _Adapter(experts.act_fn)
    return experts


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (_Adapter, "experts"),
        (lambda experts: _Adapter(_Adapter(experts)), "experts.base_layer"),
        (_SameArguments, "experts"),
        (_parametrized, "experts"),
        (_adapted_within, "experts.act_fn"),
        (torch.compile, "experts"),
    ],
    ids=["adapter", "two adapters", "same arguments", "parametrized", "within", "compiled"],
)
def test_changed_experts_are_refused(path: Path, worker: FakeWorker, change: Any, where: str) -> None:
    model = _model(path)
    mlp = model.model.layers[1].mlp
    mlp.experts = change(mlp.experts)
    words = rf"layer 1: expected plain experts, got .* at model\.layers\.1\.mlp\.{where}: merge it .* `crossdock load`"
    with pytest.raises(ModelMismatch, match=words):
        attach(model, worker.address, verify=False)
    assert not any(isinstance(module, RemoteExperts) for module in model.modules())


def test_adapters_beside_the_experts_stay(path: Path, worker: FakeWorker) -> None:
    model, ids = _model(path), _ids()
    for layer in model.model.layers:
        layer.self_attn.q_proj = _Adapter(layer.self_attn.q_proj)
    with torch.no_grad():
        expected = model(ids).logits
        with attach(model, worker.address):
            torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-4)


def test_two_models_in_one(path: Path, worker: FakeWorker) -> None:
    both = nn.ModuleDict({"thinker": _model(path), "talker": _model(path)})
    with pytest.raises(ModelMismatch, match=r"got thinker\..* and talker\..*: attach .* as model\.thinker"):
        attach(both, worker.address)
    with attach(both["thinker"], worker.address):
        pass


def test_a_client_of_the_caller_stays_open(path: Path, worker: FakeWorker) -> None:
    with Client(worker.address) as client:
        with attach(_model(path), client), attach(_model(path), client):
            pass
        assert client.describe().family == "mixtral"


def test_forward_with_grad_works_and_backward_says_no(path: Path, worker: FakeWorker) -> None:
    model = _model(path)
    with attach(model, worker.address):
        logits = model(_ids()).logits
        with pytest.raises(ClientError, match="no backward pass"):
            logits.sum().backward()


def test_other_weights_of_the_same_shape(tmp_path: Path, worker: FakeWorker) -> None:
    other = _model(_write("mixtral", tmp_path, seed=1))
    before = dict(other.named_modules())
    with pytest.raises(ModelMismatch, match=r"layer 0: .* are these the same weights\?"):
        attach(other, worker.address)
    assert dict(other.named_modules()) == before
    with attach(other, worker.address, verify=False):
        pass


def test_one_wrong_expert_is_found(path: Path, worker: FakeWorker) -> None:
    model = _model(path)
    with torch.no_grad():
        find_experts(model)[1].module.down_proj[7].neg_()
    with pytest.raises(ModelMismatch, match="layer 1: "):
        attach(model, worker.address)


@pytest.mark.parametrize(
    ("dtype", "noise", "fits"),
    [
        (torch.float32, 0.003, False),
        (torch.float32, 0.0, True),
        (torch.float16, 0.01, False),
        (torch.bfloat16, 0.03, False),
    ],
)
def test_a_fine_tune_is_found(path: Path, dtype: torch.dtype, noise: float, fits: bool) -> None:
    """All weights of the experts changed by noise, in units of their standard deviation."""
    worker, model = _worker(path, dtype), _model(path, dtype)
    with torch.no_grad():
        for site in find_experts(model):
            for weights in site.module.parameters():
                weights.add_(torch.randn_like(weights) * weights.std() * noise)
    with contextlib.nullcontext() if fits else pytest.raises(ModelMismatch, match="of the worst row"):
        attach(model, worker.address).detach()
    worker.kill()


def test_one_changed_expert_of_many_is_found(tmp_path: Path) -> None:
    """Far below the limit on average over all rows."""
    path = _write("mixtral", tmp_path, num_experts=64, topk=4)
    worker, model = _worker(path, torch.bfloat16), _model(path, torch.bfloat16)
    with torch.no_grad():
        find_experts(model)[0].module.down_proj[17].mul_(1.1)
    with pytest.raises(ModelMismatch, match="layer 0: "):
        attach(model, worker.address)
    worker.kill()


@pytest.mark.parametrize(
    ("family", "sizes", "words"),
    [
        ("qwen3_moe", {}, "model_type: the model has qwen3_moe, the service has mixtral"),
        ("mixtral", {"topk": 4}, "experts per token: the model has 4, the service has 2"),
        ("mixtral", {"num_layers": 3}, r"layers with experts: the model has \[0, 1, 2\], the service has \[0, 1\]"),
        ("mixtral", {"num_experts": 16}, "layer 0: experts: the model has 16, the service has 8"),
        ("mixtral", {"hidden_size": 128}, "layer 0: hidden size: the model has 128, the service has 64"),
    ],
)
def test_other_models(tmp_path: Path, worker: FakeWorker, family: str, sizes: dict[str, int], words: str) -> None:
    with pytest.raises(ModelMismatch, match=words):
        attach(_model(_write(family, tmp_path, **sizes)), worker.address)


def test_other_dtype_fingerprint_or_no_experts(path: Path, worker: FakeWorker) -> None:
    with pytest.raises(ModelMismatch, match="layer 0: dtype: the model has bfloat16, the service has float32"):
        attach(_model(path, torch.bfloat16), worker.address)
    with pytest.raises(ModelMismatch, match="fingerprint: the model has beef, the service has "):
        attach(_model(path), worker.address, fingerprint="beef")
    with pytest.raises(ModelMismatch, match="expected modules with forward"):
        attach(nn.Linear(3, 3), worker.address)


def test_service_errors_reach_the_model_code(path: Path, worker: FakeWorker) -> None:
    import grpc

    model = _model(path)
    with attach(model, worker.address), torch.no_grad():
        worker.behave = refuse(grpc.StatusCode.INVALID_ARGUMENT, "layer: no such thing")
        with pytest.raises(InvalidRequest, match="no such thing"):
            model(_ids())


class _Experts(nn.Module):
    """Any module with the signature will do."""

    def __init__(self, experts: ExpertMLPs, layer: int) -> None:
        super().__init__()
        self.experts, self.layer = experts, layer

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        raise AssertionError("never called: it has no parameters to compare with")


def test_any_torch_module(path: Path, worker: FakeWorker) -> None:
    experts = ExpertMLPs.load(Checkpoint.open(path), range(8), dtype=torch.float32)
    model = nn.Module()
    model.blocks = nn.ModuleList(nn.ModuleDict({"moe": _Experts(experts, layer)}) for layer in range(2))
    x, ids, weights = torch.randn(3, 5, 64), torch.randint(0, 9, (15, 2)), torch.rand(15, 2)
    with attach(model, worker.address):
        remote = model.blocks[1]["moe"]
        assert "layer=1" in repr(remote)
        y = remote(x, ids, weights)
    assert y.shape == x.shape
    nothing = ids == 8
    z = remote_reference(experts, x, ids.masked_fill(nothing, 0), weights.masked_fill(nothing, 0))
    torch.testing.assert_close(y.view(15, 64), z, rtol=1e-4, atol=1e-5)


def remote_reference(experts: ExpertMLPs, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Layer 1, row by row."""
    gate_up, down = (stack.data for stack in experts.held(1).weights)
    rows = []
    for row, chosen, scale in zip(x.view(-1, 64), ids.tolist(), weights, strict=True):
        parts = []
        for expert in chosen:
            gate, up = (gate_up[expert] @ row).chunk(2)
            parts.append(down[expert] @ (nn.functional.silu(gate) * up))
        rows.append((torch.stack(parts) * scale[:, None]).sum(0))
    return torch.stack(rows)
