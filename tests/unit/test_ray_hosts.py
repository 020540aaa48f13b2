"""Which hosts of a job on Ray count as there, while slices are freed and reserved again.

In: a slice that is freed, hosts that come in and leave meanwhile. Out: what the leader is told.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest

hosts = pytest.importorskip("kinetic._host.ray.hosts", exc_type=ImportError)


class Told:
    def __init__(self):
        self.deaths = []

    def on_change(self):
        pass

    def on_death(self, index, why):
        self.deaths.append(index)


def make_hosts():
    made = hosts.RayHosts(4, 1, None, None, starts_each=False, limit_s=1.0)
    made.listen(told := Told())
    return made, told


def begin(made):
    """As if the slice were reserved, and its programs ran."""
    made._starts[0] = SimpleNamespace(runs=True, reservation=SimpleNamespace(release=lambda: None))
    for index in range(4):
        made.on_enter(index)


def test_hosts_of_a_slice_that_was_freed_are_no_further_losses():
    made, told = make_hosts()
    begin(made)
    made.note_gone(1, is_taken_away=False)  # its actor died, and the leader ends the whole slice
    made.end(range(4))
    for index in (2, 0, 3):
        made.on_enter(index)  # its function was ended, and it has not been killed yet
        made.on_leave(index)
    assert told.deaths == []
    assert made.dead == {0, 1, 2, 3}


def test_a_host_that_waits_and_leaves_is_lost_once():
    made, told = make_hosts()
    begin(made)
    made.on_leave(2)
    made.on_leave(2)
    assert told.deaths == [2]


def place_on(*nodes):
    return [SimpleNamespace(node=node) for node in nodes]


def test_a_host_is_told_once_that_its_node_is_drained(monkeypatch):
    made, _ = make_hosts()
    begin(made)
    made._starts[0].which, made._starts[0].leaving = 0, set()
    made._starts[0].places = place_on("a", "b", "c", "d")
    told = []
    monkeypatch.setattr(hosts.cluster, "take_away", lambda place: told.append(place.node))
    made._on_draining({"b", "of others"})
    made._on_draining({"b", "d"})
    assert told == ["b", "d"]


def test_a_slice_whose_programs_do_not_run_yet_is_reserved_elsewhere(monkeypatch):
    made, _ = make_hosts()
    released, started = [], []
    reservation = SimpleNamespace(nodes=["a", "b"], release=lambda: released.append("a, b"))
    waiting = made._starts[0] = hosts._SliceStart(0, reservation)
    monkeypatch.setattr(made, "_start", started.append)
    made._on_draining({"c"})
    assert started == []
    made._on_draining({"b"})
    made.release_all()
    assert (released, started) == (["a, b"], [0])
    assert not waiting.is_wanted


def test_programs_are_killed_that_run(monkeypatch):
    made, told = make_hosts()
    begin(made)
    made._starts[0].places = ["at 0", "at 1", "at 2", "at 3"]
    made._running = {0, 1, 3}  # that of host 2 has ended
    killed = []
    monkeypatch.setattr(hosts.cluster, "kill_program", killed.append)
    assert sorted(made.kill_programs([1, 2, 3, 7])) == [1, 3]
    assert sorted(killed) == ["at 1", "at 3"]
    assert told.deaths == [], "Ray tells of it"
