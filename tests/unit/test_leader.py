"""The slices that a leader counts as ready while hosts come and go, with fake agents."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from doubles.memory_store import MemoryStore
from manifest_cases import planned

from kinetic._backends.attempt_logs import LogReader, drain
from kinetic._core import layout
from kinetic._core.events import EventKind, GangEvent
from kinetic._core.exits import Exit
from kinetic._core.gang.formation import make_policy
from kinetic._core.gang.policy import Form, Loss, SliceState
from kinetic._core.outcome import HostReport, Outcome, Verdict
from kinetic._core.place import Place
from kinetic._host.hosts import ForkedHosts, RemoteHosts
from kinetic._host.leader import FIRST_SIGN_S, Leader
from kinetic._host.leader_runtime import LeaderRuntime
from kinetic._host.verdicts import judge_gang
from kinetic._store.log_segments import ObjectLog

PATIENCE_S = 100.0


class FakeAgents:
    """Fake agents of two slices with one host each, which record their ends and starts."""

    def __init__(self):
        self.pids = {100: 0, 101: 1}
        self.started = []

    def end(self, indices):
        self.pids = {pid: index for pid, index in self.pids.items() if index not in indices}

    def signal(self, signum, hosts=None):
        pass

    def fork_again(self, index, place=None, *, start=1):
        self.started.append((index, start))
        self.pids[200 + start] = index


class Forked:
    """A job whose leader forks its agents."""

    def __init__(self):
        self.agents = FakeAgents()
        self.crew = ForkedHosts(self.agents, stay=True)

    def started(self):
        """Return the index of the restarted host, and the number of its start."""
        ((index, start),) = self.agents.started
        return index, start


class Distant:
    """A job whose agents run elsewhere, and are restarted by a cluster."""

    def __init__(self):
        self.crew = RemoteHosts(2)

    def started(self):
        return 1, 77


@pytest.fixture(params=[Forked, Distant])
def hosts(request):
    return request.param()


def leading(crew, store=None):
    plan = planned("cpu:2", place=Place("local"), slices=(1, 2))
    return Leader(plan, store or MemoryStore(), crew, make_policy(plan), has_records=lambda: True)


def die(leader, index):
    """Report that the agent of a host is dead."""
    leader._on_event(GangEvent(EventKind.LOST, index))


def test_what_the_agent_of_a_lost_slice_has_asked_for_counts_no_more():
    """An agent asks for its next assignment, then its slice is lost: the request gets None."""

    async def story():
        hosts = Forked()
        leader = leading(hosts.crew)
        first = asyncio.create_task(leader._hosts.waiting_room.ask(1, 1))
        await asyncio.sleep(0)
        leader._fail(Loss((1,), "its worker was killed"))
        assert hosts.agents.pids == {100: 0}
        leader._decide()
        assert leader._policy.state_of(1) is SliceState.AWAY
        assert await first is None
        await returned(leader, hosts)

    asyncio.run(story())


def test_the_agent_of_a_lost_slice_elsewhere_stays_and_waits_for_its_place():
    async def story():
        hosts = Distant()
        leader = leading(hosts.crew)
        first = asyncio.create_task(leader._hosts.waiting_room.ask(1, 5))
        await asyncio.sleep(0)
        leader._fail(Loss((1,), "its worker was killed"))
        leader._decide()
        leader._decide()
        assert leader._policy.state_of(1) is SliceState.READY
        first.cancel()

    asyncio.run(story())


@pytest.mark.parametrize("how", [Exit.AGENT_LOST, Exit.EVICTED])
def test_an_agent_elsewhere_that_says_that_it_ends_is_not_counted_on(how):
    async def story():
        leader = leading(RemoteHosts(2))
        asking = asyncio.create_task(leader._hosts.waiting_room.ask(1, 5))
        await asyncio.sleep(0)
        leader._on_event(GangEvent(EventKind.REPORT, 1, exit=how))
        leader._fail(Loss((1,), "its machine is taken away"))
        leader._decide()
        leader._decide()
        assert leader._policy.state_of(1) is SliceState.AWAY
        asking.cancel()

    asyncio.run(story())


def test_a_slice_with_a_dead_agent_is_away_until_that_is_started_again(hosts):
    async def story():
        leader = leading(hosts.crew)
        die(leader, 1)
        leader._fail(Loss((1,), "its machine is gone"))
        leader._decide()
        assert leader._policy.state_of(1) is SliceState.AWAY
        await returned(leader, hosts)

    asyncio.run(story())


async def returned(leader, hosts):
    """Let the restarted host ask for its assignment, and check that its slice is ready."""
    request = asyncio.create_task(leader._hosts.waiting_room.ask(*hosts.started()))
    await asyncio.sleep(0)
    leader._decide()
    assert leader._policy.state_of(1) is SliceState.READY
    request.cancel()


def test_a_new_start_tells_that_the_one_before_is_dead():
    async def story():
        leader, lost = leading(RemoteHosts(2)), []
        leader._gang.mark_lost = lambda rank, why, now: lost.append((rank, why))
        leader._give_places()
        assert (await leader._hosts.waiting_room.ask(1, 5)).host == 1
        assert (await leader._hosts.waiting_room.ask(1, 6)).host == 1, (
            "it had not joined yet: no loss"
        )
        leader._on_event(GangEvent(EventKind.JOINED, 1))
        request = asyncio.create_task(leader._hosts.waiting_room.ask(1, 7))
        await asyncio.sleep(0)
        assert lost == [(1, "its agent ended and was restarted.")]
        request.cancel()

    asyncio.run(story())


def test_hosts_elsewhere_that_come_and_go_while_their_slice_is_away_are_counted_once():
    async def story():
        leader = leading(RemoteHosts(2))
        leader._fail(Loss((1,), "its machine is gone"))
        for start in (5, 6, 7):
            waiting = asyncio.create_task(leader._hosts.waiting_room.ask(1, start))
            await asyncio.sleep(0)
            waiting.cancel()
        assert [failure.slices for failure in leader._policy.failures] == [(1,)]

    asyncio.run(story())


def test_the_story_is_in_the_log_also_where_the_store_is_no_folder(hosts):
    leader = leading(hosts.crew)
    leader._fail(Loss((1,), "its machine is gone"))
    leader._story.flush()
    reader = LogReader(ObjectLog(leader._store, layout.HostKeys(leader._plan.job_id, 1, 0).log), 0)
    text = b"".join(chunk.data for chunk in drain([reader], threads=1)).decode()
    assert text.startswith("kinetic: slice 1 lost (failure 1 of at most 10): its machine is gone")
    assert "kinetic: waiting for slice 1 to return" in text


def test_nobody_waits_for_hosts_elsewhere_that_know_or_are_dead():
    async def story():
        leader = leading(RemoteHosts(2))
        die(leader, 0)
        asking = asyncio.create_task(leader._hosts.waiting_room.ask(1, 5))
        await asyncio.sleep(0)
        leader._hosts.close(())
        await asyncio.wait_for(leader._all_gone(LeaderRuntime(leader._store, "", None)), 60)
        assert await asking is None

    asyncio.run(story())


def test_a_host_that_was_ready_and_is_not_heard_from_is_given_up(hosts):
    """From attempt 2 on, each host must give a sign in time; in attempt 1, a remote one may lag."""

    async def story():
        leader = leading(hosts.crew)
        first = leader._gang.spec.first_sign_s
        assert first == (FIRST_SIGN_S if isinstance(hosts, Forked) else None)
        leader._end_story(Outcome(Verdict.FAILED))
        assert leader._gang.spec.first_sign_s == FIRST_SIGN_S

    asyncio.run(story())


class SlowStore(MemoryStore):
    """A store that blocks the write of an attempt's outcome until the test lets it go on."""

    def __init__(self):
        super().__init__()
        self.has_begun, self.may_end = threading.Event(), threading.Event()

    def put(self, key, data, **options):
        if key.endswith(layout.AttemptKeys("", 1).outcome.rpartition("/")[2]):
            self.has_begun.set()
            assert self.may_end.wait(PATIENCE_S)
        return super().put(key, data, **options)


