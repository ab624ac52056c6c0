"""Waits found in machine code: lines as nvdisasm prints them, with masks of our making; and that ours is read."""

from __future__ import annotations

import pytest

from benchmarks import kernels
from benchmarks.scoreboards import early_waits, instructions
from ep_kernels import jit
from tests.tools import needs

NONE = 7
LOAD = "LDG.E.128 R20, desc[UR14][R26.64]"


def listing(*lines: tuple[str, int, int]) -> str:
    """(text, scoreboard that is taken, mask of those that are waited for) by line."""
    shown = []
    for n, (text, takes, waits) in enumerate(lines):
        shown.append(f"        /*{n * 16:04x}*/                   {text} ;    /* 0x{n:016x} */")
        shown.append(f"                                          /* 0x{takes << 46 | waits << 52:016x} */")
    return "\t.section\t.text.k\n.text.k:\n.L_x_0:\n" + "\n".join(shown) + "\n"


def test_instructions() -> None:
    """What is written and read, a predicate in front or not; uniform registers are not general ones."""
    found = list(
        instructions(
            listing(
                (LOAD, 5, 0),
                ("@!P1 STG.E.128.STRONG.SYS desc[UR12][R60.64], R56", NONE, 32),
                ("SHFL.IDX PT, R28, R36, RZ, 0x1f", 2, 0),
                ("IMAD.WIDE.U32 R20, R57.reuse, 0x8, R30", NONE, 4),
                ("R2UR UR4, R5", NONE, 0),
                ("ATOMG.E.ADD.64.STRONG.GPU PT, R66, desc[UR14][R20.64], R66", 5, 0),
            )
        )
    )
    assert [sorted(i.writes) for i in found] == [[20, 21, 22, 23], [], [28], [20, 21], [], [66, 67]]
    assert [sorted(i.reads) for i in found][:4] == [[26, 27], [56, 57, 58, 59, 60, 61], [36], [30, 31, 57]]
    assert [i.takes for i in found] == [5, NONE, 2, NONE, NONE, 5]
    assert [i.waits for i in found] == [0, 32, 0, 4, 0, 0]
    assert not any(i.ends_way for i in found)
    assert [i.address for i in found] == [0, 16, 32, 48, 64, 80]


@pytest.mark.parametrize(
    ("later", "early"),
    [
        ("LOP3.LUT R21, R77, 0x7, RZ, 0xc0, !PT", True),  # only written to
        ("IADD3 R21, R21, 0x1, RZ", False),  # read
        ("IADD3 R60, R61, 0x1, RZ", False),  # another load's, on the same scoreboard
        ("STG.E.64 desc[UR14][R60.64], R22", False),
    ],
)
def test_who_waits(later: str, early: bool) -> None:
    """The first that waits for the load's scoreboard decides; what does not wait does not matter."""
    found = early_waits(
        listing(
            (LOAD, 5, 0), ("IADD3 R9, R8, 0x1, RZ", NONE, 1), (later, NONE, 1 << 5), ("IADD3 R21, R8, R8, RZ", NONE, 32)
        )
    )
    assert [(wait.load.address, wait.by.address, wait.distance) for wait in found] == ([(0, 32, 2)] if early else [])
    assert [str(wait) for wait in found] == ([f"0x0 {LOAD}: 2 further by {later}"] if early else [])


@pytest.mark.parametrize(
    ("end", "early"),
    [
        ("BRA `(.L_x_9)", False),  # always taken: what stands behind it comes from elsewhere
        ("EXIT", False),
        ("@P0 BRA `(.L_x_9)", True),  # on, perhaps
        ("@P0 BRA `(.L_x_0)", False),  # back: the load is of a loop's next turn
    ],
)
def test_the_straight_way_ends_at_a_branch(end: str, early: bool) -> None:
    """But not at one that may not be taken, and leads on."""
    found = early_waits(listing((LOAD, 5, 0), (end, NONE, 0), ("MOV R21, R8", NONE, 32)))
    assert bool(found) is early


@needs("nvdisasm")
def test_a_kernel_of_ours_is_read() -> None:
    """Loads, stores and scoreboards of real machine code are where they are looked for."""
    variant = jit.dispatch_variant("ll", 2, "u8")
    code = kernels.disassemble(jit.compile_source(jit.source(variant), variant.name, "sm_90a").cubin)
    assert code is not None
    found = list(instructions(code))
    assert len(found) > 1000
    loads = [n for n, i in enumerate(found) if i.text.startswith("LDG.E.128.STRONG.SYS")]
    assert loads
    for n in loads:
        assert len(found[n].writes) == 4
        assert any(later.waits >> found[n].takes & 1 for later in found[n + 1 :])
