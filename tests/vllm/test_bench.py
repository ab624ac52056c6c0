"""The bench of vLLM's backends names what vLLM has: arguments, backends, managers, experts. It runs on GPUs alone."""

from __future__ import annotations

import dataclasses
from typing import get_args

import pytest

from benchmarks.vllm import QWEN3, cases, plan
from tests import tools

tools.require("vllm")

RUNS = plan.runs_of(",".join(plan.BACKENDS), eager=False) + plan.runs_of(",".join(plan.BACKENDS), eager=True)
RUNS += plan.runs_of("ll+dbo,ht1+dbo", eager=False)


@pytest.mark.parametrize("run", RUNS, ids=[run.name for run in RUNS])
def test_an_engine_takes_what_it_is_given(run: plan.Run) -> None:
    from vllm.config.parallel import All2AllBackend
    from vllm.engine.arg_utils import EngineArgs

    known = {field.name for field in dataclasses.fields(EngineArgs)}
    assert set(plan.engine_arguments(run, "folder", 256, "dummy")) <= known
    assert run.backend.slot in get_args(All2AllBackend)


def test_what_an_engine_is_told_in_the_environment_is_known() -> None:
    from vllm import envs

    told = plan.environment(RUNS[0], 0, 2, 1)
    assert {name for name in told if name.startswith("VLLM_")} <= set(envs.environment_variables)


@pytest.mark.parametrize("backend", plan.BACKENDS.values(), ids=plan.BACKENDS)
def test_the_log_will_name_a_manager_that_exists(backend: plan.Backend) -> None:
    from vllm.distributed.device_communicators import all2all

    from crossdock.vllm_plugin import managers

    assert hasattr(managers if backend.tier == "native" else all2all, backend.manager)


@pytest.mark.parametrize("case", cases.cases_of(32, 8192), ids=str)
def test_a_layer_of_each_format_has_its_experts(case: cases.Case) -> None:
    from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig
    from vllm.model_executor.layers.fused_moe.oracle import unquantized

    from benchmarks.vllm import kernels

    config = kernels.layer_config(QWEN3, 2, case, "cpu")
    assert config.moe_parallel_config.use_batched_activation_format == bool(case.slots)
    assert config.num_local_experts == 64
    triton = unquantized.UnquantizedMoeBackend
    (kind,) = unquantized.backend_to_kernel_cls(triton.BATCHED_TRITON if case.slots else triton.TRITON)
    sizes = {"max_num_tokens": case.slots, "num_dispatchers": 2} if case.slots else {}
    experts = kind(config, FusedMoEQuantConfig.make(), **sizes)
    shapes = experts.workspace_shapes(64, 2 * 768, 2048, 8, 128, 64, None, config.activation)
    rows = (64, 2 * case.slots, 2048) if case.slots else (64, 2048)
    assert tuple(shapes[2]) == rows, "the output"
