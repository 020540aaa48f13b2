"""Sessions without processes: the queue of calls, names, what does not fit, and kept modules."""

from __future__ import annotations

import copy
import importlib
import json
import os
import pickle
import re
import sys
import threading
import time
from dataclasses import replace

import pytest
from doubles.memory_store import MemoryStore
from laptop_fakes import FakeBackend, plan, put_ref, ref

import kinetic
from kinetic._backends import registry
from kinetic._backends.session import SessionBackend, find_misfit, list_waiting_calls
from kinetic._client import sessions as client_sessions
from kinetic._client.board import console
from kinetic._config import settings as configuration
from kinetic._core import events, layout
from kinetic._core.agent import Act, AgentMachine
from kinetic._core.events import EventKind, GangEvent
from kinetic._core.exits import Exit
from kinetic._core.gang.messages import HostView
from kinetic._core.gang.policy import READY_S, AttemptPolicy, Form, Loss, Restart
from kinetic._core.options import Elastic
from kinetic._core.outcome import HostReport, Outcome, Verdict
from kinetic._core.plan import Versions
from kinetic._core.session import Session, keeps_processes
from kinetic._core.state import SUBMITTING, JobStatus
from kinetic._host.calls import CallQueue
from kinetic._host.worker import kept_state
from kinetic._in_job.kept import Kept
from kinetic._store import sessions
from kinetic._store.local import LocalStore
from kinetic.errors import JobFailed, NotFound, PreflightError, SubmitError, UsageError

HELD = "job-0000005e"
IDS = ("job-00000003", "job-00000001", "job-00000002")

# -- the policy while slices are held --------------------------------------------------------------


@pytest.fixture
def held():
    """The policy of a session with two slices, which are ready."""
    policy = AttemptPolicy(Elastic(2, 2, 1000, 60.0))
    policy.gather(0.0)
    policy.hold()
    for which in (0, 1):
        policy.note_ready(which)
    return policy


def test_slices_that_are_held_form_when_a_call_comes(held):
    """However long a session waits, no attempt forms, and none is too late."""
    assert held.decide(1e6) is None
    held.release(1e6)
    assert held.decide(1e6) == Form((0, 1))
    held.note_departure(1e6 + 1)
    held.hold()
    for which in (0, 1):
        held.note_ready(which)
    assert held.decide(2e6) is None
    held.release(2e6)
    assert held.decide(2e6) == Form((0, 1))
    assert held.attempt == 2


def test_a_slice_that_is_lost_while_held_is_restarted(held):
    """The session waits for it without a limit; a call waits from its own beginning."""
    held.lose_slice(1, "its host died", 10.0)
    assert held.decide(10.0) == Restart((1,))
    assert held.decide(1e5) is None
    held.release(1e5)
    assert held.decide(1e5 + 59) is None
    held.note_ready(1)
    assert held.decide(1e5 + 59) == Form((0, 1))


def test_a_slice_that_is_lost_now_and_then_comes_back_at_once(held):
    """Only losses without a call between them make the pauses longer."""
    for hour in range(5):
        now = 3600.0 * hour
        held.lose_slice(1, "its host died", now)
        assert held.decide(now) == Restart((1,))
        held.note_ready(1)
        held.release(now)
        assert held.decide(now) == Form((0, 1))
        held.note_departure(now)
        held.hold()
        for which in (0, 1):
            held.note_ready(which)


def test_hosts_that_do_not_come_back_after_a_call_are_lost(held):
    """A host that stands still after a call is restarted while the session waits."""
    held.release(1.0)
    held.decide(1.0)
    held.note_failure(Loss((0,), "died"), 2.0)
    held.hold()
    assert held.decide(2.0) == Restart((0,))
    held.note_ready(0)
    assert held.decide(2.0 + READY_S) == Restart((1,))


# -- the agent of a kept worker --------------------------------------------------------------------


