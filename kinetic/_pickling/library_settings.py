"""What the caller's program has set in libraries: a function logs, and builds its model, on a host
as it would here.

In: the loggers of this process, Keras. Out: states, which are set on a host once the library of
each is imported there.

`logging.basicConfig(level=logging.INFO)` at the top of a script is not part of a function: without
this, a host would drop what the function logs, and build a model of float32 in spite of
`keras.mixed_precision.set_global_policy("mixed_bfloat16")`. Of logging only levels and formats
travel: handlers that write elsewhere (files, sockets) may hold anything, and stay here. So do
loggers with filters, which may hide something.
"""

from __future__ import annotations

import logging
import sys
from contextlib import suppress
from typing import Any

from kinetic._core.values import dataclass

_OURS = "kinetic"
_KINDS = (logging.Logger, logging.RootLogger)
"""Of a library's own kind of logger it is not known what its methods do."""
_STYLES: dict[Any, Any] = {style[0]: name for name, style in logging._STYLES.items()}
_IMPORTED_AHEAD = "kinetic-ahead"
_ABSL_DEFAULT = -1
"""The verbosity of absl that it begins with: warnings."""
_KERAS_STATE = "keras.src.backend.common.global_state"
"""Private to Keras, which has no other way to tell whether a seed was set."""
_added: list[HostHandler] = []


@dataclass(frozen=True)
class HandlerState:
    """A handler that writes to the output of the process.

    Attributes:
        stream: "stdout" or "stderr".
        level: the least level that it writes.
        format: as `logging.Formatter` takes them: the format, that of dates, the style.
    """

    stream: str
    level: int
    format: tuple[str | None, str | None, Any] = (None, None, "%")


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
    propagates: bool = True
    handlers: tuple[HandlerState, ...] = ()


_SET_BY_LIBRARIES = LoggerState("google", logging.NOTSET, propagates=False)
"""What Google's clients make of their logger with their first request, which may be kinetic's own:
the next call of the program would ship otherwise. They do it on a host as well."""


@dataclass(frozen=True)
class LoggingState:
    """The loggers that the program has changed."""

    loggers: tuple[LoggerState, ...] = ()
    library = "logging"

    def apply(self) -> None:
        """Set the loggers of this process. A logger that has handlers of its own keeps them."""
        while _added:
            earlier = _added.pop()
            earlier.logger.removeHandler(earlier)
        for state in self.loggers:
            logger = logging.getLogger(state.name)
            logger.setLevel(state.level)
            logger.propagate = state.propagates
            for handler in [h for h in logger.handlers if h.name == _IMPORTED_AHEAD]:
                logger.removeHandler(handler)
            _added.extend(HostHandler(logger, each) for each in state.handlers)


def mark_handlers() -> None:
    """Mark what libraries have added to the root logger that were imported ahead of a function, as
    Orbax does: where the program had begun with handlers of its own, it would not be there."""
    for handler in logging.root.handlers:
        handler.set_name(_IMPORTED_AHEAD)


class HostHandler(logging.StreamHandler[Any]):
    """Writes what its logger gets, unless another handler of the logger does, which the function or
    a module that it imports may add at any time."""

    def __init__(self, logger: logging.Logger, state: HandlerState) -> None:
        super().__init__(getattr(sys, state.stream))
        self.logger = logger
        self.setLevel(state.level)
        self.setFormatter(logging.Formatter(*state.format, validate=False))
        logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record."""
        others = (each for each in self.logger.handlers if not isinstance(each, HostHandler))
        if all(getattr(each, "stream", None) is not self.stream for each in others):
            super().emit(record)


@dataclass(frozen=True)
class AbslState:
    """The verbosity of absl."""

    verbosity: int
    library = "absl.logging"

    def apply(self) -> None:
        """Set it here, where absl is imported."""
        sys.modules["absl.logging"].set_verbosity(self.verbosity)


@dataclass(frozen=True)
class KerasState:
    """What the program has set in Keras.

    Attributes:
        policy: the dtype policy, as Keras serializes it; None for that of the default type.
        seed: of `keras.utils.set_random_seed`; None if it was not called.
    """

    policy: Any = None
    seed: int | None = None
    library = "keras"

    def apply(self) -> None:
        """Set it here, where Keras is imported."""
        keras: Any = sys.modules["keras"]
        if self.policy is not None:
            keras.config.set_dtype_policy(keras.dtype_policies.get(self.policy))
        if self.seed is not None:
            keras.utils.set_random_seed(self.seed)


def read() -> list[LoggingState | AbslState | KerasState]:
    """Return how this process logs, and what this thread has set in Keras."""
    loggers: list[tuple[str, Any]] = sorted(logging.root.manager.loggerDict.items())
    read_all = (
        _read_logger(name, logger)
        for name, logger in [("", logging.root), *loggers]
        if type(logger) in _KINDS and name.partition(".")[0] != _OURS
    )
    changed = tuple(state for state in read_all if state is not None)
    absl: Any = sys.modules.get("absl.logging")
    verbosity = _ABSL_DEFAULT if absl is None else absl.get_verbosity()
    of_absl = [] if verbosity == _ABSL_DEFAULT else [AbslState(verbosity)]
    return [LoggingState(changed), *of_absl, *_read_keras()]


def _read_logger(name: str, logger: logging.Logger) -> LoggerState | None:
    """Describe a logger; None for one that is as Python makes it, or that has filters, without
    which it might write what nobody should see."""
    handlers = [each for each in logger.handlers if type(each) is not logging.NullHandler]
    if logger.filters or any(each.filters for each in handlers):
        return None
    states: list[HandlerState | None] = []
    for handler in handlers:
        with suppress(Exception):  # It is the program's code.
            states.append(_read_handler(handler))
    sent = tuple(each for each in states if each is not None)
    propagates = logger.propagate or len(sent) < len(handlers)
    state = LoggerState(name, logger.level, propagates, sent)
    usual = LoggerState(name, logging.NOTSET if name else logging.WARNING)
    return None if state in (usual, _SET_BY_LIBRARIES) else state


def _read_handler(handler: logging.Handler) -> HandlerState | None:
    """Describe a handler that writes to a standard stream, also through the console of rich, which
    adds level and time itself; None for all others."""
    console = getattr(handler, "console", None)
    stream = getattr(handler, "stream", getattr(console, "file", None))
    for name in ("stdout", "stderr"):
        if stream is not None and stream in (getattr(sys, name), getattr(sys, f"__{name}__")):
            if console is not None:
                return HandlerState(name, handler.level, (logging.BASIC_FORMAT, None, "%"))
            formatter = handler.formatter
            style = _STYLES.get(type(getattr(formatter, "_style", None)))
            if formatter is None or style is None or not isinstance(formatter._fmt, str):
                return HandlerState(name, handler.level)
            return HandlerState(name, handler.level, (formatter._fmt, formatter.datefmt, style))
    return None


def _read_keras() -> list[KerasState]:
    keras: Any = sys.modules.get("keras")
    try:
        policy = keras.config.dtype_policy()
        is_usual = policy.name == keras.config.floatx()
        serialized = None if is_usual else keras.dtype_policies.serialize(policy)
        seed = sys.modules[_KERAS_STATE].get_global_attribute("global_random_seed")
    except (AttributeError, KeyError, TypeError):  # Another version, or not imported.
        return []
    return [] if serialized is None and seed is None else [KerasState(serialized, seed)]
