"""What the commands of `crossdock` share: options, where they print, and the certificates of a call."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from crossdock.common.transports import names

if TYPE_CHECKING:
    from rich.console import Console

PIPE_WIDTH = 132
KNOWN = " or ".join(names())
"""The transports, for people."""
DEFAULT_TARGET = "127.0.0.1:7400"

ConfigFile = Annotated[
    Path | None, typer.Option("--config", "-c", help="YAML file; `crossdock config` lists its fields.")
]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", help="Override one field: path.to.field=value. Repeatable.")
]
ParentPid = Annotated[int, typer.Option("--parent-pid", hidden=True)]
Ask = Annotated[str, typer.Option("--ask", hidden=True)]
"""Of a server: do not start, but say as text or json whether the one of this configuration is ready."""
Target = Annotated[str, typer.Option("--target", "-t", help="host:port of the control plane, or several: a:1,b:1.")]
SecurityFile = Annotated[
    Path | None, typer.Option("--security", help="YAML file: certificates and token (docs/security.md).")
]
Timeout = Annotated[float, typer.Option("--timeout", min=0, max=86400, help="Seconds to wait for each answer.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]


def console() -> Console:
    """Standard output; into a pipe or a file as wide as a table needs."""
    from rich.console import Console

    made = Console()
    return made if made.is_terminal else Console(width=PIPE_WIDTH)


def show_json(what: object) -> None:
    print(json.dumps(what, indent=1))


def load_security(path: Path | None) -> Any:
    """The SecurityConfig of a file; one that guards nothing without a file."""
    from crossdock.common import security

    return security.load_security(path)


def security_of(path: Path | None) -> Any:
    """What calls are guarded with; None: plain text."""
    from crossdock.common import security

    return security.security_of(load_security(path))


def security_override(path: Path) -> str:
    """A security file as the value of `--set`."""
    import msgspec

    return msgspec.json.encode(load_security(path)).decode()