@pytest.mark.parametrize("keeps_interrupted", [True, False])
def test_a_kept_worker_is_not_killed_by_the_stop_that_ended_its_call(keeps_interrupted):
    """The view that asks the host to stop may come again after the worker was kept. A host of
    several does not keep an interrupted function's worker."""
    agent = AgentMachine(is_held=True, keeps_worker=True, keeps_interrupted=keeps_interrupted)
    view = HostView(ready=True)
    acts = [*agent.on_prepared(), *agent.on_armed(), *agent.on_ready(view)]
    agent.on_called()
    stop = replace(view, stop=True, stop_exit=Exit.CANCELLED, grace_s=5.0)
    acts += agent.on_view(stop, 1.0)
    acts += agent.on_end(returned=False)
    agent.note_report(HostReport(0, Exit.CANCELLED), arrives=True)
    acts += agent.on_concluded(2.0)
    if not keeps_interrupted:
        assert acts[-1] == Act.RUN_EXIT_HANDLERS
        return
    agent.note_kept()
    acts += [*agent.on_view(stop, 3.0), *agent.tick(1e6)]
    assert acts == [Act.START, Act.TERMINATE, Act.CONCLUDE, Act.KEEP]
    agent.settle()
    assert agent.finished


# -- the queue -------------------------------------------------------------------------------------


@pytest.fixture
def store():
    return MemoryStore()


@pytest.fixture
def queue(store):
    return CallQueue(store, HELD)


def put_call(store, job_id, number=0):
    """Put a call into the queue; the order is that of the numbers."""
    put_ref(store, ref(job_id))
    store.put(layout.JobKeys(job_id).plan, plan_bytes(plan(job_id)))
    store.put(layout.JobKeys(HELD).call(10 + number, job_id), b"")


def plan_bytes(its_plan):
    return json.dumps(its_plan.to_json()).encode()


def outcome_of(store, job_id):
    return Outcome.read(store.get(layout.JobKeys(job_id).outcome))


def test_calls_come_in_order_and_leave_with_a_verdict(store, queue):
    """A call stays in the queue until it has a verdict, for a leader that replaces a lost one."""
    for number, job_id in enumerate(IDS):
        put_call(store, job_id, number)
    taken = []
    while (call := queue.take(1)) is not None:
        again = CallQueue(store, HELD).take(1)
        assert again is not None
        assert again.job_id == call.job_id
        queue.conclude(call, Outcome(Verdict.SUCCEEDED))
        assert call.job_id not in list_waiting_calls(store, HELD), "it has a verdict"
        assert any(store.list(call.key.rpartition("/")[0]))
        queue.remove(call)
        taken.append(call.job_id)
    assert taken == [*IDS]
    assert list_waiting_calls(store, HELD) == []
    assert all(outcome_of(store, job_id).ok for job_id in IDS)


def test_the_events_of_a_call_are_read_once(store, queue):
    """A leader that replaces a lost one has read them when it takes the call, and keeps them."""
    put_call(store, IDS[0])
    key, earlier = layout.JobKeys(IDS[0]).events, b'{"kind": "joined", "attempt": 1, "time": 1.0}\n'
    store.put(key, earlier)
    call, reads = queue.take(1), store.calls["get"]
    call.story.write(GangEvent(EventKind.READY))
    call.story.close()
    assert store.calls["get"] == reads
    assert [event.kind for event in events.parse(store.get(key))] == ["joined", "ready"]


def test_a_call_reads_its_sessions_plan_once():
    store = MemoryStore()
    its_plan = plan(HELD, holds=Session("dev"))
    put_ref(store, ref(HELD))
    store.put(layout.JobKeys(HELD).plan, plan_bytes(its_plan))
    holder = FakeBackend(store)
    holder.phases[HELD] = JobStatus.RUNNING
    backend = SessionBackend(HELD, store, holder)
    backend.preflight(plan(IDS[0]))
    reads = store.calls["get"]
    backend.choose_image(plan(IDS[0]), {}, print)
    assert store.calls["get"] == reads


def test_calls_that_cannot_run_leave_the_queue(store, queue):
    """One was cancelled, one removed, one has a verdict, one cannot be read; the last one runs."""
    ids = [f"job-0000000{number}" for number in range(5)]
    for number, job_id in enumerate(ids):
        put_call(store, job_id, number)
    store.put(layout.JobKeys(ids[0]).cancellation, b"{}")
    store.delete(layout.JobKeys(ids[1]).prefix)
    store.put(layout.JobKeys(ids[2]).outcome, b"kept as it is")
    store.put(layout.JobKeys(ids[3]).plan, b"no plan")
    call = queue.take(1)
    assert call is not None
    assert call.job_id == ids[4]
    assert list_waiting_calls(store, HELD) == [ids[4]]
    assert outcome_of(store, ids[0]).verdict is Verdict.CANCELLED
    assert not store.has(layout.JobKeys(ids[1]).outcome)
    assert store.get(layout.JobKeys(ids[2]).outcome) == b"kept as it is"
    assert outcome_of(store, ids[3]).verdict is Verdict.FAILED


