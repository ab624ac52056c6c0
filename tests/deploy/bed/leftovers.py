"""What a killed test run leaves of its bed: pods that go on running, their cgroups, networks and mounts, a folder.

The folder of a bed is named after the process that made it. A bed whose process is gone is a leftover.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from pathlib import Path

from tests.deploy.bed import runtime
from tests.deploy.bed.say import say

_NAME = re.compile(r"crossdock-bed-(\d+)-\w+")


def new_folder() -> Path:
    """A folder for the bed of this process."""
    return Path(tempfile.mkdtemp(prefix=f"crossdock-bed-{os.getpid()}-"))


def found() -> list[Path]:
    """The folders of beds whose process is gone, also of those of which only cgroups are left."""
    top = Path(tempfile.gettempdir())
    names = {path.name for place in (top, *runtime.hierarchies()) for path in place.glob("crossdock-bed-*")}
    matches = [match for name in sorted(names) if (match := _NAME.fullmatch(name))]
    return [top / match[0] for match in matches if not Path("/proc", match[1]).exists()]


def clear() -> None:
    """Remove every leftover."""
    for folder in found():
        say(f"  a killed run left {folder.name}: removing it")
        runtime.clear(folder)
        shutil.rmtree(folder, ignore_errors=True)
