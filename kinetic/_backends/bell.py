"""The bell of a session: its callers ring it after a request is in the queue, and its leader says
through it that a call has a verdict. Neither side then waits for its next poll of the store.

Everything else goes through the store, so a bell that does not work only costs time. There are
three: a pipe on this machine, a port-forward to the leader's pod, and none.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from kinetic._backends.base import Backend, Connection, Tunnels
from kinetic._core import layout, record
from kinetic._core.ref import JobRef
from kinetic._store import index
from kinetic._store.base import Store, folder_of
from kinetic._system import pipes
from kinetic.errors import BackendUnavailable, KineticError, PreflightError

_ANSWER_S = 2.0
"""Longest wait in seconds for the leader's answer to a ring; the connection counts as lost then."""
_RETRY_S = 60.0
"""Seconds between two attempts to open a port-forward, after one that failed."""
_RECENT = 64
"""Number of ended calls that a bell remembers."""
_log = logging.getLogger("kinetic")


class Bell:
    """The bell of one session, for any number of threads. This base class does nothing, for a
    leader that cannot be reached: both sides then poll the store. No method of a bell waits for the
    network or raises an error."""

    def ring(self) -> None:
        """Ask the leader to read its queue at once."""

    def ending_fd(self, job_id: str) -> int | None:
        """Return a descriptor that becomes readable when this call has a verdict or the connection
        is lost; None if there is no connection. The caller closes the descriptor."""
        return None


class PipeBell(Bell):
    """The bell of a session on this machine, whose files callers watch."""

    def __init__(self, pipe: Path) -> None:
        self._pipe = pipe

    def ring(self) -> None:
        """Write to the leader's pipe."""
        pipes.tell(self._pipe, "!")


class PortBell(Bell):
    """The bell of a session whose leader listens on a port: one connection for all calls of this
    process, opened by the first ring in a thread of its own.

    To ring, a caller sends any bytes, and the leader answers with an empty line. When a call has a
    verdict, the leader sends a line with the call's id. A connection that is lost, or on which a
    ring gets no answer because the laptop slept, is replaced at the next ring.
    """

    def __init__(
        self,
        find_session: Callable[[], JobRef],
        connect: Callable[[JobRef], Connection],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make the bell of the session whose own job `find_session` returns. `connect` opens a
        connection to the leader of that job. Tests replace `clock`."""
        self._find_session = find_session
        self._connect = connect
        self._clock = clock
        self._lock = threading.Lock()
        self._line: Connection | None = None
        self._is_opening = False
        self._retry_at = 0.0
        self._unanswered_since: float | None = None
        self._watched: dict[str, list[int]] = {}
        """Descriptors to close when a call has ended, by its id."""
        self._ended: deque[str] = deque(maxlen=_RECENT)

    def ring(self) -> None:
        """Send a ring, if necessary through a new connection."""
        with self._lock:
            now = self._clock()
            is_silent = now - (self._unanswered_since or now) >= _ANSWER_S
            if self._line is not None and (is_silent or not self._send_ring()):
                self._line.end()  # `_serve` closes it.
                self._line = None
            if self._line is None and not self._is_opening and now >= self._retry_at:
                self._is_opening = True
                threading.Thread(target=self._serve, name="kinetic-bell", daemon=True).start()

    def ending_fd(self, job_id: str) -> int | None:
        """See `Bell.ending_fd`."""
        with self._lock:
            if self._line is None:
                return None
            reading, writing = os.pipe()
            self._watched.setdefault(job_id, []).append(writing)
            if job_id in self._ended:
                self._signal(job_id)
        return reading

    def _send_ring(self) -> bool:
        if self._line is not None:
            with contextlib.suppress(OSError):
                self._line.write(b"!\n")
                self._unanswered_since = self._unanswered_since or self._clock()
                return True
        return False

    def _serve(self) -> None:
        """Open the connection, ring, and read from it until it ends."""
        line, name = None, ""
        try:
            session = self._find_session()
            name = session.session_name
            line = self._connect(session)
        except (BackendUnavailable, PreflightError) as error:
            if not self._retry_at:
                _log.warning(
                    "kinetic: calls on the session %s go through the store alone, which takes "
                    "longer, because no port-forward to its leader can be opened: %s",
                    name,
                    error,
                )
            self._retry_at = self._clock() + _RETRY_S
        except (KineticError, LookupError, OSError, ValueError) as error:
            _log.info("the leader of the session %s cannot be reached: %s", name, error)
        with self._lock:
            self._is_opening, self._line, self._unanswered_since = False, line, None
            self._send_ring()
        if line is None:
            return
        rest = b""
        with contextlib.suppress(OSError):
            while data := line.read():
                *lines, rest = (rest + data).split(b"\n")
                self._take(lines)
        with self._lock:
            if self._line is line:
                self._line = None
            for job_id in list(self._watched):
                self._signal(job_id)
        line.close()

    def _take(self, lines: list[bytes]) -> None:
        with self._lock:
            for line in lines:
                if not line:
                    self._unanswered_since = None
                    continue
                self._ended.append(job_id := line.decode(errors="replace"))
                self._signal(job_id)

    def _signal(self, job_id: str) -> None:
        for fd in self._watched.pop(job_id, ()):
            os.close(fd)  # The reading end has reached its end.


_shared: dict[tuple[int, str, str], PortBell] = {}


def open_bell(store: Store, session_id: str, holder: Backend) -> Bell:
    """Return the bell of a session whose slices are held by a job on the backend `holder`. The
    calls of this process share one port-forward."""
    keys = layout.JobKeys(session_id)
    if (folder := folder_of(store)) is not None:
        return PipeBell(folder / keys.bell)
    if not isinstance(holder, Tunnels):
        return Bell()
    tunnels = holder

    def connect(session: JobRef) -> Connection:
        port = record.parse(store.get(keys.bell_port))["port"]
        return tunnels.connect(session, None, int(port))

    bell = PortBell(lambda: index.find(store, session_id), connect)
    # A forked process must not use the connection of its parent.
    return _shared.setdefault((os.getpid(), store.uri, session_id), bell)
