"""The output of a pod, line by line, through every break of the stream.

In: an `Api`, a pod, where to begin. Out: `LogLine`s; None from time to time, so that the caller can
look at its clock; and at the end why it ended.

The server filters by whole seconds only, so a stream that is taken up repeats lines; those are told
by their times (nine digits) and texts. A stream ends in the same way when the program ends, when
the pod is deleted and when its node dies: only the pod says which. What the kubelet writes into a
stream (why it cannot read on) has no time, and is left out.
"""

from __future__ import annotations

import random
import re
import threading
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator
from datetime import datetime, timedelta
from enum import Enum, StrEnum

from kinetic._backends.kubernetes.answers import Refused
from kinetic._backends.kubernetes.api import Api, ByteStream, LogOptions, Patience, waits_s
from kinetic._backends.kubernetes.observed import Pod, Stage, pod_of, shape_of
from kinetic._backends.kubernetes.resources import PODS
from kinetic._core.values import dataclass
from kinetic.errors import BackendUnavailable, NotFound

MARGIN = timedelta(seconds=1)
"""Standard output and errors are stamped by two readers, so lines may lie a little out of order."""
REFUSALS = 20
"""A container that runs and whose output is refused so often in a row has none to read."""
_LINE = re.compile(
    rb"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d) ?(.*)", re.DOTALL
)


@dataclass(frozen=True)
class LogLine:
    """A line, as a program printed it.

    Attributes:
        time: when, with nine digits after the second, in UTC: "2026-11-21T01:33:56.033062388Z".
        text: without its end of line; whether it had one says `complete`.
        complete: False for a last line without an end.
    """

    time: str
    text: bytes
    complete: bool = True


@dataclass(frozen=True)
class LogMark:
    """A place in a pod's output: after so many lines of this time.

    Attributes:
        time: of the last line that one has; "" for the beginning.
        lines: how many lines with exactly this time one has.
    """

    time: str = ""
    lines: int = 0


class LogEnd(StrEnum):
    """Why a pod's output ended."""

    EXITED = "exited"
    """Its program has ended, and all of its output was read."""
    GONE = "gone"
    """The pod was deleted; there may have been more."""
    CLOSED = "closed"
    """The reader was told to end."""


class _Reading(Enum):
    """How one stream ended."""

    ENDED = 1
    BROKEN = 2
    REFUSED = 3
    GONE = 4


