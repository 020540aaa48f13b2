"""Debugging, tested without debugpy: the forwarded port, the waits of hosts, refused calls."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import replace

import pytest
from laptop_fakes import NOW, FakeBackend, plan, put_attempt, put_ref, ref

import kinetic
import kinetic.debug
from kinetic._backends import registry
from kinetic._backends.local import simulation
from kinetic._backends.local.backend import LocalBackend
from kinetic._client import debugging as debug
from kinetic._client.handle import JobHandle
from kinetic._core import layout
from kinetic._core.debug_address import Debugger, DebuggerState, launch_configuration
from kinetic._core.gang.messages import Activity
from kinetic._core.plan import Limits
from kinetic._host.channel import WorkerEvent
from kinetic._host.identity import Identity, from_environ
from kinetic._host.worker import debugger
from kinetic._store.local import LocalStore
from kinetic._system.connection import SocketConnection
from kinetic.errors import (
    CorruptRecord,
    NotFound,
    PreflightError,
    SetupFailed,
    StoreError,
    UsageError,
    UsageTypeError,
)

WAITING = Debugger(
    DebuggerState.WAITING, 4321, "/scratch/tree", "/home/me/project", closes_at=NOW + 600
)


@pytest.fixture
def store(home):
    return LocalStore(home)


def connection_to(port):
    return SocketConnection(socket.create_connection(("127.0.0.1", port), timeout=200))


class Reachable(FakeBackend):
    """A backend that connects every port of its hosts to a server in this process."""

    def __init__(self, store, port):
        super().__init__(store)
        self.port = port
        self.opened = []

    def connect(self, ref, host, port):
        self.opened.append((host, port))
        return connection_to(self.port)


@pytest.fixture
def echo():
    """Yield the port of a server that sends back the bytes that it receives."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(200)

        def answer(connection):
            with connection:
                while data := connection.recv(100):
                    connection.sendall(data)

        def serve():
            with contextlib.suppress(OSError):
                while True:
                    threading.Thread(target=answer, args=(server.accept()[0],), daemon=True).start()

        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)


def debug_ref():
    import dataclasses

    return dataclasses.replace(ref(), debug=True)


def put_debugger(store, record):
    store.put(layout.AttemptKeys("job-00000001", 1).debugger, json.dumps(record.to_json()).encode())


def talk(port, data):
    with socket.create_connection(("127.0.0.1", port), timeout=200) as near:
        near.sendall(data)
        near.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: near.recv(1 << 16), b""))


# -- the forwarded port ----------------------------------------------------------------------------


def test_a_port_is_forwarded_both_ways(store, echo):
    backend = Reachable(store, echo)
    put_debugger(store, WAITING)
    forward = debug.attach(backend, store, debug_ref(), local_port=0, ended=lambda: False)
    data = bytes(range(256)) * 4000
    assert talk(forward.port, data) == data
    assert talk(forward.port, b"again") == b"again"
    assert backend.opened == [(0, 4321)] * 2
    assert (forward.poll(), forward.returncode) == (None, None)
    forward.terminate()
    forward.terminate()
    assert forward.wait(200) == 0
    assert (forward.poll(), forward.returncode) == (0, 0)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", forward.port), timeout=1)


def test_a_status_that_cannot_be_told_at_times_ends_no_forward(echo):
    answers = [StoreError("no route"), False, StoreError("no route"), True]

    def ended():
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    listener = socket.create_server(("127.0.0.1", 0))
    forward = debug.PortForward(listener, lambda: connection_to(echo), ended, check_every_s=0.01)
    assert forward.wait(200) == 0
    assert answers == []


class Loop:
    """A connection without a socket, which returns the bytes that are written to it."""

    def __init__(self):
        self.bytes = queue.SimpleQueue()

    def read(self):
        return self.bytes.get()

    def write(self, data):
        self.bytes.put(data)

    def finish(self):
        self.bytes.put(b"")

    end = close = finish


def test_a_tunnel_need_not_be_a_socket():
    listener = socket.create_server(("127.0.0.1", 0))
    forward = debug.PortForward(listener, Loop, lambda: False)
    assert talk(forward.port, b"x" * 200_000) == b"x" * 200_000
    forward.terminate()
    assert forward.wait(200) == 0


