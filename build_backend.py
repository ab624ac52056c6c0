"""Build backend of the distribution: setuptools, after the native libraries have been compiled.

pip calls the hooks below (PEP 517, PEP 660). `python build_backend.py` compiles in place, for work in a checkout.
Where no C++ compiler is on PATH, the wheel `ziglang`, which holds one, becomes a build requirement; also with
`pip wheel --config-settings portable=yes`, whose wheel is one that the package index takes (manylinux).
"""

from __future__ import annotations

import importlib.util
import platform
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

COMPILER_WHEEL = "ziglang>=0.13,<0.16"
Settings = Mapping[str, Any] | None


def _compile() -> ModuleType:
    """`ep_kernels/transports/build.py`, loaded by path: its package would import torch."""
    path = Path(__file__).resolve().parent / "ep_kernels" / "transports" / "build.py"
    spec = importlib.util.spec_from_file_location("crossdock_native_build", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot load {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def _build_all(*, force: bool = False, portable: bool = False) -> list[Path]:
    """Compile every library; their paths."""
    compile_, protocol = _compile(), Path(__file__).resolve().parent / "services" / "crossdock" / "protocol"
    frames = compile_.Native(protocol / "native", protocol / "_native.so", (compile_.network().sources,))
    how = {"force": force, "portable": portable}
    return [*compile_.build_all(**how), frames.build(**how)]


def _setuptools() -> Any:
    from setuptools import build_meta

    return build_meta


def _compiler_requirement(settings: Settings) -> list[str]:
    return [] if _compile().find_compiler() and not _is_portable(settings) else [COMPILER_WHEEL]


def _is_portable(settings: Settings) -> bool:
    found = (settings or {}).get("portable", "no")
    if found not in ("yes", "no"):
        raise ValueError(f"portable: expected yes or no, got {found!r}")
    return bool(found == "yes")


def get_requires_for_build_wheel(config_settings: Settings = None) -> list[str]:
    """PEP 517."""
    return [*_setuptools().get_requires_for_build_wheel(config_settings), *_compiler_requirement(config_settings)]


def get_requires_for_build_editable(config_settings: Settings = None) -> list[str]:
    """PEP 660."""
    return [*_setuptools().get_requires_for_build_editable(config_settings), *_compiler_requirement(None)]


def get_requires_for_build_sdist(config_settings: Settings = None) -> list[str]:
    """PEP 517. Sources are not compiled, so no compiler is needed."""
    return list(_setuptools().get_requires_for_build_sdist(config_settings))


def prepare_metadata_for_build_wheel(metadata_directory: str, config_settings: Settings = None) -> str:
    """PEP 517."""
    return str(_setuptools().prepare_metadata_for_build_wheel(metadata_directory, config_settings))


def prepare_metadata_for_build_editable(metadata_directory: str, config_settings: Settings = None) -> str:
    """PEP 660."""
    return str(_setuptools().prepare_metadata_for_build_editable(metadata_directory, config_settings))


def build_wheel(wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None) -> str:
    """PEP 517. The wheel is py3-none-linux_<machine>, or manylinux where it is to be portable: it holds libraries, but
    none that knows Python; and the kernels that `python -m ep_kernels.tools.kernels --ship` has compiled before, if it
    has."""
    portable = _is_portable(config_settings)
    _build_all(portable=portable)
    system = f"manylinux_{_compile().OLDEST_GLIBC.replace('.', '_')}" if portable else "linux"
    shutil.rmtree(Path(__file__).resolve().parent / "build" / "lib", ignore_errors=True)  # else packed again
    settings = {name: value for name, value in (config_settings or {}).items() if name != "portable"}
    settings["--build-option"] = [
        *_as_list(settings.get("--build-option")),
        "--plat-name",
        f"{system}_{platform.machine()}",
    ]
    return str(_setuptools().build_wheel(wheel_directory, settings, metadata_directory))


def build_editable(
    wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None
) -> str:
    """PEP 660. The libraries lie in the checkout, beside their sources."""
    _build_all()
    return str(_setuptools().build_editable(wheel_directory, config_settings, metadata_directory))


def build_sdist(sdist_directory: str, config_settings: Settings = None) -> str:
    """PEP 517."""
    return str(_setuptools().build_sdist(sdist_directory, config_settings))


def _as_list(value: Any) -> list[str]:
    if value is None:
        return []
    return [value] if isinstance(value, str) else list(value)


if __name__ == "__main__":
    print(*_build_all(force="--force" in sys.argv[1:]), sep="\n")
