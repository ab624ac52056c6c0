"""`make dist`: what a release consists of, made from this checkout and tried out.

    python deploy/dist.py FOLDER [--no-check]

    crossdock-V-py3-none-manylinux*.whl   with the common kernels, if `make wheel` or `make dist` compiled them
    crossdock-V.tar.gz                    sources; a wheel is built of it as a check
    crossdock-chart-V.tgz                 `helm install moe crossdock-chart-V.tgz`
    crossdock-images-V.tar.gz             `docker build --target worker - < crossdock-images-V.tar.gz`
    SHA256SUMS

The version V stands in services/crossdock/__init__.py and nowhere else; Chart.yaml must agree.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CHART = ROOT / "helm" / "crossdock"
PORTABLE = ("--config-settings", "portable=yes")
"""The package index refuses a wheel of this machine's own compiler and glibc."""
SKIPPED = ("__pycache__", ".so", ".egg-info")
TIMEOUT_S = 1800


def version() -> str:
    """The version of this checkout; exits where the chart says another."""
    found = re.search(r'^__version__ = "(.+)"$', (ROOT / "services/crossdock/__init__.py").read_text(), re.MULTILINE)
    if found is None:
        sys.exit('services/crossdock/__init__.py: expected a line __version__ = "...", got none')
    for key in ("version", "appVersion"):
        told = re.search(rf'^{key}: "?([^"\n]+)"?$', (CHART / "Chart.yaml").read_text(), re.MULTILINE)
        if told is None or told[1] != found[1]:
            sys.exit(f"Chart.yaml: {key}: expected {found[1]}, got {told[1] if told else 'none'}")
    return found[1]


def archive(path: Path, files: Iterable[Path], base: Path, prefix: str = "") -> None:
    """A tar.gz of `files` under their paths from `base`: equal files give equal bytes."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        for file in sorted(files):
            info = tar.gettarinfo(str(file), prefix + str(file.relative_to(base)))
            info.uid = info.gid = info.mtime = 0
            info.uname = info.gname = ""
            info.mode = 0o755 if file.stat().st_mode & 0o100 else 0o644
            with file.open("rb") as content:
                tar.addfile(info, content)
    with path.open("wb") as out, gzip.GzipFile(fileobj=out, mode="wb", mtime=0, filename="") as packed:
        packed.write(made.getvalue())


def below(*tops: Path) -> list[Path]:
    """The files below these folders that belong into a release; a file is itself."""
    found = [p for top in tops for p in ([top] if top.is_file() else top.rglob("*")) if p.is_file()]
    return [p for p in found if not any(part.endswith(SKIPPED) for part in p.parts)]


def context() -> list[Path]:
    """What the image build reads: the Dockerfile and what .dockerignore lets in."""
    allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().split() if line.startswith("!")]
    return below(ROOT / "Dockerfile", ROOT / ".dockerignore", *(ROOT / name for name in allowed))


def run(*words: str | Path, cwd: Path = ROOT) -> str:
    """stdout of a command; exits with its output where it fails."""
    done = subprocess.run(
        [str(w) for w in words], cwd=cwd, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    if done.returncode:
        said = done.stdout[-2000:] + done.stderr[-3000:]
        sys.exit(f"{' '.join(str(w) for w in words)}: exit status {done.returncode}\n{said}")
    return done.stdout


def check(folder: Path, number: str) -> None:
    """The wheel installs into an empty venv and starts; the sdist gives a wheel with the same files."""
    wheel = next(folder.glob("*.whl"))
    with tempfile.TemporaryDirectory() as scratch:
        python = Path(scratch) / "venv" / "bin" / "python"
        run(sys.executable, "-m", "venv", python.parents[1])
        run(python, "-m", "pip", "install", "--quiet", f"{wheel}[control]")
        said = run(python.with_name("crossdock"), "version")
        if number not in said:
            sys.exit(f"crossdock version: expected {number} in it, got {said!r}")
        run(
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "--quiet",
            "--no-deps",
            "--wheel-dir",
            scratch,
            folder / f"crossdock-{number}.tar.gz",
        )
        again = next(Path(scratch).glob("*.whl"))
        lost = names(wheel) - names(again)
        if lost := {name for name in lost if not name.endswith(".cubin")}:
            sys.exit(f"sdist: expected every file of the wheel, got none of {sorted(lost)[:9]}")


def names(wheel: Path) -> set[str]:
    """The files of a wheel."""
    with zipfile.ZipFile(wheel) as opened:
        return set(opened.namelist())


def main(words: list[str]) -> None:
    """Make, check, list."""
    folder, number = Path(words[0]).resolve(), version()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", *PORTABLE, "--wheel-dir", folder, ".")
    run(sys.executable, "-m", "build", "--sdist", "--outdir", folder)
    archive(folder / f"crossdock-chart-{number}.tgz", below(CHART), CHART.parent)
    archive(folder / f"crossdock-images-{number}.tar.gz", context(), ROOT)
    if "--no-check" not in words:
        check(folder, number)
    for path in add_sums(folder):
        print(f"{path.stat().st_size:>12}  {path.name}")


def add_sums(folder: Path) -> list[Path]:
    """Write SHA256SUMS of the files there; these."""
    made = sorted(path for path in folder.iterdir() if path.is_file() and path.name != "SHA256SUMS")
    sums = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in made]
    (folder / "SHA256SUMS").write_text("".join(sums))
    return made


if __name__ == "__main__":
    main(sys.argv[1:])