def test_terminate_ends_open_connections(store, echo):
    put_debugger(store, WAITING)
    forward = debug.attach(
        Reachable(store, echo), store, debug_ref(), local_port=0, ended=lambda: False
    )
    with socket.create_connection(("127.0.0.1", forward.port), timeout=200) as near:
        near.sendall(b"x")
        assert near.recv(1) == b"x"
        debug.cleanup_port_forward(forward)
        assert near.recv(1) == b""
    assert forward.poll() == 0


def test_it_ends_with_the_job(echo):
    over = threading.Event()
    listener = socket.create_server(("127.0.0.1", 0))
    connect = lambda: connection_to(echo)  # noqa: E731
    forward = debug.PortForward(listener, connect, over.is_set, check_every_s=0.0)
    with pytest.raises(subprocess.TimeoutExpired):
        forward.wait(timeout=0)
    threading.Timer(0.1, os.kill, [os.getpid(), signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt):
        forward.wait()
    assert forward.poll() is None, "an interrupt of who waits does not end it"
    over.set()
    assert forward.wait(200) == 0


def test_a_debugger_that_is_gone_closes_the_connection(store, caplog):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    put_debugger(store, WAITING)
    forward = debug.attach(
        Reachable(store, port), store, debug_ref(), local_port=0, ended=lambda: False
    )
    with contextlib.suppress(ConnectionResetError):
        assert talk(forward.port, b"") == b""
    forward.terminate()
    forward.wait(200)
    assert "cannot connect to the job's debugger" in caplog.text


@pytest.mark.starts_processes
def test_cleaning_up_is_for_anything_like_a_process():
    debug.cleanup_port_forward(None)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        debug.cleanup_port_forward(process)
        assert process.poll() is not None
        debug.cleanup_port_forward(process)
    assert kinetic.debug.cleanup_port_forward is debug.cleanup_port_forward


# -- waiting for the debugger ----------------------------------------------------------------------


def test_attaching_waits_until_the_leader_listens(store, echo):
    pauses = []

    def pause(seconds):
        pauses.append(seconds)
        if len(pauses) == 2:
            import dataclasses

            # The record of an earlier attempt.
            put_debugger(store, dataclasses.replace(WAITING, state=DebuggerState.CLOSED))
        if len(pauses) == 3:
            put_debugger(store, WAITING)

    forward = debug.attach(
        Reachable(store, echo), store, debug_ref(), local_port=0, ended=lambda: False, pause=pause
    )
    forward.terminate()
    assert len(pauses) == 3


def test_what_cannot_be_attached_to_says_so(store, echo):
    backend = Reachable(store, echo)
    with pytest.raises(UsageError, match="debug=True"):
        debug.attach(backend, store, ref(), ended=lambda: False)
    with pytest.raises(NotFound, match="has ended"):
        debug.attach(backend, store, debug_ref(), local_port=0, ended=lambda: True)
    put_debugger(store, replace(WAITING, address="10.0.0.7"))
    with pytest.raises(
        UsageError, match=r"ssh -N -L 5678:127.0.0.1:4321 10.0.0.7`(.|\n)*launch.json"
    ):
        debug.attach(FakeBackend(store), store, debug_ref(), ended=lambda: False)


@pytest.mark.parametrize(
    ("port", "error"),
    [("5678", UsageTypeError), (True, UsageTypeError), (-1, UsageError), (65536, UsageError)],
)
def test_ports_are_checked(store, echo, port, error):
    with pytest.raises(error, match="local_port"):
        debug.attach(
            Reachable(store, echo), store, debug_ref(), local_port=port, ended=lambda: False
        )


def test_a_port_that_is_taken_is_refused_before_anything_is_waited_for(store, echo):
    with pytest.raises(UsageError, match=rf"Port {echo} .*\(address already in use\).*--port 0"):
        debug.attach(Reachable(store, echo), store, debug_ref(), local_port=echo, ended=pytest.fail)
    assert debug.free_port(echo) == 0


def test_instructions_can_be_pasted(store, echo):
    put_debugger(store, WAITING)
    forward = debug.attach(
        Reachable(store, echo),
        store,
        debug_ref(),
        local_port=0,
        working_dir="/src",
        ended=lambda: False,
    )
    forward.terminate()
    words, _, document = forward.instructions.partition("{")
    (attach,) = json.loads("{" + document)["configurations"]
    assert attach["connect"] == {"host": "127.0.0.1", "port": forward.port}
    assert attach["pathMappings"] == [{"localRoot": "/src", "remoteRoot": "/scratch/tree"}]
    assert (attach["type"], attach["request"]) == ("debugpy", "attach")
    assert "job-00000001" in words


def test_without_a_project_there_are_no_paths_to_map():
    import dataclasses

    bare = dataclasses.replace(WAITING, client_root="")
    assert "pathMappings" not in launch_configuration(bare, name="x", port=1)["configurations"][0]


def test_instructions_say_whether_the_function_waits():
    import dataclasses

    assert "starts once you have attached, or in 540 s" in debug.instructions(
        ref(), WAITING, 5678, "", now=NOW + 60
    )
    released = dataclasses.replace(WAITING, state=DebuggerState.RELEASED)
    assert "is running" in debug.instructions(ref(), released, 5678, "", now=NOW + 60)


@pytest.mark.parametrize("damage", [[], {}, {"state": "asleep"}, WAITING.to_json() | {"state": 7}])
def test_a_damaged_record_is_said_to_be_one(damage):
    with pytest.raises(CorruptRecord):
        Debugger.from_json(damage)
    assert Debugger.from_json(WAITING.to_json() | {"later": 1}) == WAITING


# -- debug calls -----------------------------------------------------------------------------------


@pytest.fixture
def backend(store):
    fake = FakeBackend(store)
    with registry.substitute_backend("local", lambda *_: fake):
        yield fake


def test_a_blocking_call_without_a_terminal_creates_nothing(backend, home):
    @kinetic.run(accelerator="cpu", debug=True)
    def train(): ...

    with pytest.raises(UsageError, match="KINETIC_NO_TTY_DEBUG"):
        train()
    assert backend.calls == []
    assert not home.exists()


def test_terminals_and_permission():
    debug.check_terminal(has_terminal=True, allowed=False)
    debug.check_terminal(has_terminal=False, allowed=True)
    with pytest.raises(UsageError):
        debug.check_terminal(has_terminal=False, allowed=False)


def test_debugging_on_spot_machines_warns():
    with pytest.warns(UserWarning, match="preemptible"):
        kinetic.run(accelerator="tpu-v6e-8", spot=True, debug=True)


def test_a_debug_job_may_stand_still(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KINETIC_DEBUG_WAIT_TIMEOUT", "30")
    options = {"accelerator": "cpu", "timeout": 10, "hang_timeout": 5}
    limits = kinetic.run(debug=True, **options)(print).plan().plan.limits
    assert (limits.debug_wait_s, limits.hang_timeout_s, limits.timeout_s) == (30.0, None, 40.0)
    limits = kinetic.run(**options)(print).plan().plan.limits
    assert (limits.hang_timeout_s, limits.timeout_s) == (5.0, 10.0)


def test_a_window_that_is_no_number_is_refused(monkeypatch):
    monkeypatch.setenv("KINETIC_DEBUG_WAIT_TIMEOUT", "soon")
    with pytest.raises(UsageError, match="KINETIC_DEBUG_WAIT_TIMEOUT"):
        kinetic.run(accelerator="cpu")(print).plan()


def test_without_debugpy_nothing_is_created(store):
    backend = LocalBackend(store, {}, has_debugger=lambda: False)
    backend.preflight(plan(accelerator="cpu"))
    with pytest.raises(PreflightError, match=r"pip install debugpy"):
        backend.preflight(plan(accelerator="cpu", options={"debug": True}))
    assert simulation.has_debugger()


def test_a_job_that_is_no_debug_job_cannot_be_attached_to(store, backend):
    handle = JobHandle(put_ref(store, ref()), backend, store)
    with pytest.raises(UsageError, match="has no debugger"):
        handle.debug_attach()


# -- on hosts --------------------------------------------------------------------------------------


class Wire:
    """A fake channel between agent and worker: records messages, returns prepared answers."""

    def __init__(self, *answers):
        self.sent, self.answers = [], list(answers)

    def send(self, message):
        self.sent.append(message)
        return True

    def receive(self):
        return self.answers.pop(0)


def gate(store, host, clock=lambda: 0.0, attempt=1):
    who = Identity(store.uri, "job-00000001", host, 4, "", "", "", "", attempt=attempt)
    return debugger.Gate(
        who,
        plan(
            options={"debug": True},
            client_root="/home/me/project",
            limits=Limits(debug_wait_s=100.0),
        ),
        store,
        clock=clock,
    )


def test_hosts_go_on_when_the_leader_has_a_debugger(store):
    now = iter(range(1000))
    leader, other = gate(store, 0), gate(store, 3, clock=lambda: float(next(now)))
    assert (leader.activity, other.activity, other.opens()) == ("waiting", "waiting", False)
    other.take({"event": WorkerEvent.DEBUGGER_HELD}, "/unused")
    assert other.activity is Activity.HELD
    assert not other.opens()
    leader.take({"event": WorkerEvent.DEBUGGER_LISTENING, "port": 4321}, "/scratch/tree")
    assert leader.activity is Activity.DEBUGGING
    assert not other.opens()
    leader.take({"event": WorkerEvent.DEBUGGER_ATTACHED, "attached": True}, "/scratch/tree")
    assert leader.activity is Activity.WAITING
    assert other.opens()
    assert not other.opens(), "the word is given once"
    assert (other.activity, other.holds) == (Activity.WAITING, False)
    record = debug.read(store, ref())
    assert (record.state, record.port, record.attached, record.client_root) == (
        DebuggerState.RELEASED,
        4321,
        True,
        "/home/me/project",
    )
    leader.close()
    assert not debug.read(store, ref()).listens


def test_a_leader_that_is_done_at_once_releases_the_others_too(store):
    leader, other = gate(store, 0), gate(store, 1)
    other.take({"event": WorkerEvent.DEBUGGER_HELD}, "")
    leader.take({"event": WorkerEvent.DEBUGGER_LISTENING, "port": 1}, "")
    leader.close()
    assert other.opens()


def test_hosts_wait_for_a_silent_leader_only_so_long(store):
    now = [0.0]
    other = gate(store, 1, clock=lambda: now[0])
    other.take({"event": WorkerEvent.DEBUGGER_HELD}, "")
    now[0] = 100.0 + debugger.BEYOND_S - 0.1
    assert not other.opens()
    now[0] += 1.0
    assert other.opens()


def test_hosts_look_only_now_and_then(store):
    now, looks = [0.0], []
    other = gate(store, 1, clock=lambda: now[0])
    other.take({"event": WorkerEvent.DEBUGGER_HELD}, "")
    other._store = type(
        "Counting", (), {"get": lambda self, key: looks.append(key) or store.get(key)}
    )()
    for tick in range(100):
        now[0] = tick / 100
        other.opens()
    assert len(looks) == 4


def test_the_record_of_an_attempt_before_releases_nobody(store):
    first = gate(store, 0)
    first.take({"event": WorkerEvent.DEBUGGER_LISTENING, "port": 1}, "")
    first.take({"event": WorkerEvent.DEBUGGER_ATTACHED, "attached": False}, "")
    other = gate(store, 1, attempt=2)
    other.take({"event": WorkerEvent.DEBUGGER_HELD}, "")
    assert not other.opens()
    put_attempt(store, ref(), 1)
    assert debug.read(store, ref()) is None, "the debugger of attempt 1 is not that of attempt 2"


def test_a_host_without_debugpy_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "debugpy", None)
    with pytest.raises(SetupFailed, match=r"pip install debugpy"):
        debugger.serve(Wire(), 0, 1.0, "/nowhere", "job-1a2b3c4d")


def test_a_held_worker_waits_for_the_word():
    wire = Wire({"go": True})
    debugger.hold(wire)
    assert wire.sent == [{"event": WorkerEvent.DEBUGGER_HELD}]
    with pytest.raises(SetupFailed):
        debugger.hold(Wire(None))


def test_a_cluster_has_the_port_of_its_manifest(tmp_path):
    env = dict.fromkeys(("KINETIC_STORE", "KINETIC_JOB_ID", "KINETIC_COORDINATOR"), "x")
    env |= {"KINETIC_HOST_INDEX": "0", "KINETIC_HOSTS": "1", "KINETIC_CREDENTIALS": str(tmp_path)}
    for name in ("token", "tls.crt", "tls.key"):
        (tmp_path / name).write_text(name)
    assert from_environ(env).debug_port == 5678
    assert from_environ(env | {"KINETIC_DEBUG_PORT": "6000"}).debug_port == 6000
