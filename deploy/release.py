"""`make release-check`: everything of a release but its publication, from the commit in whose clone this file lies.

    python -m deploy.release FOLDER --tools VENV/bin [--without STEP]... [--family NAME]... [--suite NAME]...

Fills FOLDER with the files of `deploy/dist.py` and a list of components (SBOM, CycloneDX), tries them, and prints what
each step found. A step that this machine cannot run is skipped with the reason. Exit status 1: a step failed; those
behind it were not begun. Provenance is the release workflow's part, which runs this too.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from deploy import dist
from tests import bare

EXAMPLE = dist.CHART / "examples" / "laptop.yaml"


class Skipped(Exception):
    """This machine cannot run the step; why."""


def names(archive: Path) -> set[str]:
    """The files of a tar."""
    with tarfile.open(archive) as tar:
        return {member.name for member in tar if member.isfile()}


def glibc(tag: re.Match[str]) -> tuple[int, int]:
    """The version in a platform tag."""
    return int(tag[1]), int(tag[2])


@dataclass
class Release:
    """The steps, in order. Each returns what it found, or ends the program with what is wrong.

    Attributes:
        folder: of the files.
        tools: where twine, auditwheel and cyclonedx-py lie.
        scratch: for what is left behind.
        families: of the demo; none: all of it.
        suites: bare roots of debootstrap.
    """

    folder: Path
    tools: Path
    scratch: Path
    families: list[str] = field(default_factory=list)
    suites: list[str] = field(default_factory=list)

    @cached_property
    def number(self) -> str:
        """The version of code and chart."""
        return dist.version()

    @property
    def wheel(self) -> Path:
        """Its file."""
        return next(self.folder.glob("*.whl"))

    @property
    def python(self) -> Path:
        """Of the environment that has the wheel."""
        return self.scratch / "installed" / "bin" / "python"

    def version(self) -> str:
        """Code, chart, changelog and tag name one version."""
        if not re.search(rf"^## {re.escape(self.number)}\b", (dist.ROOT / "CHANGELOG.md").read_text(), re.MULTILINE):
            sys.exit(f"CHANGELOG.md: expected a section {self.number}, got none")
        tags = [tag for tag in dist.run("git", "tag", "--points-at", "HEAD").split() if re.match(r"v\d", tag)]
        if tags and tags != [f"v{self.number}"]:
            sys.exit(f"tag of this commit: expected v{self.number}, got {', '.join(tags)}")
        return f"{self.number}, {'tagged' if tags else 'no tag on this commit'}"

    def kernels(self) -> str:
        """The cubins that travel in the wheel."""
        dist.run(sys.executable, "-m", "ep_kernels.tools.kernels", "--ship")
        return f"{len(list((dist.ROOT / 'ep_kernels' / 'cubins').glob('*/*.cubin')))} cubins"

    def files(self) -> str:
        """Wheel, sdist, chart, the images' context."""
        dist.main([str(self.folder), "--no-check"])
        return ", ".join(sorted(path.name for path in self.folder.iterdir()))

    def metadata(self) -> str:
        """As the package index reads it, and the oldest glibc that the wheel's libraries really need."""
        dist.run(self.tools / "twine", "check", "--strict", self.wheel, self.folder / f"crossdock-{self.number}.tar.gz")
        said = dist.run(self.tools / "auditwheel", "show", self.wheel)
        least, claimed = (re.search(r"manylinux_(\d+)_(\d+)_", text) for text in (said, self.wheel.name))
        if least is None or claimed is None or glibc(least) > glibc(claimed):
            sys.exit(f"{self.wheel.name}: expected libraries for that glibc, got {said.strip()}")
        return f"twine check --strict passed; libraries need {least[0].rstrip('_')}"

    def installs(self) -> str:
        """The wheel with the control plane alone, and the sdist's wheel beside it."""
        dist.check(self.folder, self.number)
        return "control plane starts from the wheel; the sdist gives the same files"

    def demo(self) -> str:
        """The wheel in an environment of its own serves models."""
        dist.run(sys.executable, "-m", "venv", self.python.parents[1])
        dist.run(self.python, "-m", "pip", "install", "--quiet", f"{self.wheel}[demo]")
        families = [word for name in self.families for word in ("--family", name)]
        said = dist.run(self.python.with_name("crossdock"), "demo", "--json", *families, cwd=self.scratch)
        return f"crossdock demo: {len(json.loads(said)['rows'])} models from the wheel, tokens as transformers says"

    def components(self) -> str:
        """The SBOM of that environment."""
        path = self.folder / f"crossdock-{self.number}.cdx.json"
        how = ("--pyproject", dist.ROOT / "pyproject.toml", "--output-reproducible", "--output-file", path)
        dist.run(self.tools / "cyclonedx-py", "environment", *how, self.python)
        bom = json.loads(path.read_text())
        names = {part["name"].lower() for part in bom["components"]}
        if lost := {"grpcio", "protobuf", "torch"} - names:
            sys.exit(f"{path.name}: expected {', '.join(sorted(lost))} among its components")
        bom["metadata"]["component"]["version"] = self.number  # which pyproject.toml does not have itself
        path.write_text(json.dumps(bom, indent=2) + "\n")
        return f"{path.name}: {len(names)} components"

    def chart(self) -> str:
        """helm takes the archive, and packs the same files."""
        if shutil.which("helm") is None:
            raise Skipped("no helm on PATH")
        archive = self.folder / f"crossdock-chart-{self.number}.tgz"
        dist.run("helm", "lint", "--strict", archive, "--values", EXAMPLE)
        dist.run("helm", "template", "moe", archive, "--values", EXAMPLE)
        dist.run("helm", "package", dist.CHART, "--destination", self.scratch)
        odd = names(archive) ^ names(self.scratch / f"crossdock-{self.number}.tgz")
        if odd:
            sys.exit(f"{archive.name}: expected the files of `helm package`, got {sorted(odd)} in one alone")
        return "helm lint, template and package"

    def bare(self) -> str:
        """The wheel on machines that have python3 and venv, and no compiler."""
        if os.geteuid() or shutil.which("debootstrap") is None:
            raise Skipped("needs root and debootstrap")
        for suite in self.suites or ["bookworm"]:
            root = self.scratch / suite
            bare.make_root(root, suite, "", "main")
            (root / bare.TREE / "dist").mkdir()
            shutil.copy(self.wheel, root / bare.TREE / "dist")
            families = "".join(f" --family {name}" for name in self.families)
            install = f"../moe/bin/python -m pip install --quiet 'dist/{self.wheel.name}[demo]'"
            script = f"python3 -m venv ../moe && {install} && cd .. && moe/bin/crossdock demo{families}"
            ended = bare.run(root, f"sh -c {shlex.quote(script)}")
            if ended.status:
                sys.exit("\n".join([f"{suite}: exit status {ended.status}", *ended.words]))
        return f"crossdock demo ran from the wheel on {', '.join(self.suites or ['bookworm'])}"

    def images(self) -> str:
        """Theirs is another target, which needs an API server too."""
        raise Skipped("`make test-deploy` builds and starts them")


