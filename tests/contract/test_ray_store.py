"""The contract of `Store` for a store on a real Ray head, reached only through its dashboard."""

from __future__ import annotations

import errno
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

import pytest
import test_store

from kinetic._host.ray import store_server as server_module
from kinetic._host.ray.store_server import StoreServer
from kinetic._ray.address import connect
from kinetic._ray.jobs_api import RayJob, RayNode
from kinetic._ray.store_servers import MODULE, ensure_server
from kinetic._store import ray as ray_store
from kinetic._store import ray_protocol
from kinetic._store.base import pause_of
from kinetic._store.local import LocalStore
from kinetic._store.open import open_store
from kinetic._store.ray import RayStore
from kinetic.errors import BackendUnavailable, StoreError, StoreFull

ROOT = Path(__file__).resolve().parents[2]
ELSEWHERE = {
    "test_list_is_the_sorted_set_of_keys",
    "test_open_store_opens_it_again",
    "test_bad_keys_are_usage_errors",
}
"""Tests of the contract with thousands of calls, which this module replaces by smaller ones."""
globals().update(
    {
        name: test
        for name, test in vars(test_store).items()
        if name.startswith("test_") and name not in ELSEWHERE
    }
)


@pytest.fixture
def many():
    """The number of keys: few, because each key takes several calls and lists have no pages."""
    return 30


@pytest.fixture
def store(ray_store_turn) -> Iterator[RayStore]:
    api = connect(ray_store_turn.address)
    runs = f"{sys.executable} -m {MODULE}"
    ensure_server(api, runs, {"env_vars": {"PYTHONPATH": str(ROOT)}})
    opened = RayStore(f"ray+{ray_store_turn.address}", api=api)
    for top in {key.partition("/")[0] for key in opened.list("")}:
        opened.delete(top)
    yield opened
    api.close()


def test_its_address_opens_it_again(store):
    store.put("again", b"1")
    reopened = open_store(store.uri)
    assert reopened.get("again") == b"1"
    assert reopened.uri == store.uri
    reopened._api.close()


def test_keys_may_have_any_characters(store):
    keys = ["a b", "[x]/*?", "é/ü", ".hidden/.file", "worker.out", "a=%2F"]
    keys += ["long/" + "x" * 900, "long/" + "é" * 61 + "/b"]
    for key in keys:
        store.put(key, key.encode())
    assert list(store.list("")) == sorted(keys)
    assert [store.get(key) for key in keys] == [key.encode() for key in keys]
    assert sorted(entry.key for entry in store.entries("long")) == sorted(keys[-2:])
    assert all(store.delete(entry.key) == 1 for entry in store.entries("long"))


def test_large_content_goes_in_parts(store, tmp_path, monkeypatch):
    part_bytes = 1 << 20
    monkeypatch.setattr(ray_store, "PART_BYTES", part_bytes)
    content = os.urandom(2 * part_bytes + 1)
    assert store.put("large", iter([content[:1000], content[1000:]]), if_absent=True) is True
    assert store.put("large", content, if_absent=True) is False
    store.fetch("large", tmp_path / "there")
    assert (tmp_path / "there").read_bytes() == content


def test_it_is_looked_into_as_often_as_it_keeps_up_with(tmp_path):
    """Calls cost nothing, so a pause between polls is only as long as the last call, or 50 ms."""
    store = RayStore("ray+http://head:8265", api=Silent())
    assert [pause_of(store, took_s, 0.5) for took_s in (0.0, 0.1, 9.0)] == [0.05, 0.1, 0.5]
    assert pause_of(LocalStore(tmp_path), 0.1, 0.5) == 0.5


def test_one_store_server_is_enough(store):
    assert ensure_server(store._api, "false", {}) is False


# --- the store server itself, without a cluster


class Requests(dict):
    """The packages of a dashboard (see `Packages`), in memory."""

    def names(self) -> list[str]:
        return sorted(self)

    def open(self, name: str) -> bytes | None:
        return self.get(name)

    def discard(self, name: str) -> None:
        self.pop(name, None)

    def send(self, request_id: str, request: dict, data: bytes = b"") -> None:
        self[ray_protocol.package_name(request_id)] = ray_protocol.pack_request(request, data)


def responses(folder: Path) -> dict[str, object]:
    names = [path.name for path in (folder / ray_protocol.RESPONSES).iterdir()]
    return {name.partition("=")[0]: ray_protocol.read_response_name(name)[1] for name in names}


def test_a_store_server_answers_what_it_does_not_understand(tmp_path):
    packages = Requests()
    packages.send("1", {"do": "fly"})
    packages.send("2", {"do": "append", "upload": "../up"}, b"x")
    packages.send("3", {"do": "put", "key": "a/../../b", "if_absent": False})
    packages[ray_protocol.package_name("4")] = b"no request"
    assert StoreServer(tmp_path, packages).work() == 4
    assert packages == {}
    assert responses(tmp_path).keys() == {"1", "2", "3", "4"}
    assert list((tmp_path / ray_protocol.CONTENT).rglob("*")) == []


