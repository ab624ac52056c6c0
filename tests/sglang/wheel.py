"""SGLang's token dispatchers, as its wheel has them, without the rest of it: no GPU, none of its dependencies.

`load()` runs the modules in RUN from the unpacked wheel, which is on the path. Of all others a dispatcher imports
names, which are in VALUES where it depends on them and mean nothing elsewhere.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch

import crossdock
from ep_kernels import quant

RUN = (
    "sglang.srt.layers.moe.token_dispatcher.base",
    "sglang.srt.layers.moe.token_dispatcher.deepep",
    "sglang.srt.layers.moe.token_dispatcher.deepep_v2",
    "sglang.srt.layers.moe.utils",
)


def quantized(
    x: torch.Tensor, group_size: int, column_major_scales: bool, scale_tma_aligned: bool, scale_ue8m0: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Stands for SGLang's quantiser, whose kernels need a GPU."""
    assert (group_size, scale_ue8m0) == (128, False)
    q, scales = quant.quantize(x)
    return q, scales.T.contiguous().T if column_major_scales else scales


ENVIRONMENT = {
    "SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK": 16,
    "SGLANG_DEEPEP_V2_NUM_MAX_DISPATCH_TOKENS_PER_RANK": 16,
    "SGLANG_DEEPEP_V2_NUM_SMS": 0,
    "SGLANG_DEEPEP_V2_ENABLE_PREFILL_EXPAND": None,
    "SGLANG_ZBAL_LOCAL_MEM_SIZE": 0,
    "SGLANG_IN_DEEPGEMM_PRECOMPILE_STAGE": False,
    "SGLANG_DEEPEP_BF16_DISPATCH": False,
}
"""Of SGLang; numbers of tokens as small as the tests' steps."""
ENVS = SimpleNamespace(**{name: SimpleNamespace(get=lambda v=value: v) for name, value in ENVIRONMENT.items()})
BATCH = SimpleNamespace(is_prefill=False)
DEEP_GEMM = SimpleNamespace(
    ENABLE_JIT_DEEPGEMM=True, DEEPGEMM_BLACKWELL=False, DEEPGEMM_SCALE_UE8M0=False,
    DEEPGEMM_NEED_TMA_ALIGNED_SCALES=True,
)  # fmt: skip
"""As on Hopper."""
CHOSEN = SimpleNamespace(deepep_dispatcher_output_dtype="auto", deepep_v2_mode="direct")
"""What the server was started with."""
FLAGS = SimpleNamespace(moe=SimpleNamespace(deepep_config="", tbo_enabled=True))
PARALLEL = SimpleNamespace(attn_dp_size=4, attn_cp_size=1, tp_size=4, tp_group=None)
RESOURCES = SimpleNamespace(buffers={})
VALUES: dict[str, dict[str, Any]] = {
    "sglang.srt.environ": {"envs": ENVS},
    "sglang.srt.utils": {
        "get_bool_env_var": lambda *_: False, "get_cuda_version": lambda: (13, 0), "is_blackwell": lambda: False,
        "is_flashinfer_available": lambda: False, "is_hip": lambda: False, "is_npu": lambda: False,
    },
    "sglang.srt.layers": {"deep_gemm_wrapper": DEEP_GEMM},
    "sglang.srt.layers.dp_attention": {"get_is_extend_in_batch": lambda: BATCH.is_prefill},
    "sglang.srt.runtime_context": {
        "get_exec": lambda: SimpleNamespace(moe=CHOSEN), "get_flags": lambda: FLAGS,
        "get_parallel": lambda: PARALLEL, "get_resources": lambda: RESOURCES, "get_server_args": lambda: True,
    },
    "sglang.kernels.ops.quantization.fp8_kernel": {"sglang_per_token_group_quant_fp8": quantized},
}  # fmt: skip


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Modules of the wheel."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] != "sglang":
            return None
        if name in RUN:
            file = self._folder / f"{name.replace('.', '/')}.py"
            return importlib.machinery.ModuleSpec(
                name, importlib.machinery.SourceFileLoader(name, str(file)), origin=str(file)
            )
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Hollow(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(VALUES.get(module.__name__, {}))


class _Hollow(ModuleType):
    """A module that is not run."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return mock.MagicMock(name=f"{self.__name__}.{name}")


def load() -> tuple[ModuleType, ModuleType]:
    """(`deepep`, `deepep_v2`) of `sglang.srt.layers.moe.token_dispatcher`, over our `deep_ep`; once in a process."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        found = importlib.util.find_spec("sglang")
        assert found is not None
        assert found.origin is not None
        sys.meta_path.insert(0, _Finder(Path(found.origin).parents[1]))
        sys.path.insert(0, str(Path(crossdock.__file__).parent / "deep_ep" / "path"))
    return importlib.import_module(RUN[1]), importlib.import_module(RUN[2])
