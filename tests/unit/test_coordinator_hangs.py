"""Hanging gangs, hosts that fail alike, and random events in a gang."""

from __future__ import annotations

import subprocess
import sys

import pytest
from gang_cases import HOSTS, ended, exits, gang_of, hosts, let_pass, raised
from hypothesis import given, settings
from hypothesis import strategies as st

from kinetic._core.exits import Exit
from kinetic._core.gang.blame import STOPPED, notice_of
from kinetic._core.gang.machine import Activity, Gang, GangPhase, GangSpec, Heartbeat
from kinetic._core.outcome import RemoteError, blame_rank
from kinetic.errors import UsageError

WAITING = (
    'File "/v/site-packages/jax/_src/array.py", line 9 in _value\n'
    '  File "train.py", line 5 in <module>'
)


SLEEPING = 'File "train.py", line 3 in load\n  File "train.py", line 5 in <module>'


# --- hangs


def stand_still(gang: Gang, hosts, now: float, stalled_s: float = 31.0) -> None:
    for host in hosts:
        gang.heartbeat(Heartbeat(host, Activity.RUNNING, stalled_s=stalled_s), now)
    gang.sweep(now)


def test_a_hang_asks_for_stacks_and_names_the_odd_host_out():
    gang = gang_of(4, hang_timeout_s=30.0)
    gang.report(ended(3), 1.0)
    stand_still(gang, (0, 1, 2), 40.0)
    request = gang.view(0).stacks_request
    assert request == 1
    gang.stacks(0, request, WAITING, 40.1)
    gang.stacks(1, request, WAITING, 40.1)
    gang.sweep(40.2)
    assert gang.phase is GangPhase.RUNNING
    gang.stacks(2, request, SLEEPING, 40.3)
    gang.sweep(40.4)
    assert gang.first_failure == (2,)
    assert [gang.view(h).stop_exit for h in range(3)] == [Exit.STOPPED, Exit.STOPPED, Exit.HANG]
    assert "hosts 0-2 of 4 stood still for 31 s" in gang.stop_reason
    assert "host 2 differs from the others" in gang.stop_reason
    gang.report(ended(2, Exit.HANG), 41.0)
    gang.report(ended(1, Exit.STOPPED), 41.0)
    gang.report(ended(0, Exit.RAISED), 41.0)
    assert [r.stacks for r in gang.reports] == ["", WAITING, SLEEPING, ""]


def test_a_host_that_moves_but_keeps_the_others_waiting_is_the_odd_one():
    gang = gang_of(2, hang_timeout_s=30.0)
    gang.heartbeat(Heartbeat(1, Activity.RUNNING, stalled_s=0.1), 40.0)
    stand_still(gang, (0,), 40.0)
    gang.stacks(0, 1, WAITING, 40.1)
    gang.stacks(1, 1, SLEEPING, 40.1)
    gang.sweep(40.2)
    assert gang.first_failure == (1,)
    assert gang.stop_reason.startswith("host 0 of 2 stood still for 31 s")
    assert gang.stop_reason.endswith("waiting for host 1")


def test_a_host_that_sends_no_stacks_in_time_is_blamed_for_the_hang():
    gang = gang_of(3, hang_timeout_s=30.0, stacks_window_s=2.0)
    stand_still(gang, (0, 1, 2), 40.0)
    gang.stacks(0, 1, WAITING, 40.1)
    gang.stacks(2, 1, SLEEPING, 40.1)
    gang.sweep(41.9)
    assert gang.phase is GangPhase.RUNNING
    gang.sweep(42.0)
    assert gang.first_failure == (1,)


def test_a_gang_that_moves_on_while_stacks_are_taken_is_left_alone():
    gang = gang_of(1, hang_timeout_s=30.0)
    stand_still(gang, (0,), 40.0)
    gang.heartbeat(Heartbeat(0, Activity.RUNNING, stalled_s=0.0), 41.0)
    gang.stacks(0, 1, SLEEPING, 41.0)
    gang.sweep(41.0)
    assert gang.phase is GangPhase.RUNNING
    stand_still(gang, (0,), 80.0)
    gang.stacks(0, 2, SLEEPING, 80.1)
    gang.sweep(80.2)
    assert gang.stop_reason == "host 0 of 1 stood still for 31 s (hang_timeout is 30 s)"


