"""Output on this process's streams: jobs' output, and kinetic's notices on stderr.

The only module of the library that writes to stdout and stderr.
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
    """True if a line on this stream can be redrawn: it is a terminal that can move its cursor."""
    from kinetic._config import settings

    try:
        is_terminal = stream is not None and stream.isatty()
    except (OSError, ValueError, AttributeError):  # A notebook's stream, or a closed one.
        return False
    kind = settings.variables().get("TERM", "").lower()
    return is_terminal and kind not in ("dumb", "unknown")


class Printer:
    """Writes a job's output to this process's stdout and stderr, without delay.

    Promises: (1) streams with a buffer get the bytes unchanged; streams without a buffer, as in
    notebooks, get text; (2) a broken stream gets no more output, but the caller's wait goes on.
    """

    def __init__(self, *, prefixed: bool = False) -> None:
        self._prefixer = Prefixer(hosts=prefixed)
        self._broken: set[int] = set()
        self._decoders: dict[tuple[int, int], codecs.IncrementalDecoder] = {}

    def write(self, chunk: LogChunk) -> None:
        """Write one chunk to the stream on which the job printed it."""
        if chunk.stream in self._broken:
            return
        stream = sys.stderr if chunk.stream == STDERR else sys.stdout
        try:
            self._put(stream, self._prefixer.add(chunk), (chunk.host, chunk.stream))
        except Exception as error:  # noqa: BLE001 - the caller may have replaced the stream by any object
            self._broken.add(chunk.stream)
            _log.warning(
                "the job's output can no longer be printed here, but the job keeps running and "
                "`kinetic jobs logs` shows its output. The error: %s",
                error,
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
    """Write to an object in place of a stream, which may have no `flush`."""
    stream.write(text)
    if hasattr(stream, "flush"):
        stream.flush()


def _write_all(raw: Any, data: bytes) -> None:
    """Write all data: unbuffered streams may accept only a part, non-blocking ones nothing yet."""
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
    except BlockingIOError:  # Closing the stream now would lose its buffer.
        return False
    return True


_printed: set[str] = set()


def notice(text: str, *, repeat: bool = False) -> None:
    """Print a line on stderr. A text is printed only once in a process, unless `repeat` is True."""
    if text in _printed and not repeat:
        return
    _printed.add(text)
    try:
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()
    except Exception:  # noqa: BLE001 - the caller may have replaced stderr by any object
        _log.info("%s", text)


def print_last(
    interrupt: KeyboardInterrupt, text: str, is_over: Callable[[], bool] = lambda: False
) -> None:
    """Print a text as the last line on stderr, after Python's traceback of the interrupt. If the
    program catches the interrupt, print it at the program's exit, unless `is_over()` then."""
    interrupt.add_note(text)
    atexit.register(_print_unless_shown, interrupt, text, is_over)


def _print_unless_shown(
    interrupt: KeyboardInterrupt, text: str, is_over: Callable[[], bool]
) -> None:
    # `sys.last_value` is the exception that the interpreter or the notebook has printed.
    if getattr(sys, "last_value", None) is not interrupt and not is_over():
        notice(text, repeat=True)


def describe_interrupted(job_id: str, *, ended: bool, has_value: bool) -> str:
    """Return the line for a user who interrupts a wait. With `has_value`, the line refers to the
    handle, because the job's records may have been removed."""
    if not ended:
        return f"kinetic: {job_id} keeps running; {_describe_reattaching(job_id)}"
    call = "this handle's result()" if has_value else f'kinetic.attach("{job_id}").result()'
    return f"kinetic: {job_id} has ended: {call} returns its value, or raises its error."


def describe_timeout(job_id: str, fault: str) -> str:
    """Return the last part of a timeout's message. `fault` is the error because of which the job's
    state is unknown; "" if the state is known."""
    state = "The job keeps running"
    if fault:
        state = f"It may still be running, but its state is unknown now ({fault.rstrip('.')})"
    return f"{state}; {_describe_reattaching(job_id)}"


def _describe_reattaching(job_id: str) -> str:
    return (
        f'reattach with kinetic.attach("{job_id}").result() or `kinetic jobs logs -f {job_id}`, '
        f"or stop it with `kinetic jobs cancel {job_id}`."
    )
