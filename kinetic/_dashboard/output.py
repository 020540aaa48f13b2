"""Output of hosts as lines for a page: the lines since the last read, or the matches of a search.

Lines have a bounded length, and the only escape sequences in them are colours.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from kinetic._backends.base import LogRequest
from kinetic._client.board import text
from kinetic._core.log_format import STDOUT, LogChunk, Position

if TYPE_CHECKING:
    from kinetic._client.handle import JobHandle

LINE_CHARS = 4000
"""Longer lines are truncated."""
TAIL_LINES = 1000
MOST_LINES = 5000
"""Maximum number of lines on a page; its script has the same limit."""
READ_BYTES = 4 << 20
"""Approximate number of bytes that one read takes; the next read continues."""
SEARCH_BYTES = 256 << 20
HITS = 500
_BUFFER_CHARS = 4 * LINE_CHARS
_ESCAPE = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[\]P^_X][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b[ -/]*[0-OQ-WYZ\\`-~]"
)
_COLOUR = re.compile(r"(\x1b\[[\d;]*m)")
_CUT_COLOUR = re.compile(r"\x1b[^m]*$")


class OutputLine(NamedTuple):
    """One line.

    Attributes:
        host: host that printed it.
        attempt: attempt in which it was printed.
        time_ns: when the end of the line arrived, in nanoseconds since the epoch; 0 if unknown.
        is_error: True if it came from stderr.
        text: the line for display, with its colour sequences.
    """

    host: int
    attempt: int
    time_ns: int
    is_error: bool
    text: str

    def to_json(self) -> list[Any]:
        """Return the fields in the order that the page's script expects."""
        return [self.host, self.attempt, self.time_ns / 1e9, int(self.is_error), self.text]


class LineFolder:
    """Splits the chunks of one host, which may end inside a line, into lines. Stores only the
    beginning of a long line."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._begun = ""
        self._dropped = 0
        self._last: LogChunk | None = None

    def fold(self, chunk: LogChunk, newest: int | None = None) -> Iterator[OutputLine]:
        """Yield the lines that end in this chunk; with `newest`, only the last `newest` lines. Also
        yield the unfinished line of an earlier attempt."""
        before, self._last = self._last, chunk
        if before is not None and before.end.attempt != chunk.end.attempt and self._begun:
            yield self._end_line(before)
        *ended, rest = self._decoder.decode(chunk.data).split("\n")
        if newest is not None and len(ended) > newest:
            ended, self._begun, self._dropped = ended[-newest:], "", 0
        for piece in ended:
            self._extend(piece)
            yield self._end_line(chunk)
        self._extend(rest)
        if "\r" in self._begun[:-1]:  # A progress bar: keep only its latest state.
            returned = "\r" if self._begun.endswith("\r") else ""
            self._begun, self._dropped = _latest(self._begun) + returned, 0

    def rest(self) -> str:
        """Return the unfinished line for display."""
        return format_line(self._begun, self._dropped)

    def _extend(self, piece: str) -> None:
        room = _BUFFER_CHARS - len(self._begun)
        self._dropped += max(len(piece) - room, 0)
        self._begun += piece[:room]

    def _end_line(self, chunk: LogChunk) -> OutputLine:
        words = format_line(self._begun, self._dropped)
        self._begun, self._dropped = "", 0
        return OutputLine(
            chunk.host, chunk.end.attempt, chunk.time_ns, chunk.stream != STDOUT, words
        )


def _latest(line: str) -> str:
    """Return the part of a line after its last carriage return, as a terminal shows it."""
    return line.rstrip("\r").rpartition("\r")[2]


def format_line(line: str, dropped: int = 0) -> str:
    """Return a line for display: without escape sequences except colours, with other control
    characters escaped, and truncated."""
    parts = _COLOUR.split(_latest(line))
    parts[::2] = [text.printable_lines(_ESCAPE.sub("", part)) for part in parts[::2]]
    whole = "".join(parts)
    more = max(len(whole) - LINE_CHARS, 0) + dropped
    cut = _CUT_COLOUR.sub("", whole[:LINE_CHARS])
    return f"{cut} … {more:,} more characters" if more else whole


class OutputReader:
    """Reads the output of one host, for one page."""

    def __init__(self, handle: JobHandle[Any], host: int) -> None:
        self._handle = handle
        self._request = LogRequest(hosts=(host,), follow=False, tail=TAIL_LINES)
        self._host = host
        self._after: Position | None = None
        self._folder = LineFolder()

    def read(self) -> tuple[list[OutputLine], str]:
        """Return the newest lines that have ended since the last read, at most `MOST_LINES`, and
        the unfinished line.

        Raises:
            KineticError: the output cannot be read.
        """
        request = self._request
        if self._after is not None:
            request = replace(request, tail=None, after={self._host: self._after})
        lines: list[OutputLine] = []
        size_bytes = 0
        for chunk in self._handle.chunks(request):
            if chunk is None:
                continue
            lines += self._folder.fold(chunk, MOST_LINES)
            self._after = chunk.end
            size_bytes += len(chunk.data)
            if size_bytes > READ_BYTES:
                break
        return lines[-MOST_LINES:], self._folder.rest()


class SearchResult(NamedTuple):
    """The matches of a search.

    Attributes:
        lines: the first `HITS` matching lines.
        is_cut: True if there may be more matching lines.
        size_bytes: size of the output that was searched.
    """

    lines: list[OutputLine]
    is_cut: bool
    size_bytes: int


def search(
    handle: JobHandle[Any],
    host: int | None,
    words: str,
    *,
    is_wanted: Callable[[], bool] = lambda: True,
) -> SearchResult:
    """Find the lines that contain the words, ignoring case, in the output of a host or of all
    hosts, in all attempts. Stop early when `is_wanted()` becomes false.

    Raises:
        KineticError: the output cannot be read.
    """
    wanted, size_bytes = words.casefold(), 0
    lines: list[OutputLine] = []
    folders: dict[int, LineFolder] = {}
    request = LogRequest(hosts=None if host is None else (host,), follow=False)
    for chunk in handle.chunks(request):
        if chunk is None:
            continue
        size_bytes += len(chunk.data)
        folder = folders.setdefault(chunk.host, LineFolder())
        for line in folder.fold(chunk):
            if wanted in _COLOUR.sub("", line.text).casefold():
                lines.append(line)
        if len(lines) >= HITS or size_bytes >= SEARCH_BYTES or not is_wanted():
            return SearchResult(lines[:HITS], True, size_bytes)
    for host_of_rest, folder in folders.items():
        if wanted in _COLOUR.sub("", rest := folder.rest()).casefold():
            lines.append(OutputLine(host_of_rest, 0, 0, False, rest))
    return SearchResult(lines, False, size_bytes)