def test_calls_that_wait_when_the_session_ends_fail_and_say_why(store, queue):
    put_call(store, IDS[0])
    queue.close("The session s was stopped.")
    outcome = outcome_of(store, IDS[0])
    assert outcome.verdict is Verdict.FAILED
    assert outcome.reason == "The call did not begin. The session s was stopped."
    assert list_waiting_calls(store, HELD) == []


# -- the backend of calls --------------------------------------------------------------------------


@pytest.fixture
def holder(store):
    fake = FakeBackend(store)
    put_ref(store, replace(ref(HELD), session_name="s"))
    fake.phases[HELD] = JobStatus.RUNNING
    return fake


@pytest.fixture
def backend(store, holder):
    return SessionBackend(HELD, store, holder)


def test_a_waiting_call_says_what_it_waits_for(store, holder, backend):
    """The first call waits for the session's hosts, the others for the call before them."""
    holder.phases[HELD], holder.reasons[HELD] = JobStatus.PENDING, "its hosts are starting"
    for number, job_id in enumerate(IDS):
        put_call(store, job_id, number)
    assert [backend.why_waiting(ref(job_id)) for job_id in IDS] == [
        "its hosts are starting",
        f"it waits for {IDS[0]} on its session",
        f"it waits for {IDS[1]} on its session",
    ]


def test_the_queue_is_read_once_for_many_calls(store, holder, backend):
    """A batch asks for hundreds of calls at once."""
    ids = [f"job-{number:08x}" for number in range(30)]
    for number, job_id in enumerate(ids):
        put_call(store, job_id, number)
    store.forget_calls()
    assert len(backend.status([ref(job_id) for job_id in ids])) == 30
    assert store.calls["list"] == 1
    assert len(holder.asked) == 1


def test_a_cancelled_call_that_waits_has_its_verdict_at_once(store, backend):
    """Nobody waits for the calls before it."""
    for number, job_id in enumerate(IDS):
        put_call(store, job_id, number)
    backend.cancel(ref(IDS[1]))
    assert outcome_of(store, IDS[1]).verdict is Verdict.CANCELLED
    assert list_waiting_calls(store, HELD) == [IDS[0], IDS[2]]
    assert backend.why_waiting(ref(IDS[2])) == f"it waits for {IDS[0]} on its session"


def test_a_call_whose_session_is_gone_has_failed(store, holder, backend):
    put_call(store, IDS[0])
    holder.phases[HELD] = JobStatus.FAILED
    status = backend.status([ref(IDS[0])])[IDS[0]]
    assert (status.phase, status.reason) == (JobStatus.FAILED, "its session has ended")


def test_only_the_hosts_of_a_running_call_can_be_killed(store, backend):
    put_call(store, IDS[0])
    with pytest.raises(UsageError, match="cannot be killed"):
        backend.kill(ref(IDS[0]), (0,), 9)


class ReachableBackend(FakeBackend):
    """A backend that knows the processes and the leader of every job, under the job's id."""

    def processes(self, ref):
        return ref.job_id

    def control(self, ref):
        return ref.job_id


def test_a_running_call_is_reached_by_the_leader_of_its_session(store, holder):
    """A waiting call has no processes, and so has a call whose session cannot be reached."""
    fake = ReachableBackend(store)
    fake.phases[HELD] = JobStatus.RUNNING
    reachable, unreachable = (SessionBackend(HELD, store, each) for each in (fake, holder))
    for number, job_id in enumerate(IDS[:2]):
        put_call(store, job_id, number)
    ready = events.GangEvent(events.EventKind.READY, time=1.0)
    store.put(layout.JobKeys(IDS[0]).events, json.dumps(ready.to_json()).encode() + b"\n")
    for job_id, backend, answer in (
        (IDS[0], reachable, HELD),
        (IDS[1], reachable, None),
        (IDS[0], unreachable, None),
    ):
        assert (backend.processes(ref(job_id)), backend.control(ref(job_id))) == (answer, answer)


# -- what does not fit -----------------------------------------------------------------------------

SESSION = replace(plan(HELD, "cpu:2"), holds=Session("s"))


