"""vLLM's private names, the checks that they are as expected, and their replacement by ours. vLLM 0.20 to 0.33.

vLLM has no registry for all-to-all backends. But `CudaCommunicator` imports the manager class by name when it is built,
and the two functions of `all2all_utils` look their prepare/finalize classes up as globals of that module: so it is
enough to rebind these names, whatever was imported before, and no function of vLLM is replaced. `missing()` checks
that this still holds; `check()` raises an error otherwise, with vLLM's version and each missing hook. install.py
maps our classes to these names.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from crossdock.vllm_plugin.errors import PluginError

_MOE = "vllm.model_executor.layers.fused_moe"
_COMM = "vllm.distributed.device_communicators"
_MANAGERS, _FINALIZERS = f"{_COMM}.all2all", f"{_MOE}.all2all_utils"
_BUILDER = (f"{_COMM}.cuda_communicator", "CudaCommunicator")
_FACTORIES = ("maybe_make_prepare_finalize", "maybe_roundup_layer_hidden_size")
_BLOCK_SHAPE = "DEEPEP_QUANT_BLOCK_SHAPE"
_ATTENTION = ("vllm.v1.attention.backend", "AttentionMetadataBuilder")
_REUSES = "supports_update_block_table"
_PARALLEL, _BATCHES = (f"{_MOE}.config", "FusedMoEParallelConfig"), "use_batched_activation_format"

NAMES = {
    "All2AllManagerBase": f"{_COMM}.base_device_communicator",
    "ExpertTokensMetadata": f"{_MOE}.modular_kernel",
    "FusedMoEActivationFormat": f"{_MOE}.modular_kernel",
    "FusedMoEPrepareAndFinalizeModular": f"{_MOE}.modular_kernel",
    "TopKWeightAndReduceContiguous": f"{_MOE}.topk_weight_and_reduce",
    "TopKWeightAndReduceDelegate": f"{_MOE}.topk_weight_and_reduce",
    "moe_kernel_quantize_input": f"{_MOE}.utils",
    "normalize_batched_scales_shape": f"{_MOE}.utils",
    "dbo_current_ubatch_id": "vllm.v1.worker.ubatching",
    "dbo_enabled": "vllm.v1.worker.ubatching",
    "dbo_maybe_run_recv_hook": "vllm.v1.worker.ubatching",
    "dbo_switch_to_comm": "vllm.v1.worker.ubatching",
    "dbo_switch_to_compute": "vllm.v1.worker.ubatching",
    "dbo_switch_to_compute_sync": "vllm.v1.worker.ubatching",
    "dbo_yield_and_switch_from_comm_to_compute": "vllm.v1.worker.ubatching",
    "dbo_yield_and_switch_from_compute_to_comm": "vllm.v1.worker.ubatching",
    "get_forward_context": "vllm.forward_context",
}
"""Names that our classes use, and their modules."""

SHARED_EXPERTS = (
    "n_shared_experts", "num_shared_experts", "num_shared_expert", "moe_num_shared_experts",
    "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size",
)  # fmt: skip
"""Fields of a model's config, one of which says how many there are, or how large."""

PARAMETERS = {
    "prepare_async": {
        "self", "a1", "topk_weights", "topk_ids", "num_experts", "expert_map", "apply_router_weight_on_input",
        "quant_config", "defer_input_quant",
    },
    "finalize_async": {
        "self", "output", "fused_expert_output", "topk_weights", "topk_ids", "apply_router_weight_on_input",
        "weight_and_reduce_impl",
    },
}  # fmt: skip
"""Parameters of the methods that vLLM calls; `prepare` and `finalize` take the same."""


@dataclass(frozen=True, slots=True)
class BackendSlot:
    """A backend of vLLM that ours replace.

    Attributes:
        backend: as `--all2all-backend` names it.
        manager, finalizer: names of its classes.
        optional: older vLLM has no such backend.
    """

    backend: str
    manager: str
    finalizer: str
    optional: bool = False


