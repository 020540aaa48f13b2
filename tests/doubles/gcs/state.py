"""State of the storage double: its buckets, its log of requests, and its pending faults."""

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
    """A fault that the next requests of a kind suffer.

    Attributes:
        calls: the kinds of requests; () for all kinds.
        times: the number of requests that suffer the fault.
        status, message: the error response.
        cut_after: close the connection after this many bytes of the body, in either direction.
        lost: carry out the request, but close the connection without a response.
        stored_bytes: store at most this many bytes of a chunk.
        damaged: flip a bit of the content on its way.
        abandoned: close the connection when the request has arrived, but carry the request out.
        gate: send the response only when this event is set.
        only: a substring that the object's name must have.
    """

    calls: tuple[str, ...]
    times: int = 1
    status: int = 0
    message: str = ""
    cut_after: int = -1
    lost: bool = False
    stored_bytes: int = -1
    damaged: bool = False
    abandoned: bool = False
    gate: threading.Event | None = None
    only: str = ""


@dataclass
class Upload:
    """A resumable upload; `result` is its object once it is complete."""

    bucket: str
    name: str
    query: dict[str, str]
    resource: dict[str, object]
    content_type: str
    data: bytearray = field(default_factory=bytearray)
    result: Object | None = None


class Double:
    """The storage double: its buckets, its log of requests, and its pending faults."""

    def __init__(self, uri: str) -> None:
        self.uri = uri
        self.buckets = Buckets()
        self.requests: list[Request] = []
        self.denied: set[str] = set()
        """The permissions that callers lack."""
        self.peers: set[int] = set()
        """The client ports of requests, one for each connection."""
        self.uploads: dict[str, Upload] = {}
        self.before: Callable[[str, str], None] | None = None
        """Called before each response, with the kind of request and the object's name."""
        self._faults: list[Fault] = []
        self._lock = threading.Lock()
        self._busy = 0
        self._done = threading.Condition(self._lock)

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """Count one request more as being handled while the block runs; `idle` waits for these."""
        with self._lock:
            self._busy += 1
        try:
            yield
        finally:
            with self._done:
                self._busy -= 1
                self._done.notify_all()

    def idle(self, patience_s: float) -> bool:
        """Wait until no request is being handled; return False after `patience_s` seconds."""
        with self._done:
            return self._done.wait_for(lambda: not self._busy, patience_s)

    def fail(self, *calls: str, **fault: object) -> None:
        """Add a `Fault` for the next requests of these kinds, or of any kind."""
        with self._lock:
            self._faults.append(Fault(calls, **fault))  # type: ignore[arg-type]

    def heal(self) -> None:
        """Remove all faults."""
        with self._lock:
            self._faults.clear()

    def forget_requests(self) -> None:
        with self._lock:
            self.requests.clear()

    def calls(self) -> Counter[str]:
        """Count the requests of each kind."""
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
