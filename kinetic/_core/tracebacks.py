"""Removal of kinetic's frames from tracebacks, so that an error points at the user's own line."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar, cast

from kinetic.errors import KineticError

F = TypeVar("F", bound=Callable[..., Any])

_PACKAGE = __file__.removesuffix("_core/tracebacks.py")
_entry_files = {__file__}
"""Files of public functions, whose frames lie between the user's call and an error."""


class _FrameHider:
    """Decorator for a public function or method; `with hide_frames:` does the same for a block, for
    example in a generator or a coroutine.

    A `KineticError` keeps only frames of user code. A KeyboardInterrupt keeps none, because the
    interrupted line of a wait is of no interest. Any other exception loses the leading frames of
    public functions, but keeps those below, which show a fault within kinetic.
    """

    def __call__(self, entry: F) -> F:
        _entry_files.add(entry.__code__.co_filename)

        @functools.wraps(entry)
        def call(*args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True  # Notebooks and pytest hide this frame.
            with self:
                return entry(*args, **kwargs)

        return cast("F", call)

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        # A `with` statement adds no entry for this frame when it re-raises. The base class's method
        # also works for exceptions that refuse assignments, such as frozen dataclasses.
        if isinstance(error, KeyboardInterrupt):
            BaseException.with_traceback(error, None)
        elif isinstance(error, KineticError):
            BaseException.with_traceback(error, _skip_own_frames(error.__traceback__))
        elif error is not None:
            BaseException.with_traceback(error, _skip_entries(error.__traceback__))


hide_frames = _FrameHider()


def _skip_own_frames(trace: TracebackType | None) -> TracebackType | None:
    rest = trace
    while trace is not None:
        if trace.tb_frame.f_code.co_filename.startswith(_PACKAGE):
            rest = trace.tb_next
        trace = trace.tb_next
    return rest


def _skip_entries(trace: TracebackType | None) -> TracebackType | None:
    rest = trace
    while rest is not None and rest.tb_frame.f_code.co_filename in _entry_files:
        rest = rest.tb_next
    return rest or trace
