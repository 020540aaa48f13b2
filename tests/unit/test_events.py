"""Events of a gang, and the picture of its attempts and hosts that is computed from them."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from kinetic._core.events import EventKind, GangEvent, parse
from kinetic._core.exits import Exit, HostState
from kinetic._core.gang.machine import Gang, GangSpec
from kinetic._core.gang.picture import picture_of
from kinetic._core.outcome import HostReport, Verdict, judge

EVENTS = st.builds(
    GangEvent,
    st.sampled_from(EventKind),
    host=st.none() | st.integers(-2, 5),
    detail=st.text(max_size=9),
    exit=st.none() | st.sampled_from(Exit),
    hosts=st.lists(st.integers(-2, 5), max_size=3).map(tuple),
    verdict=st.none() | st.sampled_from(Verdict),
    attempt=st.integers(1, 3),
    time=st.floats(0, 2e9),
    ago_s=st.just(0.0),
)


def lines(*events):
    return "".join(json.dumps(event.to_json()) + "\n" for event in events).encode()


def states(*events, hosts=3):
    return tuple(host.state for host in picture_of(events, hosts).current.hosts)


def happened(kind, host=None, exit=None, **more):
    return GangEvent(EventKind(kind), host, exit=exit, **more)


@given(st.lists(EVENTS, max_size=5))
def test_what_is_written_is_read(events):
    assert parse(lines(*events)) == events
    plain = {str, int, float, list, type(None)}
    assert {type(value) for event in events for value in event.to_json().values()} <= plain


@given(st.lists(EVENTS, max_size=20))
def test_any_events_have_a_picture(events):
    picture = picture_of(events, 4)
    assert all(len(attempt.hosts) == 4 for attempt in picture.attempts)
    assert json.loads(json.dumps([attempt.to_json() for attempt in picture.attempts]))


@given(
    st.lists(
        st.dictionaries(
            st.sampled_from(["kind", "host", "detail", "attempt", "exit", "hosts", "time"]),
            st.none() | st.integers(-3, 9) | st.text(max_size=9) | st.lists(st.integers()),
        ).map(lambda line: json.dumps(line).encode())
        | st.binary(max_size=20)
    )
)
def test_damaged_events_are_passed_over(damaged):
    event = GangEvent(EventKind.JOINED, 1)
    parsed = parse(b"\n".join(damaged) + b"\n" + lines(event))
    assert parsed[-1] == event
    assert picture_of(parsed, 4).attempts


def test_what_only_a_newer_version_knows_is_passed_over():
    data = b'{"kind": "moved", "host": 1}\n{"kind": "joined", "host": 1, "rack": "b"}\n'
    assert parse(data) == [GangEvent(EventKind.JOINED, 1)]


def test_hosts_join_run_stall_and_end():
    begun = [happened("joined", 0), happened("joined", 2)]
    assert states(*begun) == ("joined", "pending", "joined")
    begun += [happened("joined", 1), happened("ready", time=7.0)]
    assert states(*begun) == ("running",) * 3
    begun += [happened("stalled", hosts=(0, 1))]
    assert states(*begun) == ("stalled", "stalled", "running")
    begun += [happened("resumed")]
    assert states(*begun) == ("running",) * 3
    begun += [
        happened("report", 1, Exit.RETURNED),
        happened("report", 2, Exit.RAISED, detail="returned: no, a sentence that lies"),
        happened("failure", 2, Exit.RAISED, detail="ValueError"),
        happened("report", 0, Exit.STOPPED),
    ]
    assert states(*begun) == ("stopped", "returned", "failed")
    current = picture_of(begun, 3).current
    assert [host.exit for host in current.hosts] == [Exit.STOPPED, Exit.RETURNED, Exit.RAISED]
    assert (current.number, current.ready_at, current.verdict) == (1, 7.0, None)


def test_each_attempt_has_a_picture_of_its_own():
    events = [
        happened("joined", 0, time=1.0),
        happened("lost", 0, Exit.AGENT_LOST),
        happened("ended", verdict=Verdict.FAILED, hosts=(0,), detail="host 0: lost", time=3.0),
        happened("retry", time=4.0),
    ]
    first, second = picture_of(events, 2).attempts
    assert (first.number, first.began_at, first.ended_at) == (1, 1.0, 3.0)
    assert (first.verdict, first.reason, first.blamed) == (Verdict.FAILED, "host 0: lost", (0,))
    assert first.hosts[0].state is HostState.FAILED
    assert second.number == 2
    assert {host.state for host in second.hosts} == {HostState.PENDING}
    assert states(*events, happened("joined", 1, attempt=2), hosts=2) == ("pending", "joined")


def test_the_verdict_counts_more_than_the_events():
    reports = [HostReport(0, Exit.RETURNED), HostReport(1, Exit.SIGNAL, "killed")]
    outcome = judge(2, reports, blamed=(1,), now=9.0, attempt=2)
    current = picture_of([happened("joined", 1)], 2, outcome).current
    assert [host.state for host in current.hosts] == [HostState.RETURNED, HostState.FAILED]
    assert (current.number, current.verdict, current.blamed) == (2, Verdict.FAILED, (1,))


def test_a_gang_tells_what_its_picture_shows():
    gang = Gang(GangSpec(hosts=3, start_timeout_s=5.0, attempt=2), 0.0)
    gang.join(0, "a", "", 0.0)
    gang.join(1, "b", "", 0.0)
    events = [*gang.sweep(1.0), *gang.sweep(5.0)]
    gang.report(HostReport(0, Exit.STOPPED), 6.0)
    gang.mark_lost(1, "killed", 6.0)
    events += gang.sweep(7.0)
    current = picture_of(events, 3).current
    assert gang.finished
    assert current.number == 2
    assert {i: host.exit for i, host in enumerate(current.hosts)} == {
        report.host: report.exit for report in gang.reports
    }


def test_the_slices_of_an_elastic_job():
    events = [
        happened("formed", hosts=(0, 1, 2, 3), slices=(0, 1)),
        happened("ready"),
        happened("report", 3, Exit.SIGNAL),
        happened("slice_lost", slices=(1,)),
        happened("awaited", slices=(1,)),
    ]
    waiting = picture_of(events, 4).current
    assert (waiting.slices, waiting.lost, waiting.awaited) == ((0, 1), (1,), (1,))
    events += [
        happened("slice_back", slices=(1,)),
        happened("retry"),
        happened("formed", hosts=(2, 3), slices=(1,), attempt=2),
        happened("ready", attempt=2),
    ]
    first, second = picture_of(events, 4).attempts
    assert (first.lost, first.awaited) == ((1,), ())
    assert [host.state for host in second.members] == [HostState.RUNNING] * 2
    assert second.to_json()["slices"] == [1]
    assert parse(lines(*events)) == events


def test_how_long_a_job_ran_counts_all_its_attempts_and_no_wait_between_them():
    events = [
        happened("ready", time=1.0),
        happened("ended", verdict=Verdict.FAILED, hosts=(0,), time=5.0),
        happened("formed", hosts=(0,), attempt=2, time=8.0),
        happened("ready", attempt=2, time=10.0),
    ]
    running = picture_of(events, 1)
    assert (running.started_at, running.ran_s(12.0)) == (1.0, 6.0)
    outcome = judge(1, [HostReport(0, Exit.SIGNAL, started_at=10.5)], now=13.0, attempt=2)
    ended = picture_of(events, 1, outcome)
    assert (ended.started_at, ended.ran_s(99.0)) == (1.0, 7.0)
    # A function that ended at once has left no event.
    at_once = picture_of([], 1, judge(1, [HostReport(0, Exit.SIGNAL, started_at=3.0)], now=4.0))
    assert (at_once.started_at, at_once.ran_s(99.0)) == (3.0, 1.0)
    assert (picture_of([], 1).started_at, picture_of([], 1).ran_s(9.0)) == (None, 0.0)


def test_hosts_that_left_to_make_room_have_not_failed():
    events = [
        happened("report", 0, Exit.REFORMED),
        happened("report", 1, Exit.REFORMED),
        happened("ended", verdict=Verdict.FAILED, hosts=(0, 1, 7), time=5.0),
    ]
    (attempt,) = picture_of(events, 2).attempts
    assert (attempt.blamed, attempt.failed_first) == ((0, 1, 7), (7,))
