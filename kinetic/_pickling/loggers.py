"""How the caller's program logs: what its function logs is written on a host as it would be here.

In: the loggers of this process. Out: their levels, and the handlers that write to its output, set
on a host.

`logging.basicConfig(level=logging.INFO)` at the top of a script is not part of a function: without
this, a host would drop what the function logs. Handlers of other kinds (files, sockets) stay here,
and so do those of libraries, which add their own where they are imported.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any

from kinetic._core.values import dataclass

_OURS = "kinetic"


@dataclass(frozen=True)
class LoggingHandler:
    """A handler that writes to the output of the process.

    Attributes:
        stream: "stdout" or "stderr".
        level: the least level that it writes.
        formatter: None for that of the library.
        filters: what decides about each record.
    """

    stream: str
    level: int
    formatter: logging.Formatter | None
    filters: tuple[Any, ...]


@dataclass(frozen=True)
class LoggerState:
    """A logger that the program has changed.

    Attributes:
        name: empty for the root.
        level: the least level that it passes on; 0 for that of the logger above.
        propagates: whether the loggers above get its records, too.
        filters: what decides about each record.
        handlers: those that write to the output of the process.
    """

    name: str
    level: int
    propagates: bool
    filters: tuple[Any, ...]
    handlers: tuple[LoggingHandler, ...]


@dataclass(frozen=True)
class LoggingState:
    """The loggers that the program has changed.

    Attributes:
        loggers: those of the standard library.
        absl: the verbosity of absl, and whether its handler is in use; None if it is not imported.
    """

    loggers: tuple[LoggerState, ...] = ()
    absl: tuple[int, bool] | None = None

    def apply(self) -> None:
        """Set the loggers of this process. A logger that has handlers of its own keeps them."""
        while _added:
            logger, handler = _added.pop()
            logger.removeHandler(handler)
        if self.absl is not None:
            _apply_absl(*self.absl)
        for each in self.loggers:
            logger = logging.getLogger(each.name)
            logger.setLevel(each.level)
            logger.propagate = each.propagates
            _set_filters(logger, each.filters)
            for made in () if logger.handlers else tuple(map(_make_handler, each.handlers)):
                logger.addHandler(made)
                _added.append((logger, made))


_added: list[tuple[logging.Logger, logging.Handler]] = []


def read(can_be_sent: Callable[[object], bool]) -> LoggingState:
    """Return how this process logs.

    Args:
        can_be_sent: whether a formatter or a filter can be pickled; those that cannot are left out.
    """

    def select(filters: Any) -> tuple[Any, ...]:
        return tuple(each for each in filters if can_be_sent(each))

    def describe(handler: logging.Handler) -> LoggingHandler | None:
        stream = _stream_of(handler)
        if stream is None:
            return None
        formatter = handler.formatter if can_be_sent(handler.formatter) else None
        return LoggingHandler(stream, handler.level, formatter, select(handler.filters))

    found = []
    for name, logger in _list_loggers():
        handlers = map(describe, () if _is_of_library(name) else logger.handlers)
        found.append(
            LoggerState(
                name,
                logger.level,
                logger.propagate,
                select(logger.filters),
                tuple(each for each in handlers if each is not None),
            )
        )
    return LoggingState(
        tuple(each for each in found if each != _make_unchanged(each.name)), _read_absl()
    )


def _make_unchanged(name: str) -> LoggerState:
    return LoggerState(name, logging.NOTSET if name else logging.WARNING, True, (), ())


def _list_loggers() -> Iterator[tuple[str, logging.Logger]]:
    """List the loggers by name, the root first; a library's own kind of logger is not known."""
    yield "", logging.root
    for name, logger in sorted(logging.root.manager.loggerDict.items()):
        if type(logger) is logging.Logger and name.partition(".")[0] != _OURS:
            yield name, logger


def _is_of_library(name: str) -> bool:
    top = name.partition(".")[0]
    return top in sys.modules and top != "__main__"


def _stream_of(handler: logging.Handler) -> str | None:
    """Return the standard stream that a handler writes to, also through the console of rich."""
    stream = getattr(handler, "stream", None)
    if stream is None:
        stream = getattr(getattr(handler, "console", None), "file", None)
    for name in ("stdout", "stderr"):
        if stream is not None and stream in (getattr(sys, name), getattr(sys, f"__{name}__")):
            return name
    return None


def _make_handler(made: LoggingHandler) -> logging.Handler:
    handler = logging.StreamHandler(getattr(sys, made.stream))
    handler.setLevel(made.level)
    handler.setFormatter(made.formatter)
    _set_filters(handler, made.filters)
    return handler


def _set_filters(on: logging.Handler | logging.Logger, filters: tuple[Any, ...]) -> None:
    for each in filters:
        on.addFilter(each)


def _read_absl() -> tuple[int, bool] | None:
    absl = sys.modules.get("absl.logging")
    if absl is None:
        return None
    return absl.get_verbosity(), absl.get_absl_handler() in logging.root.handlers


def _apply_absl(verbosity: int, is_used: bool) -> None:
    try:
        from absl import logging as absl
    except ImportError:
        return
    if is_used:
        absl.use_absl_handler()
    absl.set_verbosity(verbosity)
