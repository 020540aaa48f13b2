"""The coordinator on a real Unix socket, with real clients."""

from __future__ import annotations

import asyncio
import json
import queue
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from kinetic._core.endpoint import Endpoint
from kinetic._core.exits import Exit
from kinetic._core.gang.machine import Activity, Gang, GangSpec, Heartbeat
from kinetic._core.outcome import HostReport, RemoteError
from kinetic._rpc import certificate, codec
from kinetic._rpc.client import AgentClient, ControlClient
from kinetic._rpc.server import Coordinator
from kinetic.errors import CoordinatorLost, CorruptRecord, SubmitError, UsageError

TOKEN = "s3cret"
JOB = "job-00c0ffee"
PATIENCE_S = 200.0


class Served:
    """A coordinator in a thread of its own, with a clock that only the test moves."""

    def __init__(self, address: str, hosts: int, **limits) -> None:
        self.key = ""
        self.now = 0.0
        self.events: list = []
        self.gang = Gang(GangSpec(hosts=hosts, **limits), 0.0)
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()
        self.coordinator = self.run(self._make(address))
        self.endpoint = self.run(self.coordinator.start())

    async def _make(self, address: str) -> Coordinator:
        endpoint = Endpoint(address, TOKEN, JOB)
        if not endpoint.is_unix:
            made = certificate.make(endpoint.tls_name)
            self.key = made.key
            endpoint = replace(endpoint, certificate=made.certificate)
        return self.coordinator_at(endpoint)

    def coordinator_at(self, endpoint: Endpoint) -> Coordinator:
        def clock() -> float:
            return self.now

        return Coordinator(
            self.gang, endpoint, key=self.key, clock=clock, on_event=self.events.append
        )

    def run(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(PATIENCE_S)

    def do(self, call, *args):
        async def inside():
            return call(*args)

        return self.run(inside())

    def finish(self) -> None:
        self.run(self.coordinator.wait_finished())

    def close(self) -> None:
        if self.thread.is_alive():
            self.run(self.coordinator.stop())
            self.loop.call_soon_threadsafe(self.loop.stop)
            self.thread.join()
            self.loop.close()


class Agent(AgentClient):
    """An agent that keeps what it is told."""

    def __init__(self, endpoint: Endpoint, host: int, **options) -> None:
        super().__init__(endpoint, host, **options)
        self.heard: queue.Queue = queue.Queue()

    def listen(self) -> None:
        self.watch(self.heard.put)

    def hear(self, wanted):
        while not wanted(view := self.heard.get(timeout=PATIENCE_S)):
            pass
        return view


@pytest.fixture
def opened():
    things: list = []
    yield lambda thing: things.append(thing) or thing
    for thing in reversed(things):
        thing.close()


@pytest.fixture
def serve(opened, tmp_path):
    return lambda hosts, address=f"unix:{tmp_path}/s", **limits: opened(
        Served(address, hosts, **limits)
    )


@pytest.fixture
def agents(opened):
    return lambda served, **options: [
        opened(Agent(served.endpoint, h, **options)) for h in range(served.gang.spec.hosts)
    ]


def ended(host: int, how: Exit = Exit.RETURNED, **facts) -> HostReport:
    return HostReport(host, how, **facts)


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
    told = first.hear(lambda v: v.stop)
    assert (told.stop_exit, told.grace_s) == (Exit.STOPPED, 5.0)
    assert told.stop_reason == "host 1 of 2: ValueError: no ? good"
    assert served.gang.reports == (report,)
    first.report(ended(0, Exit.STOPPED))
    served.finish()
    assert served.gang.first_failure == (1,)


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
    served.do(served.coordinator.lost, 1, "killed by SIGKILL")
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
    again = served.coordinator_at(served.endpoint)
    served.coordinator = served.do(lambda: again)
    served.run(served.coordinator.start())
    second.join("b", "y")
    assert first.hear(lambda v: v.ready).addresses == ("x", "y")
    assert served.gang.first_failure == ()


def test_a_view_that_cannot_be_acted_on_does_not_end_the_watch(serve, agents, caplog):
    served = serve(1)
    (agent,) = agents(served)
    seen = queue.Queue()

    def stumble(view):
        seen.put(view)
        raise KeyError(view.version)

    agent.watch(stumble)
    seen.get(timeout=PATIENCE_S)
    agent.join("a", "x")
    assert seen.get(timeout=PATIENCE_S).ready
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
    assert not first._watcher.is_alive()  # nobody closed it: the coordinator has ended the stream


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


# --- the door


def test_without_the_token_nothing_is_told_and_nothing_changes(serve, opened):
    served = serve(1)
    for token in ("wrong", "", TOKEN + "x"):
        thief = opened(Agent(replace(served.endpoint, token=token), 0))
        with pytest.raises(CoordinatorLost, match="refused the token"):
            thief.join("a", "x")
        with pytest.raises(CoordinatorLost, match="refused the token"):
            thief.heartbeat(Heartbeat(0))
    with pytest.raises(CoordinatorLost, match="refused the token"):
        opened(ControlClient(replace(served.endpoint, token="wrong"))).cancel()
    assert served.gang.snapshot()["joined"] == 0
    assert served.events == []


@pytest.mark.parametrize(
    "metadata",
    [(), (("authorization", TOKEN),), (("authorization", "Bearer "),), (("other-bin", b"\xff"),)],
)
def test_bare_calls_are_refused(serve, metadata):
    served = serve(1)
    with grpc.insecure_channel(served.endpoint.target) as channel:
        for method in ("Snapshot", "Watch", "NoSuchMethod"):
            call = channel.unary_unary(f"/kinetic.coordinator.Coordinator/{method}")
            with pytest.raises(grpc.RpcError) as caught:
                call(b"", timeout=PATIENCE_S, metadata=metadata)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_a_stranger_watching_is_logged_and_gives_up(serve, opened, caplog):
    thief = opened(Agent(replace(serve(1).endpoint, token="wrong"), 0))
    thief.listen()
    thief._watcher.join(PATIENCE_S)
    assert "refused the token" in caplog.text
    assert thief.heard.empty()


def test_the_socket_is_ours_alone(serve, tmp_path):
    serve(1)
    assert (tmp_path / "s").stat().st_mode & 0o077 == 0


def test_nonsense_is_refused_with_a_reason(serve, opened):
    served = serve(2)
    with pytest.raises(UsageError, match="no host 7 in this gang of 2"):
        opened(Agent(served.endpoint, 7)).join("a", "x")
    with pytest.raises(UsageError, match="no host 7"):
        opened(Agent(served.endpoint, 0)).heartbeat(Heartbeat(7))
    with pytest.raises(CorruptRecord, match="not JSON"):
        codec.report_from_wire(codec.pb.ReportRequest(report=b"\xff{"))
    with pytest.raises(CorruptRecord):
        codec.report_from_wire(codec.pb.ReportRequest(report=b"[1]"))
    with grpc.insecure_channel(served.endpoint.target) as channel:
        call = channel.unary_unary(codec.REPORT.path)
        with pytest.raises(grpc.RpcError) as caught:
            call(
                codec.pb.ReportRequest(report=b"{}").SerializeToString(),
                metadata=codec.metadata_of(served.endpoint),
            )
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_an_agent_of_another_job_or_of_an_earlier_attempt_is_refused(serve, opened):
    served = serve(1, attempt=2)
    stranger = opened(Agent(replace(served.endpoint, job_id="job-0000000b"), 0))
    with pytest.raises(CoordinatorLost, match="leads job-00c0ffee; the caller belongs to job-0000"):
        stranger.join("a", "x")
    late = opened(Agent(replace(served.endpoint, attempt=1), 0))
    with pytest.raises(CoordinatorLost, match="is at attempt 2; the caller belongs to 1"):
        late.heartbeat(Heartbeat(0))
    assert served.events == []
    assert opened(Agent(replace(served.endpoint, attempt=2), 0)).join("a", "x").ready


def test_an_agent_of_the_next_attempt_tries_again_until_its_leader_is_there(serve, opened):
    served = serve(1)
    early = opened(Agent(replace(served.endpoint, attempt=2), 0, clock=Hurried()))
    with pytest.raises(CoordinatorLost, match=r"has not answered for 30 s .*is at attempt 1"):
        early.join("a", "x")


def test_over_tcp_only_the_jobs_own_certificate_is_accepted(serve, opened):
    served = serve(1, "127.0.0.1:0")
    other = certificate.make(served.endpoint.tls_name).certificate
    deceived = opened(Agent(replace(served.endpoint, certificate=other), 0, clock=Hurried()))
    with pytest.raises(CoordinatorLost, match="has not answered for 30 s"):
        deceived.join("a", "x")
    with pytest.raises(UsageError, match="without the certificate of job-00c0ffee"):
        Agent(replace(served.endpoint, certificate=""), 0)
    plain = grpc.insecure_channel(served.endpoint.target)
    with plain, pytest.raises(grpc.RpcError):
        plain.unary_unary(codec.JOIN.path)(b"", metadata=codec.metadata_of(served.endpoint))
    assert served.events == []
    assert opened(Agent(served.endpoint, 0)).join("a", "x").ready


def test_a_port_that_cannot_be_bound_says_so():

    async def start() -> None:
        endpoint = Endpoint("192.0.2.1:1", TOKEN, JOB)
        made = certificate.make(endpoint.tls_name)
        endpoint = replace(endpoint, certificate=made.certificate)
        await Coordinator(Gang(GangSpec(hosts=1), 0.0), endpoint, key=made.key).start()

    with pytest.raises(SubmitError, match=r"cannot listen on 192\.0\.2\.1:1"):
        asyncio.run(start())


def test_an_address_that_cannot_be_bound_says_so(tmp_path):
    async def start(address: str) -> None:
        await Coordinator(Gang(GangSpec(hosts=1), 0.0), Endpoint(address, TOKEN, JOB)).start()

    with pytest.raises(SubmitError, match="107 bytes"):
        asyncio.run(start(f"unix:{tmp_path}/{'x' * 200}"))
    with pytest.raises(UsageError, match=r"cannot listen on 127\.0\.0\.1:0 without a certificate"):
        asyncio.run(start("127.0.0.1:0"))


# --- nobody there


class Hurried:
    """A clock that moves ten seconds each time somebody looks."""

    now = 0.0

    def __call__(self) -> float:
        self.now += 10.0
        return self.now


def test_a_coordinator_that_never_was_is_given_up(opened, tmp_path):
    nowhere = Endpoint(f"unix:{tmp_path}/nobody", TOKEN, JOB)
    agent = opened(Agent(nowhere, 0, clock=Hurried()))
    with pytest.raises(CoordinatorLost, match=r"has not answered for 30 s"):
        agent.join("a", "x")
    with pytest.raises(CoordinatorLost):
        opened(
            ControlClient(Endpoint(f"unix:{tmp_path}/nobody", TOKEN, JOB), clock=Hurried())
        ).snapshot()


def test_a_coordinator_that_vanishes_is_given_up(serve, opened):
    served, clock = serve(1), Hurried()
    agent = opened(Agent(served.endpoint, 0, clock=clock))
    agent.join("a", "x")
    assert agent.heartbeat(Heartbeat(0))
    served.close()
    assert not agent.heartbeat(Heartbeat(0))  # once is not enough
    with pytest.raises(CoordinatorLost, match="has not answered for 30 s"):
        all(not agent.heartbeat(Heartbeat(0)) for _ in range(10))
    with pytest.raises(CoordinatorLost):
        agent.report(ended(0))
    assert clock.now < 200


def test_an_agent_that_is_there_first_waits_for_its_coordinator(opened, tmp_path):
    agent = opened(Agent(Endpoint(f"unix:{tmp_path}/late", TOKEN, JOB), 0))
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(agent.join, "a", "x")
        opened(Served(f"unix:{tmp_path}/late", 1))
        assert joining.result(PATIENCE_S).ready


# --- people


def test_people_see_cancel_and_get_stacks(serve, agents, opened):
    served = serve(3)
    gang = agents(served)
    for i, agent in enumerate(gang):
        agent.listen()
        agent.join("a", "x")
        agent.heartbeat(Heartbeat(i, Activity.RUNNING, last_line="hällo \udcff", log_bytes=2**40))
    gang[2].report(ended(2))
    control = opened(ControlClient(served.endpoint))
    member = control.snapshot()["members"][0]
    assert (member["state"], member["last_line"], member["log_bytes"]) == (
        "running",
        "hällo ?",
        2**40,
    )
    with ThreadPoolExecutor(1) as pool:
        dumping = pool.submit(control.dump_stacks, 60.0)
        for agent in gang[:2]:
            agent.stacks(
                agent.hear(lambda v: v.stacks_request).stacks_request,
                f"stack \udcff of {agent._host}",
            )
        assert dumping.result(PATIENCE_S) == {0: "stack ? of 0", 1: "stack ? of 1"}
    control.cancel("enough")
    assert gang[0].hear(lambda v: v.stop).stop_exit is Exit.CANCELLED
    json.dumps(control.snapshot())


def test_stacks_come_as_far_as_they_came_in_time(serve, agents, opened):
    served = serve(2)
    for agent in agents(served):
        agent.join("a", "x")
    control = opened(ControlClient(served.endpoint))
    assert control.dump_stacks(0.0) == {}


# --- the importer may fork

FORK = """
import os, sys, threading, asyncio, tempfile, time
import kinetic._rpc.server as service, kinetic._rpc.client as client
from kinetic._core.endpoint import Endpoint
from kinetic._core.gang.machine import Gang, GangSpec
tasks = os.listdir("/proc/self/task")
assert threading.active_count() == 1 and len(tasks) == 1, tasks
folder = tempfile.mkdtemp()
endpoint = Endpoint(f"unix:{folder}/s", "t", "job-00000000")
async def serve():
    coordinator = service.Coordinator(Gang(GangSpec(hosts=1), time.monotonic()), endpoint)
    await coordinator.start()
    await coordinator.wait_finished()
    await coordinator.stop()
child = os.fork()
if child == 0:
    asyncio.run(serve())
    os._exit(7)
agent = client.AgentClient(endpoint, 0)
assert agent.join("a", "x").ready
control = client.ControlClient(endpoint)
control.cancel("done")
from kinetic._core.exits import Exit
from kinetic._core.outcome import HostReport
agent.report(HostReport(0, Exit.CANCELLED))
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
os.rmdir(folder)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_importing_starts_nothing_so_that_the_importer_may_fork():
    subprocess.run([sys.executable, "-W", "error", "-c", FORK], check=True, timeout=200)


def test_the_generated_code_loads_with_the_oldest_protobuf_that_we_support():
    generated = Path(codec.pb.__file__).read_text()
    # made by a newer protoc it would refuse every older protobuf
    assert "# Protobuf Python Version: 5.29." in generated
