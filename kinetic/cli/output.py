"""The only place that prints: text for people, one JSON document for programs, bytes of logs.

In: values, chunks, errors. Out: stdout and stderr.

rich is loaded only to lay out a table on a terminal; a pipe gets plain aligned text, whole and
without colour.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, BinaryIO

from kinetic._client.board import text
from kinetic.errors import KineticError

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    from kinetic._client.board.line_prefix import Prefixer
    from kinetic._core.log_format import LogChunk

_STATE_STYLES: dict[str, str] = {
    # JobStatus
    "RUNNING": "cyan",
    "PENDING": "yellow",
    "SUCCEEDED": "green",
    "FAILED": "red",
    "CANCELLED": "magenta",
    # HostState
    "running": "cyan",
    "returned": "green",
    "stalled": "yellow",
    "pending": "yellow",
    "joined": "yellow",
    "failed": "red",
    "stopped": "magenta",
    # Activity
    "preparing": "yellow",
    "waiting": "yellow",
    "starting": "yellow",
    "joining": "yellow",
    "silent": "red",
    # findings of `doctor`
    "ok": "green",
    "warn": "yellow",
    "problem": "red",
}


_UNBROKEN = "\N{NO-BREAK SPACE}"


def line(words: str = "") -> None:
    """Print a line."""
    print(words)


def notice(words: str) -> None:
    """Tell something beside the answer, on stderr."""
    sys.stdout.flush()
    print(words, file=sys.stderr, flush=True)


def error(words: str, hint: str = "") -> None:
    """Tell what went wrong and, where it is known, what to do next."""
    notice(_fitted(f"error: {words}" + (f"\n{hint}" if hint else "")))


def _fitted(words: str) -> str:
    """On a terminal, break lines between words, not within `commands`; lines that begin with a
    blank (traces) stay whole."""
    if not sys.stderr.isatty():
        return words
    import re
    import shutil
    from textwrap import fill

    columns = shutil.get_terminal_size().columns
    lines = re.sub(r"`[^`\n]+`", lambda command: command[0].replace(" ", _UNBROKEN), words).split(
        "\n"
    )
    fitted = "\n".join(
        line
        if line[:1].isspace()
        else fill(line, columns, break_long_words=False, break_on_hyphens=False)
        for line in lines
    )
    return fitted.replace(_UNBROKEN, " ")


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


def table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    right: Sequence[str] = (),
    cut: str = "",
    wrap: str = "",
) -> None:
    """Print rows below a head line: laid out to the width of a terminal, or plain and whole in a
    pipe.

    On a narrow terminal only the column `cut` is cut short, and only the column `wrap` takes
    several lines: what people copy and compare stays whole.
    """
    kept = [tuple(map(text.printable, row)) for row in rows]
    if not sys.stdout.isatty():
        print(text.aligned(columns, kept))
        return
    from rich.console import Console

    Console(highlight=False, markup=False, emoji=False).print(
        _grid(columns, kept, right, {cut, wrap}, wrap)
    )


def width() -> int | None:
    """Return the columns of the terminal; None for a pipe, which takes any width."""
    import shutil

    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


class Screen:
    """A table that is drawn over and over on a terminal of its own, until somebody presses q."""

    def __enter__(self) -> Screen:
        from rich.console import Console
        from rich.live import Live

        self._console = Console(highlight=False, markup=False, emoji=False)
        self._live = Live(console=self._console, screen=True, auto_refresh=False)
        self._keys = _Keys()
        self._keys.open()
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()
        self._keys.close()

    @property
    def size(self) -> tuple[int, int]:
        """Columns and lines, now."""
        return self._console.size.width, self._console.size.height

    def show(
        self,
        head: str,
        columns: Sequence[str],
        rows: Iterable[Sequence[str]],
        foot: str,
        *,
        right: Sequence[str],
        cut: str,
    ) -> None:
        """Draw a table between a line above and a line below."""
        from rich.console import Group
        from rich.text import Text

        kept = [tuple(map(text.printable, row)) for row in rows]
        above = Text(f"{head}\n", no_wrap=True, overflow="ellipsis")
        self._live.update(
            Group(above, _grid(columns, kept, right, {cut}, ""), Text(foot, style="dim")),
            refresh=True,
        )

    def wait(self, seconds: float) -> bool:
        """Wait; return whether somebody pressed q meanwhile."""
        return self._keys.quits_within(seconds)


class _Keys:
    """Keys of the terminal, one by one and unseen; nothing where there is no keyboard."""

    def open(self) -> None:
        """Take each key as it is pressed."""
        self._before: list[Any] | None = None
        if sys.stdin.isatty():
            import termios
            import tty

            self._before = termios.tcgetattr(sys.stdin)
            tty.setcbreak(sys.stdin)  # Ctrl-C goes on interrupting

    def close(self) -> None:
        """Give the keyboard back as it was."""
        if self._before is not None:
            import termios

            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, self._before)

    def quits_within(self, seconds: float) -> bool:
        """Wait so long; return at once, and True, when q is pressed or the keyboard is gone."""
        import os
        import select
        import time

        until = time.monotonic() + seconds
        watched = [sys.stdin] if self._before is not None else []
        while select.select(watched, [], [], max(0.0, until - time.monotonic()))[0]:
            key = os.read(sys.stdin.fileno(), 1)
            if key in (b"q", b"Q", b"\x04", b""):
                return True
        return False


def _grid(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    right: Sequence[str],
    elastic: set[str],
    wrap: str,
) -> Table:
    from rich.table import Table
    from rich.text import Text

    grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for index, name in enumerate(columns):
        widest = max([len(name), *(len(row[index]) for row in rows)])
        grid.add_column(
            Text(name, no_wrap=True, overflow="ellipsis"),
            no_wrap=name not in elastic,
            justify="right" if name in right else "left",
            min_width=None if name in elastic else widest,
        )
    for row in rows:
        cells = zip(columns, row, strict=True)
        grid.add_row(*(_cell(c, wraps=name == wrap) for name, c in cells))
    return grid


def _cell(words: str, *, wraps: bool) -> Text:
    from rich.text import Text

    return Text(
        words,
        _style(words),
        no_wrap=not wraps,
        overflow="fold" if wraps else "ellipsis",
    )


def _style(words: str) -> str:
    if words in _STATE_STYLES:
        return _STATE_STYLES[words]
    from kinetic._core.exits import Exit

    return _STATE_STYLES[Exit(words).kind.shown] if words in set(Exit) else ""


def failure(problem: BaseException) -> None:
    """Print what a job raised: as Python would, with the frames of the host, or as ours where it is
    ours."""
    import traceback

    if isinstance(problem, KineticError):
        return error("\n".join([str(problem), *getattr(problem, "__notes__", ())]).rstrip())
    return notice("".join(traceback.format_exception(problem)).rstrip())


def copy_log(chunks: Iterable[LogChunk | None], prefixer: Prefixer, *, flush: bool) -> bool:
    """Copy a log to stdout, byte for byte but for the marks of the prefixer; return whether there
    was anything.

    With `flush`, each chunk is seen at once.
    """
    streams, anything = Streams(), False
    for chunk in prefixer.joined(chunks):
        if chunk is None:
            continue
        anything = True
        streams.stdout(prefixer.add(chunk))
        if flush:
            streams.flush()
    streams.stdout(prefixer.end())
    streams.flush()
    return anything


def copy_output(chunks: Iterable[LogChunk | None], stdout: Prefixer, stderr: Prefixer) -> None:
    """Copy the output of a program as it comes, each of its streams to ours, so that it can be
    piped as if it ran here."""
    from kinetic._core.log_format import STDERR

    streams = Streams()
    for chunk in stdout.joined(chunks):
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
    """Where bytes of logs go: unmodified to the binary side of stdout and stderr, or as text where
    there is none."""

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


def replace_closed_streams() -> None:
    """Put /dev/null where this process was started without a standard stream, which Python calls
    None."""
    import os

    for fd, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(fd)
        except OSError:
            # The lowest that is free: this one. Programs that are started inherit it.
            os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(fd, True)
        if getattr(sys, name) is None:
            setattr(sys, name, open(fd, mode, encoding="utf-8", closefd=False))


def silence_stdout() -> None:
    """Send what is still to be written nowhere: the reader of the pipe has gone."""
    import os

    # Closing stdout at exit flushes it; without this the interpreter would complain about the pipe
    # once more.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, sys.stdout.fileno())
    except (OSError, ValueError):  # stdout was replaced by something without a descriptor
        pass
    finally:
        os.close(nowhere)