STEPS: dict[str, Callable[[Release], str]] = {
    step.__name__: step
    for step in (
        Release.version, Release.kernels, Release.files, Release.metadata, Release.installs, Release.demo,
        Release.components, Release.chart, Release.bare, Release.images,
    )
}  # fmt: skip


def run_steps(release: Release, steps: dict[str, Callable[[Release], str]], without: list[str]) -> list[list[str]]:
    """(step, how it ended, seconds, what it found) of each; those behind one that failed are not begun."""
    rows: list[list[str]] = []
    for name, step in steps.items():
        began = time.monotonic()
        try:
            if rows and rows[-1][1] in ("FAILED", "not begun"):
                state, found = "not begun", ""
            elif name in without:
                state, found = "skipped", "--without"
            else:
                print(f"== {name}", flush=True)
                state, found = "ok", step(release)
        except Skipped as reason:
            state, found = "skipped", str(reason)
        except SystemExit as wrong:
            state, found = "FAILED", str(wrong.code)
        rows.append([name, state, f"{time.monotonic() - began:.0f}", found])
    return rows


def main(words: list[str]) -> int:
    """Run them, list what they found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--tools", type=Path, required=True, help="bin of the environment with twine, auditwheel, cyclonedx-py"
    )
    parser.add_argument("--without", action="append", default=[], choices=STEPS, help="a step to leave out")
    parser.add_argument("--family", action="append", default=[], help="of the demo; without: all that it has")
    parser.add_argument("--suite", action="append", default=[], help="of debootstrap; without: bookworm")
    options = parser.parse_args(words)
    with tempfile.TemporaryDirectory(prefix="crossdock-release-") as scratch:
        release = Release(
            options.folder.resolve(), options.tools.resolve(), Path(scratch), options.family, options.suite
        )
        rows = run_steps(release, STEPS, options.without)
    if (options.folder / "SHA256SUMS").exists():
        dist.add_sums(options.folder)
    print(f"\n{'step':<12}{'':<11}{'s':>5}  found")
    for name, state, took_s, found in rows:
        print(f"{name:<12}{state:<11}{took_s:>5}  {found}")
    return int(any(state == "FAILED" for _, state, _, _ in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
