"""vLLM's FusedMoEKernel over the `cpu` transport, four ranks of 16, 5, 0 and 9 tokens."""

from __future__ import annotations

import pytest

from tests import tools
from tests.engines import record
from tests.vllm.layers import CLASSES, GRAPH, HT, LL, Case, run
from tests.worlds import World

tools.require("vllm")

CASES = [Case(plugin, backend, fp8) for plugin, backend in CLASSES for fp8 in (False, True)]
CASES += [Case(plugin, backend, topk=1) for plugin, backend in CLASSES]
CASES += [Case(plugin, backend, tokens=(0, 0, 0, 0)) for plugin, backend in CLASSES]
CASES += [Case(plugin, backend, missing=True) for plugin, backend in CLASSES]
CASES += [Case("native", backend, strided=True) for plugin, backend in CLASSES if plugin == "native"]
CASES += [Case("native", LL, missing=missing, round_robin=True) for missing in (False, True)]
CASES += [
    Case(plugin, backend, fp8=True, scale=scale)
    for plugin, backend in CLASSES for scale in ("token", "given") if plugin == "native"
]  # fmt: skip
CASES += [
    Case("native", LL, masked=True, **more)
    for more in (
        {}, {"fp8": True}, {"topk": 1}, {"tokens": (0, 0, 0, 0)}, {"missing": True, "round_robin": True},
        {"fp8": True, "scale": "token"}, {"fp8": True, "scale": "given"}, {"hidden": 272},
    )
]  # fmt: skip
CASES += [Case("native", backend, whole=True, **more) for backend in (LL, HT, GRAPH) for more in ({}, {"fp8": True})]
CASES += [Case("native", LL, whole=True, masked=True)]
CASES += [
    Case("native", backend, fp8=True, rounded=True, **more)
    for backend in (LL, GRAPH) for more in ({}, {"whole": True}, {"missing": True}, {"tokens": (0, 0, 0, 0)})
]  # fmt: skip
CASES += [Case("native", backend, hidden=272) for _, backend in CLASSES if backend != HT]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_layer(four: World, case: Case, pytestconfig: pytest.Config) -> None:
    from vllm import __version__

    results = four.run(run, case, timeout_s=600)
    assert {name for name, _, _ in results} == {case.finalizer}
    if any(case.tokens):
        assert max(error for _, error, _ in results) > 0, "rows have travelled in bf16"
    if case.plugin == "deep_ep":
        record(pytestconfig, "vLLM", __version__, results[0][2])
