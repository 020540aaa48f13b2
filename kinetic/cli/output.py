"""Output of commands: text, one JSON document, or bytes of logs. Only this module prints.

rich is imported only for a table on a terminal; a pipe gets plain aligned text, without truncation
and colours.
"""

from __future__ import annotations

import itertools
import signal
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

from kinetic._client.board import text
from kinetic.errors import KineticError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from kinetic._client.board.line_prefix import Prefixer
    from kinetic._core.log_format import LogChunk

_LINES_BELOW = 3


def line(words: str = "") -> None:
    """Print a line."""
    print(words)


def flush() -> None:
    """Flush stdout, so that the reader of a pipe gets everything printed so far."""
    sys.stdout.flush()


def notice(words: str) -> None:
    """Print a message on stderr, to keep it out of the command's result."""
    sys.stdout.flush()
    try:
        print(words, file=sys.stderr, flush=True)
    except OSError:  # stderr is closed or its disk full: still finish the command.
        _silence(sys.stderr)


def error(words: str, hint: str = "") -> None:
    """Print an error, and below it a hint on what to do next if there is one."""
    words = text.printable_lines(words)
    notice(f"error: {words}" + (f"\n{hint}" if hint else ""))


def traceback_of(problem: BaseException) -> None:
    """Print the whole traceback on stderr."""
    import traceback

    notice("".join(traceback.format_exception(problem)).rstrip())


def json_number(value: float) -> float | str:
    """Return a number for JSON. Numbers that are not finite become "NaN", "Infinity" or
    "-Infinity", which JavaScript and Python can convert back."""
    import math  # Slow to import; few commands need it.

    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def json_document(value: Any, default: Callable[[Any], Any] | None = None) -> None:
    """Print exactly one JSON document.

    Raises:
        TypeError, ValueError: the value has no JSON form.
    """
    import json

    ascii_only = "utf" not in (sys.stdout.encoding or "utf").lower()  # Use JSON's escapes.
    print(json.dumps(value, indent=2, ensure_ascii=ascii_only, default=default, allow_nan=False))


def table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    left_out: Collection[str] = (),
    right: Sequence[str] = (),
    cut: str = "",
    wrap: str = "",
    below: str | None = None,
) -> None:
    """Print rows below a header, without the columns in `left_out`. The table is fitted to the
    width of a terminal; in a pipe it is plain and complete.

    On a narrow terminal only the column `cut` is truncated and only the column `wrap` is wrapped,
    so that ids and other cells stay complete for copying. On any terminal the text of the column
    `below` is printed below its row, in at most `_LINES_BELOW` lines. `right` names the columns to
    align on the right.
    """
    columns, clean = _choose_columns(columns, rows, left_out)
    if not sys.stdout.isatty():
        print(text.align_table(columns, clean))
        return
    from rich.console import Console

    console = Console(highlight=False, markup=False, emoji=False)
    if below is not None and below in columns:
        at = columns.index(below)
        narrow = [(*row[:at], *row[at + 1 :]) for row in (columns, *clean)]
        grid = _grid(narrow[0], narrow[1:], right, {cut}, "")
        return _print_with_lines_below(console, grid, ["", *(row[at] for row in clean)])
    return console.print(_grid(columns, clean, right, {cut, wrap}, wrap))


def _print_with_lines_below(console: Console, grid: Table, below: Sequence[str]) -> None:
    from textwrap import wrap

    from rich.segment import Segment, Segments

    width = max(console.width - 3, 20)
    lines = console.render_lines(grid, pad=False)
    for line, words in zip(lines, below, strict=True):
        console.print(Segments([*line, Segment.line()]), end="")
        for more in wrap(words, width, max_lines=_LINES_BELOW, placeholder=" …"):
            console.print(f"  {more}", style="dim", soft_wrap=True)


def width() -> int | None:
    """Return the terminal's width in columns; None for a pipe, which takes any width."""
    if not sys.stdout.isatty():
        return None
    import shutil  # The import takes 5 ms.

    return shutil.get_terminal_size().columns


def can_redraw() -> bool:
    """True if stdout is a terminal that can move its cursor; Emacs' shell cannot."""
    from kinetic._client.board import console

    return console.can_redraw(sys.stdout)


def can_draw() -> bool:
    """True if stdout is a terminal whose encoding has the Braille dots of a chart."""
    try:
        "⣿".encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return sys.stdout.isatty()


_ENDING_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


def _exit_on_signal(signum: int, _: object) -> NoReturn:
    """Raise SystemExit, so that `Screen` restores the terminal before the process ends."""
    sys.exit(128 + signum)


