"""Files that people write: read whole up to a limit, and YAML in which no key is given twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

MAX_BYTES = 1 << 20
"""Most bytes of a config, a certificate, a file of tokens."""


def read_small(path: str | Path, max_bytes: int = MAX_BYTES) -> bytes:
    """The bytes of a file, which may be a pipe. Raises OSError, and ValueError: more than `max_bytes`."""
    with Path(path).open("rb") as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise ValueError(f"expected at most {max_bytes} bytes, got more")
    return data


def write_text(path: Path, text: str) -> None:
    """Write a file. Raises OSError that names it, as Python's own does not where the disk is full."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def parse_yaml(text: str) -> Any:
    """The value of one YAML document. Raises ValueError."""
    try:
        return yaml.load(text, _Loader)
    except RecursionError:
        raise ValueError("expected YAML, got lists or mappings nested too deeply") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date or a number that Python cannot make
        raise ValueError(f"expected YAML: {error}") from error


class _Loader(yaml.SafeLoader):
    """Without it the last of two equal keys wins, and the first, perhaps `security`, is dropped silently."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Raises MarkedYAMLError: a key is given twice."""
        node = super().compose_mapping_node(anchor)
        known: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in known:
                raise yaml.MarkedYAMLError(problem=f"{key.value!r} is given twice", problem_mark=key.start_mark)
            known.add(str(key.value))
        return node
