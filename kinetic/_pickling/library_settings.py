"""Settings of libraries in the caller's program that apply on hosts too: logging, absl, Keras.

`logging.basicConfig(level=logging.INFO)` at the top of a script is not part of a function. Without
this module, a host would drop the function's log lines, and build a model of float32 in spite of
`keras.mixed_precision.set_global_policy("mixed_bfloat16")`. The settings are applied once a host
imports the library. Of logging, only levels and formats are sent: handlers for files or sockets may
hold anything, and loggers with filters may hide secrets.
"""

from __future__ import annotations

import logging
import sys
from contextlib import suppress
from typing import Any

from kinetic._core.values import dataclass

_OURS = "kinetic"
_KINDS = (logging.Logger, logging.RootLogger)
"""Classes of loggers that are read; a library's own subclass may have methods with side effects."""
_STYLES: dict[Any, Any] = {style[0]: name for name, style in logging._STYLES.items()}
_IMPORTED_AHEAD = "kinetic-ahead"
_ABSL_DEFAULT = -1
"""Initial verbosity of absl: warnings."""
_KERAS_STATE = "keras.src.backend.common.global_state"
"""Private module of Keras, read because no public function returns the seed."""
_added: list[HostHandler] = []


@dataclass(frozen=True)
class HandlerState:
    """A handler that writes to the output of the process.

    Attributes:
        stream: "stdout" or "stderr".
        level: Lowest level that it writes.
        format: Arguments of `logging.Formatter`: format, date format, style.
    """

    stream: str
    level: int
    format: tuple[str | None, str | None, Any] = (None, None, "%")


@dataclass(frozen=True)
class LoggerState:
    """A logger that the program has changed.

    Attributes:
        name: Name; "" for the root.
        level: Lowest level that it passes on; 0 for its parent's level.
        propagates: True if its parents' handlers also get its records.
        handlers: Handlers that write to the output of the process.
    """

    name: str
    level: int
    propagates: bool = True
    handlers: tuple[HandlerState, ...] = ()


_SET_BY_LIBRARIES = LoggerState("google", logging.NOTSET, propagates=False)
"""State of the logger that Google's client libraries set at their first request, which may be
kinetic's. It is not sent: otherwise two calls, before and after that request, would differ."""


@dataclass(frozen=True)
class LoggingState:
    """The loggers that the program has changed."""

    loggers: tuple[LoggerState, ...] = ()
    library = "logging"

    def apply(self) -> None:
        """Set levels and handlers of this process's loggers. Handlers that user code added stay."""
        while _added:
            earlier = _added.pop()
            earlier.logger.removeHandler(earlier)
        for handler in [h for h in logging.root.handlers if h.name == _IMPORTED_AHEAD]:
            logging.root.removeHandler(handler)
        for state in self.loggers:
            logger = logging.getLogger(state.name)
            logger.setLevel(state.level)
            logger.propagate = state.propagates
            _added.extend(HostHandler(logger, each) for each in state.handlers)


def mark_handlers() -> None:
    """Mark the root logger's handlers, for `LoggingState.apply` to remove. Libraries such as Orbax
    add handlers when they are imported, but not if the program has set up logging before, as it
    had on the caller."""
    for handler in logging.root.handlers:
        handler.set_name(_IMPORTED_AHEAD)


class HostHandler(logging.StreamHandler[Any]):
    """Writes a logger's records, unless the logger gets another handler for the same stream: the
    function or an imported module may add one at any time."""

    def __init__(self, logger: logging.Logger, state: HandlerState) -> None:
        super().__init__(getattr(sys, state.stream))
        self.logger = logger
        self.setLevel(state.level)
        self.setFormatter(logging.Formatter(*state.format, validate=False))
        logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record."""
        others = (other for other in self.logger.handlers if not isinstance(other, HostHandler))
        if all(getattr(other, "stream", None) is not self.stream for other in others):
            super().emit(record)


@dataclass(frozen=True)
class AbslState:
    """The verbosity of absl."""

    verbosity: int
    library = "absl.logging"

    def apply(self) -> None:
        """Set the verbosity; absl must be imported."""
        sys.modules["absl.logging"].set_verbosity(self.verbosity)


@dataclass(frozen=True)
class KerasState:
    """The settings of Keras.

    Attributes:
        policy: Dtype policy, as Keras serializes it; None for that of the default type.
        seed: Seed of `keras.utils.set_random_seed`; None if it was not called.
    """

    policy: Any = None
    seed: int | None = None
    library = "keras"

    def apply(self) -> None:
        """Set policy and seed; Keras must be imported."""
        keras: Any = sys.modules["keras"]
        if self.policy is not None:
            keras.config.set_dtype_policy(keras.dtype_policies.get(self.policy))
        if self.seed is not None:
            keras.utils.set_random_seed(self.seed)


def read() -> list[LoggingState | AbslState | KerasState]:
    """Return the logging of this process, and the settings of Keras in this thread."""
    loggers: list[tuple[str, Any]] = sorted(logging.root.manager.loggerDict.items())
    states = (
        _read_logger(name, logger)
        for name, logger in [("", logging.root), *loggers]
        if type(logger) in _KINDS and name.partition(".")[0] != _OURS
    )
    changed = tuple(state for state in states if state is not None)
    absl: Any = sys.modules.get("absl.logging")
    verbosity = _ABSL_DEFAULT if absl is None else absl.get_verbosity()
    absl_states = [] if verbosity == _ABSL_DEFAULT else [AbslState(verbosity)]
    return [LoggingState(changed), *absl_states, *_read_keras()]


def _read_logger(name: str, logger: logging.Logger) -> LoggerState | None:
    """Describe a logger. None if it has the default settings, or has filters: filters are not
    sent, and without them a host could write secrets."""
    handlers = [handler for handler in logger.handlers if type(handler) is not logging.NullHandler]
    if logger.filters or any(handler.filters for handler in handlers):
        return None
    states: list[HandlerState | None] = []
    for handler in handlers:
        with suppress(Exception):  # The handler may be the program's own class.
            states.append(_read_handler(handler))
    described = tuple(state for state in states if state is not None)
    propagates = logger.propagate or len(described) < len(handlers)
    state = LoggerState(name, logger.level, propagates, described)
    default = LoggerState(name, logging.NOTSET if name else logging.WARNING)
    return None if state in (default, _SET_BY_LIBRARIES) else state


def _read_handler(handler: logging.Handler) -> HandlerState | None:
    """Describe a handler that writes to stdout or stderr; None for all others. A handler of rich
    becomes one with logging's basic format."""
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
        is_default = policy.name == keras.config.floatx()
        serialized = None if is_default else keras.dtype_policies.serialize(policy)
        seed = sys.modules[_KERAS_STATE].get_global_attribute("global_random_seed")
    except (AttributeError, KeyError, TypeError):  # Not imported, or another version.
        return []
    return [] if serialized is None and seed is None else [KerasState(serialized, seed)]
