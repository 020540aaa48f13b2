"""Failures between a client and the API server, as requested by a test.

A test adds rules for the next requests (an error, a delay, a closed connection), and breaks open
streams.
"""

from __future__ import annotations

import fnmatch
import threading
from dataclasses import dataclass, field

from doubles.cluster.problems import Refused, refusal

ALL = "*"


@dataclass
class Rule:
    """A rule that makes some requests fail: which requests, how many, and in which way."""

    verb: str
    resource: str
    left: int
    refused: Refused | None = None
    delay_s: float = 0.0
    reset: bool = False
    after: bool = False
    """True if the request is carried out and only its answer is lost."""


@dataclass
class Break:
    """A point at which to break an open stream: properly, within a line, or within a chunk."""

    where: str = "end"


@dataclass(eq=False)
class Stream:
    """An open watch or followed log."""

    verb: str
    resource: str
    broken: Break | None = None


@dataclass
class Faults:
    """All rules of a test. Verbs are those of the API (get, list, watch, create, delete ...), and
    "try" for a dry run; resources are plurals ("jobs", "pods/log"). Both may be patterns."""

    _rules: list[Rule] = field(default_factory=list)
    _streams: list[Stream] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def _add(self, rule: Rule) -> None:
        with self._lock:
            self._rules.append(rule)

    def fail(
        self,
        code: int = 500,
        *,
        times: int = 1,
        verb: str = ALL,
        resource: str = ALL,
        message: str = "",
        retry_after: int | None = None,
        after: bool = False,
    ) -> None:
        """Answer the next requests with this status; with `after`, carry them out first."""
        reason, text = {
            409: ("Conflict", "Operation cannot be fulfilled: the object has been modified"),
            429: ("TooManyRequests", "Too many requests, please try again later."),
            500: ("InternalError", "Internal error occurred: etcdserver: request timed out"),
            503: ("ServiceUnavailable", "apiserver is shutting down."),
            504: ("Timeout", "Timeout: request did not complete within the allotted timeout"),
        }.get(code, ("", "fault"))
        more = {"details": {"retryAfterSeconds": retry_after}} if retry_after is not None else {}
        refused = refusal(code, reason, message or text, **more)
        self._add(Rule(verb, resource, times, refused=refused, after=after))

    def plain(self, code: int, text: str, *, times: int = 1, verb: str = ALL) -> None:
        """Answer the next requests with plain text, like a load balancer, not with a Status."""
        self._add(Rule(verb, ALL, times, refused=Refused(code, text)))

    def slow(self, delay_s: float, *, times: int = 1, verb: str = ALL, resource: str = ALL) -> None:
        self._add(Rule(verb, resource, times, delay_s=delay_s))

    def reset(
        self, *, times: int = 1, verb: str = ALL, resource: str = ALL, after: bool = False
    ) -> None:
        """Close the connections of the next requests; with `after`, carry them out first."""
        self._add(Rule(verb, resource, times, reset=True, after=after))

    def clear(self) -> None:
        with self._lock:
            self._rules.clear()

    def drop_watches(self, resource: str = ALL, *, where: str = "end") -> int:
        """Break open watches at the `end` of an event, in a `line` or in a `chunk`; return the
        number of watches."""
        return self._drop("watch", resource, where)

    def drop_logs(self, *, where: str = "end") -> int:
        """Break open log streams, like `drop_watches`; return the number of streams."""
        return self._drop("log", ALL, where)

    def _drop(self, verb: str, resource: str, where: str) -> int:
        if where not in ("end", "line", "chunk", "reset"):
            raise ValueError(where)
        with self._lock:
            streams = [
                s
                for s in self._streams
                if s.verb == verb and fnmatch.fnmatch(s.resource, resource) and s.broken is None
            ]
            for stream in streams:
                stream.broken = Break(where)
            return len(streams)

    # --- for the server

    def before(self, verb: str, resource: str) -> list[Rule]:
        """Return the rules that apply to this request, and count it against each of them."""
        with self._lock:
            matching = [
                rule
                for rule in self._rules
                if fnmatch.fnmatch(verb, rule.verb) and fnmatch.fnmatch(resource, rule.resource)
            ]
            rules: list[Rule] = []
            for rule in matching:
                rules.append(rule)
                rule.left -= 1
                if rule.left <= 0:
                    self._rules.remove(rule)
                if rule.refused or rule.reset:
                    break
            return rules

    def opened(self, verb: str, resource: str) -> Stream:
        stream = Stream(verb, resource)
        with self._lock:
            self._streams.append(stream)
        return stream

    def closed(self, stream: Stream) -> None:
        with self._lock:
            self._streams.remove(stream)

    @property
    def open_streams(self) -> list[tuple[str, str]]:
        with self._lock:
            return [(s.verb, s.resource) for s in self._streams]
