"""The README's two commands on the machine that it describes: a Debian with python3, venv, make and git, no compiler.

    python3 -m tests.bare [--suite trixie] [--suite bookworm] [--tests "-k name"] [--command .ci/run]

Makes the root of such a machine with debootstrap, clones the committed tree into it, and runs `make demo` and
`make test` there, in mount and process namespaces that end with them. pip has the settings that it has here: its
variables and files, proxies, and what these name. Needs root, and only the standard library.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
PACKAGES = ("python3", "python3-venv", "make", "git")
TREE = "root/crossdock"
INSIDE = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "LANG": "C.UTF-8",
}
PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy", "ssl_cert_file", "requests_ca_bundle")
PIP_FILES = (Path("/etc/pip.conf"), Path.home() / ".config" / "pip" / "pip.conf", Path.home() / ".pip" / "pip.conf")
ALONE = ("unshare", "--mount", "--propagation", "private", "--pid", "--fork", "--kill-child")
MOUNT = """
mount -t proc proc "$0/proc"
mount --rbind /sys "$0/sys"
mount --rbind /dev "$0/dev"
exec chroot "$0" "$@"
"""
SHOWN = 8
"""Lines of a log that the report shows."""


@dataclass(frozen=True)
class Run:
    """A command, how it ended, and its last words."""

    command: str
    status: int
    took_s: float
    words: list[str]


def pip_environment() -> dict[str, str]:
    """Variables by which pip, and what asks servers beside it, finds its way here."""
    return {name: value for name, value in os.environ.items() if name.startswith("PIP_") or name.lower() in PROXIES}


def named_files() -> Iterator[Path]:
    """Files of this machine without which pip would not find its way: its own, what they and the variables name, and
    the names of servers."""
    told = list(pip_environment().values())
    for path in PIP_FILES:
        if path.exists():
            yield path
            told += [line.partition("=")[2].strip() for line in path.read_text().splitlines()]
    yield from (Path(one) for text in told for one in text.split() if one.startswith("/") and Path(one).exists())
    yield from (Path("/etc/resolv.conf"), Path("/etc/hosts"))


def make_root(root: Path, suite: str, mirror: str, components: str) -> None:
    """Such a machine with the committed tree, in a folder that it takes anew."""
    shutil.rmtree(root, ignore_errors=True)
    root.parent.mkdir(parents=True, exist_ok=True)
    packages = f"--include={','.join(PACKAGES)}"
    made = ["debootstrap", "--variant=minbase", f"--components={components}", packages, suite, str(root)]
    subprocess.run([*made, *([mirror] if mirror else [])], check=True, stdout=subprocess.DEVNULL)
    for path in named_files():
        there = root / path.relative_to("/")
        if path.is_relative_to(Path.home()):
            there = root / "root" / path.relative_to(Path.home())
        there.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            shutil.copytree(path, there, dirs_exist_ok=True)
        else:
            shutil.copyfile(path, there)
    subprocess.run(["git", "clone", "--quiet", "--no-hardlinks", str(HERE), str(root / TREE)], check=True)


def run(root: Path, command: str) -> Run:
    """Run a command in the tree there, shown as it goes and kept beside the root."""
    variables = [f"{name}={value}" for name, value in {**INSIDE, **pip_environment()}.items()]
    inside = ["env", "-i", *variables, "sh", "-c", f"cd /{TREE} && exec {command}"]
    name = "-".join(re.findall(r"\w+", command)[:2])
    log, began = root.with_name(f"{root.name}-{name}.log"), time.monotonic()
    words: list[str] = []
    with (
        log.open("w") as file,
        subprocess.Popen(
            [*ALONE, "sh", "-ec", MOUNT, str(root), *inside],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            file.write(line)
            words = [*words, line.rstrip()][-SHOWN:]
    return Run(command, process.wait(), time.monotonic() - began, words)


def has_no_compiler(root: Path) -> bool:
    """Whether the machine is as bare as it should be."""
    return not any((root / "usr" / "bin" / name).exists() for name in ("cc", "gcc", "g++", "c++", "clang", "ip"))


def main() -> int:
    """Exit status 0: every command ended with 0 on every machine."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", action="append", help="of debootstrap; without: bookworm and trixie (Debian 12, 13)")
    parser.add_argument("--mirror", default="", help="where its packages are, if not where debootstrap looks")
    parser.add_argument("--components", default="main", help="Ubuntu has python3-venv in universe: main,universe")
    parser.add_argument("--folder", type=Path, default=Path("/var/tmp/crossdock-bare"), help="of the roots and logs")
    parser.add_argument("--jobs", type=int, default=3, help="of make test")
    parser.add_argument("--tests", default="", help="arguments of pytest")
    parser.add_argument("--command", action="append", help="another than those two, like .ci/run")
    parser.add_argument("--keep", action="store_true", help="leave the roots there")
    options = parser.parse_args()
    if os.geteuid() or shutil.which("debootstrap") is None:
        sys.exit("make test-bare: expected root and debootstrap (apt install debootstrap)")
    test = shlex.join(["make", "test", f"JOBS={options.jobs}", f"ARGS={options.tests}"])
    commands = options.command or ["make demo", test]
    runs: dict[str, list[Run]] = {}
    for suite in options.suite or ["bookworm", "trixie"]:
        root = options.folder.resolve() / suite
        make_root(root, suite, options.mirror, options.components)
        assert has_no_compiler(root), f"{root}: expected no compiler and no ip"
        runs[suite] = [run(root, command) for command in commands]
        if not options.keep:
            shutil.rmtree(root)
    for suite, some in runs.items():
        for one in some:
            print(
                f"\n== {suite}: {one.command}: exit status {one.status} after {one.took_s:.0f} s", *one.words, sep="\n"
            )
    return int(any(one.status for some in runs.values() for one in some))


if __name__ == "__main__":
    sys.exit(main())