SLOTS = (
    BackendSlot("deepep_low_latency", "DeepEPLLAll2AllManager", "DeepEPLLPrepareAndFinalize"),
    BackendSlot("deepep_high_throughput", "DeepEPHTAll2AllManager", "DeepEPHTPrepareAndFinalize"),
    BackendSlot("deepep_v2", "DeepEPV2All2AllManager", "DeepEPV2PrepareAndFinalize", optional=True),
)


def version() -> str:
    return str(getattr(importlib.import_module("vllm"), "__version__", "unknown"))


def find(name: str) -> Any:
    """One of NAMES. Raises PluginError."""
    try:
        return getattr(importlib.import_module(NAMES[name]), name)
    except (ImportError, AttributeError) as error:
        raise PluginError(f"vLLM {version()}: expected {NAMES[name]}.{name}: {error}") from error


def present(slot: BackendSlot) -> bool:
    return slot.manager in _code_names(_module(_BUILDER[0]), _BUILDER[1], "__init__")


def missing() -> list[str]:
    """Hooks that this vLLM lacks, or has in another form than expected; empty: none."""
    builder, managers, utils = _module(_BUILDER[0]), _module(_MANAGERS), _module(_FINALIZERS)
    made = _code_names(builder, _BUILDER[1], "__init__")
    faults = []
    for slot in SLOTS:
        if slot.optional and slot.manager not in made:
            continue
        if slot.manager not in made:
            faults.append(f"{'.'.join(_BUILDER)}.__init__ imports {slot.manager} when it is called")
        if not hasattr(managers, slot.manager):
            faults.append(f"{_MANAGERS}.{slot.manager}")
        faults += [
            f"{_FINALIZERS}.{function} looks {slot.finalizer} up as a global"
            for function in _FACTORIES
            if slot.finalizer not in _code_names(utils, function)
        ]
    batching = getattr(getattr(_module(_PARALLEL[0]), _PARALLEL[1], None), _BATCHES, None)
    if not isinstance(batching, property):
        faults.append(f"{'.'.join(_PARALLEL)}.{_BATCHES} is a property")
    if _BLOCK_SHAPE not in _code_names(utils, _FACTORIES[0]):
        faults.append(f"{_FINALIZERS}.{_FACTORIES[0]} looks {_BLOCK_SHAPE} up as a global")
    for name, place in NAMES.items():
        if not hasattr(_module(place), name):
            faults.append(f"{place}.{name}")
    return faults + _changed_methods()


def _changed_methods() -> list[str]:
    base = getattr(_module(NAMES["FusedMoEPrepareAndFinalizeModular"]), "FusedMoEPrepareAndFinalizeModular", None)
    faults = []
    for method, wanted in PARAMETERS.items() if base is not None else ():
        found = set(inspect.signature(getattr(base, method, lambda: None)).parameters)
        if found != wanted:
            faults.append(f"FusedMoEPrepareAndFinalizeModular.{method} takes {sorted(wanted)}, not {sorted(found)}")
    return faults


def check() -> None:
    """Raises PluginError where a hook is missing."""
    faults = missing()
    if faults:
        raise PluginError(
            f"CROSSDOCK_VLLM=native: vLLM {version()} lacks what the plugin needs: {'; '.join(faults)}. Tested with "
            "0.26.0 and 0.33.0; CROSSDOCK_VLLM=deep_ep needs none of it."
        )


def put(chosen: Mapping[str, tuple[Any, Any]]) -> None:
    """Bind (manager, finalizer) to the names of the slots that this vLLM has, by backend. Idempotent."""
    for slot in filter(present, SLOTS):
        manager, finalizer = chosen[slot.backend]
        setattr(_module(_MANAGERS), slot.manager, manager)
        setattr(_module(_FINALIZERS), slot.finalizer, finalizer)
    setattr(_module(_FINALIZERS), _BLOCK_SHAPE, [128, 128])
    setattr(getattr(_module(_PARALLEL[0]), _PARALLEL[1]), _BATCHES, property(_wants_batches))


