"""Authentication of a coordinator's callers, and errors when no coordinator answers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import grpc
import pytest
import service_cases
from service_cases import JOB, PATIENCE_S, TOKEN, Agent, Served, ended

from kinetic._core.endpoint import Endpoint
from kinetic._core.exits import Exit
from kinetic._core.gang.machine import Activity, Gang, GangSpec, Heartbeat
from kinetic._rpc import certificate, codec
from kinetic._rpc.client import ControlClient
from kinetic._rpc.server import Coordinator
from kinetic.errors import CoordinatorLost, CorruptRecord, SubmitError, UsageError

opened, serve, agents = service_cases.opened, service_cases.serve, service_cases.agents


# --- authentication and limits


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


@pytest.mark.parametrize("method", [codec.REPORT.path, codec.WATCH.path, "/no/such"])
def test_a_stranger_is_refused_before_its_message_is_read(serve, method):
    """A caller without the token must not fill the leader's memory with messages of up to 64 MB."""
    served, never = serve(1), threading.Event()

    def messages():
        never.wait()
        yield from ()

    with grpc.insecure_channel(served.endpoint.target) as channel:
        call = channel.stream_unary(method)
        try:
            with pytest.raises(grpc.RpcError) as caught:
                call(messages(), timeout=PATIENCE_S, metadata=((codec.AUTHORIZATION, "wrong"),))
        finally:
            never.set()
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_only_so_many_may_connect(serve, monkeypatch, tmp_path):
    options = dict(codec.SERVER_OPTIONS) | {"grpc.max_allowed_incoming_connections": 3}
    monkeypatch.setattr(codec, "SERVER_OPTIONS", tuple(options.items()))
    serve(1)
    with contextlib.ExitStack() as stack:
        idle = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(9)]
        for sock in idle:
            sock.settimeout(PATIENCE_S)
            sock.connect(str(tmp_path / "s"))
        # A server greets an accepted caller with its settings, and hangs up on others.
        assert sorted(bool(sock.recv(1)) for sock in idle) == [False] * 6 + [True] * 3


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
    with pytest.raises(UsageError, match="no host 7 in this job, which has hosts 0 to 1"):
        opened(Agent(served.endpoint, 7)).join("a", "x")
    with pytest.raises(UsageError, match="no host 7"):
        opened(Agent(served.endpoint, 0)).heartbeat(Heartbeat(7))
    with pytest.raises(CorruptRecord, match=r"text is 7, not of type str"):
        codec.read(codec.write({"host": 0, "request": 1, "text": 7}), codec.StacksAnswer)
    with grpc.insecure_channel(served.endpoint.target) as channel:
        for path, sent in [
            *((codec.REPORT.path, sent) for sent in (b"\xff{", b"[1]", b"{}")),
            *((codec.JOIN.path, sent) for sent in (b"", b"{}", codec.write({"host": "a"}))),
        ]:
            with pytest.raises(grpc.RpcError) as caught:
                channel.unary_unary(path)(sent, metadata=codec.metadata_of(served.endpoint))
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_texts_of_programs_need_not_be_unicode():
    beat = codec.read(codec.write(Heartbeat(1, last_line="a\udc80b")), Heartbeat)
    assert beat == Heartbeat(1, last_line="a\udc80b")
    assert codec.read(codec.write({3: "\udc80"}), dict[int, str]) == {3: "\udc80"}


READ_AT_ONCE = """
import os, sys, threading
from kinetic._core.gang.messages import HostView
from kinetic._rpc import codec

sys.setswitchinterval(1e-6)
sent, barrier = codec.write(HostView(version=3)), threading.Barrier(3)

def read():
    barrier.wait()
    codec.read(sent, HostView)

for _ in range(300):
    if (pid := os.fork()) == 0:
        threads = [threading.Thread(target=read) for _ in range(3)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        os._exit(0)
    if status := os.waitpid(pid, 0)[1]:
        sys.exit(f"ended with {status}")
"""


@pytest.mark.starts_processes
def test_the_first_messages_may_be_read_by_several_threads_at_once():
    """Several threads may decode the first messages of a process at once. Each try is in a fork."""
    subprocess.run([sys.executable, "-c", READ_AT_ONCE], check=True, timeout=PATIENCE_S)


def test_an_agent_of_another_job_or_of_an_earlier_attempt_is_refused(serve, opened):
    served = serve(1, attempt=2)
    stranger = opened(Agent(replace(served.endpoint, job_id="job-0000000b"), 0))
    with pytest.raises(CoordinatorLost, match="leads job-00c0ffee, but the host belongs to job-0"):
        stranger.join("a", "x")
    late = opened(Agent(replace(served.endpoint, attempt=1), 0))
    with pytest.raises(CoordinatorLost, match="is at attempt 2, but the host belongs to attempt 1"):
        late.heartbeat(Heartbeat(0))
    assert served.events == []
    assert opened(Agent(replace(served.endpoint, attempt=2), 0)).join("a", "x").ready