@pytest.mark.parametrize(
    ("wanted", "fault"),
    [
        (plan(accelerator="cpu:2"), ""),
        (plan(accelerator="tpu-v6e-8"), r"holds cpu:2 \(1 host\), .* needs tpu-v6e-8 \(2 hosts\)"),
        (plan(accelerator="cpu:2", options={"slices": 2}), "holds 1 slice, .* needs 2 slices"),
        (plan(accelerator="cpu:2", versions=Versions("3.9", "3", "0")), "this is Python 3.9"),
        (plan(accelerator="cpu:2", options={"debug": True}), "debug=True does not work"),
        (plan(accelerator="cpu:2", secrets=("TOKEN",)), "the secret TOKEN was not given"),
    ],
)
def test_a_call_that_does_not_fit_is_refused(wanted, fault):
    """The message names what the session has, and what the call needs."""
    assert re.search(fault, find_misfit(wanted, SESSION))
    assert bool(fault) == bool(find_misfit(wanted, SESSION))


def test_a_session_on_spot_machines_runs_calls_that_do_not_ask_for_them():
    """A function need not say that its session's machines are preemptible."""
    spot = replace(plan(HELD, "tpu-v6e-8:spot"), holds=Session("s"))
    assert find_misfit(plan(accelerator="tpu-v6e-8"), spot) == ""


@pytest.mark.parametrize(
    ("own", "of_session", "keeps"),
    [
        (None, None, False),
        (None, False, False),
        (None, True, True),
        (False, True, False),
        (True, None, True),
        (True, False, True),
    ],
)
def test_the_call_says_whether_it_runs_in_kept_processes_else_the_session(own, of_session, keeps):
    call, session = plan(options={"keep": own}), plan(options={"keep": of_session})
    assert keeps_processes(call.options, session.options) is keeps


def test_a_name_under_which_nothing_is_kept_says_so():
    """The namespace behaves like any other: it can be printed, copied, compared and pickled."""
    kept = Kept(step=1)
    with pytest.raises(AttributeError, match=r"nothing named 'weights' is kept: .*first call"):
        kept.weights  # noqa: B018 - reading it raises
    assert not hasattr(kept, "weights")
    assert pickle.loads(pickle.dumps(kept)) == copy.deepcopy(kept) == kept == Kept(step=1)
    assert repr(kept) == "Kept(step=1)"


# -- callers ---------------------------------------------------------------------------------------


@pytest.fixture
def fake(home, monkeypatch, tmp_path):
    """A local backend that holds slices without processes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(client_sessions, "_started", {})  # No notice at exit.
    fake = FakeBackend(LocalStore(home))
    with registry.substitute_backend("local", lambda *_: fake):
        yield fake


def run(accelerator="cpu", **options):
    return kinetic.run(accelerator, **options)(len).run_async("abc")


def test_a_call_on_no_session_of_this_name_says_how_to_start_it(fake, monkeypatch):
    """The message names where the session's name comes from."""
    with pytest.raises(NotFound, match=r"no session 'dev' .*`kinetic session start cpu --name dev"):
        run(session="dev")
    monkeypatch.setenv("KINETIC_SESSION", "other")
    with pytest.raises(NotFound, match=r"no session 'other' \(from .*KINETIC_SESSION"):
        run()
    assert fake.calls == []


def test_keep_needs_a_session(fake):
    with pytest.raises(UsageError, match="keep=True works only for calls on a session"):
        run(keep=True)
    assert fake.calls == []