class Screen:
    """A full-screen table that can be redrawn until the user presses q."""

    def __enter__(self) -> Screen:
        from rich.console import Console
        from rich.live import Live

        self._console = Console(highlight=False, markup=False, emoji=False)
        self._live = Live(console=self._console, screen=True, auto_refresh=False)
        self._keys = _Keys()
        ending = (
            number for number in _ENDING_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN
        )
        self._before = {number: signal.signal(number, _exit_on_signal) for number in ending}
        self._keys.open()
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()
        self._keys.close()
        for signum, handler in self._before.items():
            signal.signal(signum, handler)

    @property
    def size(self) -> tuple[int, int]:
        """The terminal's present width and height, in columns and lines."""
        return self._console.size.width, self._console.size.height

    def show(
        self,
        head: str,
        columns: Sequence[str],
        rows: Iterable[Sequence[str]],
        foot: str,
        *,
        left_out: Collection[str] = (),
        right: Sequence[str],
        cut: str,
    ) -> None:
        """Draw a table between a headline and a footer."""
        from rich.console import Group
        from rich.text import Text

        columns, clean = _choose_columns(columns, rows, left_out)
        above = Text(f"{head}\n", no_wrap=True, overflow="ellipsis")
        self._live.update(
            Group(
                above, _grid(columns, clean, right, {cut}, ""), Text.from_ansi(foot, style="dim")
            ),
            refresh=True,
        )

    def wait(self, seconds: float) -> bool:
        """Wait this many seconds. Return True as soon as the user presses q."""
        return self._keys.quits_within(seconds)


class _Keys:
    """Reads single keys of the terminal without echo; does nothing if stdin is not a terminal."""

    def open(self) -> None:
        """Switch the terminal to single keys."""
        self._saved: list[Any] | None = None
        if sys.stdin.isatty():
            import termios
            import tty

            self._saved = termios.tcgetattr(sys.stdin)
            tty.setcbreak(sys.stdin)  # Unlike raw mode, Ctrl-C still interrupts.

    def close(self) -> None:
        """Restore the terminal."""
        if self._saved is not None:
            import termios

            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, self._saved)

    def quits_within(self, seconds: float) -> bool:
        """Wait this many seconds. Return True as soon as q is pressed or stdin ends."""
        import os
        import select
        import time

        until = time.monotonic() + seconds
        watched = [sys.stdin] if self._saved is not None else []
        while select.select(watched, [], [], max(0.0, until - time.monotonic()))[0]:
            key = os.read(sys.stdin.fileno(), 1)
            if key in (b"q", b"Q", b"\x04", b""):
                return True
        return False


def _choose_columns(
    columns: Sequence[str], rows: Iterable[Sequence[str]], left_out: Collection[str]
) -> tuple[list[str], list[tuple[str, ...]]]:
    """Return the visible columns and rows, without control characters."""
    visible = [name not in left_out for name in columns]
    clean = [tuple(map(text.printable, itertools.compress(row, visible))) for row in rows]
    return list(itertools.compress(columns, visible)), clean


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
    from kinetic._client.board import colours
    from kinetic._core.exits import Exit

    state = str(Exit(words).kind.state) if words in set(Exit) else words.lower()
    return colours.TERMINAL.get(colours.STATES.get(state, ""), "")


def failure(problem: BaseException) -> None:
    """Print the exception of a failed job as Python does, with the host's frames. For kinetic's own
    errors, print only the message."""
    import traceback

    if isinstance(problem, KineticError):
        return error("\n".join([str(problem), *getattr(problem, "__notes__", ())]).rstrip())
    return notice(text.printable_lines("".join(traceback.format_exception(problem)).rstrip()))


def copy_log(chunks: Iterable[LogChunk | None], prefixer: Prefixer, *, flush: bool) -> bool:
    """Copy a log to stdout, byte for byte except for prefixes; return True if there was any output.

    With `flush`, flush after each chunk.
    """
    sys.stdout.flush()
    anything = False
    for chunk in chunks:
        if chunk is None:
            continue
        anything = True
        sys.stdout.buffer.write(prefixer.add(chunk))
        if flush:
            sys.stdout.flush()
    sys.stdout.buffer.write(prefixer.end())
    sys.stdout.flush()
    return anything


def copy_output(chunks: Iterable[LogChunk | None], stdout: Prefixer, stderr: Prefixer) -> None:
    """Copy a program's output as it arrives: its stdout to stdout and its stderr to stderr, so that
    it can be piped like the output of a local program."""
    from kinetic._core.log_format import STDERR

    sys.stdout.flush()
    for chunk in chunks:
        if chunk is None:
            continue
        stream, prefixer = (sys.stderr, stderr) if chunk.stream == STDERR else (sys.stdout, stdout)
        stream.buffer.write(prefixer.add(chunk))
        stream.flush()
    for stream, prefixer in ((sys.stdout, stdout), (sys.stderr, stderr)):
        stream.buffer.write(prefixer.end())
        stream.flush()


def silence_stdout() -> None:
    """Discard everything printed from now on, because the reader of the pipe has closed it."""
    _silence(sys.stdout)


def silence_broken_stdout() -> str:
    """If stdout cannot be written, discard all further output and return why; "" if it works."""
    try:
        sys.stdout.flush()
    except OSError as error:
        silence_stdout()
        return error.strerror or str(error)
    return ""


def _silence(stream: TextIO) -> None:
    import os

    # Otherwise the interpreter flushes the stream at exit and reports the broken pipe again.
    devnull = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(devnull, stream.fileno())
    except (OSError, ValueError):  # The stream was replaced by one without a file descriptor.
        pass
    finally:
        os.close(devnull)
