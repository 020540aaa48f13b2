"""Log messages on stderr, if `KINETIC_LOG_LEVEL` asks for them."""

from __future__ import annotations

import logging

_ours: logging.Handler | None = None


class _Named(logging.Formatter):
    """A formatter that writes the prefix "kinetic: " only once: some messages contain it already,
    for programs that do not configure logging."""

    def format(self, record: logging.LogRecord) -> str:
        return super().format(record).replace("kinetic: kinetic: ", "kinetic: ", 1)


def show(level: str) -> None:
    """Show log messages of this level and above: through the program's own handlers if there are
    any, else on stderr."""
    global _ours
    logger = logging.getLogger("kinetic")
    logger.setLevel(level)
    if _ours is None and not logger.hasHandlers():
        _ours = logging.StreamHandler()
        _ours.setFormatter(_Named("%(name)s: %(message)s"))
        logger.addHandler(_ours)
