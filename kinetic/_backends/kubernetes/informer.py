"""The jobs that this process follows, as the cluster's watches report them.

In: an `Api`, references. Out: `ClusterSnapshot`s. A single question is answered by lists. Whoever
asks again follows: from then on, one watch for each kind of object serves all questions of this
process, for any number of jobs and threads. Where watching is forbidden, or fails for some time,
one list a second does.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from weakref import WeakValueDictionary

from kinetic._backends.kubernetes import watching
from kinetic._backends.kubernetes.api import Api, CallLimits, Document, Selector
from kinetic._backends.kubernetes.errors import Forbidden
from kinetic._backends.kubernetes.names import job_of, selector
from kinetic._backends.kubernetes.resources import PODS, Resource
from kinetic._backends.kubernetes.snapshot import (
    ClusterSnapshot,
    Surroundings,
    kinds_of,
    resource_of,
    take_snapshot,
)
from kinetic._backends.kubernetes.watching import Change, Watched, Watcher
from kinetic._core.ref import JobRef
from kinetic._core.values import dataclass
from kinetic.errors import KineticError

FOLLOWED_S = 15.0
"""A job that is asked for again within this time is followed; a watch that was not used for this
long ends."""
LIST_EVERY_S = 1.0
"""How old a list may be if there is no watch."""
AROUND_EVERY_S = 2.0
"""How old an explanation of why a job waits may be."""
SILENT_S = 10.0
"""While a server restarts, its last answers are used for this long; then it is asked for lists."""


class _ObjectKind:
    """The objects of one kind, by job, as a watch reports them."""

    def __init__(self, watcher: Watcher, clock: Callable[[], float]) -> None:
        self._watcher = watcher
        self._clock = clock
        self._lock = threading.Lock()
        self._by_job: dict[str, dict[str, Document]] = {}
        self._version = 0
        """The moment up to which it knows all objects."""
        self._is_synced = False
        self._silent_since: float | None = None
        self.is_over = False
        self.is_refused = False

    def run(self) -> None:
        """Watch until it is no longer needed."""
        try:
            for told in self._watcher:
                self._take(told)
        except KineticError as error:  # The lists that replace it raise the same error.
            self.is_refused = isinstance(error, Forbidden)
        finally:
            self.is_over = True

    def close(self) -> None:
        """End it."""
        self.is_over = True
        self._watcher.close()

    def _note_version(self) -> None:
        """Keep the moment: the watcher forgets it before it lists again."""
        self._version = max(self._version, watching.version_number(self._watcher.version))

    def _take(self, told: Watched) -> None:
        with self._lock:
            self._note_version()
            if isinstance(told.problem, Forbidden):  # Listing may be allowed without it.
                self.is_refused = True
                return self.close()
            if told.change is Change.INTERRUPTED:
                if self._silent_since is None:
                    self._silent_since = self._clock()
                return None
            self._silent_since = None
            if told.change is Change.SYNCED:
                self._is_synced = True
                return None
            uid = str(told.object["metadata"].get("uid"))
            of_job = self._by_job.setdefault(job_of(told.object), {})
            if told.change is Change.DELETED:
                of_job.pop(uid, None)
            else:
                of_job[uid] = told.object
            return None

    @property
    def is_synced(self) -> bool:
        """Whether it has begun."""
        return self._is_synced and not self.is_over

    @property
    def is_told(self) -> bool:
        """Whether it knows the current objects."""
        with self._lock:
            since = self._silent_since
            return self.is_synced and (since is None or self._clock() - since <= SILENT_S)

    def of(self, ref: JobRef, listed: Iterable[Document]) -> list[Document]:
        """Return the objects of a job; those that were `listed` where these are newer: a watch may
        be late, and what users were told must not be undone."""
        with self._lock:
            self._note_version()
            known = dict(self._by_job.get(ref.job_id, {}))
            for each in listed:
                uid = str(each["metadata"].get("uid"))
                told_of = _version_of(known[uid]) if uid in known else self._version
                if _version_of(each) > told_of:
                    known[uid] = each
            return list(known.values())


@dataclass(frozen=True)
class _List:
    """A look by lists: which jobs it covers, when it began."""

    look: ClusterSnapshot
    jobs: frozenset[str]
    began: float

    def covers(self, refs: Sequence[JobRef]) -> bool:
        return self.jobs.issuperset(ref.job_id for ref in refs)


class Informer:
    """The jobs of one connection. Threads share it."""

    def __init__(
        self,
        api: Api,
        *,
        patience: CallLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
        start: Callable[[Callable[[], None]], None] | None = None,
    ) -> None:
        """Ask nothing yet.

        Args:
            api: the cluster.
            patience: the pauses of watches between tries.
            clock: seconds; for tests.
            start: runs something in a thread of its own; for tests.
        """
        self.api = api
        self._patience = patience
        self._clock = clock
        self._start = start or _in_thread
        self._lock = threading.Lock()
        self._listing = threading.Lock()
        self._asked: dict[str, tuple[JobRef, float]] = {}
        self._asked_at = 0.0
        self._kinds: dict[Resource, _ObjectKind] = {}
        self._labels = ""
        self._may_watch = True
        self._list: _List | None = None
        self._made: dict[str, Document] = {}
        """What this process created itself, until it is no longer followed: a watch may be late."""
        self._around = Surroundings(api)
        self._around_at = -AROUND_EVERY_S

    def note_created(self, ref: JobRef, workload: Document) -> None:
        """Follow a job that this process has just created."""
        with self._lock:
            self._note((ref,), self._clock())
            self._made[ref.job_id] = workload

    def look(self, refs: Sequence[JobRef]) -> ClusterSnapshot:
        """Return what is known of jobs; for followed jobs, from a moment ago.

        Raises:
            BackendUnavailable: the server does not answer.
            PreflightError: it refuses to answer.
        """
        now = self._clock()
        with self._lock:
            is_followed = self._note(refs, now)
            if is_followed:
                self._watch(refs)
            kinds = self._kinds_for(refs)
            last, made = self._list, dict(self._made)
            around = self._surroundings(now)
        if kinds is not None and all(kind.is_told for kind in kinds.values()):
            return _make_snapshot(kinds, refs, around, None if last is None else last.look, made)
        if is_followed and last is not None and now - last.began < LIST_EVERY_S:
            since = {job: each for job, each in made.items() if job not in last.jobs}
            if last.jobs | since.keys() >= {ref.job_id for ref in refs}:
                return last.look.add_workloads(since)
        return self.ask_now(refs)

    def ask_now(self, refs: Sequence[JobRef]) -> ClusterSnapshot:
        """Ask the cluster now; once for all threads that ask."""
        began = self._clock()
        with self._listing:
            last = self._list
            if last is not None and last.began >= began and last.covers(refs):
                return last.look
            with self._lock:
                around, self._around_at = Surroundings(self.api), began
                self._around = around
                watches = self._kinds.values()
                is_watched = watches and all(kind.is_told for kind in watches)
                followed = () if is_watched else [ref for ref, _ in self._asked.values()]
            wanted = list({ref.job_id: ref for ref in (*followed, *refs)}.values())
            look = take_snapshot(self.api, wanted, around)
            jobs = frozenset(ref.job_id for ref in wanted)
            self._list = _List(look.mark_remembered(), jobs, began)
            return look

    def forget_watches(self) -> None:
        """Begin anew in a process that was forked: the threads that watched, or held a lock, are
        not there."""
        self._lock, self._listing = threading.Lock(), threading.Lock()
        self._kinds, self._list = {}, None

    def _note(self, refs: Sequence[JobRef], now: float) -> bool:
        """Whether all of these jobs were asked for recently."""
        self._asked_at = now
        self._asked = {
            job: (ref, at) for job, (ref, at) in self._asked.items() if now - at < FOLLOWED_S
        }
        known = [ref.job_id in self._asked for ref in refs]
        self._asked |= {ref.job_id: (ref, now) for ref in refs}
        self._made = {job: each for job, each in self._made.items() if job in self._asked}
        return bool(known) and all(known)

    def _watch(self, refs: Sequence[JobRef]) -> None:
        """Start a watch for each kind of object that these jobs have."""
        if any(kind.is_refused for kind in self._kinds.values()):
            self._may_watch = False
            self._end()
        if not self._may_watch:
            return
        self._kinds = {each: kind for each, kind in self._kinds.items() if not kind.is_over}
        if not self._kinds or not _covers(self._labels, refs):
            self._end()
            self._labels = selector(self._asked)
        for resource in (*kinds_of(refs), PODS):
            if resource not in self._kinds:
                chosen, wanted = Selector(labels=self._labels), self._is_wanted
                watcher = Watcher(
                    self.api, resource, chosen, patience=self._patience, wanted=wanted
                )
                self._kinds[resource] = kind = _ObjectKind(watcher, self._clock)
                try:
                    self._start(kind.run)
                except RuntimeError:  # The main thread has ended. Lists tell as much, but later.
                    self._may_watch = False
                    return self._end()

    def _end(self) -> None:
        for kind in self._kinds.values():
            kind.close()
        self._kinds = {}

    def _is_wanted(self) -> bool:
        return self._clock() - self._asked_at < FOLLOWED_S

    def _kinds_for(self, refs: Sequence[JobRef]) -> dict[Resource, _ObjectKind] | None:
        """The watches that cover these jobs; None if there are none."""
        needed = (*kinds_of(refs), PODS)
        if not _covers(self._labels, refs) or not self._kinds.keys() >= set(needed):
            return None
        return {resource: self._kinds[resource] for resource in needed}

    def _surroundings(self, now: float) -> Surroundings:
        if now - self._around_at >= AROUND_EVERY_S:
            self._around, self._around_at = Surroundings(self.api), now
        return self._around


def share_informer(api: Api) -> Informer:
    """Return the one `Informer` of a connection."""
    with _lock:
        live = _all.get(id(api))
        if live is None:
            _all[id(api)] = live = Informer(api)
        return live


_all: WeakValueDictionary[int, Informer] = WeakValueDictionary()  # Each keeps its connection.
_lock = threading.Lock()


def _forget_all_watches() -> None:
    global _lock
    _lock = threading.Lock()
    for informer in list(_all.values()):
        informer.forget_watches()


os.register_at_fork(after_in_child=_forget_all_watches)


def _make_snapshot(
    kinds: dict[Resource, _ObjectKind],
    refs: Sequence[JobRef],
    around: Surroundings,
    last: ClusterSnapshot | None,
    made: Mapping[str, Document],
) -> ClusterSnapshot:
    """What the watches say; the last look by lists, or what was created, where that is newer."""
    workloads: dict[str, Document] = {}
    pods: dict[str, list[Document]] = {}
    for ref in refs:
        newer = [each for each in (made.get(ref.job_id), last and last.workload(ref)) if each]
        if found := kinds[resource_of(ref)].of(ref, newer):
            workloads[ref.job_id] = found[-1]
        pods[ref.job_id] = kinds[PODS].of(ref, last.pods(ref) if last else ())
    return ClusterSnapshot(around, workloads, pods, is_remembered=True)


def _version_of(thing: Document) -> int:
    return watching.version_number(thing["metadata"].get("resourceVersion", ""))


def _covers(labels: str, refs: Sequence[JobRef]) -> bool:
    """Whether a selector matches all of these jobs."""
    return labels in (selector(()), selector({ref.job_id for ref in refs}))


def _in_thread(act: Callable[[], None]) -> None:
    threading.Thread(target=act, name="kinetic-cluster", daemon=True).start()
