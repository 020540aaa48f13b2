"""The standard streams of a program, whatever it was started with.

In: descriptors 0, 1 and 2. Out: open ones.
"""

from __future__ import annotations

import codecs
import contextlib
import os
import sys

_ESCAPE = "kinetic-escape"


def replace_closed() -> None:
    """Open /dev/null in place of standard streams that were closed at start (None in Python):
    whatever took their numbers would get what is printed."""
    for fd, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(fd)
        except OSError:
            # open() takes the lowest free descriptor: this one. Child processes inherit it.
            os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(fd, True)
        if getattr(sys, name) is None:
            setattr(sys, name, open(fd, mode, encoding="utf-8", closefd=False))


def escape() -> None:
    """Have stdout show letters that its encoding lacks as escapes, as stderr does."""
    with contextlib.suppress(AttributeError):  # It was replaced by something simpler.
        if sys.stdout.errors == "strict":
            sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
        elif sys.stdout.errors == "surrogateescape" and not _is_utf8(sys.stdout.encoding):
            codecs.register_error(_ESCAPE, _escape_letter)
            sys.stdout.reconfigure(errors=_ESCAPE)  # type: ignore[union-attr]


def _is_utf8(encoding: str) -> bool:
    return codecs.lookup(encoding).name == "utf-8"


def _escape_letter(error: UnicodeError) -> tuple[str | bytes, int]:
    """Return what stands for the first letter that cannot be encoded: bytes of file names are what
    they were (the locale is C), other letters are escapes."""
    assert isinstance(error, UnicodeEncodeError)
    first = UnicodeEncodeError(
        error.encoding, error.object, error.start, error.start + 1, error.reason
    )
    try:
        return codecs.lookup_error("surrogateescape")(first)
    except UnicodeEncodeError:
        return codecs.backslashreplace_errors(first)
