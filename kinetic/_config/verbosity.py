"""Log messages on stderr, if `KINETIC_LOG_LEVEL` asks for them.

In: a level. Out: the "kinetic" logger shows messages from that level on.
"""

from __future__ import annotations

import logging

_ours: logging.Handler | None = None


class _Named(logging.Formatter):
    """Drops a doubled "kinetic: ": some messages begin with it, for programs without logging."""

    def format(self, record: logging.LogRecord) -> str:
        return super().format(record).replace("kinetic: kinetic: ", "kinetic: ", 1)


def show(level: str) -> None:
    """Show messages from this level on: by the program's own handlers if it has some, else on
    stderr."""
    global _ours
    logger = logging.getLogger("kinetic")
    logger.setLevel(level)
    if _ours is None and not logger.hasHandlers():
        _ours = logging.StreamHandler()
        _ours.setFormatter(_Named("%(name)s: %(message)s"))
        logger.addHandler(_ours)