def test_hosts_are_heard_while_the_end_of_an_attempt_is_written():
    async def story():
        store, hosts, finished = SlowStore(), Forked(), asyncio.Event()
        leader = leading(hosts.crew, store)
        gang, now = leader._gang, time.monotonic()
        for host in range(2):
            gang.join(host, f"agent {host}", "", now)
        gang.mark_lost(1, "its machine is gone", now)
        gang.report(HostReport(0, Exit.STOPPED), now)
        gang.sweep(now)
        finished.set()
        coordinator = SimpleNamespace(wait_finished=finished.wait)
        attempts = leader._lead_attempts(coordinator, LeaderRuntime(store, "", coordinator))
        room, tasks = leader._hosts.waiting_room, [asyncio.create_task(attempts)]
        try:
            await until(lambda: hosts.agents.started)
            tasks += [asyncio.create_task(room.ask(*one)) for one in ((0, 1), hosts.started())]
            await until(store.has_begun.is_set)
            finished.clear()
            leader.on_death(0, "its machine is gone, too")
        finally:
            store.may_end.set()
        assert leader._gang.spec.attempt == 2
        assert "its machine is gone, too" in [report.detail for report in leader._gang.reports]
        for task in tasks:
            task.cancel()

    asyncio.run(story())


async def until(has_come):
    for _ in range(int(PATIENCE_S / 0.01)):
        if has_come():
            return
        await asyncio.sleep(0.01)
    raise TimeoutError


