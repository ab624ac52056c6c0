"""Shared memory of a block of HT combine: stages for rows on their way out, for partials that it makes, and for
partials that have come home. Pure arithmetic; the kernel's side is kernels/ht/pipeline.cuh.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ep_kernels.config import FP8_BLOCK
from ep_kernels.kernels import abi

MOST_SENT, MOST_SUMMED, MOST_MADE, MOST_HOME = 12, 16, 4, 12
"""Stages of each kind at most: so many barriers there are."""
ITEM_BYTES = 16
ASKED_BYTES = 32 * 16
"""What one warp at home asks another to load: for each lane (kernels/ht/combine_recv.cuh)."""
LONG_MADE, SHORT_BYTES = 3, 8192
"""So many stages for partials that are made, where they are longer than so many bytes: each is one less for rows."""
LEAST_CONVERTED, LEAST_ROWS = 7, 4
"""Stages for rows that the kernel counts on, where they become fp8 in their stages and where not: those that a store
reads (3, kernels/ht/combine_send.cuh), and those that end the ring: 4 for the warps that take turns, else 1."""
MAKERS, MOST_OF_TEAM, FEW_OF_TEAM = 8, 4, 2
"""Warps that make partials, and of a team of them (kernels/ht/combine_block.cuh, kernels/ht/combine_reduce.cuh)."""
MOST_BYTES = 16384
"""Of a stage."""
MOST_FP8_BYTES = 14336
"""The same where rows become fp8 in their stages: the scales, which lie behind the fp8 columns, are first written when
8 KiB of the row have been read (common/quantize.cuh). A multiple of COLUMN_UNIT columns of two and of four bytes."""
COLUMN_UNIT = 512
"""Pieces of a row that has several: whole scale blocks, whole 16 bytes of scales."""
HOME_SHARE = 0.36
"""Of what is left for stages of rows and stages of partials that have come home. Rows of several experts are summed on
their way out, so more bytes go out than come home."""
COPIED_HOME_SHARE = 0.7
"""The same where rows travel as they are: what waits in stages to leave comes late at home (docs/kernels/log/ht.md)."""


@dataclass(frozen=True, slots=True)
class Rings:
    """Sizes in bytes, as in `abi.Rings`, and where the stages begin."""

    num_pieces: int
    columns: int
    row_bytes: int
    home_bytes: int
    made_bytes: int
    num_rows: int
    num_made: int
    num_home: int
    stage_offset: int

    @property
    def num_bytes(self) -> int:
        """All stages."""
        return self.num_rows * self.row_bytes + (self.num_made + self.num_home) * self.made_bytes

    @property
    def home_row_bytes(self) -> int:
        """A row of partials as it lies at home: pieces with their scales."""
        return self.num_pieces * self.home_bytes

    def record(self) -> Any:
        """The kernel's record."""
        return abi.Rings(*(getattr(self, name) for name, _ in abi.Rings._fields_))


def most_items(in_place: bool) -> int:
    """An item lies beside each stage that there may be."""
    return (MOST_SENT if in_place else MOST_SUMMED) + MOST_MADE + MOST_HOME


def rings_of(
    hidden: int, y_bytes: int, moved_bytes: int, copies: bool, in_place: bool, control_bytes: int, most_bytes: int
) -> Rings:
    """As many stages as fit.

    Args:
        hidden: columns of a row.
        y_bytes, moved_bytes: of a column of y, and as it travels; 1 = fp8 with scales.
        copies: rows travel as they are.
        in_place: so, or as fp8 into which each is turned where it lies.
        control_bytes: what lies before the stages.
        most_bytes: shared memory of a block.
    """
    most_piece = MOST_FP8_BYTES if moved_bytes == 1 else MOST_BYTES
    num_pieces = -(-hidden * max(y_bytes, moved_bytes) // most_piece)
    columns = hidden if num_pieces == 1 else _padded(-(-hidden // num_pieces), COLUMN_UNIT)
    scales = _padded(-(-columns // FP8_BLOCK) * 4, 16) if moved_bytes == 1 else 0
    home_bytes = _padded(columns * moved_bytes, 16) + scales
    row, made = _padded(columns * y_bytes, 128), _padded(home_bytes, 128)
    offset = _padded(control_bytes, 128)
    num_made = 0 if in_place else MOST_MADE if made <= SHORT_BYTES else LONG_MADE
    left = most_bytes - offset - num_made * made
    num_home = min(MOST_HOME, int(left * (COPIED_HOME_SHARE if copies else HOME_SHARE)) // made)
    num_rows = min(MOST_SENT if in_place else MOST_SUMMED, (left - num_home * made) // row)
    least = LEAST_ROWS if copies or not in_place else LEAST_CONVERTED
    assert num_rows >= least, f"stages of rows: expected at least {least}, got {num_rows}"
    if not in_place:
        teams = num_teams(columns, y_bytes, moved_bytes)
        assert num_made >= teams, f"stages of partials: expected at least {teams}, one for each team, got {num_made}"
    return Rings(num_pieces, columns, row, home_bytes, made, num_rows, num_made, num_home, offset)


def num_teams(columns: int, y_bytes: int, moved_bytes: int) -> int:
    """Teams that make partials, each of which takes every `num_teams`-th stage (kernels/ht/combine_reduce.cuh)."""
    most_columns = (MOST_FP8_BYTES if moved_bytes == 1 else MOST_BYTES) // max(y_bytes, moved_bytes)
    group = 32 * (4 if moved_bytes == 1 else 16 // y_bytes)
    most_groups = -(-most_columns // (MOST_OF_TEAM * group))
    return MAKERS // (FEW_OF_TEAM if columns <= FEW_OF_TEAM * most_groups * group else MOST_OF_TEAM)


def _padded(num: int, unit: int) -> int:
    return -(-num // unit) * unit