def test_a_session_that_does_not_fit_is_refused_before_anything_is_sent(fake, monkeypatch):
    kinetic.session("cpu:2", name="dev")
    calls = [*fake.calls]
    for options, words in (
        ({"accelerator": "cpu"}, "the session holds cpu:2"),
        ({"accelerator": "cpu:2", "slices": 2}, "needs 2 slices"),
    ):
        with pytest.raises(PreflightError, match=f"session dev: {words}|session dev: .*{words}"):
            run(session="dev", **options)
    monkeypatch.setenv("KINETIC_SESSION", "dev")
    words = r"session dev \(from environment KINETIC_SESSION\): .* without the session"
    with pytest.raises(PreflightError, match=words):
        run()
    assert fake.calls == calls
    with pytest.raises(UsageError, match=r"dev holds cpu:2, not cpu\. Stop it"):
        kinetic.session("cpu", name="dev")


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ({}, ""),
        ({"idle_timeout": "10m", "keep": True}, ""),
        (
            {"keep": False},
            "keep=False has no effect. Stop the session and start it again, or set keep=False",
        ),
        ({"idle_timeout": 60}, "idle_timeout= has no effect. Stop the session and start it again."),
        ({"max_lifetime": "1h"}, "max_lifetime= has no effect."),
        ({"budget": 5, "idle_timeout": 60}, "idle_timeout=, budget= have no effect."),
    ],
)
def test_who_asks_for_other_options_than_a_session_has_is_told(fake, monkeypatch, wanted, words):
    """Options that the caller leaves at their defaults are not compared."""
    notices = []
    monkeypatch.setattr(console, "notice", notices.append)
    kinetic.session("cpu", name="dev", idle_timeout="10m", keep=True)
    notices.clear()
    kinetic.session("cpu", name="dev", **wanted)
    assert len(notices) == bool(words)
    assert words in "".join(notices)


def test_a_session_that_has_ended_is_not_used_again(fake):
    session = kinetic.session("cpu", name="dev")
    assert kinetic.session("cpu", name="dev").job.job_id == session.job.job_id
    put_verdict(fake.store, session.job.job_id, Outcome(Verdict.CANCELLED, ended_at=time.time()))
    fake.phases[session.job.job_id] = JobStatus.FAILED
    with pytest.raises(PreflightError, match=r"The session dev \(job-.*\) has ended. Start it"):
        run(session="dev")
    assert kinetic.session("cpu", name="dev").job.job_id != session.job.job_id


def test_a_session_that_has_ended_is_named_with_the_command_that_starts_one_like_it(fake):
    session = kinetic.session("cpu:2", name="dev", slices=2, keep=True)
    fake.phases[session.job.job_id] = JobStatus.FAILED
    with pytest.raises(PreflightError, match="start cpu:2 --name dev --slices 2 --keep`"):
        run(session="dev", accelerator="cpu:2", slices=2)


def test_a_call_waits_for_a_session_that_is_being_submitted(fake):
    """Another caller has written the session's records, and its backend does not know it yet."""
    session = kinetic.session("cpu", name="dev").job
    fake.phases[session.job_id] = JobStatus.NOT_FOUND
    handle = run(session="dev")
    assert (
        handle.read_standings([handle.ref])[handle.job_id] == ("PENDING", SUBMITTING) + (None,) * 4
    )
    session.remove(k8s=False, gcs=True)
    with pytest.raises(NotFound):
        run(session="dev")


def test_a_stopped_session_takes_no_call(fake):
    """Its leader still runs, but reads its queue no more."""
    session = kinetic.session("cpu", name="dev")
    with session:
        session.stop()
        with pytest.raises(PreflightError, match=r"The session dev \(job-.*\) has ended. Start it"):
            run()


def test_a_call_that_came_too_late_for_its_session_blames_no_host(fake):
    """It came after the leader had emptied the queue. It has a verdict once somebody reads it."""
    session = kinetic.session("cpu", name="dev")
    handle = run(session="dev")
    put_verdict(fake.store, session.job.job_id, Outcome(Verdict.SUCCEEDED, ended_at=time.time()))
    fake.phases[session.job.job_id] = JobStatus.SUCCEEDED
    assert session.status().calls == ()
    error = handle.error()
    assert type(error) is JobFailed
    assert "The call did not begin: its session has ended." in str(error)
    outcome = outcome_of(fake.store, handle.job_id)
    assert (outcome.blamed, outcome.reports, outcome.supervisor_lost) == ((), (), False)


def put_verdict(store, job_id, outcome):
    store.put(layout.JobKeys(job_id).outcome, json.dumps(outcome.to_json()).encode())


@pytest.mark.parametrize(
    "options", [{"slices": (1, 2)}, {"controller": "single", "accelerator": "tpu-v6e-8"}]
)
def test_a_session_holds_a_fixed_number_of_slices_with_a_process_on_each_host(fake, options):
    with pytest.raises(UsageError, match="fixed number of slices"):
        kinetic.session(**({"accelerator": "cpu"} | options))


def test_a_session_that_could_not_be_started_leaves_its_name_free(fake):
    fake.refusal = PreflightError("no room")
    with pytest.raises(PreflightError):
        kinetic.session("cpu", name="dev")
    fake.refusal = None
    assert kinetic.session("cpu", name="dev").name == "dev"