def _wants_batches(parallel: Any) -> bool:
    """vLLM's `use_batched_activation_format`, but that our low latency has two formats."""
    return bool(parallel.use_nixl_ep_kernels or (parallel.use_deepep_ll_kernels and batches()))


_seen: dict[str, Any] = {}
"""What vLLM's configuration has said: it is not set while weights are loaded again."""


def _current() -> Any:
    return getattr(importlib.import_module("vllm.config"), "get_current_vllm_config_or_none", lambda: None)()


def batches() -> bool:
    """Whether the low-latency backend's experts get the batched format: where DeepGEMM's masked kernels run, which skip
    empty slots; that is for weights in fp8 blocks of 128, where DeepGEMM is installed, the GPU has it, and vLLM may use
    it for experts."""
    config = _current()
    if config is not None:
        model = config.model_config
        quantized = None if model is None else getattr(model.hf_config, "quantization_config", None)
        block = quantized.get("weight_block_size") if isinstance(quantized, dict) else None
        wanted = block == [128, 128] and bool(_module("vllm.envs").VLLM_MOE_USE_DEEP_GEMM)
        _seen["batches"] = wanted and bool(_module("vllm.utils.deep_gemm").is_deep_gemm_supported())
    return bool(_seen.get("batches"))


def rounds_scales() -> bool:
    """Whether vLLM's fp8 rows have scales of powers of two, as DeepGEMM's kernels use them."""
    return bool(_module("vllm.utils.deep_gemm").is_deep_gemm_e8m0_used())


def overlaps() -> bool:
    """Whether the engine has something to run between the halves of a dispatch or a combine: shared experts, or the
    other half of a batch. A model whose config names shared experts otherwise does without that overlap."""
    config = _current()
    if config is None or config.parallel_config.use_ubatching or config.model_config is None:
        return True
    model = config.model_config.hf_text_config
    return any(getattr(model, name, None) for name in SHARED_EXPERTS)


def most_tokens() -> int:
    """M, most tokens of a rank in one step, as vLLM's scheduler has it."""
    config = _current()
    if config is not None:
        _seen["most_tokens"] = int(config.scheduler_config.max_num_batched_tokens)
    if "most_tokens" not in _seen:
        raise PluginError("crossdock: expected vLLM's configuration to be set while layers are made")
    return int(_seen["most_tokens"])


def part_halves() -> list[str]:
    """With dual-batch overlap (or `--ubatch-size`), let each part of a batch have attention metadata of its own.

    Returns the builders that were changed. Idempotent; no effect where vLLM splits no batch, or has no such builder.

    vLLM, 0.26 and 0.33 at least, caches per kind of builder the metadata of the first part. Where the builder can
    (FlashAttention's), the other parts reuse it with another block table: they have the sequence lengths of the
    first, and are refused, or wrong (vllm-project/vllm#48659). Other builders build it anew.
    """
    config = _current()
    if config is None or not config.parallel_config.use_ubatching:
        return []
    try:
        base = getattr(importlib.import_module(_ATTENTION[0]), _ATTENTION[1])
    except (ImportError, AttributeError):
        return []
    changed = [builder for builder in _descendants(base) if getattr(builder, _REUSES, False)]
    for builder in changed:
        setattr(builder, _REUSES, False)
    return [builder.__name__ for builder in changed]


def _descendants(base: type) -> set[type]:
    return {base}.union(*map(_descendants, base.__subclasses__()))


def _module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise PluginError(f"vLLM {version()}: expected the module {name}: {error}") from error


def _code_names(holder: Any, *path: str) -> set[str]:
    """Names that a function's code mentions; empty where there is no such function."""
    for name in path:
        holder = getattr(holder, name, None)
    code = getattr(holder, "__code__", None)
    return set() if code is None else {*code.co_names, *(c for n in code.co_consts if isinstance(n, tuple) for c in n)}