def test_somebody_elses_wish_for_stacks_does_not_spoil_the_answer():
    gang = gang_of(2, hang_timeout_s=30.0)
    stand_still(gang, (0, 1), 40.0)
    second = gang.request_stacks(40.0)
    gang.stacks(0, second, WAITING, 40.1)
    gang.stacks(1, second, SLEEPING, 40.1)
    gang.sweep(40.2)
    assert gang.first_failure == (1,)


def test_a_host_whose_function_has_returned_is_not_to_blame_for_a_hang():
    gang = gang_of(2, hang_timeout_s=30.0)
    gang.heartbeat(Heartbeat(0, Activity.RUNNING, stalled_s=31.0), 40.0)
    gang.report(ended(0), 40.0)
    gang.sweep(40.0)
    assert gang.view(1).stacks_request == 0


@pytest.mark.parametrize("state", ["preparing", "waiting", "returned"])
def test_a_host_that_does_not_run_its_function_does_not_hang(state):
    gang = gang_of(1, hang_timeout_s=30.0)
    gang.heartbeat(Heartbeat(0, Activity(state), stalled_s=1e9), 40.0)
    gang.sweep(40.0)
    assert gang.view(0).stacks_request == 0


def test_a_hang_after_an_early_return_names_who_has_returned():
    gang = gang_of(3, hang_timeout_s=30.0)
    gang.heartbeat(Heartbeat(2, Activity.RETURNED), 40.0)
    stand_still(gang, (0, 1), 40.0)
    for host in (0, 1):
        gang.stacks(host, 1, WAITING, 40.1)
    gang.sweep(40.2)
    assert gang.first_failure == (0, 1)
    assert gang.stop_reason.startswith("host 2 has returned; hosts 0-1 wait for it at ")
    assert "hosts 0-1 of 3 stood still for 31 s" in gang.stop_reason.replace("Hosts", "hosts")


def test_that_some_have_returned_and_all_others_stand_still_is_said_once():
    gang = gang_of(4)
    gang.report(ended(2), 1.0)
    stand_still(gang, (0, 1), 40.0)
    gang.heartbeat(Heartbeat(3, Activity.RUNNING, stalled_s=19.0), 40.0)
    gang.sweep(40.0)
    assert gang.view(0).notice == ""
    version = gang.version
    stand_still(gang, (0, 1, 3), 41.0, stalled_s=32.0)
    assert gang.view(0).notice == notice_of((2,), (0, 1, 3), 20.0)
    assert gang.version > version
    version = gang.version
    stand_still(gang, (0, 1, 3), 99.0, stalled_s=90.0)
    assert gang.version == version
    assert gang.view(0).stacks_request == 0, "nothing is interrupted for it"


def test_hosts_that_stand_still_are_not_worth_a_notice_while_none_has_returned():
    gang = gang_of(2)
    stand_still(gang, (0, 1), 40.0, stalled_s=1e6)
    assert gang.view(0).notice == ""


# --- the same failure on several hosts


def test_code_that_fails_on_all_hosts_is_reported_of_all():
    gang = gang_of(3, peers_window_s=0.3)
    for host, now in ((2, 1.0), (0, 1.2), (1, 1.4)):
        assert gang.phase is GangPhase.RUNNING
        gang.report(
            ended(host, Exit.RAISED, error=RemoteError("ModuleNotFoundError", "no x", "")), now
        )
    assert gang.finished, "nobody is waited for any more"
    assert gang.first_failure == (2, 0, 1)
    assert gang.stop_reason == "all 3 hosts: ModuleNotFoundError: no x"


def test_hosts_that_fail_alike_have_a_moment_each_to_say_so():
    gang = gang_of(4, peers_window_s=0.3)
    gang.report(raised(2), 1.0)
    let_pass(gang, 1.0, 0.2)
    assert gang.urgent
    gang.report(raised(0), 1.2)
    let_pass(gang, 1.2, 0.2)
    assert gang.phase is GangPhase.RUNNING
    let_pass(gang, 1.4, 0.2)
    assert gang.phase is GangPhase.STOPPING
    assert gang.first_failure == (2, 0)
    assert gang.stop_reason == "host 2 of 4: ValueError: on 2", "the other one says something else"


