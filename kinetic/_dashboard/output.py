"""What hosts printed, as lines for a page: read on from where the last read ended, or searched.

In: a job's handle, hosts, words. Out: lines of bounded length without control characters but those
that colour a terminal.
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
"""Longer lines are cut."""
TAIL_LINES = 1000
MOST_LINES = 5000
"""What a page keeps, as its script does."""
READ_BYTES = 4 << 20
"""A page gets at most about this much at once, then the rest."""
SEARCH_BYTES = 256 << 20
HITS = 500
_KEPT_CHARS = 4 * LINE_CHARS
_ESCAPE = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[\]P^_X][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b[ -/]*[0-OQ-WYZ\\`-~]"
)
_COLOUR = re.compile(r"(\x1b\[[\d;]*m)")
_CUT_COLOUR = re.compile(r"\x1b[^m]*$")


class OutputLine(NamedTuple):
    """One line.

    Attributes:
        host: that printed it.
        attempt: in which it was printed.
        time_ns: when its end arrived, in nanoseconds since the epoch; 0 if that is unknown.
        is_error: whether it came from stderr.
        text: as shown, with the sequences that colour it.
    """

    host: int
    attempt: int
    time_ns: int
    is_error: bool
    text: str

    def to_json(self) -> list[Any]:
        """Return it in the order that the page's script expects."""
        return [self.host, self.attempt, self.time_ns / 1e9, int(self.is_error), self.text]


class LineFolder:
    """Makes lines of one host's chunks, which may end anywhere. Keeps little of a long line."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._begun = ""
        self._dropped = 0
        self._last: LogChunk | None = None

    def fold(self, chunk: LogChunk, newest: int | None = None) -> Iterator[OutputLine]:
        """Yield the lines that end in a chunk, at most this many of the newest, and the last one of
        an earlier attempt."""
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
        if "\r" in self._begun[:-1]:  # A progress bar: only its latest state counts.
            returned = "\r" if self._begun.endswith("\r") else ""
            self._begun, self._dropped = _latest(self._begun) + returned, 0

    def rest(self) -> str:
        """Return the line that has not ended yet, as shown."""
        return show_line(self._begun, self._dropped)

    def _extend(self, piece: str) -> None:
        room = _KEPT_CHARS - len(self._begun)
        self._dropped += max(len(piece) - room, 0)
        self._begun += piece[:room]

    def _end_line(self, chunk: LogChunk) -> OutputLine:
        words = show_line(self._begun, self._dropped)
        self._begun, self._dropped = "", 0
        return OutputLine(
            chunk.host, chunk.end.attempt, chunk.time_ns, chunk.stream != STDOUT, words
        )


def _latest(line: str) -> str:
    """What a terminal would show of a line that was begun again by carriage returns."""
    return line.rstrip("\r").rpartition("\r")[2]


def show_line(line: str, dropped: int = 0) -> str:
    """Return a line without escape sequences but colours, other control characters written out, and
    its end cut off where it is long."""
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
        """Return the newest of the lines that have ended since the last read, as many as a page
        keeps, and the one that has not ended.

        Raises:
            KineticError: the output cannot be read at present.
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
    """What a search found.

    Attributes:
        lines: that have the words; the first `HITS` of them.
        is_cut: whether there may be more.
        size_bytes: how much was searched.
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
    """Find the lines that have the words, in small or capital letters, in what a host printed, or
    all hosts, in all attempts; end early when that is wanted no more.

    Raises:
        KineticError: the output cannot be read at present.
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
