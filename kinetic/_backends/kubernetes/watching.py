"""Watching objects without losing a change: a list, then watches, for any length of time.

In: an `Api`, a kind of object and a selection. Out: `Watched` events: the existing objects, then
changes. It survives watches that end, lost connections, 5xx, expired tokens, restarts of the
server, and resource versions that the server has forgotten.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import field
from enum import StrEnum

from kinetic._backends.kubernetes.api import (
    Api,
    CallLimits,
    Document,
    EventStream,
    Selector,
    waits_s,
)
from kinetic._backends.kubernetes.errors import Busy, Expired
from kinetic._backends.kubernetes.resources import BY_KIND, Resource
from kinetic._core.values import dataclass
from kinetic.errors import BackendUnavailable, KineticError, PreflightError

STEADY_S = 5.0
"""A watch that lasted this long shows that the server is well."""
_KINDS = {resource: kind for (_, kind), resource in BY_KIND.items()}


class Change(StrEnum):
    """What a `Watched` reports."""

    ADDED = "ADDED"
    MODIFIED = "MODIFIED"
    DELETED = "DELETED"
    """The object in its last version; its resources are free now."""
    SYNCED = "SYNCED"
    """All existing objects have been reported: after a list, and when a watch resumes after an
    interruption."""
    INTERRUPTED = "INTERRUPTED"
    """The server does not answer; it is asked again after a pause."""


@dataclass(frozen=True)
class Watched:
    """One event.

    Attributes:
        change: what happened.
        object: the object; empty for SYNCED and INTERRUPTED.
        problem: why it was interrupted.
    """

    change: Change
    object: Document = field(default_factory=dict)
    problem: KineticError | None = None


class Watcher:
    """The objects of one kind, and their changes. One thread iterates; any may close it."""

    def __init__(
        self,
        api: Api,
        resource: Resource,
        selection: Selector | None = None,
        *,
        patience: CallLimits | None = None,
        wanted: Callable[[], bool] = lambda: True,
        wait: Callable[[float], bool] | None = None,
        clock: Callable[[], float] = time.monotonic,
        seed: random.Random | None = None,
    ) -> None:
        """Ask nothing yet.

        Args:
            api: the cluster.
            resource, selection: the objects.
            patience: its pauses between tries.
            wanted: whether it is still needed; asked when a watch has ended, after some five
                minutes at most.
            wait: waits this many seconds, or until the watcher is closed, and returns whether it
                is; for tests.
            clock: seconds; for tests.
            seed: of the pauses; for tests.
        """
        self._api = api
        self._resource = resource
        self._selection = selection or Selector()
        self._patience = patience or CallLimits()
        self._closed = threading.Event()
        self._wanted = wanted
        self._wait = wait or self._closed.wait
        self._clock = clock
        self._random = seed or random.Random()
        self._lock = threading.Lock()
        self._stream: EventStream | None = None
        self._known: dict[str, Document] = {}
        self._version = ""
        self._was_synced = self._is_interrupted = False
        self._failures = 0

    def close(self) -> None:
        """End the iteration, from any thread. Idempotent."""
        with self._lock:
            self._closed.set()
            stream = self._stream
        if stream is not None:
            stream.close()

    @property
    def version(self) -> str:
        """The moment from which the watch continues; "" before the first list."""
        return self._version

    def __iter__(self) -> Iterator[Watched]:
        """Yield the existing objects, SYNCED, and then each change.

        Raises:
            PreflightError: it may not be watched, or cannot be. Only before the first SYNCED: after
                that every failure is an interruption, as when a laptop wakes up and its login
                plugin has no network yet. The caller decides how many are enough.
        """
        while not self._closed.is_set() and self._wanted():
            try:
                if not self._version:
                    yield from self._list_changes()
                yield from self._changes()
            except Expired:
                self._version = ""
                self._failures += 1
                self._pause()
            except (BackendUnavailable, PreflightError) as error:
                if isinstance(error, PreflightError) and not self._was_synced:
                    raise
                if self._closed.is_set():
                    return
                self._is_interrupted = True
                yield Watched(Change.INTERRUPTED, problem=error)
                self._failures += 1
                asked_s = error.after_s if isinstance(error, Busy) else None
                self._pause(asked_s or 0.0)

    def _pause(self, least_s: float = 0.0) -> None:
        self._wait(max(least_s, waits_s(self._failures, self._patience, self._random)))

    def _list_changes(self) -> Iterator[Watched]:
        """List, and yield the differences from what was known."""
        listing = self._api.list(self._resource, self._selection)
        there = {str(o["metadata"].get("uid")): self._complete_item(o) for o in listing.items}
        before, self._known = self._known, there
        self._version = listing.resource_version
        for uid, known in before.items():
            if uid not in there:
                yield Watched(Change.DELETED, known)
        for uid, found in there.items():
            if uid not in before:
                yield Watched(Change.ADDED, found)
            elif _version_of(found) != _version_of(before[uid]):
                yield Watched(Change.MODIFIED, found)
        self._was_synced, self._is_interrupted = True, False
        yield Watched(Change.SYNCED)

    def _changes(self) -> Iterator[Watched]:
        """Watch until the stream ends, for whatever reason. A watch that breaks off after a long
        silence may have been held back on its way, as some proxies do with streamed answers: then
        everything is listed again, so that changes are not delayed forever."""
        began = self._clock()
        try:
            stream = self._open_stream()
        except BackendUnavailable:
            self._list_if_since(began)
            raise
        with self._lock:
            self._stream = stream
        if self._closed.is_set():
            stream.close()
            return
        if self._is_interrupted:
            self._is_interrupted = False
            yield Watched(Change.SYNCED)
        got = False
        try:
            for event in stream:
                got = True
                yield from self._apply_event(event)
        except Expired:
            raise
        except BackendUnavailable:
            # The same as an end, since the next watch continues from here.
            if not got:
                self._list_if_since(began)
        finally:
            with self._lock:
                self._stream = None
            stream.close()
        if got or self._clock() - began > STEADY_S:
            self._failures = 0
            return
        self._failures += 1  # do not ask a server that ends watches at once without pauses
        self._pause()

    def _open_stream(self) -> EventStream:
        return self._api.watch(self._resource, self._selection, resource_version=self._version)

    def _list_if_since(self, began: float) -> None:
        if self._clock() - began > STEADY_S:
            self._version = ""

    def _apply_event(self, event: Document) -> Iterator[Watched]:
        found = event.get("object") or {}
        kind = event.get("type")
        if kind == "ERROR":
            # Whatever the reason is, the same may come again from this version.
            raise Expired(str(found.get("message") or ""))
        version = _version_of(found)
        if version:
            self._version = version
        if kind not in ("ADDED", "MODIFIED", "DELETED"):
            return  # a bookmark has only a version
        uid = str(found["metadata"].get("uid"))
        known = self._known.get(uid)
        if kind == "DELETED":
            self._known.pop(uid, None)
            if known is not None:
                yield Watched(Change.DELETED, found)
            return
        self._known[uid] = found
        if known is None:
            yield Watched(Change.ADDED, found)
        elif version != _version_of(known):
            yield Watched(Change.MODIFIED, found)

    def _complete_item(self, item: Document) -> Document:
        """An item of a list, completed with what only objects of a watch have."""
        named = {"apiVersion": self._resource.api_version}
        kind = _KINDS.get(self._resource)
        return {**named, **({"kind": kind} if kind else {}), **item}


def version_number(version: str) -> int:
    """Return a resource version as a number, which orders all objects of a kind; 0 if it is none.

    https://kubernetes.io/docs/reference/using-api/api-concepts/#resource-versions
    """
    return int(version) if version.isdecimal() else 0


def _version_of(thing: Document) -> str:
    return str((thing.get("metadata") or {}).get("resourceVersion") or "")