@pytest.mark.parametrize("code", [grpc.StatusCode.CANCELLED, grpc.StatusCode.UNAVAILABLE])
def test_calls_that_a_busy_server_drops_are_made_again(code, tmp_path, opened):
    """Regression: a server on an overloaded machine answered a heartbeat with CANCELLED."""
    answers = {
        codec.JOIN.path: codec.write(Gang(GangSpec(hosts=1), 0.0).view(0)),
        codec.HEARTBEAT.path: codec.write(1),
    }
    dropped = set()

    class DropsOnce(grpc.GenericRpcHandler):
        def service(self, details):
            def answer(request, context):
                if details.method not in dropped:
                    dropped.add(details.method)
                    context.abort(code, "dropped")
                return answers[details.method]

            return grpc.unary_unary_rpc_method_handler(answer)

    server = grpc.server(ThreadPoolExecutor(1), handlers=[DropsOnce()])
    server.add_insecure_port(f"unix:{tmp_path}/d")
    server.start()
    agent = opened(Agent(Endpoint(f"unix:{tmp_path}/d", TOKEN, JOB), 0))
    try:
        assert not agent.join("a", "x").ready
        beat = Heartbeat(0, Activity.RUNNING)
        assert [agent.heartbeat(beat) for _ in range(2)] == [False, True]
    finally:
        server.stop(None).wait()


def test_an_agent_of_the_next_attempt_tries_again_until_its_leader_is_there(serve, opened):
    served = serve(1)
    early = opened(Agent(replace(served.endpoint, attempt=2), 0, clock=Hurried()))
    with pytest.raises(CoordinatorLost, match=r"has not answered for 30 s .*is at attempt 1"):
        early.join("a", "x")


def test_hosts_join_the_leader_of_their_own_start_only(serve, opened):
    """After a restart of all hosts, a host may call the previous leader, which must refuse it."""
    served = serve(1, restarts=1)
    early = opened(Agent(replace(served.endpoint, restarts=2), 0, clock=Hurried()))
    with pytest.raises(
        CoordinatorLost,
        match=r"not answered for 30 s .*leader belongs to restart 1, but the host to restart 2",
    ):
        early.join("a", "x")
    asking = opened(ControlClient(replace(served.endpoint, restarts=2), clock=Hurried()))
    with pytest.raises(CoordinatorLost, match=r"not answered for 5 s .*belongs to restart 1"):
        asking.snapshot()
    late = opened(Agent(replace(served.endpoint, restarts=0), 0))
    with pytest.raises(
        CoordinatorLost, match="leader belongs to restart 1, but the host to restart 0"
    ):
        late.join("a", "x")
    with pytest.raises(CoordinatorLost, match="belongs to restart 1"):
        late.report(ended(0))
    assert served.events == []
    assert opened(Agent(replace(served.endpoint, restarts=1), 0)).join("a", "x").ready


def test_over_tcp_only_the_jobs_own_certificate_is_accepted(serve, opened):
    served = serve(1, "127.0.0.1:0")
    other = certificate.make(served.endpoint.tls_name).certificate
    deceived = opened(Agent(replace(served.endpoint, certificate=other), 0, clock=Hurried()))
    with pytest.raises(CoordinatorLost, match="has not answered for 30 s"):
        deceived.join("a", "x")
    with pytest.raises(UsageError, match="lacks the certificate of job-00c0ffee"):
        Agent(replace(served.endpoint, certificate=""), 0)
    plain = grpc.insecure_channel(served.endpoint.target)
    with plain, pytest.raises(grpc.RpcError):
        plain.unary_unary(codec.JOIN.path)(b"", metadata=codec.metadata_of(served.endpoint))
    assert served.events == []
    assert opened(Agent(served.endpoint, 0)).join("a", "x").ready


def test_a_port_that_cannot_be_bound_says_so():

    async def start() -> None:
        endpoint = Endpoint("192.0.2.1:1", TOKEN, JOB)
        own_certificate = certificate.make(endpoint.tls_name)
        endpoint = replace(endpoint, certificate=own_certificate.certificate)
        await Coordinator(Gang(GangSpec(hosts=1), 0.0), endpoint, key=own_certificate.key).start()

    with pytest.raises(SubmitError, match=r"cannot listen on 192\.0\.2\.1:1"):
        asyncio.run(start())


def test_an_address_that_cannot_be_bound_says_so(tmp_path):
    async def start(address: str) -> None:
        await Coordinator(Gang(GangSpec(hosts=1), 0.0), Endpoint(address, TOKEN, JOB)).start()

    with pytest.raises(SubmitError, match="107 bytes"):
        asyncio.run(start(f"unix:{tmp_path}/{'x' * 200}"))
    with pytest.raises(SubmitError, match=r"/absent/socket: No such file or directory\.$"):
        asyncio.run(start("unix:/absent/socket"))
    with pytest.raises(UsageError, match=r"cannot listen on 127\.0\.0\.1:0 without a certificate"):
        asyncio.run(start("127.0.0.1:0"))


# --- no coordinator answers


class Hurried:
    """A clock that advances by ten seconds at each reading."""

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
    assert not agent.heartbeat(Heartbeat(0))  # One failure is not enough.
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


# --- calls of users


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
        "hällo \udcff",
        2**40,
    )
    with ThreadPoolExecutor(1) as pool:
        dumping = pool.submit(control.dump_stacks, 60.0)
        for agent in gang[:2]:
            agent.stacks(
                agent.hear(lambda v: v.stacks_request).stacks_request,
                f"stack \udcff of {agent._host}",
            )
        assert dumping.result(PATIENCE_S) == {0: "stack \udcff of 0", 1: "stack \udcff of 1"}
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


@pytest.mark.starts_processes
@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_importing_starts_nothing_so_that_the_importer_may_fork():
    subprocess.run([sys.executable, "-W", "error", "-c", FORK], check=True, timeout=200)