def test_a_job_cancelled_while_an_attempt_ends_that_lost_a_slice_is_cancelled():
    async def story():
        leader = leading(Forked().crew)
        gang, now = leader._gang, time.monotonic()
        coordinator = SimpleNamespace(wait_finished=lambda: asyncio.sleep(0))
        for host in range(2):
            gang.join(host, f"agent {host}", "", now)
        gang.mark_lost(1, "its machine is gone", now)
        gang.cancel("The job was cancelled.", now)
        gang.report(HostReport(0, Exit.STOPPED), now)
        gang.sweep(now)
        assert gang.finished
        outcome = (
            await leader._lead_attempts(coordinator, LeaderRuntime(leader._store, "", coordinator))
        ).outcome
        assert outcome.verdict is Verdict.CANCELLED
        assert "host 0 of slice 1: its machine is gone" in outcome.reason
        assert not any("waiting" in line for line in leader._story._lines)

    asyncio.run(story())


def test_a_slice_that_dies_while_it_waits_is_not_counted_on(hosts):
    async def story():
        leader = leading(hosts.crew)
        die(leader, 1)
        leader._fail(Loss((1,), "its machine is gone"))
        leader._decide()
        waiting = asyncio.create_task(leader._hosts.waiting_room.ask(*hosts.started()))
        await asyncio.sleep(0)
        leader._decide()
        leader._hosts.on_leave(1)
        assert leader._policy.state_of(1) is SliceState.AWAY
        leader._decide()
        assert leader._policy.state_of(1) is SliceState.AWAY
        waiting.cancel()
        assert [failure.slices for failure in leader._policy.failures] == [(1,), (1,)]

    asyncio.run(story())


@pytest.mark.parametrize(
    ("slices", "text"),
    [((0,), ["kinetic: continuing on 1 slice until lost slices return."]), ((0, 1), [])],
)
def test_only_a_job_that_shrinks_is_said_to(slices, text):
    """No shrinking is announced if the lost slice returned before the next attempt was formed."""
    leader = leading(Forked().crew)
    leader._policy.rules = replace(leader._policy.rules, shrinks=True)
    leader._fail(Loss((1,), "its machine is gone"))
    (lost,) = leader._story._lines
    assert "slice 1 lost" in lost
    leader._story.tell_of_next(Form(slices), before=2)
    assert leader._story._lines[1:] == text


@pytest.mark.parametrize(
    ("exit_", "joins", "begun", "repeats"),
    [
        (Exit.AGENT_LOST, False, False, True),
        (Exit.SIGNAL, False, False, True),
        (Exit.SETUP_FAILED, False, False, False),
        (Exit.SIGNAL, True, False, True),
        (Exit.SIGNAL, True, True, False),
        (Exit.AGENT_LOST, True, False, False),
    ],
)
def test_a_call_begins_again_if_a_process_died_before_the_function_began(
    exit_, joins, begun, repeats
):
    """An agent or a kept worker that was killed while the session was idle costs no call. A death
    while the function runs does, and so does a call that cannot be prepared."""
    leader, now = leading(Forked().crew), time.monotonic()
    plan = planned("cpu:2", place=Place("local"), slices=2)
    call = SimpleNamespace(policy=make_policy(plan))
    gang = leader._gang
    for host in range(1 + joins):
        gang.join(host, f"agent {host}", "", now)
    gang.report(HostReport(1, exit_), now)
    gang.report(HostReport(0, Exit.STOPPED, started_at=1.0 if begun else 0.0), now)
    gang.sweep(now)
    assert leader._repeats(call, judge_gang(gang)) is repeats
    assert call.policy.attempt == 1 + repeats
