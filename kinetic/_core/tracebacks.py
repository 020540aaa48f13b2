"""Errors of kinetic, and Ctrl-C while it waits, are shown at the user's own line: what is said with
them tells what to do.

In: a block of code. Out: the traceback of an error that leaves it.
"""

from __future__ import annotations

from collections.abc import Container
from types import CodeType, TracebackType

from kinetic.errors import KineticError


class _OwnFramesHidden:
    """Drops the frames below the user's call from exceptions of some kinds, its own included: an
    exception that is raised again by `with` gets no entry for that frame."""

    def __init__(self, *kinds: type[BaseException]) -> None:
        self._kinds = kinds

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, self._kinds):
            error.__traceback__ = None


own_frames_hidden = _OwnFramesHidden(KineticError)
waiting_hidden = _OwnFramesHidden(KineticError, KeyboardInterrupt)
"""For waits: where Ctrl-C has struck in one says nothing."""


def drop_frames(
    trace: TracebackType | None, codes: Container[CodeType | None]
) -> TracebackType | None:
    """Return a traceback without its first frames, as far as they run this code."""
    while trace is not None and trace.tb_frame.f_code in codes:
        trace = trace.tb_next
    return trace
