"""What GitHub would do with .github/workflows: nothing is published without its tests, and no host's tests are skipped
for lack of namespaces on its runners."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import pytest
import yaml

from tests import tools
from tests.house.tree import ROOT

FOLDER = ROOT / ".github" / "workflows"
TESTS = "./.github/workflows/ci.yaml"
RUNNER = "ubuntu-24.04"

Jobs = Mapping[str, Mapping[str, Any]]


def jobs_of(text: str) -> Jobs:
    """The jobs of a workflow."""
    jobs: Jobs = yaml.safe_load(text)["jobs"]
    return jobs


JOBS = {path.name: jobs_of(path.read_text(encoding="utf-8")) for path in sorted(FOLDER.glob("*.yaml"))}


def publishes(job: Mapping[str, Any]) -> bool:
    """Whether a job may write to the repository or the registry."""
    rights = job.get("permissions", {})
    return rights == "write-all" or "write" in dict(rights).values()


def before(jobs: Jobs, name: str) -> set[str]:
    """The jobs that must have succeeded before this one begins."""
    needs = jobs[name].get("needs", [])
    direct = {needs} if isinstance(needs, str) else set(needs)
    return direct.union(*(before(jobs, other) for other in direct))


def untested(jobs: Jobs) -> list[str]:
    """Jobs that publish although the tests have failed or have not run."""
    return [
        name
        for name, job in jobs.items()
        if publishes(job)
        and ("always()" in str(job.get("if", "")) or TESTS not in {jobs[one].get("uses") for one in before(jobs, name)})
    ]


def lenient(jobs: Jobs) -> list[str]:
    """Jobs that run the tests and let them skip for lack of namespaces, or do not ask the runner for any."""
    faults = []
    for name, job in jobs.items():
        runs = [step.get("run", "") for step in job.get("steps", [])]
        tests = [run for run in runs if re.search(r"\.ci/run|\bmake test(?!-)", run)]
        given = "--privileged" in str(job.get("container", "")) or "apparmor_restrict_unprivileged_userns=0" in str(
            runs
        )
        strict = all("network namespaces" in must_haves(run) for run in tests)
        faults += [name] if tests and not (given and strict) else []
    return faults


def must_haves(run: str) -> set[str]:
    """The tools for lack of which this command fails."""
    words = [inner for word in shlex.split(run) for inner in (shlex.split(word) if "--must-have " in word else [word])]
    return {after for word, after in pairwise(words) if word == "--must-have"}


@pytest.mark.parametrize("name", JOBS)
def test_nothing_is_published_without_its_tests(name: str) -> None:
    assert not untested(JOBS[name])


def test_a_release_and_the_tests_that_it_calls_are_there() -> None:
    assert sum(map(publishes, JOBS["release.yaml"].values())) == 3
    triggers = yaml.safe_load((ROOT / TESTS).read_text(encoding="utf-8"))[True]  # `on`, which YAML 1.1 reads as true
    assert "workflow_call" in triggers


@pytest.mark.parametrize("name", JOBS)
def test_tests_of_hosts_may_not_skip(name: str) -> None:
    assert not lenient(JOBS[name])


def test_jobs_name_githubs_runner_and_tools_that_tests_know() -> None:
    jobs = [job for each in JOBS.values() for job in each.values()]
    assert {job["runs-on"] for job in jobs if "uses" not in job} == {RUNNER}
    named = set[str]().union(*(must_haves(step.get("run", "")) for job in jobs for step in job.get("steps", [])))
    assert {"network namespaces"} < named <= set(tools.TOOLS)


def test_the_rules_see_a_planted_fault() -> None:
    jobs = jobs_of(f"""
jobs:
  tests: {{uses: {TESTS}}}
  middle: {{needs: tests}}
  good: {{needs: [middle], permissions: {{contents: write}}}}
  early: {{permissions: {{packages: write}}}}
  anyway: {{needs: tests, if: "${{{{ always() }}}}", permissions: write-all}}
  reads: {{permissions: {{contents: read}}}}
""")
    assert untested(jobs) == ["early", "anyway"]
    flag = "--must-have 'network namespaces'"
    assert lenient(
        {
            "silent": {"steps": [{"run": "sysctl kernel.apparmor_restrict_unprivileged_userns=0"}, {"run": ".ci/run"}]},
            "closed": {"steps": [{"run": f".ci/run {flag}"}]},
            "good": {"container": {"options": "--privileged"}, "steps": [{"run": f'make test ARGS="-x {flag}"'}]},
            "other": {"steps": [{"run": "make test-deploy"}]},
        }
    ) == ["silent", "closed"]
