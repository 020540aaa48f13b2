"""The only place that prints: text for people, one JSON document for programs, bytes of logs.

In: values, chunks, errors. Out: stdout and stderr. Called by `main` and by every command.

rich is loaded only to lay out a table on a terminal; a pipe gets plain aligned text, whole and without colour.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, BinaryIO

from kinetic.cli import text
from kinetic.job.logformat import STDERR

if TYPE_CHECKING:
    from kinetic.cli.prefix import Prefixer
    from kinetic.job.logformat import LogChunk

_STATE_STYLES = {"RUNNING": "cyan", "PENDING": "yellow", "SUCCEEDED": "green", "FAILED": "red", "CANCELLED": "magenta"}


def line(words: str = "") -> None:
    """Print a line."""
    print(words)


def notice(words: str) -> None:
    """Tell something beside the answer, on stderr."""
    sys.stdout.flush()
    print(words, file=sys.stderr, flush=True)


def error(words: str, hint: str = "") -> None:
    """Tell what went wrong and, where it is known, what to do next."""
    notice(f"error: {words}" + (f"\n{hint}" if hint else ""))


def traceback_of(problem: BaseException) -> None:
    """Print the whole traceback on stderr."""
    import traceback

    notice("".join(traceback.format_exception(problem)).rstrip())


def json_document(value: Any, default: Callable[[Any], Any] | None = None) -> None:
    """Print exactly one JSON document.

    Raises:
        TypeError, ValueError: the value has no JSON form.
    """
    import json

    print(json.dumps(value, indent=2, ensure_ascii=False, default=default, allow_nan=False))


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, right: Sequence[str] = ()) -> None:
    """Print rows below a head line: laid out to the width of a terminal, or plain and whole in a pipe."""
    kept = [tuple(map(text.printable, row)) for row in rows]
    if sys.stdout.isatty():
        _terminal_table(columns, kept, right)
    else:
        print(text.aligned(columns, kept))


def _terminal_table(columns: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for index, name in enumerate(columns):
        # The first column is what people copy: it is never cut.
        grid.add_column(name, no_wrap=True, overflow="ellipsis", justify="right" if name in right else "left")
        grid.columns[index].min_width = max([len(row[index]) for row in rows], default=0) if index == 0 else None
    for row in rows:
        grid.add_row(*(Text(cell, style=_STATE_STYLES.get(cell, "")) for cell in row))
    Console(highlight=False, markup=False).print(grid)


def copy_output(chunks: Iterable[LogChunk | None], stdout: Prefixer, stderr: Prefixer) -> None:
    """Copy the output of a program as it comes, each of its streams to ours, so that it can be piped as if it ran here."""
    streams = Streams()
    for chunk in chunks:
        if chunk is None:
            continue
        if chunk.stream == STDERR:
            streams.stderr(stderr.add(chunk))
        else:
            streams.stdout(stdout.add(chunk))
            streams.flush()
    streams.stdout(stdout.end())
    streams.stderr(stderr.end())
    streams.flush()


class Streams:
    """Where bytes of logs go: unmodified to the binary side of stdout and stderr, or as text where there is none."""

    def __init__(self) -> None:
        sys.stdout.flush()
        self._stdout: BinaryIO | None = getattr(sys.stdout, "buffer", None)
        self._stderr: BinaryIO | None = getattr(sys.stderr, "buffer", None)

    def stdout(self, data: bytes) -> None:
        """Write to stdout, in order with what was printed there."""
        if self._stdout is None:
            sys.stdout.write(data.decode(errors="replace"))
        else:
            self._stdout.write(data)

    def stderr(self, data: bytes) -> None:
        """Write to stderr, at once."""
        if self._stderr is None:
            sys.stderr.write(data.decode(errors="replace"))
        else:
            self._stderr.write(data)
        sys.stderr.flush()

    def flush(self) -> None:
        """Let the reader see all that was written."""
        sys.stdout.flush()


def failure(problem: BaseException) -> None:
    """Print what a job raised as Python would: its type, its message, and the notes with the remote traceback."""
    import traceback

    notice("".join(traceback.format_exception_only(problem)).rstrip())


def copy_log(chunks: Iterable[LogChunk | None], prefixer: Prefixer, *, flush: bool) -> None:
    """Copy a log to stdout, byte for byte but for the marks of the prefixer; with `flush`, each chunk is seen at once."""
    streams = Streams()
    for chunk in chunks:
        if chunk is None:
            continue
        streams.stdout(prefixer.add(chunk))
        if flush:
            streams.flush()
    streams.stdout(prefixer.end())
    streams.flush()


def silence_stdout() -> None:
    """Send what is still to be written nowhere: the reader of the pipe has gone."""
    import os

    # Closing stdout at exit flushes it; without this the interpreter would complain about the pipe once more.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, sys.stdout.fileno())
    except (OSError, ValueError):  # stdout was replaced by something without a descriptor
        pass
    finally:
        os.close(nowhere)
