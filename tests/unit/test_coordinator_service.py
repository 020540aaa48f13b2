"""The coordinator on a real Unix socket, with real clients."""

from __future__ import annotations

import asyncio
import queue
import select
import threading
import time
from collections import Counter

import grpc
import pytest
import service_cases
from service_cases import PATIENCE_S, ended

from kinetic._core.exits import Exit
from kinetic._core.gang.machine import Activity, Heartbeat
from kinetic._core.outcome import RemoteError
from kinetic._host.agent.link import Link
from kinetic._host.identity import Identity
from kinetic._rpc import client, codec

LARGE = 2000
ARRIVED_S = 1.0
"""Seconds to let accepted calls arrive; with later arrivals the test passes, but proves less."""

opened, serve, agents = service_cases.opened, service_cases.serve, service_cases.agents


# --- a gang's life


@pytest.mark.parametrize("address", ["unix", "127.0.0.1:0"])
def test_a_gang_joins_runs_and_ends(serve, agents, address):
    served = serve(3) if address == "unix" else serve(3, address)
    gang = agents(served)
    for agent in gang:
        agent.listen()
    views = [agent.join(f"agent-{i}", f"address-{i}") for i, agent in enumerate(gang)]
    assert [v.ready for v in views] == [False, False, True]
    assert gang[0].hear(lambda v: v.ready).addresses == ("address-0", "address-1", "address-2")
    assert all(
        agent.heartbeat(Heartbeat(i, Activity.RUNNING, rss_bytes=5)) for i, agent in enumerate(gang)
    )
    for i, agent in enumerate(gang):
        agent.report(ended(i))
    served.finish()
    assert gang[1].hear(lambda v: v.all_done).stop is False
    assert [e.kind for e in served.events] == ["joined"] * 3 + ["ready"] + ["report"] * 3 + [
        "finished"
    ]


def test_the_address_that_was_bound_is_returned(serve):
    assert serve(1, "127.0.0.1:0").endpoint.target.removeprefix("127.0.0.1:") != "0"


def test_a_failure_reaches_everybody_and_keeps_its_details(serve, agents):
    served = serve(2)
    first, second = agents(served)
    first.listen()
    first.join("a", "x")
    second.join("b", "y")
    error = RemoteError(
        "ValueError", "no \udcff good", "Traceback…", key="jobs/1/attempts/1/hosts/1/error.pkl"
    )
    report = ended(1, Exit.RAISED, error=error, leftover_threads=("t",), peak_rss_bytes=7, signal=0)
    second.report(report)
    view = first.hear(lambda v: v.stop)
    assert (view.stop_exit, view.grace_s) == (Exit.STOPPED, 5.0)
    assert view.stop_reason == "host 1 of 2: ValueError: no \udcff good"
    assert served.gang.reports == (report,)
    first.report(ended(0, Exit.STOPPED))
    served.finish()
    assert served.gang.first_failure == (1,)


def test_what_a_host_reports_before_all_have_joined_is_no_second_agent(serve, agents):
    served = serve(2)
    first, _ = agents(served)
    first.join("a", "x")
    first.report(ended(0, Exit.EVICTED))
    assert [(r.host, r.exit) for r in served.gang.reports] == [(0, Exit.EVICTED)]


def test_repeating_oneself_does_no_harm(serve, agents):
    served = serve(2)
    first, second = agents(served)
    for _ in range(3):
        first.join("a", "x")
        second.join("b", "y")
    for _ in range(3):
        first.report(ended(0))
    second.report(ended(1, Exit.SYS_EXIT, exit_code=3))
    second.report(ended(1))
    assert [r.exit for r in served.gang.reports] == [Exit.RETURNED, Exit.SYS_EXIT]
    assert [e.kind for e in served.events].count("report") == 2


def test_time_passes_between_calls(serve, agents):
    served = serve(2, start_timeout_s=30.0)
    agent, _ = agents(served)
    agent.listen()
    agent.join("a", "x")
    served.now = 31.0
    assert "host 1 of 2 did not join" in agent.hear(lambda v: v.stop).stop_reason


def test_a_death_that_the_supervisor_saw_is_told_at_once(serve, agents):
    served = serve(2)
    first, second = agents(served)
    first.listen()
    first.join("a", "x")
    second.join("b", "y")
    served.do(served.gang.mark_lost, 1, "killed by SIGKILL", served.now)
    served.do(served.coordinator.sweep)
    assert first.hear(lambda v: v.stop).stop_reason == "host 1 of 2: killed by SIGKILL"


def test_a_listener_that_fails_does_not_take_the_gang_down(serve, agents, caplog):
    served = serve(1)
    served.coordinator._on_event = lambda event: 1 / 0
    (agent,) = agents(served)
    assert agent.join("a", "x").ready
    agent.report(ended(0))
    served.finish()
    assert "ZeroDivisionError" in caplog.text


def test_stopping_twice_is_stopping_once(serve):
    served = serve(1)
    served.run(served.coordinator.stop())
    served.run(served.coordinator.stop())


# --- watching


def test_a_view_arrives_on_connecting_and_then_only_when_it_changes(serve, agents):
    served = serve(1)
    (agent,) = agents(served)
    agent.listen()
    assert not agent.hear(lambda v: True).ready
    for _ in range(5):
        agent.heartbeat(Heartbeat(0))
    agent.join("a", "x")
    agent.report(ended(0))
    assert agent.hear(lambda v: True).ready
    assert agent.hear(lambda v: True).all_done
    assert agent.heard.empty()


