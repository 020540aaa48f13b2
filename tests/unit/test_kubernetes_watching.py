"""Watches that go on through everything, with a scripted API."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import recorded
from hypothesis import given
from hypothesis import strategies as st

from kinetic._backends.kubernetes.api import Api, CallLimits, ObjectList, Selector
from kinetic._backends.kubernetes.errors import Busy, Expired, Forbidden
from kinetic._backends.kubernetes.resources import JOBS, Resource
from kinetic._backends.kubernetes.watching import Change, Watched, Watcher
from kinetic.errors import BackendUnavailable, PreflightError

Document = dict[str, Any]
AWAY = BackendUnavailable("The server does not answer.")
TOO_OLD = {"type": "ERROR", "object": {"kind": "Status", "code": 410, "message": "too old"}}


def job(name: str, version: int, uid: str = "") -> Document:
    return {"metadata": {"name": name, "uid": uid or name, "resourceVersion": str(version)}}


def event(kind: str, name: str, version: int, uid: str = "") -> Document:
    return {"type": kind, "object": job(name, version, uid)}


def bookmark(version: int) -> Document:
    return {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": str(version)}}}


class Stream:
    """Events, or an exception where it breaks off."""

    def __init__(self, events: Sequence[Document | Exception], on_end: Any = None) -> None:
        self.events = events
        self.closed = False
        self.on_end = on_end

    def __iter__(self) -> Iterator[Document]:
        for found in self.events:
            if isinstance(found, Exception):
                raise found
            yield found
        if self.on_end is not None:
            self.on_end()

    def close(self) -> None:
        self.closed = True


class Over(Exception):
    """The script has no more answers."""


@dataclass
class Server:
    """Gives its answers in order; what it was asked is kept."""

    lists: list[ObjectList | Exception] = field(default_factory=list)
    watches: list[Sequence[Document | Exception] | Exception] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)
    streams: list[Stream] = field(default_factory=list)

    def list(self, _resource: Resource, _selection: Selector) -> ObjectList:
        return self._next(self.lists)

    def watch(self, _resource: Resource, _selection: Selector, *, resource_version: str) -> Stream:
        self.versions.append(resource_version)
        self.streams.append(Stream(self._next(self.watches)))
        return self.streams[-1]

    def _next(self, answers: list[Any]) -> Any:
        if not answers:
            raise Over
        found = answers.pop(0)
        if isinstance(found, Exception):
            raise found
        return found


def watcher(server: Any, pauses: list[float] | None = None) -> Watcher:
    kept = [] if pauses is None else pauses

    def wait(seconds: float) -> bool:
        kept.append(seconds)
        return False

    api: Api = server
    return Watcher(api, JOBS, wait=wait, clock=lambda: 0.0, seed=random.Random(1))


def told(server: Server, pauses: list[float] | None = None) -> list[Watched]:
    """All that is told until the script is over."""
    found: list[Watched] = []
    with pytest.raises(Over):
        found.extend(watcher(server, pauses))
    return found


def shown(seen: Sequence[Watched]) -> list[str]:
    return [
        f"{w.change} {w.object['metadata']['name']}" if w.object else str(w.change) for w in seen
    ]


def test_what_is_there_comes_first_then_what_changes() -> None:
    server = Server(
        [ObjectList([job("a", 1)], "5")],
        [[event("MODIFIED", "a", 6), event("ADDED", "b", 7), event("DELETED", "a", 8)]],
    )
    assert shown(told(server)) == ["ADDED a", "SYNCED", "MODIFIED a", "ADDED b", "DELETED a"]
    assert server.versions == ["5", "8"]


def test_a_watch_that_ends_or_breaks_off_is_taken_up_where_it_was() -> None:
    pauses: list[float] = []
    server = Server(
        [ObjectList([], "5")],
        [[event("ADDED", "a", 6), bookmark(9)], [event("MODIFIED", "a", 10), AWAY], []],
    )
    assert shown(told(server, pauses)) == ["SYNCED", "ADDED a", "MODIFIED a"]
    assert server.versions == ["5", "9", "10", "10"]
    assert all(stream.closed for stream in server.streams)
    assert len(pauses) == 1  # after the one that ended at once


@pytest.mark.parametrize("old", [[TOO_OLD], Expired("gone")])
def test_a_forgotten_version_is_listed_anew_and_the_differences_are_told(old: Any) -> None:
    server = Server(
        [
            ObjectList([job("a", 1), job("b", 2), job("c", 3)], "5"),
            ObjectList([job("b", 2), job("c", 8), job("d", 9), job("a", 9, uid="a2")], "9"),
        ],
        [old],
    )
    assert shown(told(server)) == [
        "ADDED a",
        "ADDED b",
        "ADDED c",
        "SYNCED",
        "DELETED a",  # the one of that name is another object
        "MODIFIED c",
        "ADDED d",
        "ADDED a",
        "SYNCED",
    ]
    assert server.versions == ["5", "9"]


def test_an_outage_is_told_and_waited_out_with_growing_pauses() -> None:
    pauses: list[float] = []
    server = Server([AWAY, AWAY, ObjectList([], "5")], [AWAY, [event("ADDED", "a", 6)], AWAY])
    seen = told(server, pauses)
    assert shown(seen) == [
        "INTERRUPTED",
        "INTERRUPTED",
        "SYNCED",
        "INTERRUPTED",
        "SYNCED",
        "ADDED a",
        "INTERRUPTED",
    ]
    assert seen[0].problem is AWAY
    assert pauses[0] < pauses[1] < pauses[2]
    assert pauses[3] <= 0.25  # the server was well in between


@pytest.mark.parametrize("opens", [True, False])
def test_a_watch_that_is_held_back_on_its_way_is_replaced_by_lists(opens: bool) -> None:
    now = 0.0

    def held_back(*_args: Any, **_kwargs: Any) -> Stream:
        nonlocal now
        now += 90
        if not opens:
            raise AWAY
        return Stream([AWAY])

    lists: list[ObjectList | Exception] = [
        ObjectList([job("a", 1)], "5"),
        ObjectList([job("b", 7)], "8"),
    ]
    server: Any = Server(lists)
    server.watch = held_back
    seen: list[Watched] = []
    with pytest.raises(Over):
        seen.extend(Watcher(server, JOBS, wait=lambda _: False, clock=lambda: now))
    changes = [word for word in shown(seen) if not word.isupper()]
    assert changes == ["ADDED a", "DELETED a", "ADDED b"]


def test_a_watch_that_breaks_off_at_once_is_not_replaced_by_lists() -> None:
    server = Server([ObjectList([], "5")], [[AWAY], [event("ADDED", "a", 6), AWAY]])
    assert shown(told(server)) == ["SYNCED", "ADDED a"]
    assert server.versions == ["5", "5", "6"]


def test_missing_rights_are_raised_at_first_and_waited_out_later() -> None:
    no = Forbidden("You may not list jobs.")
    with pytest.raises(PreflightError):
        next(iter(watcher(Server([no]))))
    assert shown(told(Server([ObjectList([], "5")], [no, []]))) == [
        "SYNCED",
        "INTERRUPTED",
        "SYNCED",
    ]


@pytest.mark.parametrize("code", [403, 429, 500])
def test_after_another_error_in_the_stream_everything_is_listed_after_a_pause(code: int) -> None:
    pauses: list[float] = []
    broken = {"type": "ERROR", "object": {"kind": "Status", "code": code, "message": "etcd"}}
    lists: list[ObjectList | Exception] = [
        ObjectList([], "5"),
        ObjectList([job("a", 6)], "7"),
        ObjectList([], "9"),
    ]
    server = Server(lists, [[broken], [broken]])
    assert shown(told(server, pauses)) == ["SYNCED", "ADDED a", "SYNCED", "DELETED a", "SYNCED"]
    assert server.versions == ["5", "7", "9"]
    assert 0 < pauses[0] < pauses[1]


def test_what_is_told_twice_by_the_server_is_told_once() -> None:
    server = Server(
        [ObjectList([job("a", 6)], "5")],
        [[event("ADDED", "a", 6), event("DELETED", "z", 7), event("MODIFIED", "a", 8)]],
    )
    assert shown(told(server)) == ["ADDED a", "SYNCED", "MODIFIED a"]


def test_objects_of_lists_get_the_kind_that_watches_give() -> None:
    (first, *_) = told(Server([ObjectList([job("a", 1)], "5")]))
    assert (first.object["kind"], first.object["apiVersion"]) == ("Job", "batch/v1")


def test_it_ends_when_told() -> None:
    server = Server([ObjectList([], "5")], [[event("ADDED", "a", 6), event("ADDED", "b", 7)]])
    watching = watcher(server)
    seen = []
    for found in watching:
        seen.append(found)
        if found.object:
            watching.close()
            # a closed stream ends; what it had given already still comes
            server.streams[-1].events = ()
    assert shown(seen)[:2] == ["SYNCED", "ADDED a"]
    assert server.streams[-1].closed
    assert list(watching) == []


def test_a_server_that_says_when_to_come_again_is_believed() -> None:
    busy = Busy("Too many requests.")
    busy.after_s = 7.0
    pauses: list[float] = []
    told(Server([ObjectList((), "1")], [busy, [bookmark(2)]]), pauses)
    assert pauses[0] == 7.0


def test_a_pause_ends_when_told() -> None:
    watching = Watcher(Server([AWAY] * 9), JOBS, patience=CallLimits(first_s=1000, most_s=1000))  # type: ignore[arg-type]
    seen = []
    for found in watching:
        seen.append(found)
        watching.close()
    assert shown(seen) == ["INTERRUPTED"]


TROUBLE = st.sampled_from(["", "away", "old", "old event", "ends", "breaks off"])
NAMES = st.lists(st.sampled_from("abc"), min_size=1, max_size=12)
STEPS = st.lists(st.tuples(TROUBLE, st.integers(0, 5)), max_size=12)


def history_of(names: Sequence[str]) -> list[tuple[str, str]]:
    """Each name comes, changes, goes, comes again."""
    turns = ("ADDED", "MODIFIED", "DELETED")
    return [(turns[names[:n].count(name) % 3], name) for n, name in enumerate(names)]


class Cluster:
    """A history of changes, of which a bit more has happened at each request."""

    def __init__(self, history: list[tuple[str, str]], trouble: list[tuple[str, int]]) -> None:
        self.history = history
        self.trouble = trouble
        self.now = 0
        self.on_end: Any = None

    def step(self) -> str:
        what, more = self.trouble.pop(0) if self.trouble else ("", len(self.history))
        self.now = min(self.now + more, len(self.history))
        return what

    def list(self, _resource: Resource, _selection: Selector) -> ObjectList:
        if self.step() == "away":
            raise AWAY
        return ObjectList([job(n, v) for n, v in self.there(self.now).items()], str(self.now))

    def there(self, at: int) -> dict[str, int]:
        found: dict[str, int] = {}
        for version, (kind, name) in enumerate(self.history[:at], 1):
            found.pop(name, None)
            if kind != "DELETED":
                found[name] = version
        return found

    def watch(self, _r: Resource, _s: Selector, *, resource_version: str) -> Stream:
        what = self.step()
        if what == "old":
            raise Expired("gone")
        if what == "away":
            raise AWAY
        begin = int(resource_version)
        events: list[Document | Exception] = [
            event(kind, name, version)
            for version, (kind, name) in enumerate(self.history[begin : self.now], begin + 1)
        ]
        if what == "ends":
            return Stream(events[: len(events) // 2])
        if what == "breaks off":
            return Stream([*events[: len(events) // 2], AWAY])
        if what == "old event":
            return Stream([*events, TOO_OLD])
        return Stream(events, self.on_end if self.now == len(self.history) else None)


@given(NAMES, STEPS)
def test_nothing_is_lost_and_nothing_comes_twice_wherever_it_breaks(
    names: list[str], steps: list[tuple[str, int]]
) -> None:
    cluster = Cluster(history_of(names), list(steps))
    watching = watcher(cluster)
    cluster.on_end = watching.close
    have: dict[str, int] = {}
    for seen in watching:
        if not seen.object:
            continue
        meta = seen.object["metadata"]
        if seen.change is Change.DELETED:
            del have[meta["name"]]
            continue
        assert (meta["name"] in have) == (seen.change is Change.MODIFIED)
        have[meta["name"]] = int(meta["resourceVersion"])
    assert have == cluster.there(len(cluster.history))


def test_a_recorded_watch_is_told_as_it_was() -> None:
    sent = recorded.exchange("20-watch-protocol", "watch without resourceVersion")
    chunks = sent["response"]["chunks_t_data (null: end of stream)"]
    events = [data for _, data in chunks if data]
    seen = told(Server([ObjectList([], "1")], [events]))
    kinds = [e["type"] for e in events]
    assert [str(w.change) for w in seen[1:]] == kinds
