"""The product as it is when a run begins: processes that are started or restarted later load a copy of it.

A run of minutes that restarts processes from a checkout would load what is edited, pulled or checked out meanwhile, and
put two versions into one group.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

PRODUCT = ("crossdock", "ep_kernels")


@contextlib.contextmanager
def frozen(folder: Path, packages: Sequence[str] = PRODUCT) -> Iterator[None]:
    """Copy the packages to `folder`. Python processes that are started meanwhile load them from there, in any working
    directory, and everything else from where this process does."""
    for name in packages:
        shutil.copytree(_home(name), folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    kept = {name: os.environ.get(name) for name in ("PYTHONPATH", "PYTHONSAFEPATH")}
    sys.path.insert(0, str(folder))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    os.environ["PYTHONSAFEPATH"] = "1"  # else `-m` and `-c` would look in the working directory first
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        for name, value in kept.items():
            if value is None:
                os.environ.pop(name)
            else:
                os.environ[name] = value


def _home(package: str) -> Path:
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"{package}: expected a package with files")
    return Path(spec.submodule_search_locations[0])
