"""The state of the storage double: its buckets, what it was asked, and the faults to come.

In: requests that were answered, faults that a test asks for. Out: the fault that a request meets.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from doubles.gcs.objects import Buckets, Object


@dataclass(frozen=True)
class Request:
    """A request that was answered, or cut off (status 0).

    `call` is one of "bucket", "permissions", "get", "media", "list", "insert" (in one request),
    "start", "chunk" and "status" (of a resumable upload), "patch", "delete".
    """

    call: str
    name: str
    status: int
    sent_bytes: int = 0
    query: dict[str, str] = field(default_factory=dict)


@dataclass
class Fault:
    """What happens to the next requests of a kind, instead of an answer or on the way to it.

    status: the answer, with this message. cut_after: the connection ends when this many bytes of
    the body have arrived, or have been sent. lost: the work is done, but the connection ends
    without an answer. kept: of a chunk, no more than this is kept. gate: the answer waits for it.
    damaged: a bit of the content is turned over on its way. abandoned: the connection ends when
    the request has arrived, and what it asks for is done nevertheless.
    """

    calls: tuple[str, ...]
    times: int = 1
    status: int = 0
    message: str = ""
    cut_after: int = -1
    lost: bool = False
    kept: int = -1
    damaged: bool = False
    abandoned: bool = False
    gate: threading.Event | None = None
    only: str = ""


@dataclass
class Upload:
    """A resumable upload that has begun."""

    bucket: str
    name: str
    query: dict[str, str]
    resource: dict[str, object]
    content_type: str
    data: bytearray = field(default_factory=bytearray)
    made: Object | None = None


class Double:
    """The service: its buckets, what it was asked, and the faults to come."""

    def __init__(self, uri: str) -> None:
        self.uri = uri
        self.buckets = Buckets()
        self.requests: list[Request] = []
        self.denied: set[str] = set()
        """Permissions that callers do not have."""
        self.peers: set[int] = set()
        """Ports from which requests came: one for each connection."""
        self.uploads: dict[str, Upload] = {}
        self.before: Callable[[str, str], None] | None = None
        """Called with each request, its kind and the object's name, before it is answered."""
        self._faults: list[Fault] = []
        self._lock = threading.Lock()
        self._busy = 0
        self._done = threading.Condition(self._lock)

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """While a request is worked on."""
        with self._lock:
            self._busy += 1
        try:
            yield
        finally:
            with self._done:
                self._busy -= 1
                self._done.notify_all()

    def idle(self, patience_s: float) -> bool:
        """Wait until no request is worked on; return whether that came to be."""
        with self._done:
            return self._done.wait_for(lambda: not self._busy, patience_s)

    def fail(self, *calls: str, **fault: object) -> None:
        """Let the next requests of these kinds (or any) meet a `Fault`."""
        with self._lock:
            self._faults.append(Fault(calls, **fault))  # type: ignore[arg-type]

    def heal(self) -> None:
        """Let no fault be left."""
        with self._lock:
            self._faults.clear()

    def forget_requests(self) -> None:
        with self._lock:
            self.requests.clear()

    def calls(self) -> Counter[str]:
        """How many requests of each kind there were."""
        with self._lock:
            return Counter(request.call for request in self.requests)

    def content(self, bucket: str, name: str) -> bytes:
        return self.buckets.find(bucket, name, {}).data

    def log(self, request: Request) -> None:
        with self._lock:
            self.requests.append(request)

    def fault(self, call: str, name: str) -> Fault:
        with self._lock:
            for fault in self._faults:
                if (not fault.calls or call in fault.calls) and fault.only in name:
                    fault.times -= 1
                    if not fault.times:
                        self._faults.remove(fault)
                    return fault
        return Fault(())