@pytest.mark.parametrize(
    ("how", "waits"), [(Exit.RAISED, False), (Exit.SYS_EXIT, False), (Exit.UNPICKLE_FAILED, True)]
)
def test_nobody_waits_for_others_to_fail_alike_where_the_function_is_called_again(how, waits):
    """A gang that may retry ends at the first failure, unless every attempt would repeat it."""
    gang = gang_of(4, peers_window_s=0.3, repeats=True)
    gang.report(ended(2, how), 1.0)
    assert (gang.phase is GangPhase.RUNNING) is waits


def test_the_moment_for_others_to_fail_alike_is_bounded():
    gang = gang_of(99, peers_window_s=0.3)
    for host in range(90):
        gang.report(raised(host), 1.0 + host / 10)
        gang.sweep(1.0 + host / 10)
        if gang.phase is not GangPhase.RUNNING:
            break
    assert host == 15


@pytest.mark.parametrize("how", [Exit.SIGNAL, Exit.OS_EXIT, Exit.OUT_OF_MEMORY, Exit.AGENT_LOST])
def test_the_death_of_a_host_ends_the_gang_at_once(how):
    gang = gang_of(4, peers_window_s=0.3)
    gang.report(ended(2, how), 1.0)
    assert gang.phase is GangPhase.STOPPING


def test_a_death_ends_the_wait_for_others():
    gang = gang_of(4, peers_window_s=0.3)
    gang.report(raised(2), 1.0)
    gang.report(ended(3, Exit.SIGNAL), 1.1)
    assert gang.phase is GangPhase.STOPPING
    assert gang.first_failure == (2, 3)


@pytest.mark.parametrize("limit", ["timeout", "budget"])
@pytest.mark.parametrize("resumes", [False, True])
def test_a_timeout_names_the_host_for_which_the_others_still_wait(limit, resumes):
    """A host has returned and the others stand still; in one case one of them goes on later."""
    gang = gang_of(3, **{f"{limit}_s": 60.0, limit: f"{limit} of 60 s"})
    gang.report(ended(2), 1.0)
    stand_still(gang, (0, 1), 40.0)
    notice = gang.view(0).notice
    assert notice.startswith("host 2 has returned, and hosts 0-1 have stood still for 20 s: ")
    if resumes:
        stand_still(gang, (0,), 50.0, stalled_s=0.1)
    gang.sweep(61.0)
    assert f"{limit} of 60 s" in gang.stop_reason
    assert (notice[1:] in gang.stop_reason) == (not resumes)


def test_without_a_hang_timeout_nothing_hangs():
    gang = gang_of(1)
    stand_still(gang, (0,), 40.0, stalled_s=1e9)
    assert gang.view(0).stacks_request == 0


# --- refusals and limits


def test_stacks_that_were_not_requested_are_dropped():
    gang = gang_of(1)
    gang.stacks(0, 7, SLEEPING, 1.0)
    assert gang.stacks_of(7) == {}
    assert gang.stacks_missing(1) == (0,)


def test_huge_texts_are_cut():
    gang = gang_of(1)
    request = gang.request_stacks(1.0)
    gang.stacks(0, request, "x" * 10_000_000 + "end", 1.0)
    gang.heartbeat(Heartbeat(0, Activity.RUNNING, last_line="y" * 10_000_000), 1.0)
    assert len(gang.stacks_of(request)[0]) < 1_000_000
    assert gang.stacks_of(request)[0].endswith("end")
    assert len(gang.snapshot()["members"][0]["last_line"]) < 1000


@pytest.mark.parametrize("host", [-1, 2])
def test_hosts_outside_the_gang_are_refused(host):
    gang = gang_of(2)
    for call in (
        lambda: gang.join(host, "a", "h", 0.0),
        lambda: gang.heartbeat(Heartbeat(host), 0.0),
        lambda: gang.report(ended(host), 0.0),
        lambda: gang.mark_lost(host, "", 0.0),
        lambda: gang.stacks(host, 1, "", 0.0),
        lambda: gang.view(host),
    ):
        with pytest.raises(UsageError, match=r"no host .* in this job, which has hosts 0 to 1"):
            call()


def test_a_gang_without_hosts_and_an_agent_without_name_are_refused():
    with pytest.raises(UsageError):
        Gang(GangSpec(hosts=0), 0.0)
    with pytest.raises(UsageError):
        gang_of(1, joined=False).join(0, "", "h", 0.0)


