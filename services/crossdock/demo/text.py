"""Real text for the demo: the README of this repository or of the installed distribution, else a page that is packaged.

Byte-level: a token is a byte, so any text has ids and nothing has to be downloaded.
"""

from __future__ import annotations

from importlib import metadata
from importlib.resources import files
from pathlib import Path

import torch


def find_text(num_bytes: int) -> tuple[str, bytes]:
    """(where it is from, text of at least `num_bytes` bytes)."""
    for text in (_checkout(), _distribution()):
        if len(text) >= num_bytes:
            return "README.md", text
    page = (files("crossdock.demo") / "text.txt").read_bytes()
    return "packaged text", page * -(-num_bytes // len(page))


def token_ids(text: bytes, num_rows: int, num_columns: int) -> torch.Tensor:
    """The first bytes of a text as int64 ids [rows, columns]."""
    return torch.tensor(list(text[: num_rows * num_columns]), device="cpu").view(num_rows, num_columns)


def _checkout() -> bytes:
    path = Path(__file__).parents[3] / "README.md"
    return path.read_bytes() if path.is_file() else b""


def _distribution() -> bytes:
    try:
        return str(metadata.metadata("crossdock").json.get("description", "")).encode()
    except metadata.PackageNotFoundError:
        return b""
