"""Torch, where only its CUDA build of 4 GB can be had: the image gets a placeholder, pods this machine's own copy.

The image is that of the Dockerfile in all else: pip finds a wheel `torch` here that holds no file but asks for the same
pure Python packages; a pod mounts the folders of torch that this Python runs, read-only, and finds them by PYTHONPATH.
"""

from __future__ import annotations

import importlib.metadata
import re
import sys
import zipfile
from pathlib import Path
from typing import Any

from tests.deploy.bed.say import Missing

MOUNT = "/usr/local/lent"
FOLDERS = ("torch", "nvidia", "torchgen", "cuda", "triton")
_HEAVY = re.compile(r"^(nvidia|cuda|triton)")


def placeholder(folder: Path) -> str:
    """Write the wheel into `folder`; the version that pip shall take. Raises Missing without torch in this Python."""
    try:
        torch = importlib.metadata.distribution("torch")
    except importlib.metadata.PackageNotFoundError:
        raise Missing("torch is lent to the pods by this Python, which has none") from None
    version = f"{torch.version.partition('+')[0]}+lent"
    needs = [line for line in torch.requires or () if "extra ==" not in line and not _HEAVY.match(line)]
    fields = [
        "Metadata-Version: 2.1",
        "Name: torch",
        f"Version: {version}",
        *(f"Requires-Dist: {one}" for one in needs),
    ]
    info = f"torch-{version}.dist-info"
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("torch-*.whl"):
        old.unlink()
    with zipfile.ZipFile(folder / f"torch-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{info}/METADATA", "\n".join(fields) + "\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return version


def values(python_of_image: str) -> dict[str, Any]:
    """Values of the chart under `worker` that lend torch to its pods. Raises Missing where the Pythons differ."""
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    if python_of_image != here:
        raise Missing(f"torch is built for one Python: the image has {python_of_image}, this machine {here}")
    site = Path(str(importlib.metadata.distribution("torch").locate_file("")))
    present = [name for name in FOLDERS if (site / name).is_dir()]
    return {
        "extraEnv": [{"name": "PYTHONPATH", "value": MOUNT}],
        "extraVolumes": [{"name": f"lent-{n}", "hostPath": {"path": str(site / n)}} for n in present],
        "extraVolumeMounts": [{"name": f"lent-{n}", "mountPath": f"{MOUNT}/{n}", "readOnly": True} for n in present],
    }
