"""Reports about the hosts of a Ray job to its leader, while slices are freed and reserved again and
hosts enter or leave."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from kinetic._backends.ray.backend import HostSettings, RayBackend
from kinetic._store.local import LocalStore

hosts = pytest.importorskip("kinetic._host.ray.driver", exc_type=ImportError)


class Listener:
    def __init__(self):
        self.deaths, self.reasons, self.reports = [], [], []

    def on_change(self):
        pass

    def on_death(self, index, why):
        self.deaths.append(index)
        self.reasons.append(why)

    def on_report(self, report):
        self.reports.append(report)


def make_hosts():
    ray_hosts = hosts.RayHosts(4, 1, None, None, starts_each=False, limit_s=1.0)
    ray_hosts.listen(listener := Listener())
    return ray_hosts, listener


def begin(ray_hosts):
    """Let all four hosts of a reserved slice run their programs."""
    ray_hosts._starts[0] = SimpleNamespace(
        which=0, runs=True, reservation=SimpleNamespace(release=lambda: None)
    )
    for index in range(4):
        ray_hosts.on_enter(index)


def test_hosts_of_a_slice_that_was_freed_are_no_further_losses():
    ray_hosts, listener = make_hosts()
    begin(ray_hosts)
    # The actor of host 1 has died, so the leader ends the whole slice.
    ray_hosts.note_gone(1, is_taken_away=False)
    ray_hosts.end(range(4))
    for index in (2, 0, 3):
        ray_hosts.on_enter(index)  # The function has ended, but not its process.
        ray_hosts.on_leave(index)
    assert listener.deaths == []
    assert ray_hosts.dead == {0, 1, 2, 3}


def test_a_host_that_waits_and_leaves_is_lost_once():
    ray_hosts, listener = make_hosts()
    begin(ray_hosts)
    ray_hosts.on_leave(2)
    ray_hosts.on_leave(2)
    assert listener.deaths == [2]


def place_on(*nodes):
    return [SimpleNamespace(node=node) for node in nodes]


def test_a_host_is_told_once_that_its_node_is_drained(monkeypatch):
    ray_hosts, _ = make_hosts()
    begin(ray_hosts)
    ray_hosts._starts[0].leaving = set()
    ray_hosts._starts[0].places = place_on("a", "b", "c", "d")
    drained = []
    monkeypatch.setattr(hosts.cluster, "take_away", lambda place: drained.append(place.node))
    ray_hosts._on_draining({"b", "of others"})
    ray_hosts._on_draining({"b", "d"})
    assert drained == ["b", "d"]


def test_a_slice_whose_programs_do_not_run_yet_is_reserved_elsewhere(monkeypatch):
    ray_hosts, _ = make_hosts()
    released, started = [], []
    reservation = SimpleNamespace(nodes=["a", "b"], release=lambda: released.append("a, b"))
    waiting = ray_hosts._starts[0] = hosts._SliceStart(0, reservation)
    monkeypatch.setattr(ray_hosts, "_start", started.append)
    ray_hosts._on_draining({"c"})
    assert started == []
    ray_hosts._on_draining({"b"})
    ray_hosts.release_all()
    assert (released, started) == (["a, b"], [0])
    assert not waiting.is_wanted


def test_programs_are_killed_that_run(monkeypatch):
    ray_hosts, listener = make_hosts()
    begin(ray_hosts)
    ray_hosts._starts[0].places = ["at 0", "at 1", "at 2", "at 3"]
    ray_hosts._running = {0, 1, 3}  # Host 2's program has ended.
    killed = []
    monkeypatch.setattr(hosts.cluster, "kill_program", killed.append)
    assert sorted(ray_hosts.kill_programs([1, 2, 3, 7])) == [1, 3]
    assert sorted(killed) == ["at 1", "at 3"]
    assert listener.deaths == [], "Ray tells of it"


class Losing:
    """A reservation of four hosts whose machine is lost `losses` times before the hosts start."""

    def __init__(self, losses):
        self.losses, self.had = losses, []

    def act(self):
        pass

    def reserve(self, *, until, is_wanted):
        self.had.append("machines")

    def start_actors(self, *, until, is_wanted):
        self.act()
        if self.losses:
            self.losses -= 1
            raise hosts.MachinesLost("The actor died because its node has died.")
        return place_on("a", "b", "c", "d")

    def release(self):
        self.had.append("nothing")


def bring_up(losing, monkeypatch):
    """Start the slice; return the reports that the leader got, and the node of each host."""
    monkeypatch.setattr(hosts, "START_AGAIN_S", 0.0)
    monkeypatch.setattr(hosts.cluster, "run_program", lambda *_: Future())
    ray_hosts, listener = make_hosts()
    ray_hosts._variables = lambda index, place: {}
    ray_hosts._loop = SimpleNamespace(call_soon_threadsafe=lambda act, *values: act(*values))
    ray_hosts._serves.set()
    start = hosts._SliceStart(0, losing)
    ray_hosts._starts[0] = start
    ray_hosts._bring_up(start)
    return listener.reports, [place.node for place in start.places]


def test_a_machine_that_is_lost_before_its_host_has_started_is_had_elsewhere(monkeypatch):
    losing = Losing(hosts.MOST_STARTS - 1)
    assert bring_up(losing, monkeypatch) == ([], ["a", "b", "c", "d"])
    assert losing.had == [*["machines", "nothing"] * (hosts.MOST_STARTS - 1), "machines"]


def test_what_ends_each_actor_of_a_slice_ends_the_job(monkeypatch):
    losing = Losing(1000)
    (report,), places = bring_up(losing, monkeypatch)
    detail = "Ray could not start its hosts: The actor died because its node has died."
    assert (report.exit, report.detail, places) == (hosts.Exit.SETUP_FAILED, detail, [])
    assert losing.had.count("machines") == hosts.MOST_STARTS


def test_a_slice_that_is_wanted_no_more_is_freed_by_whoever_gets_it(monkeypatch):
    ray_hosts, _ = make_hosts()
    losing = Losing(0)
    losing.act = lambda: setattr(start, "is_wanted", False)
    start = hosts._SliceStart(0, losing)
    ray_hosts._serves.set()
    ray_hosts._bring_up(start)
    assert (losing.had, start.places) == (["machines", "nothing"], [])


def test_a_slice_that_has_its_machines_lacks_none(monkeypatch):
    ray_hosts, _ = make_hosts()
    monkeypatch.setattr(hosts.cluster, "describe_lack", lambda _, count: f"{count} lack")
    first, second = (hosts._SliceStart(n, SimpleNamespace(nodes=())) for n in range(2))
    ray_hosts._starts = {0: first, 1: second}
    assert ray_hosts._describe_wait() == "2 lack"
    first.reservation.nodes = ("a",)
    assert ray_hosts._describe_wait() == "1 lack"
    second.reservation.nodes, second.places = ("b",), place_on("b")
    assert "Ray installs its requirements and starts its hosts" in ray_hosts._describe_wait()


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (4, "Its worker process was killed while it waited for the next attempt."),
        (43, "its program on 10.0.0.1 was told to end."),
        (1, "its program on 10.0.0.1 ended with exit code 1."),
    ],
)
def test_a_program_that_ends_says_why(code, reason):
    ray_hosts, listener = make_hosts()
    begin(ray_hosts)
    ended = Future()
    ended.set_result((code, ""))
    ray_hosts._on_end(ray_hosts._starts[0], 2, SimpleNamespace(address="10.0.0.1"), ended)
    assert listener.reasons == [reason]


def test_what_a_job_waits_for_is_said_while_it_does_and_kept_afterwards(tmp_path):
    store = LocalStore(tmp_path)
    backend = RayBackend(store, lambda: None, lambda: None, HostSettings("", store.uri))
    ref = SimpleNamespace(job_id="job-00c0ffee")
    note = hosts._WaitingNote(store, ref.job_id)
    note.tell("")
    assert (backend._read_wait(ref), backend.why_unready(ref)) == ("", "")
    note.tell("it waits for 1 node")
    assert backend._read_wait(ref) == "it waits for 1 node"
    note.tell("")
    assert (backend._read_wait(ref), backend.why_unready(ref)) == ("", "It waits for 1 node.")


def test_a_slice_that_has_come_ends_no_wait_for_another_one(monkeypatch):
    ray_hosts, _ = make_hosts()
    ray_hosts._tell = (notes := []).append
    first, second = (hosts._SliceStart(n, SimpleNamespace(nodes=())) for n in range(2))
    ray_hosts._starts = {0: first, 1: second}
    over = hosts.threading.Event()
    over.set()
    ray_hosts._keep_telling(first, over)
    assert notes == []
    first.places = place_on("a")
    ray_hosts._keep_telling(second, over)
    assert notes == [""]


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ("Failed to set up runtime environment.\nx\nLast 50 lines of stdout:\n  no", "no"),
        ("The actor died.\n\tpid: 7\nIt was killed.", "It was killed."),
        ("The actor died.\n\tpid: 7", "The actor died."),
        ("", "ValueError"),
    ],
)  # fmt: skip
def test_the_end_of_an_actor_is_said_in_a_line(message, line):
    assert hosts.cluster.describe_death(ValueError(message)) == line