class PodLog:
    """Follows the output of one pod. One thread iterates; any may close it."""

    def __init__(
        self,
        api: Api,
        pod: str,
        *,
        container: str = "",
        after: LogMark | None = None,
        follow: bool = True,
        patience: Patience | None = None,
        wait: Callable[[float], bool] | None = None,
        seed: random.Random | None = None,
    ) -> None:
        """Ask nothing yet.

        Args:
            api: whom to ask.
            pod: the name of the pod.
            container: which container of it.
            after: where to begin.
            follow: until the program has ended; else what is there.
            patience: its pauses.
            wait: waits for so many seconds, or until the reader is closed; for tests.
            seed: of the pauses; for tests.
        """
        self._api = api
        self._pod = pod
        self._container = container
        self._begin = self._mark = after or LogMark()
        self._follow = follow
        self._patience = patience or Patience()
        self._closed = threading.Event()
        self._wait = wait or self._closed.wait
        self._random = seed or random.Random()
        self._lock = threading.Lock()
        self._stream: ByteStream | None = None
        self._recent: deque[LogLine] = deque()
        self._latest: datetime | None = None
        self._rest: LogLine | None = None
        self._pauses = 0
        self._refused = 0
        self.end: LogEnd | None = None

    @property
    def mark(self) -> LogMark:
        """Where it is: after the last line that was yielded."""
        return self._mark

    def close(self) -> None:
        """End the iteration, from any thread. Idempotent."""
        with self._lock:
            self._closed.set()
            stream = self._stream
        if stream is not None:
            stream.close()

    def __iter__(self) -> Iterator[LogLine | None]:
        """Yield lines; None before each pause.

        Raises:
            PreflightError: the output may not be read.
            BackendUnavailable: never while following: it waits. Without, when nothing was read.
        """
        finishing = False
        while not self._closed.is_set():
            before = self._mark
            reading = yield from self._read_on(follow=self._follow and not finishing)
            if self._closed.is_set():
                break
            state = LogEnd.GONE if reading is _Reading.GONE else self._state()
            complete = reading is _Reading.ENDED and (finishing or not self._follow)
            if complete or state is LogEnd.GONE:
                yield from self._last()
                self.end = state
                return
            finishing = finishing or state is LogEnd.EXITED
            if finishing and reading is _Reading.REFUSED:  # it ended before it began
                self.end = LogEnd.EXITED
                return
            if self._mark != before or (finishing and reading is _Reading.ENDED):
                self._pauses = 0
                continue
            self._pauses += 1
            yield None
            self._wait(waits_s(self._pauses, self._patience, self._random))
        self.end = LogEnd.CLOSED

    def _read_on(self, *, follow: bool) -> Generator[LogLine, None, _Reading]:
        """Read one stream, and say how it ended."""
        self._rest = None
        try:
            for line in self._read(follow=follow):
                if line.complete:
                    yield line
                else:
                    self._rest = line
        except NotFound:
            return _Reading.GONE
        except Refused:
            self._refused += 1
            if self._refused > REFUSALS:
                raise
            return _Reading.REFUSED
        except BackendUnavailable:
            if not self._follow:
                raise
            return _Reading.BROKEN
        self._refused = 0
        return _Reading.ENDED

    def _last(self) -> Iterator[LogLine]:
        """A last line without an end: it is one only when nothing follows."""
        if self._rest is not None:
            self._keep(self._rest)
            yield self._rest

    def _state(self) -> LogEnd | None:
        """Whether there is more to come: only the pod knows."""
        try:
            document = self._api.get(PODS, self._pod)
        except NotFound:
            return LogEnd.GONE
        except BackendUnavailable:
            return None
        pod: Pod = pod_of(document, shape_of({}))
        return LogEnd.EXITED if pod.stage in (Stage.SUCCEEDED, Stage.FAILED) else None

    def _read(self, *, follow: bool) -> Iterator[LogLine]:
        """Read one stream to its end, without the lines that one has."""
        repeated = Counter(self._recent)
        given = self._begin.lines
        options = LogOptions(self._container, follow=follow, since=self._since())
        stream = self._api.log(self._pod, options)
        with self._lock:
            self._stream = stream
        if self._closed.is_set():
            stream.close()
            return
        try:
            for line in _lines(stream):
                if line.time < self._begin.time:
                    continue
                if given and line.time == self._begin.time:
                    given -= 1
                elif repeated[line] > 0:
                    repeated[line] -= 1
                else:
                    if line.complete:
                        self._keep(line)
                    yield line
        finally:
            with self._lock:
                self._stream = None
            stream.close()

    def _since(self) -> str:
        if self._latest is not None:
            return (self._latest - MARGIN).strftime("%Y-%m-%dT%H:%M:%SZ")
        return f"{self._begin.time[:19]}Z" if self._begin.time else ""

    def _keep(self, line: LogLine) -> None:
        """Remember a line as long as a new stream may repeat it."""
        same = line.time == self._mark.time
        self._mark = LogMark(line.time, self._mark.lines + 1 if same else 1)
        at = _second(line.time)
        self._latest = at if self._latest is None else max(at, self._latest)
        self._recent.append(line)
        begin = self._latest - MARGIN
        while self._recent and _second(self._recent[0].time) < begin:
            self._recent.popleft()


def _lines(stream: ByteStream) -> Iterator[LogLine]:
    rest = b""
    for data in stream:
        *whole, rest = (rest + data).split(b"\n")
        for raw in whole:
            line = _parsed(raw, complete=True)
            if line is not None:
                yield line
    line = _parsed(rest, complete=False)
    if line is not None:
        yield line


def _parsed(raw: bytes, *, complete: bool) -> LogLine | None:
    found = _LINE.fullmatch(raw)
    if found is None:
        return None
    second, digits, zone, text = found.groups()
    fraction = (digits or b"").decode().ljust(9, "0")
    if zone != b"Z":
        at = datetime.fromisoformat(second.decode() + zone.decode())
        second = (at - (at.utcoffset() or timedelta())).strftime("%Y-%m-%dT%H:%M:%S").encode()
    return LogLine(f"{second.decode()}.{fraction}Z", text, complete)


def _second(time: str) -> datetime:
    return datetime.fromisoformat(time[:19])
