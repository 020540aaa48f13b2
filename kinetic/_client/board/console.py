"""What a job says on this process's streams: its output, and the library's notices on stderr.

In: `LogChunk`s, sentences. Out: bytes on stdout and stderr. The only module of the library that
writes there.
"""

from __future__ import annotations

import atexit
import codecs
import logging
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

from kinetic._client.board.line_prefix import Prefixer
from kinetic._core.log_format import STDERR, LogChunk

_log = logging.getLogger("kinetic.following")


def can_redraw(stream: TextIO | None) -> bool:
    """Whether a line can be written over on this stream: a terminal, and not a dumb one."""
    from kinetic._config import settings

    try:
        is_terminal = stream is not None and stream.isatty()
    except (OSError, ValueError, AttributeError):  # A notebook's, or one that is closed.
        return False
    kind = settings.variables().get("TERM", "").lower()
    return is_terminal and kind not in ("dumb", "unknown")


class Printer:
    """Writes output to this process's stdout and stderr: the same bytes, on the same stream, at
    once.

    Promises: (1) real streams get the bytes unchanged, streams without bytes (notebooks) get text;
    (2) a broken stream is ignored from then on, and the job is still watched.
    """

    def __init__(self, *, prefixed: bool = False) -> None:
        self._prefixer = Prefixer(hosts=prefixed)
        self._broken: set[int] = set()
        self._decoders: dict[tuple[int, int], codecs.IncrementalDecoder] = {}

    def write(self, chunk: LogChunk) -> None:
        """Write one chunk."""
        if chunk.stream in self._broken:
            return
        stream = sys.stderr if chunk.stream == STDERR else sys.stdout
        try:
            self._put(stream, self._prefixer.add(chunk), (chunk.host, chunk.stream))
        except Exception as error:  # noqa: BLE001 - closed, or an object of the caller's, which may raise any
            self._broken.add(chunk.stream)
            _log.warning(
                "output cannot be written any more (%s); it is kept, see `kinetic jobs logs`", error
            )

    def _put(self, stream: Any, data: bytes, source: tuple[int, int]) -> None:
        if stream is None:
            return
        raw = getattr(stream, "buffer", None)
        if raw is None:
            decoder = self._decoders.setdefault(
                source, codecs.getincrementaldecoder("utf-8")("replace")
            )
            _write_text(stream, decoder.decode(data))
            return
        stream.flush()
        _write_all(raw, data)


def _write_text(stream: Any, text: str) -> None:
    """Write to what stands for a stream, maybe an object of the caller's that has no `flush`."""
    stream.write(text)
    if hasattr(stream, "flush"):
        stream.flush()


def _write_all(raw: Any, data: bytes) -> None:
    """Write to a stream that may be unbuffered (and take less than it is given) or non-blocking
    (and take nothing)."""
    view = memoryview(data)
    while view:
        try:
            written = raw.write(view) or 0
        except BlockingIOError as full:
            written = full.characters_written
        view = view[written:]
        if view and not written:
            time.sleep(0.01)
    while not _try_flush(raw):
        time.sleep(0.01)


def _try_flush(raw: Any) -> bool:
    try:
        raw.flush()
    except BlockingIOError:  # Its buffer would be lost when the stream is closed.
        return False
    return True


_printed: set[str] = set()


def notice(text: str, *, repeat: bool = False) -> None:
    """Print a line on stderr; the same text only once in a process."""
    if text in _printed and not repeat:
        return
    _printed.add(text)
    try:
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()
    except Exception:  # noqa: BLE001 - an object of the caller's may raise any
        _log.info("%s", text)


def print_last(
    interrupt: KeyboardInterrupt, text: str, is_over: Callable[[], bool] = lambda: False
) -> None:
    """Have this text printed last: after what Python prints of an interrupt or, if that is caught,
    at the end of the process, unless what it tells of is over by then."""
    interrupt.add_note(text)
    atexit.register(_print_unless_shown, interrupt, text, is_over)


def _print_unless_shown(
    interrupt: KeyboardInterrupt, text: str, is_over: Callable[[], bool]
) -> None:
    # the exception that the interpreter, or a notebook, has printed
    if getattr(sys, "last_value", None) is not interrupt and not is_over():
        notice(text, repeat=True)


def describe_interrupted(job_id: str, *, ended: bool, has_value: bool) -> str:
    """For who is interrupted; whether the job has ended, and whether the handle has its value, so
    that the records may be removed."""
    if not ended:
        return f"kinetic: {job_id} keeps running; {_describe_reattaching(job_id)}"
    way = "this handle's result()" if has_value else f'kinetic.attach("{job_id}").result()'
    return f"kinetic: {job_id} has ended: {way} returns its value, or raises its error."


def describe_timeout(job_id: str, fault: str) -> str:
    """For an error; `fault` is why it cannot be told whether the job runs."""
    it = "It keeps running"
    if fault:
        it = f"Whether it keeps running cannot be told now ({fault.rstrip('.')})"
    return f"{it}; {_describe_reattaching(job_id)}"


def _describe_reattaching(job_id: str) -> str:
    return (
        f'reattach with kinetic.attach("{job_id}").result() or `kinetic jobs logs -f {job_id}`, '
        f"stop it with `kinetic jobs cancel {job_id}`."
    )
