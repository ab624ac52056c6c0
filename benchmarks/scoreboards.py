"""Needless waits in machine code. Reads a listing of nvdisasm; touches no GPU.

A load goes on while instructions behind it are executed. It takes one of six scoreboards, and every instruction carries
a mask of those that it waits for, a wait for all that is under way on them. So an instruction that only *writes* a
register which a load will fill, as it may where nobody reads that part of a 16-byte load, stops the warp as if it read
it, however early it stands: it cost LL dispatch up to 12 % (docs/lab/kernels/ll.md, version 11).

The encoding of the mask is not documented; this is what the instructions of sm_90a show: of the upper 64 bits, 46 to 48
name the scoreboard that a load takes (7 = none), 52 to 57 are the mask.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_TEXT = re.compile(r"\s*/\*([0-9a-f]+)\*/\s+(.*?)\s*;?\s*/\* 0x[0-9a-f]{16} \*/")
_UPPER = re.compile(r"\s*/\* 0x([0-9a-f]{16}) \*/")
_GUARD = re.compile(r"@!?U?P\w+\s+")
_LABEL, _TARGET = re.compile(r"(\S+):\s*$"), re.compile(r"`\(([^)]+)\)")
_REGISTER = re.compile(r"(?<![A-Za-z])R(\d+)(\.64)?")
_NONE = 7
_LOADS = ("LDG", "LD.", "ATOMG")
_NO_RESULT = ("ST", "RED", "BRA", "BSYNC", "CALL", "SYNCS", "UBLKCP", "EXIT", "RET", "WARPSYNC", "DEPBAR", "CCTL")
_ENDS = ("BRA", "EXIT", "RET", "BRX")
FAR = 400
"""Instructions behind a load that are looked at."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """One line of machine code.

    Attributes:
        address: in its function, bytes.
        text: as disassembled.
        ends_way: what stands behind it comes from elsewhere, or after a loop, whose loads are of the next turn.
        is_load: of memory that is not the block's own.
        writes, reads: general registers.
        takes: scoreboard, or 7.
        waits: mask of scoreboards.
    """

    address: int
    text: str
    ends_way: bool
    is_load: bool
    writes: frozenset[int]
    reads: frozenset[int]
    takes: int
    waits: int


@dataclass(frozen=True, slots=True)
class EarlyWait:
    """An instruction that waits for a load only to write to one of its registers.

    Attributes:
        load: whose answer nobody reads here yet.
        by: what waits.
        distance: instructions between.
    """

    load: Instruction
    by: Instruction
    distance: int

    def __str__(self) -> str:
        return f"{self.load.address:#x} {self.load.text}: {self.distance} further by {self.by.text}"


def lines(listing: str) -> Iterator[tuple[list[str], int, str, int]]:
    """(labels in front of it, address, text, upper 64 bits) of each instruction of a listing by `nvdisasm -c -hex`, in
    which the upper half of an instruction follows on a line of its own."""
    remaining, labels = iter(listing.splitlines()), list[str]()
    for line in remaining:
        if label := _LABEL.match(line):
            labels.append(label[1])
        elif (text := _TEXT.match(line)) and (upper := _UPPER.match(next(remaining, ""))):
            yield labels, int(text[1], 16), text[2], int(upper[1], 16)
            labels = []


def instructions(listing: str) -> Iterator[Instruction]:
    """The instructions of a listing, as `lines` reads it."""
    passed = set[str]()
    for labels, address, text, control in lines(listing):
        passed.update(labels)
        plain = _GUARD.sub("", text, count=1)
        target = _TARGET.search(plain)
        back = target is not None and target[1] in passed
        ends = plain.startswith(_ENDS) and (back or plain == text)
        yield Instruction(
            address, text, ends, plain.startswith(_LOADS), *_registers(plain), control >> 46 & 7, control >> 52 & 63
        )


def early_waits(listing: str) -> list[EarlyWait]:
    """Early waits of every load, at most one each, along the straight path."""
    code = list(instructions(listing))
    loads = (n for n, found in enumerate(code) if found.is_load and found.takes != _NONE)
    return [found for n in loads if (found := _early(code, n))]


def _early(code: list[Instruction], n: int) -> EarlyWait | None:
    load = code[n]
    for distance, later in enumerate(code[n + 1 : n + FAR], 1):
        if later.waits >> load.takes & 1:
            overwrites = later.writes & load.writes and not later.reads & load.writes
            return EarlyWait(load, later, distance) if overwrites else None
        if later.ends_way:
            return None
    return None


def _registers(plain: str) -> tuple[frozenset[int], frozenset[int]]:
    """Written, read."""
    name, _, rest = plain.partition(" ")
    operands = [operand.strip() for operand in rest.split(",")]
    result = 1 if operands[0].startswith("P") else 0  # SHFL, ATOMG: a predicate comes first
    if name.startswith(_NO_RESULT) or len(operands) <= result or not _REGISTER.match(operands[result]):
        result = -1
    writes: set[int] = set()
    reads: set[int] = set()
    for n, operand in enumerate(operands):
        for found in _REGISTER.finditer(operand):
            first = int(found[1])
            if n == result:
                writes.update(range(first, first + _width(name)))
            else:
                stored = name.startswith("ST") and "[" not in operand
                wide = found[2] or ("WIDE" in name and n == len(operands) - 1)
                reads.update(range(first, first + (_width(name) if stored else 2 if wide else 1)))
    return frozenset(writes), frozenset(reads)


def _width(name: str) -> int:
    """Registers of a result, or of what is stored."""
    if ".128" in name:
        return 4
    return 2 if name == "CS2R" or any(mark in name for mark in (".64", "WIDE")) else 1
