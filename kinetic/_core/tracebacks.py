"""Errors of kinetic are shown at the user's own line: their message says what to do.

In: a block of code. Out: the traceback of an error that leaves it.
"""

from __future__ import annotations

from kinetic.errors import KineticError


class _OwnFramesHidden:
    """Drops the frames below the user's call from kinetic's errors, its own included: an exception
    that is raised again by `with` gets no entry for that frame."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, KineticError):
            error.__traceback__ = None


own_frames_hidden = _OwnFramesHidden()
