"""One line per event: time, level, logger, event, then key=value. Logging never raises and never stops a service.

    log = get(__name__)
    log.info("epoch raised", epoch=5, lost=[2])
    2026-11-21T01:50:00.123Z info    crossdock.control.server.server epoch raised epoch=5 lost=[2] host=a

`bind` adds fields to every later line of the process (host, rank, epoch). Lines of other libraries keep their text.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
import traceback
from logging.handlers import RotatingFileHandler, WatchedFileHandler
from typing import TextIO

from crossdock.common.config import LogConfig

_FIELDS = "crossdock_fields"
_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-+.,:/@%[]()<>*#|~")

_bound: dict[str, object] = {}


SELDOM_S = 1.0
"""Least time between two lines of one event that callers can cause at will."""


class Logger:
    """Writes events of one module. Keyword arguments become fields of the line."""

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)
        self._lock, self._seldom = threading.Lock(), dict[str, tuple[float, int]]()

    def debug(self, event: str, **fields: object) -> None:
        """Detail for developers."""
        self._write(logging.DEBUG, event, fields)

    def info(self, event: str, **fields: object) -> None:
        """An event of interest to operators."""
        self._write(logging.INFO, event, fields)

    def warning(self, event: str, **fields: object) -> None:
        """A handled problem."""
        self._write(logging.WARNING, event, fields)

    def seldom(self, event: str, **fields: object) -> None:
        """`warning` of an event that a caller can cause at will: at most one line in `SELDOM_S`; the next one has the
        number of those before it that were left out."""
        with self._lock:
            now, (said_at, left_out) = time.monotonic(), self._seldom.get(event, (float("-inf"), 0))
            is_due = now - said_at >= SELDOM_S
            self._seldom[event] = (now, 0) if is_due else (said_at, left_out + 1)
        if is_due:
            self._write(logging.WARNING, event, fields | ({"left_out": left_out} if left_out else {}))

    def error(self, event: str, **fields: object) -> None:
        """A problem with consequences."""
        self._write(logging.ERROR, event, fields)

    def exception(self, event: str, **fields: object) -> None:
        """`error` with the traceback of the exception being handled, on the same line."""
        self._write(logging.ERROR, event, {**fields, "traceback": traceback.format_exc().strip()})

    def _write(self, level: int, event: str, fields: dict[str, object]) -> None:
        if self._logger.isEnabledFor(level):
            self._logger.log(level, "%s", event, extra={_FIELDS: fields})


def get(name: str) -> Logger:
    """The logger of a module: `log = get(__name__)`."""
    return Logger(name)


def bind(**fields: object) -> None:
    """Add fields to every later line of this process; None removes one."""
    for key, value in fields.items():
        if value is None:
            _bound.pop(key, None)
        else:
            _bound[key] = value


def setup(config: LogConfig, **bound: object) -> None:
    """Send events to stderr and to `config.file`. A file that cannot be opened is reported there and left out.

    May be called again; the last call applies.
    """
    _bound.clear()
    bind(**bound)
    root = logging.getLogger()
    for handler in list(root.handlers):
        if isinstance(handler, _ReportsOnce):
            root.removeHandler(handler)
            handler.close()
    root.setLevel(max(logging.INFO, _level(config)))
    for name in ("crossdock", "ep_kernels"):
        logging.getLogger(name).setLevel(_level(config))
    to_stderr = _ToStderr(sys.stderr)
    to_stderr.setFormatter(_Formatter())
    root.addHandler(to_stderr)
    if config.file:
        try:
            root.addHandler(_file_handler(config))
        except OSError as error:
            get(__name__).warning("log file left out", file=config.file, error=error.strerror)


def write_to(stream: TextIO) -> None:
    for handler in logging.getLogger().handlers:
        if isinstance(handler, _ToStderr):
            handler.setStream(stream)


def _level(config: LogConfig) -> int:
    return {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING}.get(config.level, logging.ERROR)


class _ReportsOnce(logging.Handler):
    """A handler that reports its first failure (full disk, closed pipe) to the other stream and then none."""

    sink = ""
    """File that it writes to; "" for stderr."""
    _failed = False

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """Never raise; report the first failure if possible."""
        if self._failed:
            return
        self._failed = True
        if self.sink:
            get(__name__).warning("log lines are being lost", file=self.sink, error=str(sys.exc_info()[1]))

    def close(self) -> None:
        """Never raise."""
        try:
            super().close()
        except OSError:
            self._failed = True


class _ToStderr(_ReportsOnce, logging.StreamHandler[TextIO]):
    pass


class _Rotated(_ReportsOnce, RotatingFileHandler):
    pass


class _Watched(_ReportsOnce, WatchedFileHandler):
    pass


def _file_handler(config: LogConfig) -> logging.Handler:
    """Raises OSError where the file cannot be opened."""
    code, errors = "utf-8", "backslashreplace"
    made: _Rotated | _Watched
    if config.max_file_bytes:
        made = _Rotated(
            config.file, maxBytes=config.max_file_bytes, backupCount=config.old_files, encoding=code, errors=errors
        )
    else:
        made = _Watched(config.file, encoding=code, errors=errors)
    made.sink = config.file
    made.setFormatter(_Formatter())
    return made


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        """One line, whatever is in the fields."""
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        fields = {**getattr(record, _FIELDS, {}), **_bound}
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        parts = [f"{moment}.{int(record.msecs):03d}Z {record.levelname.lower():<7} {record.name}", _one_line(record)]
        return " ".join(parts + [f"{key}={_value(value)}" for key, value in fields.items()])


def _one_line(record: logging.LogRecord) -> str:
    return printable(record.getMessage())


def printable(text: str) -> str:
    """The text with an escape in the place of each character that is none of print: controls (ESC, C1), line and
    paragraph separators, directions, halves of pairs. Terminals act on these."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else _escaped(one) for one in text)


def _escaped(one: str) -> str:
    return "\\u007f" if one == "\x7f" else json.dumps(one)[1:-1]


def _value(value: object) -> str:
    if isinstance(value, BaseException):
        value = f"{type(value).__name__}: {value}"
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text if text and _PLAIN.issuperset(text) else printable(json.dumps(text, ensure_ascii=False))
