"""Repair of standard streams that are closed, or cannot print some letters."""

from __future__ import annotations

import codecs
import contextlib
import os
import sys

_ESCAPE = "kinetic-escape"


def replace_closed() -> None:
    """Open /dev/null instead of standard streams that were closed at start (None in Python).
    Otherwise the next file to open would take a stream's number, and receive what is printed."""
    for fd, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(fd)
        except OSError:
            # open() returns the lowest free descriptor: `fd`. Child processes must inherit it.
            os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(fd, True)
        if getattr(sys, name) is None:
            setattr(sys, name, open(fd, mode, encoding="utf-8", closefd=False))


def escape() -> None:
    """Make stdout print an escape for each letter that it cannot encode, as stderr does."""
    with contextlib.suppress(AttributeError):  # A program may have replaced stdout.
        if sys.stdout.errors == "strict":
            sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
        elif sys.stdout.errors == "surrogateescape" and not _is_utf8(sys.stdout.encoding):
            codecs.register_error(_ESCAPE, _escape_letter)
            sys.stdout.reconfigure(errors=_ESCAPE)  # type: ignore[union-attr]


def _is_utf8(encoding: str) -> bool:
    return codecs.lookup(encoding).name == "utf-8"


def _escape_letter(error: UnicodeError) -> tuple[str | bytes, int]:
    """Replace the first letter that cannot be encoded: bytes of a file name stay as they are, other
    letters become escapes."""
    assert isinstance(error, UnicodeEncodeError)
    first = UnicodeEncodeError(
        error.encoding, error.object, error.start, error.start + 1, error.reason
    )
    try:
        return codecs.lookup_error("surrogateescape")(first)
    except UnicodeEncodeError:
        return codecs.backslashreplace_errors(first)
