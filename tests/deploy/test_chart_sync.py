"""The chart under Argo CD and Flux, which render it again and again: equal renders, no hooks, quotas."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.test_chart import CHART, HELM, needs_helm, render

EXAMPLES = sorted((CHART / "examples").glob("*.yaml"))
EVERYTHING = (
    "control.replicas=2,tls.enabled=true,tls.issuer.name=mine,monitoring.dashboard=true,monitoring.rules=true,"
    "monitoring.podMonitor=true,worker.queue.by=volcano,worker.hosts=2,worker.config.network.provider=tcp"
)
CHANGING = (
    r"\b(rand\w+|shuffle|now|date\w*|ago|uuidv4|gen(?:CA|PrivateKey|\w*Cert\w*)|derivePassword|htpasswd|lookup)\b"
)
"""Functions of helm whose values differ from render to render, or depend on what is in the cluster."""


def text(*flags: str) -> str:
    done = subprocess.run(
        [str(HELM), "template", "moe", str(CHART), *flags], capture_output=True, text=True, timeout=240, check=True
    )
    return done.stdout


@needs_helm
@pytest.mark.parametrize("example", [None, *EXAMPLES], ids=lambda path: path.stem if path else "everything")
def test_two_renders_are_equal(example: Path | None) -> None:
    flags = ("--set", EVERYTHING) if example is None else ("--values", str(example))
    assert text(*flags) == text(*flags)


def changing(template: str) -> list[str]:
    """Functions in a template's actions whose values change; words in its text are none."""
    return [word for action in re.findall(r"{{(?!-? ?/\*)(.*?)}}", template) for word in re.findall(CHANGING, action)]


def test_no_template_uses_a_function_that_changes() -> None:
    found = {path.name: changing(path.read_text()) for path in (CHART / "templates").rglob("*.*")}
    assert {name: words for name, words in found.items() if words} == {}


def test_the_rule_sees_planted_functions() -> None:
    assert changing("{{ randAlphaNum 5 }} {{- now | date }}{{/* now */}} now") == ["randAlphaNum", "now", "date"]
    assert changing('{{ $x := lookup "v1" "Secret" "" "" }}') == ["lookup"]


@needs_helm
def test_the_only_hook_is_that_of_helm_test() -> None:
    """Any other would run in a sync, which waits for it."""
    made = render("--set", EVERYTHING)
    hooks = {name: one["metadata"].get("annotations", {}).get("helm.sh/hook") for name, one in made.items()}
    assert {name: hook for name, hook in hooks.items() if hook} == {"Pod/moe-serving": "test"}
    assert "argocd.argoproj.io/hook" not in str(made)


def containers(thing: Any) -> list[Any]:
    """The containers of an object's pods."""
    spec = thing["spec"] if thing["kind"] == "Pod" else thing.get("spec", {}).get("template", {}).get("spec", {})
    return [*spec.get("initContainers", []), *spec.get("containers", [])]


@needs_helm
def test_pods_are_admitted_where_a_quota_counts_requests_and_the_test_where_it_counts_limits() -> None:
    """A ResourceQuota refuses pods that do not say what it counts."""
    made = render("--set", EVERYTHING)
    asked = {name: [one["resources"] for one in containers(thing)] for name, thing in made.items() if containers(thing)}
    assert set(asked) == {"Deployment/moe-control", "StatefulSet/moe-worker", "Pod/moe-serving"}
    for resources in asked.values():
        assert all({"cpu", "memory"} <= set(one["requests"]) for one in resources)
    assert all({"cpu", "memory"} <= set(one["limits"]) for one in asked["Pod/moe-serving"])
    whole = ("control.resources", "worker.resources")
    flags = [word for part in whole for word in ("--set", f"{part}.limits.cpu=8,{part}.limits.memory=8Gi")]
    made = render("--set", EVERYTHING, *flags)
    limited = [one["resources"]["limits"] for thing in made.values() for one in containers(thing)]
    assert all({"cpu", "memory"} <= set(one) for one in limited)
