"""A program's table, measured part by part: a part that fails is named, and costs no other part its rows.

table = Parts(out, "host", Row, lambda: facts.of_this_run(...), show)
for size in sizes:
    table.measure(f"{size} ranks", lambda: rows_of(size))
return table.status
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Generic, TypeVar

from benchmarks import facts

R = TypeVar("R")


class Parts(Generic[R]):
    """The rows so far.

    Attributes:
        rows: of all parts.
        failures: of parts that raised, each in a line; "failures" of run.json.

    Args:
        out: folder of `<name>.csv` and run.json, which are written after each part; None: nothing is.
        name: of the table.
        kind: dataclass of a row.
        about: run.json without the failures.
        show: prints a row.
    """

    def __init__(
        self,
        out: Path | None,
        name: str,
        kind: type[R],
        about: Callable[[], dict[str, object]],
        show: Callable[[R], object] = print,
    ) -> None:
        self._out, self._name, self._kind, self._about, self._show = out, name, kind, about, show
        self.rows: list[R] = []
        self.failures: list[str] = []

    def measure(self, what: str, part: Callable[[], Iterable[R]]) -> None:
        """Add the rows of a part, and write the table. Of one that raises, those that it gave before stay."""
        try:
            for row in part():
                self.rows.append(row)
                self._show(row)
        except Exception as error:
            traceback.print_exc()
            self.failures.append(f"{what}: {type(error).__name__}: {error}")
            print(f"FAILED {self.failures[-1]}", flush=True)
        self.write()

    def write(self) -> None:
        """The table, and run.json."""
        if self._out is not None and self.rows:
            about: dict[str, Any] = self._about() | {"failures": self.failures}
            facts.keep(self._out, self._name, self._kind, self.rows, about)

    @property
    def status(self) -> int:
        """Exit status: 1 where a part failed."""
        return 1 if self.failures else 0
