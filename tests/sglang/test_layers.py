"""SGLang's dispatcher classes over the `cpu` transport, four ranks of 16, 5, 0 and 9 tokens: `make test-sglang`."""

from __future__ import annotations

import importlib.metadata

import pytest

from tests import tools
from tests.engines import record
from tests.sglang.layers import BACKENDS, LL, NORMAL, V2, Case, run
from tests.worlds import World

tools.require("sglang")

CASES = [Case(backend, fp8) for backend in BACKENDS for fp8 in (False, True)]
CASES += [Case(V2, fp8, prefill=True, expand=expand) for fp8 in (False, True) for expand in (False, True)]
CASES += [Case(backend, fp8, asynchronous=True) for backend in (NORMAL, LL) for fp8 in (False, True)]
CASES += [Case(LL, late=True, asynchronous=asynchronous) for asynchronous in (False, True)]
CASES += [Case(backend, missing=True, prefill=prefill) for backend, prefill in ((NORMAL, 0), (LL, 0), (V2, 0), (V2, 1))]
CASES += [Case(backend, tokens=(0, 0, 0, 0)) for backend in BACKENDS]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_layer(four: World, case: Case, pytestconfig: pytest.Config) -> None:
    results = four.run(run, case, timeout_s=300)
    assert {name for name, _, _ in results} == {"DeepEPv2Dispatcher" if case.backend == V2 else "DeepEPDispatcher"}
    if any(case.tokens):
        assert max(error for _, error, _ in results) > 0, "rows have travelled in bf16"
    record(pytestconfig, "SGLang", importlib.metadata.version("sglang"), results[0][2])
