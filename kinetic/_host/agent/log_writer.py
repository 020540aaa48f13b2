"""The log of a host: the worker's output as printed, in whole lines, with time and stream.

Written as `log` and `log.idx` (see _core.log_format). Memory is bounded by one buffer per stream.
On a full disk output is lost, counted and reported, but the worker is never stopped.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING

from kinetic._core import layout
from kinetic._core.log_format import RECORD, STDERR, STDOUT, encode_record
from kinetic._store import files
from kinetic._store.base import folder_of

if TYPE_CHECKING:
    from kinetic._store.base import Store
    from kinetic._store.log_segments import SegmentWriter

READ_BYTES = 1 << 20
DRAIN_BYTES = 1 << 22
"""Most bytes that `drain` reads: more than the capacity of a pipe."""
LINE_LIMIT_BYTES = 1 << 16
"""A longer line is written in pieces."""
LAST_LINE_BYTES = 200
_LAST_WINDOW_BYTES = 2048
_GLOO_PIECES = (
    rb"[Gloo] Rank ",
    rb" is connected to ",
    rb" peer ranks. ",
    rb"Expected number of connected peer ranks is : ",
)
_GLOO_WORDS = b"|".join(map(re.escape, _GLOO_PIECES))
_GLOO_LINE = rb"(?m)^\[Gloo\] Rank \d+ is connected to (\d+) peer ranks\. Expected [a-z ]+ : \1\n"
_GLOO_MIXED = rb"(?m)^(?:\d*(?:%s)(?:%s|\d+)*\n)+" % (_GLOO_WORDS, _GLOO_WORDS)
"""Lines that Gloo prints when hosts connect: one for each device, from several threads, so that
pieces of lines may be mixed. The pattern is compiled when a gang of several hosts first prints
something."""
MIRRORED_BYTES = 1 << 20
"""Output that is kept for a slow reader; more is dropped."""
CLOSE_S = 5.0
"""Time that a reader has for the last output."""


class HostLog:
    """The two files of one host in one attempt, created by the first output. Their folder is
    created if need be, but not the job's folder, `within`: the job may have been removed."""

    def __init__(
        self,
        log: Path,
        index: Path,
        *,
        within: Path | None = None,
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        _make_folder(log.parent, within)
        self._paths = log, index
        self._log = self._index = -1
        self._clock_ns = clock_ns
        self._end = self.lost_bytes = 0
        if log.exists():
            self._open()
            self._end = os.fstat(self._log).st_size
        self._own_bytes = 0
        self._segments: SegmentWriter | None = None
        self._mirror: Mirror | None = None

    def _open(self) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        if self._index < 0:  # The index first: readers take a log without one for plain bytes.
            self._index = os.open(self._paths[1], flags, 0o600)
        self._log = os.open(self._paths[0], flags, 0o600)

    def show_on(self, mirror: Mirror) -> None:
        """Repeat all output on the mirror from now on."""
        self._mirror = mirror

    def send_by(self, segments: SegmentWriter) -> None:
        """Send the log to the store while it is written."""
        self._segments = segments
        segments.start()

    def deliver(self) -> None:
        """Send everything written so far to the store, unless the files are in it."""
        if self._segments is not None:
            self._segments.flush()

    @property
    def output_bytes(self) -> int:
        """Bytes of output so far, without kinetic's own lines."""
        return self._end - self._own_bytes

    @property
    def size_bytes(self) -> int:
        """Bytes in the log so far."""
        return self._end

    def last_line(self) -> str:
        """Return the last line that is not blank, cut by the function `last_line`. Reads the file
        on each call, so that writing stays cheap."""
        size = min(self._end, _LAST_WINDOW_BYTES)
        try:
            return last_line(os.pread(self._log, size, self._end - size))
        except OSError:
            return ""

    def write(self, stream: int, data: bytes) -> None:
        """Append a chunk, as far as the disk has room, and the record that points at its end."""
        if self._mirror is not None:
            self._mirror.write(stream, data)
        if self._log < 0:
            with contextlib.suppress(OSError):  # The data is lost, as on a full disk.
                self._open()
        written = self._append(self._log, data)
        self._end += written
        self.lost_bytes += len(data) - written
        if written:  # If its record does not fit, only the time stamp is lost.
            self._append(self._index, encode_record(self._end, self._clock_ns(), stream))
            if self.lost_bytes:
                self._align_index()
            if self._segments is not None:
                self._segments.wake()

    def say(self, text: str, stream: int = STDERR) -> None:
        """Append kinetic's own lines."""
        lead = "\n" if self._ends_inside_a_line() else ""
        data = f"{lead}{text}\n".encode(errors="backslashreplace")
        before = self._end
        self.write(stream, data)
        self._own_bytes += self._end - before

    def _ends_inside_a_line(self) -> bool:
        try:
            return self._end > 0 and os.pread(self._log, 1, self._end - 1) != b"\n"
        except OSError:
            return False

    def _align_index(self) -> None:
        # A record cut short by a full disk would shift all that follow it.
        size = os.fstat(self._index).st_size
        if size % RECORD.size:
            os.ftruncate(self._index, size - size % RECORD.size)

    @staticmethod
    def _append(fd: int, data: bytes) -> int:
        view, done = memoryview(data), 0
        try:
            while done < len(view):
                done += os.write(fd, view[done:])
        except OSError:  # The disk is full or gone: what was not written is counted as lost.
            return done
        return done

    def close(self) -> None:
        """Log how many bytes were lost, if any, and close the files."""
        if self.lost_bytes:
            self.say(
                f"kinetic: {self.lost_bytes} bytes of output were lost, because the disk is full."
            )
        for fd in (self._log, self._index):
            with contextlib.suppress(OSError):
                os.close(fd)
        if self._segments is not None:
            self._segments.close()
        if self._mirror is not None:
            self._mirror.close()


def open_log(
    store: Store, key: str, paths: tuple[Path, Path], *, mirrored: bool = False
) -> HostLog:
    """Open the log of a host. Its files are in the store, or are sent to it as they grow.

    Args:
        store: store of the job.
        key: key of the log.
        paths: `log` and `log.idx`.
        mirrored: repeat the output on this process's standard streams.
    """
    root = folder_of(store)
    within = None if root is None else root / layout.JobKeys(layout.job_of(key)).prefix
    log = HostLog(*paths, within=within)
    if mirrored:
        log.show_on(Mirror())
    if root is None:
        from kinetic._store.log_segments import SegmentWriter

        log.send_by(SegmentWriter(store, key, paths))
    return log


def _make_folder(folder: Path, within: Path | None) -> None:
    if within is None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        return
    files.make_below(folder, within)


def last_line(data: bytes) -> str:
    """Return the start of the last line that is not blank. A line that was overwritten with
    carriage returns counts in its last state."""
    for line in reversed(data.replace(b"\r", b"\n").split(b"\n")):
        if not line.isspace() and line:
            return line.strip()[:LAST_LINE_BYTES].decode(errors="ignore")
    return ""


class Tee:
    """Copies one stream of the worker to the log, in whole lines."""

    def __init__(self, fd: int, stream: int, log: HostLog, *, without_gloo: bool = False) -> None:
        self.fd = fd
        self.stream = stream
        self._log = log
        self._without_gloo = without_gloo
        self._read_bytes = 0
        self._open_line = b""

    def pump(self) -> bool:
        """Read once; return False at the end of the stream."""
        try:
            data = os.read(self.fd, READ_BYTES)
        except BlockingIOError:
            return True
        except OSError:
            return False
        if not data:
            return False
        self._read_bytes += len(data)
        self._take(data)
        return True

    def _take(self, data: bytes) -> None:
        cut = data.rfind(b"\n") + 1
        if cut == 0:
            self._open_line += data
            if len(self._open_line) >= LINE_LIMIT_BYTES:
                self.flush()
            return
        lines = self._open_line + data[:cut] if self._open_line else data[:cut]
        waiting = b""
        if self._without_gloo and _GLOO_PIECES[0] in lines:
            lines, waiting = _split_mixed(without_gloo(lines))
        if lines:
            self._log.write(self.stream, lines)
        self._open_line = waiting + data[cut:]

    @property
    def has_open_line(self) -> bool:
        """True if bytes wait for the end of their line."""
        return bool(self._open_line)

    def flush(self) -> None:
        """Write the open line as it is now (a progress bar, a prompt)."""
        if self._open_line:
            self._log.write(self.stream, self._open_line)
            self._open_line = b""

    def drain(self) -> None:
        """Read everything that was written before this call, without waiting, then write the open
        line. Returns even if a child of the function keeps writing."""
        begun = self._read_bytes
        while self._read_bytes - begun < DRAIN_BYTES:
            before = self._read_bytes
            if not self.pump() or self._read_bytes == before:
                break
        self.flush()


def without_gloo(lines: bytes) -> bytes:
    """Remove the lines in which Gloo says that hosts are connected, and nothing else."""

    def unless_whole(match: re.Match[bytes]) -> bytes:
        # Mixed lines are Gloo's if they have each of its pieces once per line.
        counts = {match[0].count(piece) for piece in _GLOO_PIECES}
        return b"" if counts == {match[0].count(b"\n")} else match[0]

    return re.sub(_GLOO_MIXED, unless_whole, re.sub(_GLOO_LINE, b"", lines))


def _split_mixed(lines: bytes) -> tuple[bytes, bytes]:
    """Split off mixed Gloo lines at the end, which may still be incomplete."""
    mixed = [match for match in re.finditer(_GLOO_MIXED, lines) if match.end() == len(lines)]
    cut = mixed[-1].start() if mixed else len(lines)
    return lines[:cut], lines[cut:]


def open_tees(out: int, err: int, log: HostLog, *, without_gloo: bool = False) -> tuple[Tee, Tee]:
    """Return the two tees of a worker; make the descriptors non-blocking.

    Use `without_gloo` for a simulated slice of several hosts: real slices do not print Gloo's
    lines, which cannot be switched off.
    """
    for fd in (out, err):
        os.set_blocking(fd, False)
    return Tee(out, STDOUT, log, without_gloo=without_gloo), Tee(err, STDERR, log)


class Mirror:
    """Repeats a host's output on the standard streams of its own process, for `kubectl logs` and
    other readers of container output. Writes in its own thread: create it after the last fork, and
    use it from one thread.

    Promises:
        1. `write` never waits for the reader of a stream.
        2. Output that a slow reader misses is counted, and reported when there is room.
        3. Output to a closed or full stream is lost, without other effects.
    """

    def __init__(self, out: int = 1, err: int = 2) -> None:
        self._out = out
        self._err = err
        self._waiting: SimpleQueue[tuple[int, bytes] | None] = SimpleQueue()
        self._added_bytes = self._taken_bytes = self._missed_bytes = 0
        self._thread = threading.Thread(target=self._run, name="kinetic-mirror", daemon=True)
        self._thread.start()

    def write(self, stream: int, data: bytes) -> None:
        """Queue a chunk, or drop it if the reader is too slow."""
        if self._added_bytes - self._taken_bytes + len(data) > MIRRORED_BYTES:
            self._missed_bytes += len(data)
            return
        self._report_missed()
        self._add(stream, data)

    def _report_missed(self) -> None:
        if self._missed_bytes:
            self._add(STDERR, _notice_of_missed(self._missed_bytes))
            self._missed_bytes = 0

    def _add(self, stream: int, data: bytes) -> None:
        self._added_bytes += len(data)
        self._waiting.put((self._out if stream == STDOUT else self._err, data))

    def close(self, limit_s: float = CLOSE_S) -> None:
        """Wait until everything is written, but at most `limit_s` seconds."""
        self._report_missed()
        self._waiting.put(None)
        self._thread.join(limit_s)

    def _run(self) -> None:
        while (chunk := self._waiting.get()) is not None:
            self._taken_bytes += len(chunk[1])
            _write(*chunk)


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    try:
        while view:
            view = view[os.write(fd, view) :]
    except OSError:  # The reader is gone, or the disk is full.
        return


def _notice_of_missed(size_bytes: int) -> bytes:
    return (
        f"kinetic: {size_bytes} bytes of output are missing here, because the reader was too slow; "
        "`kinetic jobs logs` has them.\n"
    ).encode()
