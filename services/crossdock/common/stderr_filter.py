"""Program: reads the stderr of a server, returns the lines of gRPC's core to it, and passes all others on.

    python -I -S stderr_filter.py        stdin: what was written to fd 2; stdout: lines of gRPC's core; stderr: the rest

`grpc_core_log.py` starts it and explains why it is a process. It ends when the other end of stdin is closed. The other
end of stdout is non-blocking, so that a stalled server never blocks writers to its fd 2: lines of gRPC's core are
dropped then.
"""

from __future__ import annotations

import os
import re
import select
import signal

CORE = re.compile(
    rb"[IWE]\d{4} \d\d:\d\d:[\d.]+ +\d+ [\w.-]+:\d+\] |WARNING: All log messages before absl::InitializeLog\(\)"
)
"""How a line of gRPC's core begins. Fatal ones ("F...") are passed on: they are the last of a process."""
_FIRST_LETTERS = b"IWE"
_MAX_LINE = 65536
_PIPE_BUF = 4096
"""Largest atomic write to a pipe."""


def split(data: bytes, inside: bool) -> tuple[list[tuple[bool, bytes]], bytes, bool]:
    """The pieces of `data`, each with whether it is a line of gRPC's core; what must wait for its end; and whether the
    next byte continues a line that was written on already, as the first one does with `inside`."""
    *whole, rest = data.split(b"\n")
    pieces = []
    for line in whole:
        pieces.append((not inside and CORE.match(line) is not None, line + b"\n"))
        inside = False
    may_be_core = not inside and rest[:1] in {bytes([letter]) for letter in _FIRST_LETTERS} and len(rest) < _MAX_LINE
    if rest and not may_be_core:
        pieces.append((False, rest))
        rest, inside = b"", True
    return pieces, rest, inside


def main() -> None:
    """Run until the end of stdin."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the last lines of the server must come through
        signal.signal(number, signal.SIG_IGN)
    waiting, inside = b"", False
    while data := os.read(0, 65536):
        pieces, waiting, inside = split(waiting + data, inside)
        for is_core, piece in pieces:
            if not (is_core and _send(piece)):
                _pass_on(piece)
    _pass_on(waiting)


def _send(line: bytes) -> bool:
    """Send a line to the server. False: the server is gone."""
    try:
        os.write(1, line if len(line) <= _PIPE_BUF else line[: _PIPE_BUF - 1] + b"\n")
    except BlockingIOError:
        pass
    except OSError:
        return False
    return True


def _pass_on(data: bytes) -> None:
    while data:
        try:
            data = data[os.write(2, data) :]
        except BlockingIOError:
            select.select([], [2], [])
        except OSError:  # no reader, or the disk is full
            return


if __name__ == "__main__":
    main()