def test_a_broken_watch_is_taken_up_again_and_is_no_death(serve, agents, tmp_path):
    served = serve(2, f"unix:{tmp_path}/r")
    first, second = agents(served)
    first.listen()
    first.join("a", "x")
    first.hear(lambda v: True)
    served.run(served.coordinator.stop())
    successor = served.coordinator_at(served.endpoint)
    served.coordinator = served.do(lambda: successor)
    served.run(served.coordinator.start())
    second.join("b", "y")
    assert first.hear(lambda v: v.ready).addresses == ("x", "y")
    assert served.gang.first_failure == ()


def test_a_view_that_cannot_be_acted_on_does_not_end_the_watch(serve, agents, caplog):
    served = serve(1)
    (agent,) = agents(served)
    views = queue.Queue()

    def stumble(view):
        views.put(view)
        raise KeyError(view.version)

    agent.watch(stumble, views.put)
    views.get(timeout=PATIENCE_S)
    agent.join("a", "x")
    assert views.get(timeout=PATIENCE_S).ready
    agent.close()
    assert "KeyError" in caplog.text


def test_the_last_news_end_the_watch(serve, agents):
    served = serve(2)
    first, second = agents(served)
    for agent in (first, second):
        agent.listen()
        agent.join("a", "x")
    first.report(ended(0))
    second.report(ended(1))
    served.finish()
    first._watcher.join(PATIENCE_S)
    assert not first._watcher.is_alive()  # The coordinator ended the stream; `first` is open.


def test_a_busy_coordinator_refuses_no_host_of_a_large_gang(serve, opened):
    """All hosts call while the coordinator's loop is blocked. gRPC would by default cancel some of
    the calls at random; none may be cancelled."""
    served = serve(LARGE)
    goes_on, refused = threading.Event(), threading.Event()
    channel = opened(grpc.insecure_channel(served.endpoint.target, codec.CHANNEL_OPTIONS))
    beat = channel.unary_unary(codec.HEARTBEAT.path)
    served.loop.call_soon_threadsafe(goes_on.wait, PATIENCE_S)
    metadata = codec.metadata_of(served.endpoint)
    calls = [beat.future(codec.write(Heartbeat(0)), metadata=metadata) for _ in range(LARGE)]
    for call in calls:
        call.add_done_callback(lambda _: refused.set())
    refused.wait(ARRIVED_S)
    goes_on.set()
    codes = Counter(call.exception(PATIENCE_S) and call.code() for call in calls)
    assert codes == {None: LARGE}


def test_a_busy_coordinator_lets_calls_wait_as_long_as_their_callers_do(serve, opened, monkeypatch):
    """gRPC cancels calls that wait longer than a limit, which must be as long as callers wait."""
    limit = "grpc.server_max_unrequested_time_in_server"
    options = dict(codec.SERVER_OPTIONS)
    assert options[limit] >= client._WATCH_S
    monkeypatch.setattr(codec, "SERVER_OPTIONS", tuple((options | {limit: 1}).items()))
    served = serve(1)
    channel = opened(grpc.insecure_channel(served.endpoint.target, codec.CHANNEL_OPTIONS))
    beat = channel.unary_unary(codec.HEARTBEAT.path)
    metadata = codec.metadata_of(served.endpoint)
    served.loop.call_soon_threadsafe(time.sleep, 2.5)
    calls = [beat.future(codec.write(Heartbeat(0)), metadata=metadata) for _ in range(20)]
    codes = {call.exception(PATIENCE_S) and call.code() for call in calls}
    assert grpc.StatusCode.CANCELLED in codes


def test_the_same_view_is_shown_once_however_often_the_stream_is_renewed(
    serve, agents, monkeypatch
):
    monkeypatch.setattr("kinetic._rpc.client._WATCH_S", 0.05)
    served = serve(1)
    (agent,) = agents(served)
    renewed = threading.Event()
    streams = []
    view = served.coordinator._view
    served.coordinator._view = lambda host: (
        streams.append(host) or (len(streams) > 3 and renewed.set()) or view(host)
    )
    agent.listen()
    assert renewed.wait(PATIENCE_S)
    assert agent.hear(lambda v: True).version == 1
    agent.close()
    assert agent.heard.empty()


def test_closing_ends_the_watch_and_closing_twice_is_fine(serve, agents):
    (agent,) = agents(serve(1))
    agent.listen()
    agent.hear(lambda v: True)
    agent.close()
    agent.close()
    assert not agent._watcher.is_alive()


def test_a_server_that_never_stops_does_not_keep_the_coordinator(serve, monkeypatch):
    """`stop` returns although gRPC's server never stops, as when the system is out of threads."""

    async def never(self, grace):
        await asyncio.Event().wait()

    served = serve(1)
    server = served.coordinator._server
    with monkeypatch.context() as without_threads:
        without_threads.setattr("kinetic._rpc.server._STOP_LIMIT_S", 0.1)
        without_threads.setattr(type(server), "stop", never)
        served.run(served.coordinator.stop())
    served.run(server.stop(0))


@pytest.mark.parametrize("step", ["watch", "_follow"])
def test_an_agent_that_cannot_hear_its_coordinator_learns_why(serve, tmp_path, monkeypatch, step):
    def fail(*_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(client.AgentClient, step, fail)
    where = serve(1).endpoint
    who = Identity(str(tmp_path), where.job_id, 0, 1, where.target, where.token, "", str(tmp_path))
    link = Link(who, lambda: Heartbeat(0))
    link.start()
    try:
        assert select.select([link.wake_fd], [], [], PATIENCE_S)[0]
        with pytest.raises(RuntimeError, match="can't start new thread"):
            link.events()
    finally:
        link.stop()