def test_a_call_is_a_job_of_its_own_in_the_queue_of_its_session(fake):
    session = kinetic.session("cpu", name="dev")
    with session:
        handles = [run() for _ in range(2)]
        other = run("cpu:2")
    assert session.status().calls == tuple(handle.job_id for handle in handles)
    assert [h.ref.place.session for h in (*handles, other)] == [session.job.job_id] * 2 + [""]
    with pytest.raises(UsageError, match=f"runs {handles[0].job_id}, and 1 call waits"):
        session.stop()
    with session:
        run()
    with pytest.raises(UsageError, match=f"{handles[0].job_id}, and 2 calls wait"):
        session.stop()


def test_a_removed_session_is_named(fake):
    """Its handle is still there, but nothing can run on it."""
    session = kinetic.session("cpu", name="dev")
    fake.store.delete(layout.JobKeys(session.job.job_id).plan)
    with session, pytest.raises(PreflightError, match=f"{session.job.job_id} was removed"):
        run()


def test_waiting_for_a_session_that_ends_says_why(fake):
    session = kinetic.session("cpu", name="dev")
    job_id, reasons = session.job.job_id, []
    fake.phases[job_id], fake.reasons[job_id] = JobStatus.PENDING, "it waits for machines"

    def end(reason):
        reasons.append(reason)
        put_verdict(fake.store, job_id, Outcome(Verdict.FAILED, reason="no machines"))

    with pytest.raises(SubmitError, match="The session dev has not started: no machines"):
        session.wait_until_ready(end)
    assert reasons == ["it waits for machines"]


def test_a_script_that_ends_names_the_sessions_that_it_started(fake, capsys):
    """Held slices cost money. Sessions that have ended are not named."""
    kinetic.session("cpu:2", name="dev")
    ended = kinetic.session("cpu", name="ended").job.job_id
    put_verdict(fake.store, ended, Outcome(Verdict.SUCCEEDED))
    capsys.readouterr()
    client_sessions._name_held(os.getpid())
    assert capsys.readouterr().err == (
        "kinetic: the session dev still holds cpu:2; it ends after 30 min without a call. kinetic "
        "session stop dev ends it now.\n"
    )


def test_a_job_starts_no_session(fake, monkeypatch):
    """Nobody would end it."""
    monkeypatch.setattr(configuration, "on_host", lambda: True)
    with pytest.raises(UsageError, match="A job cannot hold a session"):
        kinetic.session("cpu")


def test_the_name_of_a_session_is_no_option_of_it(fake):
    with pytest.raises(UsageError, match="Pass the name as name="):
        kinetic.session("cpu", session="dev")


# -- names -----------------------------------------------------------------------------------------


@pytest.fixture(params=["folder", "memory"])
def names(request, tmp_path):
    """A store with a folder, and one without."""
    return LocalStore(tmp_path) if request.param == "folder" else MemoryStore(delay_s=0.001)