@pytest.mark.parametrize(
    "package",
    [
        b'{"do": "append", "upload": 5}',
        b'{"do": "drop", "entry": [1, 2, 3]}',
        b'{"do": "put", "key": {}, "if_absent": 0}',
        b"[" * 100_000,
        b"\xff",
        b"5",
    ],
)
def test_no_request_ends_a_store_server(tmp_path, package):
    packages = Requests(
        {ray_protocol.package_name("bad"): package, "kinetic-request-../../x.zip": package}
    )
    packages.send("good", {"do": "put", "key": "a", "if_absent": False}, b"content")
    assert StoreServer(tmp_path, packages).work() == 3
    assert packages == {}
    assert responses(tmp_path).keys() == {"bad", "good"}


def test_a_request_that_comes_twice_is_answered_once(tmp_path):
    """A client repeats a request, or a second server gets it: it must have its effect only once."""
    packages, request = Requests(), {"do": "put", "key": "a", "if_absent": True}
    for _ in range(2):
        packages.send("1", request, b"content")
        assert StoreServer(tmp_path, packages).work() == 1
    assert responses(tmp_path) == {"1": {"value": True}}
    for request_id in ("2", "3"):
        packages.send(request_id, {"do": "append", "upload": "u", "at": 0}, b"ab")
        packages.send(f"{request_id}0", {"do": "append", "upload": "u", "at": 2}, b"cd")
    StoreServer(tmp_path, packages).work()
    assert (tmp_path / ray_protocol.UPLOADS / "u").read_bytes() == b"abcd"


def test_a_part_whose_predecessors_were_removed_is_refused(tmp_path):
    """A sender was suspended until its first part was removed: its second part is refused."""
    packages = Requests()
    packages.send("1", {"do": "append", "upload": "u", "at": 2}, b"cd")
    packages.send("2", {"do": "put", "key": "a", "if_absent": True, "upload": "u"})
    server = StoreServer(tmp_path, packages)
    server.work()
    first, second = sorted((tmp_path / ray_protocol.RESPONSES).iterdir())
    assert "was interrupted for more than" in (first.name + first.read_text())
    assert '"StoreError"' in unquote(second.name) + second.read_text()
    assert not list(LocalStore(tmp_path / ray_protocol.CONTENT).list(""))


def test_a_full_disk_is_answered_and_ends_no_store_server(tmp_path, monkeypatch):
    """Not even a long error text fits on the disk: the client still gets `StoreFull`."""

    def refuse(path, content):
        if content:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        path.touch()
        return 0

    def fail(*_, **__):
        raise StoreFull("The store is full: " + "x" * 200)

    packages = Requests()
    server = StoreServer(tmp_path, packages)
    monkeypatch.setattr(Path, "write_bytes", refuse)
    monkeypatch.setattr(server._store, "put", fail)
    monkeypatch.setattr(server, "_append", lambda *_: refuse(tmp_path, b"part"))
    packages.send("1", {"do": "put", "key": "a", "if_absent": False}, b"content")
    packages.send("2", {"do": "append", "upload": "u", "at": 0}, b"part")
    assert server.work() == 2
    assert packages == {}
    assert [answer["error"] for answer in responses(tmp_path).values()] == ["StoreFull"] * 2
    assert list((tmp_path / ray_protocol.UPLOADS).iterdir()) == []


def test_a_store_server_without_requests_looks_ever_more_seldom(tmp_path, monkeypatch):
    """Polls burden Ray's control store: 200 a second while requests come, then far fewer."""
    server, polled_at = StoreServer(tmp_path, Requests()), []

    class Clock:
        now = 0.0

        def monotonic(self):
            return self.now

        def sleep(self, seconds):
            self.now += seconds

    def work():
        polled_at.append(clock.now)
        if clock.now > 10:
            raise StopIteration
        return clock.now < 1

    clock = Clock()
    monkeypatch.setattr(server_module, "time", clock)
    monkeypatch.setattr(server, "tidy", lambda: None)
    monkeypatch.setattr(server, "work", work)
    with pytest.raises(StopIteration):
        server_module._serve(server)
    busy = sum(at < 1 for at in polled_at)
    assert busy == pytest.approx(200, rel=0.1)
    assert len(polled_at) - busy < 150


def test_a_store_server_takes_up_what_was_sent_while_there_was_none(tmp_path):
    packages = Requests()
    packages.send("1", {"do": "put", "key": "a", "if_absent": True}, b"content")
    assert StoreServer(tmp_path, packages).work() == 1
    assert responses(tmp_path) == {"1": {"value": True}}
    assert (tmp_path / ray_protocol.CONTENT / "a").read_bytes() == b"content"


