"""Numbers in text."""

from __future__ import annotations


def counted(count: int, what: str) -> str:
    """1 host, 2 hosts."""
    return f"{count} {what}{'' if count == 1 else 's'}"


def span(numbers: list[int]) -> str:
    """0-3 where they are consecutive, else 0, 2, 5."""
    if len(numbers) > 1 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]}-{numbers[-1]}"
    return ", ".join(map(str, numbers))
