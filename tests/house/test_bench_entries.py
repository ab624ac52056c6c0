"""Each program of the benchmarks has a test that runs its `main` without a GPU."""

from __future__ import annotations

import ast
import re

from tests.house.tree import ROOT, module_of, parsed, python_files, text_of

RANKS, ONE_GPU = "tests/unit/test_bench_ranks.py", "tests/unit/test_bench_one_gpu.py"
PROCESSORS, RESULTS = "tests/unit/test_bench_processors.py", "tests/unit/test_bench.py"
VLLM = "tests/unit/test_bench_vllm.py"
TESTS = {
    "benchmarks.compare": (RESULTS, "test_compare_gives_ratios_worst_first"),
    "benchmarks.control": (PROCESSORS, "test_a_control_plane_with_simulated_workers"),
    "benchmarks.gpu.collective_tables": (RANKS, "test_collectives_of_ours_and_others"),
    "benchmarks.gpu.experts": (ONE_GPU, "test_quantised_experts"),
    "benchmarks.gpu.fsdp": (RANKS, "test_steps_of_fsdp"),
    "benchmarks.gpu.fused": (ONE_GPU, "test_the_schedule_of_fused_products"),
    "benchmarks.gpu.host": (ONE_GPU, "test_calls_of_a_communicator"),
    "benchmarks.gpu.host_cost": (ONE_GPU, "test_calls_of_collectives"),
    "benchmarks.gpu.network_push": (ONE_GPU, "test_a_push_to_the_proxy"),
    "benchmarks.gpu.nodes": (RANKS, "test_gpus_as_two_hosts"),
    "benchmarks.gpu.pieces": (ONE_GPU, "test_experts_in_pieces"),
    "benchmarks.gpu.zero": (RANKS, "test_steps_of_zero"),
    "benchmarks.kernels": ("tests/unit/test_kernels_compile.py", "test_the_table_shows_faults_and_fails"),
    "benchmarks.network": (PROCESSORS, "test_ring_proxy_and_providers"),
    "benchmarks.peers": (PROCESSORS, "test_experts_from_other_workers"),
    "benchmarks.placement": (PROCESSORS, "test_where_experts_are_placed"),
    "benchmarks.plot": (RESULTS, "test_the_plots_are_written"),
    "benchmarks.resume": (PROCESSORS, "test_how_long_clients_wait"),
    "benchmarks.run": (RANKS, "test_tables_of_dispatch_and_combine"),
    "benchmarks.same_code": ("tests/unit/test_same_code.py", "test_another_instruction_is_a_difference"),
    "benchmarks.scale": ("tests/unit/test_scale.py", "test_the_forecast_and_how_far_it_is_off"),
    "benchmarks.service": (PROCESSORS, "test_the_service_beside_its_experts"),
    "benchmarks.service.gpu": (ONE_GPU, "test_a_worker_with_quantised_experts"),
    "benchmarks.service.path": (PROCESSORS, "test_where_the_time_of_a_call_goes"),
    "benchmarks.service.turns": (PROCESSORS, "test_two_trees_in_turns"),
    "benchmarks.table": (RESULTS, "test_the_table_shows_every_case_once"),
    "benchmarks.vllm": (VLLM, "test_engines_are_measured_and_one_that_fails_is_a_row"),
    "benchmarks.vllm.child": ("tests/unit/test_bench_vllm_serve.py", "test_each_load_runs_on_each_server_in_turns"),
    "benchmarks.vllm.engine": (VLLM, "test_engines_load_side_by_side_and_are_timed_one_after_the_other"),
    "tests.observability.overhead": (ONE_GPU, "test_latency_records_of_kernels"),
}
"""Program -> file and name of its test."""


def programs() -> set[str]:
    """Modules of `benchmarks` that run by `python -m`, and those that the Makefile's bench targets name."""
    found = set()
    for path in python_files("benchmarks"):
        if 'if __name__ == "__main__":' in text_of(path):
            found.add(module_of(path).removesuffix(".__main__"))
    return found | set(re.findall(r"\b(?:benchmarks|tests\.observability)(?:\.\w+)+", text_of(ROOT / "Makefile")))


def test_every_program_has_one() -> None:
    assert set(TESTS) == programs()


def test_they_are_there_and_need_no_gpu() -> None:
    for program, (file, name) in TESTS.items():
        tree = parsed(text_of(ROOT / file))
        functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
        marks = [" ".join(map(ast.unparse, node.decorator_list)) for node in functions]
        assert len(marks) == 1, f"{program}: {file} has no {name}"
        assert "mark.gpu" not in marks[0], f"{program}: {name} needs a GPU"