def test_answers_that_nobody_reads_are_removed(tmp_path):
    packages = Requests()
    server = StoreServer(tmp_path, packages)
    packages.send("old", {"do": "delete", "prefix": "a"})
    server.work()
    (old,) = (tmp_path / ray_protocol.RESPONSES).iterdir()
    os.utime(old, (time.time() - 3600,) * 2)
    packages.send("new", {"do": "delete", "prefix": "a"})
    server.work()
    server.tidy()
    assert responses(tmp_path).keys() == {"new"}


class Silent:
    """A dashboard without a store server: requests stay unanswered."""

    address = "http://head:8265"

    def nodes(self):
        return [RayNode("1", "", True, True, {}, {})]

    def list(self):
        return []

    def put_package(self, name, data):
        pass

    def list_logs(self, node_id, pattern):
        return []


def test_a_store_server_that_does_not_answer_is_said():
    now = iter(range(0, 10_000, 10))
    store = RayStore(
        "ray+http://head:8265", api=Silent(), sleep=lambda _: None, clock=lambda: next(now)
    )
    with pytest.raises(
        StoreError, match=r"server of the store .* does not answer.*kinetic-store-server"
    ):
        store.put("a", b"")


class Stack(Requests):
    """A dashboard that lists its packages newest first."""

    def names(self):
        return sorted(self, reverse=True)


def test_requests_of_one_writer_are_worked_through_in_order(tmp_path):
    """A server carries out 20 old requests in the order of sending, not that of the dashboard."""
    late, now = Silent(), iter(range(0, 10_000, 10))
    late.packages = Stack()
    late.put_package = late.packages.__setitem__
    store = RayStore("ray+http://head:8265", api=late, sleep=lambda _: None, clock=now.__next__)
    for content in map(str, range(20)):
        with pytest.raises(StoreError, match="does not answer"):
            store.put("a", content.encode())
    assert StoreServer(tmp_path, late.packages).work() == 20
    assert LocalStore(tmp_path / ray_protocol.CONTENT).get("a") == b"19"


class Troubled(Silent):
    """A dashboard that refuses every second call, with a store server that works."""

    def __init__(self, folder):
        self.packages = Requests()
        self.server = StoreServer(folder, self.packages)
        self.folder = folder
        self.calls = 0

    def put_package(self, name, package):
        self._refuse()
        self.packages[name] = package
        self.server.work()

    def list_logs(self, node_id, pattern):
        self._refuse(times=5)
        return [str(path) for path in self.folder.glob(pattern)]

    def _refuse(self, times=1):
        self.calls += 1
        if self.calls % (times + 1):
            raise BackendUnavailable("Max number of in-progress requests=100 reached")


def test_the_trouble_of_a_moment_costs_nothing(tmp_path):
    """The dashboard fails now and then: the value is still written, and written once."""
    trouble = Troubled(tmp_path)
    store = RayStore("ray+http://head:8265", api=trouble, sleep=lambda _: None)
    assert store.put("a", b"value", if_absent=True) is True
    assert LocalStore(tmp_path / ray_protocol.CONTENT).get("a") == b"value"


def test_a_dashboard_in_lasting_trouble_is_named(tmp_path):
    trouble, now = Troubled(tmp_path), iter(range(0, 10_000, 10))
    trouble.list_logs = trouble.list = lambda *_: trouble._refuse(times=10**6)
    store = RayStore(
        "ray+http://head:8265", api=trouble, sleep=lambda _: None, clock=lambda: next(now)
    )
    with pytest.raises(StoreError, match="in-progress requests=100"):
        store.put("a", b"value")


@pytest.mark.parametrize("key", test_store.BAD_KEYS)
def test_bad_keys_are_refused_before_anything_is_sent(key):
    test_store.test_bad_keys_are_usage_errors(RayStore("ray+http://head:8265", api=None), key)


class Forsaken(Silent):
    """A dashboard whose store server has ended with an error."""

    def __init__(self):
        self.submitted = []
        self.jobs = [RayJob("kinetic-store-server-1-7", "FAILED", "killed", entrypoint="keep")]

    def list(self):
        return self.jobs

    def submit(self, submission):
        self.jobs.append(RayJob(submission.job_id, "FAILED", "no module"))
        self.submitted.append(submission)


def test_a_store_server_that_has_ended_is_started_again_by_whoever_writes():
    """A write finds that the store server has ended, and starts it again with its last command."""
    now, dashboard = iter(range(0, 10_000, 10)), Forsaken()
    store = RayStore(
        "ray+http://head:8265", api=dashboard, sleep=lambda _: None, clock=lambda: next(now)
    )
    with pytest.raises(StoreError, match=r"kinetic-store-server-1-8 FAILED: no module"):
        store.put("a", b"")
    first = dashboard.submitted[0]
    assert (first.job_id, first.entrypoint) == ("kinetic-store-server-1-8", "keep")
    assert len(dashboard.jobs) <= 4