@pytest.mark.starts_processes
def test_the_state_machine_needs_no_grpc():
    code = (
        "import sys, kinetic._core.gang.machine; assert not {'grpc', 'asyncio'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_big_gang_is_easy():
    hosts = 1024
    gang = gang_of(hosts)
    versions = {gang.version}
    for step in range(20):
        for host in range(hosts):
            gang.heartbeat(Heartbeat(host, Activity.RUNNING), float(step))
        gang.sweep(float(step))
        versions.add(gang.version)
    assert len(versions) == 1  # Heartbeats alone notify no host.
    assert gang.view(0) is gang.view(1023)  # All hosts share one view.
    for host in range(hosts):
        gang.report(ended(host), 20.0)
    assert gang.finished


reports = st.one_of(
    st.builds(ended, hosts, st.sampled_from(list(Exit))),
    st.builds(raised, hosts, consequence=st.booleans()),
    st.builds(ended, hosts, st.just(Exit.EVICTED), announced=st.booleans()),
)


beats = st.builds(
    Heartbeat,
    hosts,
    st.sampled_from(["preparing", "waiting", "running", "returned"]),
    stalled_s=st.sampled_from([0.0, 100.0]),
)


steps = st.one_of(
    st.tuples(st.just("join"), hosts, st.sampled_from(["a", "a", "a", "b"]), st.just("h")),
    st.tuples(st.just("heartbeat"), beats),
    st.tuples(st.just("report"), reports),
    st.tuples(st.just("mark_lost"), hosts, st.just("gone")),
    st.tuples(st.just("cancel"), st.just("")),
    st.tuples(st.just("request_stacks")),
    st.tuples(
        st.just("stacks"), hosts, st.integers(0, 3), st.sampled_from(["", WAITING, SLEEPING])
    ),
    st.tuples(st.just("sweep")),
)


moments = st.sampled_from([0.0, 0.01, 0.5, 1.5, 5.0, 40.0, -3.0])


everybody_joins = st.just([(("join", host, "a", "h"), 0.0) for host in range(HOSTS)])


stories = st.builds(
    lambda a, b: a + b,
    st.one_of(st.just([]), everybody_joins),
    st.lists(st.tuples(steps, moments), max_size=40),
)


specs = st.builds(
    GangSpec,
    hosts=st.just(HOSTS),
    start_timeout_s=st.just(30.0),
    timeout_s=st.sampled_from([None, 60.0]),
    hang_timeout_s=st.sampled_from([None, 20.0]),
)


@settings(max_examples=200, deadline=None)
@given(specs, stories)
def test_whatever_happens_the_gang_keeps_its_promises(spec, story):
    gang, now, joined, before_stop = Gang(spec, 0.0), 0.0, set(), {}
    views, version = {}, gang.version
    for (name, *args), pause in story:
        now += pause
        live = gang.phase in (GangPhase.JOINING, GangPhase.RUNNING)
        getattr(gang, name)(*args, now)
        if name == "join":
            joined.add(args[0])
        if name == "report" and live:
            before_stop.setdefault(args[0].host, args[0])
        assert gang.version >= version
        if gang.version != version:
            views, version = {}, gang.version
        for host in range(HOSTS):
            view = gang.view(host)
            # A view changes only with the version.
            assert views.setdefault(host, view) == view == gang._make_view(view.stop_exit)
            assert not view.ready or joined == set(range(HOSTS))
            assert view.all_done == (exits(gang) == [Exit.RETURNED] * HOSTS)
    for step in range(200):
        gang.sweep(now + step)
    assert gang.finished
    assert [r.host for r in gang.reports] == list(range(HOSTS))
    assert gang.view(0).all_done == all(r.ok for r in gang.reports)
    first = [r for r in gang.reports if r.host in gang.first_failure[:1]]
    causes = [r for r in before_stop.values() if blame_rank(r) < 3]
    stopped_by_failure = (
        gang.first_failure and not gang._stop_exits and Exit.NEVER_JOINED not in exits(gang)
    )
    if causes and stopped_by_failure:
        assert blame_rank(first[0]) < 5


@settings(max_examples=100, deadline=None)
@given(
    st.permutations(range(5)),
    st.sets(st.integers(0, 4), min_size=1),
    st.lists(st.floats(0.0, 0.19), min_size=5, max_size=5),
)
def test_a_cause_reported_within_the_window_is_blamed(order, causes, pauses):
    gang, now = gang_of(5), 0.0
    for host, pause in zip(order, pauses, strict=True):
        now += pause
        gang.sweep(now)
        gang.report(raised(host, consequence=host not in causes), now)
    expected = next(host for host in order if host in causes)
    assert gang.first_failure == (expected,)


def test_a_wish_to_cancel_that_comes_after_a_failure_is_remembered():
    gang = gang_of(2)
    gang.report(ended(0, Exit.RAISED), 1.0)
    assert not gang.unwanted
    gang.cancel("enough", 1.1)
    assert gang.unwanted
    assert gang.first_failure == (0,)


# --- standing still in every phase


STATES = (Activity.STARTING, Activity.RUNNING, Activity.JOINING)


def beat(gang, now, *states, stalled_s=61.0):
    """Send one heartbeat per host, which has stalled for `stalled_s` seconds in the given state;
    None stands for a host that makes progress."""
    for host, state in enumerate(states):
        still_s = stalled_s if state is not None else 0.5
        gang.heartbeat(Heartbeat(host, state or Activity.RUNNING, stalled_s=still_s), now)
    gang.sweep(now)


@pytest.mark.parametrize("state", STATES)
def test_a_worker_that_is_stopped_hangs_in_every_phase(state):
    gang = gang_of(3, hang_timeout_s=30.0)
    beat(gang, 40.0, Activity.JOINING, state, Activity.JOINING)
    for host, stacks in enumerate((WAITING, STOPPED, WAITING)):
        gang.stacks(host, 1, stacks, 40.1)
    gang.sweep(40.2)
    assert gang.first_failure == (1,)
    assert "stood still for 61 s" in gang.stop_reason
    assert gang.view(1).stop_exit is Exit.HANG


@pytest.mark.parametrize("state", [Activity.STARTING, Activity.JOINING])
def test_hosts_that_wait_in_jax_for_one_that_moves_are_not_hung(state):
    gang = gang_of(3, hang_timeout_s=30.0)
    beat(gang, 40.0, state, None, state)
    assert gang.view(0).stacks_request == 0


def notice(*stacks, states=(Activity.RUNNING,) * 3, **limits):
    gang = gang_of(len(states), **limits)
    beat(gang, 70.0, *states)
    gang.sweep(70.1)
    request = gang.view(0).stacks_request
    for host, text in enumerate(stacks) if request else ():
        gang.stacks(host, request, text, 70.1)
    gang.sweep(70.2)
    assert gang.phase is GangPhase.RUNNING
    return gang.view(0).notice


JOINING = (Activity.JOINING, Activity.STARTING, Activity.JOINING)


@pytest.mark.parametrize(
    ("detail", "stacks", "states"),
    [
        (" at train.py:3 in load", (WAITING, SLEEPING, WAITING), STATES),
        (f" ({STOPPED.rstrip('.')})", (WAITING, STOPPED, WAITING), JOINING),
        (f" ({STOPPED.rstrip('.')})", (SLEEPING, STOPPED, SLEEPING), (Activity.RUNNING,) * 3),
    ],
)
def test_the_host_that_all_others_wait_for_is_named(detail, stacks, states):
    still = f"host 1 of 3 has stood still for 60 s{detail}; all others wait for it."
    assert notice(*stacks, states=states) == still


@pytest.mark.parametrize(
    ("why", "stacks", "states"),
    [
        ("a long computation on the devices", (WAITING,) * 3, STATES),
        ("all sleep, or wait for something else", (SLEEPING,) * 3, STATES),
        ("they run programs", (SLEEPING, "", SLEEPING), STATES),
        ("one moves: it compiles, or reads", (WAITING, SLEEPING, WAITING), (*STATES[:2], None)),
        ("one waits for a debugger", (WAITING,) * 3, (*STATES[:2], Activity.DEBUGGING)),
        ("there are no others", (SLEEPING,), STATES[:1]),
    ],
)
def test_no_notice_blames_a_host_whose_stack_may_have_another_reason(why, stacks, states):
    assert notice(*stacks, states=states) == "", why


def test_stacks_are_asked_for_once_each_time_that_all_stand_still():
    gang = gang_of(2)
    for number, since in enumerate((100.0, 200.0), start=1):
        for second in range(5):
            beat(gang, since + second, Activity.RUNNING, Activity.RUNNING)
            for host in range(2):
                gang.stacks(host, number, SLEEPING, since + second)
            gang.sweep(since + second)
        assert gang.view(0).stacks_request == number
        beat(gang, since + 10, None, Activity.RUNNING)
