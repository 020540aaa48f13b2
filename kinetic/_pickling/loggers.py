"""How the caller's program logs: what its function logs is written on a host as it would be here.

In: the loggers of this process. Out: their levels, and the handlers that write to its output, set
on a host.

`logging.basicConfig(level=logging.INFO)` at the top of a script is not part of a function: without
this, a host would drop what the function logs. Only levels and formats travel: handlers that write
elsewhere (files, sockets) and formatters of other classes may hold anything, and stay here. So do
loggers with filters, which may hide something. Libraries add their own handlers where they are
imported.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from kinetic._core.values import dataclass

_OURS = "kinetic"
_STYLES: dict[Any, Any] = {style[0]: name for name, style in logging._STYLES.items()}
_USUAL_VERBOSITY = -1
"""Of absl: warnings."""


@dataclass(frozen=True)
class LoggingHandler:
    """A handler that writes to the output of the process.

    Attributes:
        stream: "stdout" or "stderr".
        level: the least level that it writes.
        format: as `logging.Formatter` takes them: the format, that of dates, the style.
    """

    stream: str
    level: int
    format: tuple[Any, Any, Any]


@dataclass(frozen=True)
class LoggerState:
    """A logger that the program has changed.

    Attributes:
        name: empty for the root.
        level: the least level that it passes on; 0 for that of the logger above.
        propagates: whether the loggers above get its records, too.
        handlers: those that write to the output of the process.
    """

    name: str
    level: int
    propagates: bool
    handlers: tuple[LoggingHandler, ...]


@dataclass(frozen=True)
class LoggingState:
    """The loggers that the program has changed.

    Attributes:
        loggers: those of the standard library.
        disabled: the level up to which all are disabled.
        absl: the verbosity of absl, and whether its handler is in use; None if they are as usual.
    """

    loggers: tuple[LoggerState, ...] = ()
    disabled: int = 0
    absl: tuple[int, bool] | None = None
    library = "logging"

    def apply(self) -> None:
        """Set the loggers of this process. A logger that has handlers of its own keeps them."""
        while _added:
            _added.pop().leave()
        logging.disable(self.disabled)
        if self.absl is not None:
            _apply_absl(*self.absl)
        for each in self.loggers:
            logger = logging.getLogger(each.name)
            logger.setLevel(each.level)
            logger.propagate = each.propagates
            _added.extend(HostHandler(logger, made) for made in each.handlers)


class HostHandler(logging.StreamHandler[Any]):
    """Writes what its logger gets, unless another handler of the logger does, which the function or
    a module that it imports may add at any time."""

    def __init__(self, logger: logging.Logger, made: LoggingHandler) -> None:
        super().__init__(getattr(sys, made.stream))
        self._logger = logger
        self.setLevel(made.level)
        self.setFormatter(_SafeFormatter(*made.format, validate=False))
        logger.addHandler(self)

    def leave(self) -> None:
        """Leave the logger."""
        self._logger.removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record."""
        others = (each for each in self._logger.handlers if not isinstance(each, HostHandler))
        if all(getattr(each, "stream", None) is not self.stream for each in others):
            super().emit(record)


class _SafeFormatter(logging.Formatter):
    """Writes records that lack what the format names, as a filter sets it, in the usual format."""

    def format(self, record: logging.LogRecord) -> str:
        try:
            return super().format(record)
        except (KeyError, ValueError):
            return logging.Formatter(logging.BASIC_FORMAT).format(record)


_added: list[HostHandler] = []


def read() -> LoggingState:
    """Return how this process logs."""
    found = [_describe_logger(name, logger) for name, logger in _list_loggers()]
    changed = (each for each in found if each is not None and each != _make_usual(each.name))
    return LoggingState(tuple(changed), logging.root.manager.disable, _read_absl())


def _make_usual(name: str) -> LoggerState:
    return LoggerState(name, logging.NOTSET if name else logging.WARNING, True, ())


def _describe_logger(name: str, logger: logging.Logger) -> LoggerState | None:
    """Describe a logger; None for one that has filters, without which it might write what nobody
    should see."""
    handlers = [each for each in logger.handlers if type(each) is not logging.NullHandler]
    if logger.filters or any(each.filters for each in handlers):
        return None
    if _is_of_library(name):
        return LoggerState(name, logger.level, True, ())
    found: list[LoggingHandler | None] = []
    for handler in handlers:
        with suppress(Exception):  # It is the program's code.
            found.append(_describe(handler))
    made = tuple(each for each in found if each is not None)
    propagates = logger.propagate or len(made) < len(handlers)
    return LoggerState(name, logger.level, propagates, made)


def _list_loggers() -> Iterator[tuple[str, logging.Logger]]:
    """List the loggers by name, the root first; a library's own kind of logger is not known."""
    yield "", logging.root
    for name, logger in sorted(logging.root.manager.loggerDict.items()):
        if type(logger) is logging.Logger and name.partition(".")[0] != _OURS:
            yield name, logger


def _is_of_library(name: str) -> bool:
    from kinetic._pickling import modules  # hosts do without

    found: Any = sys.modules.get(name.partition(".")[0])
    return found is not None and found.__name__ != "__main__" and modules.is_installed(found)


def _describe(handler: logging.Handler) -> LoggingHandler | None:
    """Describe a handler that writes to a standard stream, also through the console of rich, which
    adds level and time itself; None for all others."""
    stream = getattr(handler, "stream", None)
    console = getattr(handler, "console", None)
    if stream is None:
        stream = getattr(console, "file", None)
    for name in ("stdout", "stderr"):
        if stream is not None and stream in (getattr(sys, name), getattr(sys, f"__{name}__")):
            made = None if console is not None else handler.formatter
            return LoggingHandler(name, handler.level, _format_of(made, has_console=bool(console)))
    return None


def _format_of(formatter: logging.Formatter | None, *, has_console: bool) -> tuple[Any, Any, Any]:
    if has_console:
        return logging.BASIC_FORMAT, None, "%"
    style = _STYLES.get(type(getattr(formatter, "_style", None)))
    if formatter is None or style is None or not isinstance(formatter._fmt, str):
        return None, None, "%"
    return formatter._fmt, formatter.datefmt, style


def _read_absl() -> tuple[int, bool] | None:
    absl = sys.modules.get("absl.logging")
    if absl is None:
        return None
    found = absl.get_verbosity(), absl.get_absl_handler() in logging.root.handlers
    return None if found == (_USUAL_VERBOSITY, False) else found


def _apply_absl(verbosity: int, is_used: bool) -> None:
    try:
        from absl import logging as absl
    except ImportError:
        return
    if is_used:
        absl.use_absl_handler()
    absl.set_verbosity(verbosity)
