"""What the caller's program has set in libraries: a function logs, and builds its model, on a host
as it would here.

In: the loggers of this process, Keras. Out: levels, and the handlers that write to its output; what
differs from Keras's defaults; set on a host.

`logging.basicConfig(level=logging.INFO)` at the top of a script is not part of a function: without
this, a host would drop what the function logs, and build a model of float32 in spite of
`keras.mixed_precision.set_global_policy("mixed_bfloat16")`. Of logging only levels and formats
travel: handlers that write elsewhere (files, sockets) and formatters of other classes may hold
anything, and stay here. So do loggers with filters, which may hide something. Libraries add their
own handlers where they are imported.
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
_AHEAD = "kinetic-ahead"
_USUAL_VERBOSITY = -1
"""Of absl: warnings."""
_added: list[HostHandler] = []
_KERAS_DEFAULTS = {"floatx": "float32", "epsilon": 1e-7, "image_data_format": "channels_last"}
_KERAS_STATE = "keras.src.backend.common.global_state"
"""Private to Keras, which has no other way to tell whether a policy or a seed was set."""


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
            for handler in [h for h in logger.handlers if each.handlers and h.name == _AHEAD]:
                logger.removeHandler(handler)
            _added.extend(HostHandler(logger, made) for made in each.handlers)


def mark_handlers() -> None:
    """Mark what libraries have added to the root logger that were imported ahead of a function, as
    Orbax does: where the program had begun with handlers of its own, it would not be there."""
    for handler in logging.root.handlers:
        handler.set_name(_AHEAD)


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


def read() -> list[LoggingState | KerasState | SeedState]:
    """Return how this process logs, and what this thread has set in Keras."""
    return [_read_logging(), *_read_keras()]


def _read_logging() -> LoggingState:
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
        # The program has parsed its flags, and a host has none: nothing to warn of.
        vars(absl)["_warn_preinit_stderr"] = False
    absl.set_verbosity(verbosity)


@dataclass(frozen=True)
class KerasState:
    """What the program has set.

    Attributes:
        config: values of `keras.config`, by name.
        policy: the dtype policy, as Keras serializes it; None for that of the default type.
        seed: of `keras.utils.set_random_seed`; None if it was not called.
    """

    config: dict[str, Any]
    policy: Any = None
    seed: int | None = None
    library = "keras"

    def apply(self) -> None:
        """Set it here, where Keras is imported."""
        keras: Any = sys.modules.get("keras")
        if keras is None:
            return
        for name, value in self.config.items():
            getattr(keras.config, f"set_{name}")(value)
        if self.policy is not None:
            keras.config.set_dtype_policy(keras.dtype_policies.get(self.policy))
        if self.seed is not None:
            random, numpy = sys.modules["random"], sys.modules["numpy"].random
            kept = random.getstate(), numpy.get_state()  # The function may have seeded them.
            keras.utils.set_random_seed(self.seed)
            random.setstate(kept[0])
            numpy.set_state(kept[1])


@dataclass(frozen=True)
class SeedState:
    """A seed of `keras.utils.set_random_seed` for another library's generator."""

    library: str
    seed: int

    def apply(self) -> None:
        """Seed it here."""
        sys.modules[self.library].seed(self.seed)


def _read_keras() -> list[KerasState | SeedState]:
    keras: Any = sys.modules.get("keras")
    try:
        now = {name: getattr(keras.config, name)() for name in _KERAS_DEFAULTS}
        find: Any = getattr(sys.modules[_KERAS_STATE], "get_global_attribute", None)
        policy, seed = find("dtype_policy"), find("global_random_seed")
        if policy is not None:
            policy = (
                None if policy.name == now["floatx"] else keras.dtype_policies.serialize(policy)
            )
    except (AttributeError, KeyError, TypeError):  # Another version, or not imported.
        return []
    config = {name: value for name, value in now.items() if value != _KERAS_DEFAULTS[name]}
    if not config and policy is None and seed is None:
        return []
    seeds = [] if seed is None else [SeedState(name, seed) for name in ("random", "numpy.random")]
    return [*seeds, KerasState(config, policy, seed)]