def test_one_of_many_callers_gets_a_name(names):
    """The name is free at first; later it belongs to a session that has ended."""
    for _ in range(2):
        before = sessions.read_claim(names, "dev")
        winners, ready = [], threading.Barrier(8)

        def claim(number, before=before, winners=winners, ready=ready):
            ready.wait()
            if sessions.claim(names, "dev", f"job-0000000{number}", before):
                winners.append(number)

        threads = [threading.Thread(target=claim, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(winners) == 1
        assert sessions.read_claim(names, "dev").job_id == f"job-0000000{winners[0]}"


def test_a_name_is_taken_from_callers_that_died_before_they_started(names, monkeypatch):
    """Others wait a minute for the reference of the session."""
    assert sessions.claim(names, "dev", HELD, sessions.read_claim(names, "dev"))
    claim = sessions.read_claim(names, "dev")
    assert sessions.is_starting(names, claim)
    assert not sessions.is_starting(names, claim._replace(since=claim.since - 61))
    put_ref(names, ref(HELD))
    assert not sessions.is_starting(names, claim)
    sessions.release(names, "dev", IDS[0])
    assert sessions.read_claim(names, "dev") == claim
    sessions.release(names, "dev", HELD)
    assert sessions.read_claim(names, "dev").content == b""


def test_a_damaged_name_can_be_taken(names):
    names.put(layout.session("dev"), b"\xff")
    claim = sessions.read_claim(names, "dev")
    assert not sessions.is_starting(names, claim)
    assert sessions.claim(names, "dev", HELD, claim)
    assert sessions.find(names, "dev") is None


# -- kept modules ----------------------------------------------------------------------------------

FILES = {
    "kn_pkg/__init__.py": "",
    "kn_pkg/width.py": "WIDTH = 1\n",
    "kn_pkg/model.py": "from .width import WIDTH\n",
    "kn_trains.py": "if True:\n    from kn_pkg import model\n",
    "kn_late.py": "def late():\n    import kn_pkg.model\n    return kn_pkg.model.WIDTH\n",
    "kn_other.py": "state = []\n",
    "kn_class.py": "class Base: pass\n",
    "kn_has.py": "import kn_class\nthing = kn_class.Base\n",
}


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A project whose modules a kept process has imported."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    importlib.invalidate_caches()
    for name in FILES:
        if "__init__" not in name:
            importlib.import_module(name.removesuffix(".py").replace("/", "."))
    kept_state.note_modules(str(tmp_path))
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("kn_")]:
        del sys.modules[name]
    kept_state._digests.clear()


@pytest.mark.parametrize(
    ("changed", "anew"),
    [
        ("", []),
        ("kn_other.py", ["kn_other"]),
        ("kn_class.py", ["kn_class", "kn_has"]),
        ("kn_pkg/width.py", ["kn_pkg.model", "kn_pkg.width", "kn_trains"]),
        ("kn_pkg/model.py", ["kn_pkg.model", "kn_trains"]),
    ],
)
def test_a_changed_module_is_imported_anew_with_those_that_use_it(tree, changed, anew):
    """Other modules stay as they are, and so do modules of a package that did not change."""
    before = dict(sys.modules)
    if changed:
        (tree / changed).write_text(f"{FILES[changed]}# changed\n")
    assert kept_state.drop_changed_modules(str(tree)) == anew
    assert before.keys() - sys.modules.keys() == {*anew}
    for name in anew:
        assert importlib.import_module(name) is not before[name]
    assert kept_state.drop_changed_modules(str(tree)) == []


def test_a_removed_module_is_forgotten(tree):
    (tree / "kn_other.py").unlink()
    assert kept_state.drop_changed_modules(str(tree)) == ["kn_other"]
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("kn_other")


def test_a_touched_module_stays(tree):
    (tree / "kn_other.py").write_text(FILES["kn_other.py"])
    assert kept_state.drop_changed_modules(str(tree)) == []


def test_a_function_runs_with_the_main_module_that_it_was_loaded_with(monkeypatch):
    """Old functions are forgotten, so that a kept process does not grow."""
    monkeypatch.setattr(kept_state, "functions", {})
    monkeypatch.setattr(kept_state, "_mains", {})
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    monkeypatch.setitem(sys.modules, "__mp_main__", sys.modules["__main__"])
    first = sys.modules["__main__"]
    kept_state.choose_main("first")
    kept_state.functions["first"] = len
    sys.modules["__main__"] = other = type(sys)("__main__")
    kept_state.choose_main("second")
    kept_state.functions["second"] = len
    kept_state.choose_main("first")
    assert sys.modules["__main__"] is first
    kept_state.choose_main("second")
    assert sys.modules["__main__"] is other
    for number in range(2 * kept_state.MOST_FUNCTIONS):
        kept_state.choose_main(f"{number}")
        kept_state.functions[f"{number}"] = len
    assert len(kept_state.functions) <= kept_state.MOST_FUNCTIONS
    assert len(kept_state._mains) <= kept_state.MOST_FUNCTIONS
    assert "first" not in kept_state.functions


@pytest.mark.parametrize(
    ("idle_since", "budget_s", "end"),
    [
        (100.0, None, 160.0),  # no call for a minute
        (None, None, 710.0),  # while a call runs, only the lifetime counts
        (700.0, None, 710.0),
        (None, 300.0, 310.0),
        (100.0, 300.0, 160.0),
    ],
)
def test_a_session_ends_at_the_first_of_its_limits(idle_since, budget_s, end):
    """The lifetime and the budget count from the time at which the hosts were there."""
    terms = Session("dev", idle_timeout_s=60.0, max_lifetime_s=700.0)
    assert terms.ends_at(10.0, idle_since, budget_s) == end
