"""Runs in the guest: pytest, with `ep_kernels` made a plain folder, since the package's own face imports torch.

python tests/rxe/inside.py ARGUMENTS OF PYTEST
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]


def without_torch() -> None:
    """Let `ep_kernels.network` be imported by itself."""
    sys.path.insert(0, str(ROOT))
    for name in ("ep_kernels", "ep_kernels.transports"):
        module = ModuleType(name)
        module.__path__ = [str(ROOT.joinpath(*name.split(".")))]
        sys.modules[name] = module


without_torch()  # processes that tests start import this file, too

if __name__ == "__main__":
    import pytest

    status = pytest.main(["-p", "no:cacheprovider", "-rs", "--durations=5", *sys.argv[1:]])
    assert "torch" not in sys.modules, "the network must not need torch"
    raise SystemExit(status)
