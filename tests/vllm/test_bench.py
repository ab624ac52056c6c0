"""The bench of vLLM's backends names what vLLM has: arguments, backends, managers, experts. It runs on GPUs alone."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import get_args

import pytest

from benchmarks.vllm import QWEN3, cases, child, plan, serving
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


@pytest.mark.parametrize("run", RUNS, ids=[run.name for run in RUNS])
def test_a_server_takes_what_it_is_given(run: plan.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.platforms import current_platform
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    if importlib.util.find_spec("vllm.entrypoints.common"):  # 0.33
        from vllm.entrypoints.common.cli_args import make_arg_parser
    else:
        from vllm.entrypoints.openai.cli_args import make_arg_parser
    monkeypatch.setattr(type(current_platform), "device_type", "cpu")  # defaults depend on it
    parser = make_arg_parser(FlexibleArgumentParser())
    given = parser.parse_args(["--model", *serving.server_arguments(run, "folder", 2, 8000)])
    assert (given.all2all_backend, given.data_parallel_size, given.enforce_eager) == (run.backend.slot, 2, run.eager)


ANSWERS, CHUNK = 4, {"choices": [{"index": 0, "text": "w2"}]}
"""Tokens that the stand-in of a server sends to each request."""


class Server(BaseHTTPRequestHandler):
    """As much of vLLM's server as its load generator needs."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self.path.endswith("/completions"):  # another is of the tokenizer, and the generator does without
            self.send_error(404)
            return
        assert asked["max_tokens"] == ANSWERS
        usage = {"usage": {"prompt_tokens": len(asked["prompt"].split()), "completion_tokens": ANSWERS}}
        events = [json.dumps(CHUNK)] * ANSWERS + [json.dumps(CHUNK | {"choices": []} | usage), "[DONE]"]
        body = "".join(f"data: {event}\n\n" for event in events).encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


@pytest.mark.parametrize("kind", ["closed", "open"])
def test_the_load_generator_gives_what_is_read(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in serving.files(QWEN3).items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    pair = {"conversations": [{"value": "w2 w3 w4 w5"}, {"value": "w9 " * ANSWERS}]}
    (tmp_path / serving.CONVERSATIONS).write_text(json.dumps([pair] * 4), encoding="utf-8")
    monkeypatch.setattr(serving, "PROMPT", 5)
    monkeypatch.setattr(serving, "ANSWER", ANSWERS)
    load = serving.Load(kind, 100, 4)
    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        words = load.arguments(f"http://127.0.0.1:{server.server_port}", str(tmp_path), 0)
        child.load(str(tmp_path / "out"), [words, ["--no-such-argument"], words])
        server.shutdown()
    first, fault, last = map(json.loads, (tmp_path / "out").read_text(encoding="utf-8").splitlines())
    for found in (first, last):
        row = serving.row_of(RUNS[0], load, 0, found, serving.Setting(2, QWEN3, ("", "", "")))
        assert (row.fault, row.completed) == ("", 4)
        assert row.tokens_per_s is not None
        assert row.ttft_p99_ms is not None
    assert fault["fault"].startswith("SystemExit")
