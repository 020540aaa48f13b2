"""Sessions: calls run one after the other on held slices, in new or in kept processes. Nothing that
happens to a call, a host or a caller leaves a call without an end, or a session without hosts."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from gangs import PATIENCE_S, children, is_titled, kill, start_script, wait_until, worker_of
from on_sessions import (
    append,
    count_calls,
    describe_process,
    fail_at_first,
    gather_pids,
    import_modules,
    leave_behind,
    sum_squares,
    touch_and_wait,
    wait_for_mark,
)

import kinetic
from kinetic._core.exits import Exit
from kinetic._core.session import KEPT_IS_GONE
from kinetic.cli import root
from kinetic.errors import (
    HostLost,
    JobCancelled,
    JobFailed,
    JobTimeout,
    NotFound,
    PreflightError,
    SetupFailed,
    UsageError,
)

GONE = "what the session kept is gone"


@pytest.fixture
def hold(home):
    """Start sessions; at the end, stop those that still run."""
    sessions = []

    def hold(name="s", accelerator="cpu", **options):
        session = kinetic.session(accelerator, name=name, **options)
        sessions.append(session)
        session.wait_until_ready()
        return session

    yield hold
    for session in sessions:
        session.stop(force=True)
        wait_until(lambda session=session: has_ended(session), f"{session} has not ended")


@pytest.fixture
def session(hold):
    """A session of one host, entered."""
    with hold() as session:
        yield session


def has_ended(session):
    return session.status().state not in ("PENDING", "RUNNING")


def call(function, accelerator="cpu", **options):
    return kinetic.run(accelerator, **options)(function)


def begin(tmp_path, name="call", value=None, **options):
    """Start a call that waits for a file; return its handle once it runs, and the file."""
    mark = tmp_path / name
    handle = call(touch_and_wait, **options).run_async(str(mark), value)
    wait_until(mark.exists, f"{name} has not begun")
    return handle, Path(f"{mark}.go")


def agent_of(session, host=0):
    return session.job.processes()["agents"][host]


def supervisor_of(session):
    return session.job.processes()["supervisor"]


# -- plain calls -----------------------------------------------------------------------------------


def test_each_call_is_a_job_of_its_own_in_new_processes(session):
    """Each call has its own id, log, value and exception; the hosts stay."""
    agent, describe = agent_of(session), call(describe_process)
    handles = [describe.run_async() for _ in range(2)]
    pids, ids = zip(*(handle.result() for handle in handles), strict=True)
    assert ids == tuple(handle.job_id for handle in handles)
    assert pids[0] != pids[1]
    assert [handle.logs() for handle in handles] == ["spoken\n", "spoken\n"]
    failed = describe.run_async(fails=True)
    with pytest.raises(KeyError, match="own") as caught:
        failed.result()
    assert failed.job_id in "".join(caught.value.__notes__)
    assert [h.status() for h in (*handles, failed)] == ["SUCCEEDED", "SUCCEEDED", "FAILED"]
    assert agent_of(session) == agent
    assert session.status()[:5] == ("s", session.job.job_id, "cpu", 1, "RUNNING")
    assert session.status().calls == ()
    assert kinetic.attach(handles[0].job_id).result() == (pids[0], ids[0])


def test_only_calls_that_fit_run_on_the_session_of_a_block(hold):
    """In a `with` block a function with another accelerator runs as without a session."""
    with hold() as session:
        own, other = call(describe_process).run_async(), call(describe_process, "cpu:2").run_async()
        assert own.result()[1] == own.job_id
        assert other.result()[1] == other.job_id
    after = call(describe_process).run_async()
    after.result()
    places = [handle.ref.place.session for handle in (own, other, after)]
    assert places == [session.job.job_id, "", ""]


def test_limits_retries_and_batches_are_those_of_jobs(session, tmp_path):
    """A call may fail at first, take too long, or be one of a batch."""
    assert call(fail_at_first, retries=1).run_async().result() > 0
    late = call(touch_and_wait, timeout=0.5).run_async(str(tmp_path / "late"))
    with pytest.raises(JobTimeout):
        late.result()
    batch = call(describe_process).run_async_map([{"fails": False}] * 2)
    assert len({pid for pid, _ in batch.results()}) == 2
    batch = call(describe_process, keep=True).run_async_map([{"fails": False}] * 3)
    assert len({pid for pid, _ in batch.results()}) == 1
    assert {job.ref.place.session for job in batch.jobs} == {session.job.job_id}


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Install packages: `quiet`, `busy` starts a thread, `fatal` ends any process but that of the
    first call, `slow` writes its process id and waits wherever no call runs."""
    folder = tmp_path / "site-packages"
    folder.joinpath("quiet").mkdir(parents=True)
    folder.joinpath("quiet/__init__.py").write_text("")
    folder.joinpath("quiet/part.py").write_text("import os; pid = os.getpid()")
    folder.joinpath("busy.py").write_text(
        "import threading, time\n"
        "threading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
    )
    elsewhere = "import os, time\nif 'kinetic-forks' in open('/proc/self/cmdline').read():"
    folder.joinpath("fatal.py").write_text(f"{elsewhere} os._exit(3)\n")
    folder.joinpath("slow.py").write_text(
        f"{elsewhere}\n open({str(tmp_path / 'slow')!r}, 'w').write(str(os.getppid()))\n"
        " time.sleep(600)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return tmp_path


def test_plain_calls_begin_with_what_earlier_ones_imported(installed, hold):
    """A call finds installed packages that an earlier one has imported, but none that starts a
    thread or ends the process when it is imported, and no module of the project. A call with
    variables of its own imports everything by itself, and the call after it does not."""
    names = ["busy", "quiet", "fatal", "quiet.part"]
    with hold() as session:
        load = call(import_modules)
        assert load(*names) == []
        wait_until(lambda: "quiet" in load(*names), "nothing is imported ahead")
        assert load(*names) == ["quiet", "quiet.part"]
        assert load.with_options(env={"QUIET": "1"})(*names) == []
        assert load(*names) == ["quiet", "quiet.part"]
        assert call(import_modules, keep=True)("quiet") == ["quiet"]
        assert load("quiet") == ["quiet"]
        assert len(list_fork_servers(session)) == 2


def test_a_module_of_the_project_hides_what_an_earlier_call_imported(installed, hold, home):
    """A package that was imported ahead is not what a script with such a module gets."""
    with hold("s"):
        wait_until(lambda: call(import_modules)("quiet") == ["quiet"], "nothing is imported ahead")
        home.parent.joinpath("quiet.py").write_text("mine = True\n")
        source = """
            import kinetic, quiet

            @kinetic.run("cpu", session="s")
            def is_mine():
                return quiet.mine

            print(is_mine())
            """
        script = start_script(home, source)
        assert script.communicate(timeout=PATIENCE_S)[0].decode().strip() == "True"


@pytest.mark.parametrize("module", ["slow", "quiet"])
def test_a_fork_server_with_imports_may_die(installed, hold, module):
    """Killed while it imports or after that, it costs no call, and the host stays."""
    with hold() as session:
        load, agent = call(import_modules), agent_of(session)
        assert load(module) == []
        if module == "slow":
            mark = installed / "slow"
            wait_until(lambda: mark.exists() and mark.read_text(), "nothing is imported ahead")
            handle = call(describe_process).run_async()
            handle.result()
            assert handle.logs() == "spoken\n"
            assert list_fork_servers(session)[1] == int(mark.read_text())
        else:
            wait_until(lambda: load(module) == [module], "nothing is imported ahead")
        kill(list_fork_servers(session)[1])
        assert load(module) in ([], [module])
        assert load(module) == []
        assert (agent_of(session), len(list_fork_servers(session))) == (agent, 1)


def list_fork_servers(session):
    return [pid for pid in children(agent_of(session)) if is_titled(pid, "kinetic-forks")]


# -- kept calls ------------------------------------------------------------------------------------


def test_kept_calls_share_a_process_until_it_dies(session):
    """An exception keeps the process and its state, `os._exit` loses it, and both say so. A plain
    call sees nothing of what is kept."""
    kept = call(count_calls, keep=True)
    pid, calls, _ = kept()
    assert (calls, kept()) == (1, (pid, 2, 2))
    with pytest.raises(KeyError, match="own") as caught:
        kept("raise")
    assert KEPT_IS_GONE not in caught.value.__notes__
    assert kept() == (pid, 4, 4)
    with pytest.raises(HostLost, match=f"(?s)exit code 3.*{KEPT_IS_GONE}"):
        kept("exit")
    handle = kept.run_async()
    other, calls, seen = handle.result()
    assert other != pid
    assert (calls, seen) == (1, 1)
    assert GONE in handle.logs()
    plain, calls, seen = call(count_calls)()
    assert plain != other
    assert (calls, seen) == (1, 1)


def test_a_call_may_keep_nothing_on_a_session_that_keeps(hold):
    """The other calls, which do not say, run in kept processes; they begin anew after that call."""
    with hold(keep=True):
        run = call(count_calls)
        pid = run()[0]
        assert run() == (pid, 2, 2)
        plain, calls, seen = call(count_calls, keep=False)()
        assert (plain != pid, calls, seen) == (True, 1, 1)
        assert run()[1:] == (1, 1)
        assert run()[1:] == (2, 2)


def test_a_kept_process_that_dies_between_calls_is_missed_by_none(session):
    """The next call runs in a new process, and its log says what is lost, even if the call came
    before anyone noticed the death."""
    kept = call(count_calls, keep=True)
    for pause_s in (0.0, 0.3):
        kill(kept()[0])
        time.sleep(pause_s)
        handle = kept.run_async()
        assert handle.result()[1:] == (1, 1)
        assert GONE in handle.logs()


def test_what_a_kept_call_leaves_running_holds_up_no_later_call(session):
    """The child process is ended, and its parent never reaps it; the thread stays. The log of the
    call that started the thread names it, the logs of later calls do not."""
    first = call(leave_behind, keep=True).run_async()
    pid = first.result()
    wait_until(lambda: "sleep" in first.logs(), "the process is not named")
    assert "stay with the kept process: straggler" in first.logs()
    handles = []
    for _ in range(3):
        handles.append(call(count_calls, keep=True).run_async())
        assert handles[-1].result()[0] == pid
    assert [handle.logs() for handle in handles] == ["", "", ""]


def test_a_call_compiles_nothing_that_an_earlier_one_compiled(hold, capsys):
    """Plain calls run in new processes on two hosts. All but the first take every program from the
    store, on both hosts, and so do those of another session; their status says so."""
    counts = []
    for name in ("first", "second"):
        with hold(name, "tpu-v6e-8"):
            handle = call(sum_squares, "tpu-v6e-8", all_hosts=True).run_async()
            values, compiled = zip(*handle.results(), strict=True)
            assert values == (64.0, 64.0)
            counts.append((compiled, [r.cache_hits for r in handle.outcome().reports]))
            handle = call(sum_squares, "tpu-v6e-8", all_hosts=True).run_async()
            values, compiled = zip(*handle.results(), strict=True)
            counts.append((compiled, [r.cache_hits for r in handle.outcome().reports]))
    programs = counts[0][0]
    assert min(programs) > 0
    assert counts == [(programs, [0, 0]), *[((0, 0), [*programs])] * 3]
    assert root.call(["jobs", "status", handle.job_id]) == 0
    assert f"{programs[0]} program" in capsys.readouterr().out


def test_the_world_of_jax_stays_until_a_host_of_it_dies(hold, tmp_path):
    """Processes, the world of JAX and arrays on devices stay; after the death of one process, all
    hosts begin anew."""
    with hold("gang", "tpu-v6e-8") as session:
        kept = call(gather_pids, "tpu-v6e-8", keep=True, all_hosts=True)
        pids, before = kept()
        assert before is None
        assert kept.run_async().results() == [(pids, 0.0), (pids, 0.0)]
        with pytest.raises(HostLost, match=f"(?s)host 1 of 2 died.*{KEPT_IS_GONE}"):
            kept(dies=1)
        handle = kept.run_async()
        new, before = handle.result()
        assert before is None
        assert not {*new} & {*pids}
        assert GONE in handle.logs()
        kill(agent_of(session, 1))
        newer, before = kept()
        assert before is None
        assert not {*new} & {*newer}
        with pytest.raises(ValueError, match="while host 0 waits") as caught:
            kept(raises=1)
        assert KEPT_IS_GONE in caught.value.__notes__
        newest = kept()[0]
        assert not {*newer} & {*newest}
        handle = begin(tmp_path, accelerator="tpu-v6e-8", keep=True)[0]
        handle.cancel()
        with pytest.raises(JobCancelled) as cancelled:
            handle.result()
        assert str(cancelled.value).count(KEPT_IS_GONE) == 1
        assert not {*newest} & {*kept()[0]}, "hosts are interrupted at different steps"


PROJECT = {
    "layers.py": "WIDTH = 1\n",
    "model.py": "from layers import WIDTH\nbuilt = []\ndef size(): return WIDTH\n",
    "other.py": "seen = []\n",
    "script.py": """
        import json, os, sys, threading
        import kinetic
        import model, other
        import jax

        traced = []

        @jax.jit
        def double(x):
            traced.append(1)
            return 2 * x

        @kinetic.run("cpu", keep=True)
        def train(x):
            model.built.append(x)
            other.seen.append(x)
            return float(double(x)), len(traced), model.size(), len(model.built), len(other.seen)

        @kinetic.run("cpu")
        def place():
            return os.environ["KINETIC_JOB_ID"]

        if __name__ == "__main__":
            values = [train(1.0), train(2.0)]
            with open("layers.py", "w") as file:
                file.write("WIDTH = 23")
            handle = train.run_async(3.0)
            values.append(handle.result())
            values.append(train(4.0))
            own = place.run_async()
            own.result()
            print(json.dumps([values, handle.logs(), own.ref.place.session]))
    """,
}


def test_a_script_on_a_named_session_traces_once_and_imports_changes(hold, tmp_path, monkeypatch):
    """With KINETIC_SESSION, a script of another process runs on the session. A jitted function of
    the script is traced once; a changed module is imported anew with the one that uses it."""
    session = hold("dev")
    for name, text in PROJECT.items():
        (tmp_path / name).write_text(textwrap.dedent(text))
    monkeypatch.setenv("KINETIC_SESSION", "dev")
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    values, log, place = json.loads(done.stdout.splitlines()[-1])
    assert values[:2] == [[2.0, 1, 1, 1, 1], [4.0, 1, 1, 2, 2]]
    assert [value[2:] for value in values[2:]] == [[23, 1, 3], [23, 2, 4]]
    assert values[2][1] == values[3][1], "not traced again"
    assert "modules imported again, because their files have changed: layers, model\n" in log
    assert place == session.job.job_id


def test_of_a_running_call_the_hosts_are_shown(session, tmp_path, capsys):
    """`kinetic jobs stacks` and `top` show the session's hosts, as long as the call runs there."""
    handle, go = begin(tmp_path)
    waiting = call(describe_process).run_async()
    wait_until(lambda: handle.status() == "RUNNING", "the call does not run")
    assert "touch_and_wait" in handle.stacks(PATIENCE_S)[0]
    assert handle.processes() == session.job.processes()
    wait_until(lambda: read_memory(capsys, handle), "the host's memory is not shown")
    assert waiting.processes() == {}
    with pytest.raises(NotFound, match="is not running"):
        waiting.stacks()
    go.touch()
    handle.wait()
    assert handle.processes() == {}


def read_memory(capsys, handle):
    capsys.readouterr()
    assert root.call(["jobs", "top", "--json", handle.job_id]) == 0
    (job,) = json.loads(capsys.readouterr().out)
    return sum(member["rss_bytes"] for member in job["members"])


# -- several callers -------------------------------------------------------------------------------


def test_calls_wait_in_order_and_can_be_cancelled(session, tmp_path):
    """A waiting call says which one it waits for. Cancelling a call, waiting or running, ends that
    call alone."""
    first, _ = begin(tmp_path)
    words = tmp_path / "words"
    second, third, fourth = (call(append).run_async(str(words), word) for word in "234")
    assert session.status().calls == tuple(h.job_id for h in (first, second, third, fourth))
    assert second.status() == "PENDING"
    assert second.read_standings([second.ref])[second.job_id].reason == (
        f"it waits for {first.job_id} on its session"
    )
    third.cancel()
    first.cancel()
    assert fourth.result() == ["2", "4"]
    assert second.result() == ["2"]
    for handle in (first, third):
        with pytest.raises(JobCancelled):
            handle.result()
    assert call(describe_process)()[0] > 0
    assert not has_ended(session)


def test_a_cancelled_kept_call_keeps_the_process(session, tmp_path):
    """On one host, a cancel or a timeout does not lose what is kept."""
    kept = call(count_calls, keep=True)
    pid = kept()[0]
    begin(tmp_path, keep=True)[0].cancel()
    assert kept() == (pid, 2, 2)
    with pytest.raises(JobTimeout):
        call(touch_and_wait, keep=True, timeout=2)(str(tmp_path / "late"), None)
    assert kept() == (pid, 3, 3)


def test_threads_that_start_one_session_get_the_same(home):
    """Many callers at once hold slices once."""
    found, ready = [], threading.Barrier(4)

    def start():
        ready.wait()
        found.append(kinetic.session("cpu", name="one"))

    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    try:
        assert len({session.job.job_id for session in found}) == 1
        assert len(found) == 4
        assert len(kinetic.list_jobs()) == 1
    finally:
        for session in found:
            session.stop(force=True)
        wait_until(lambda: all(map(has_ended, found)), "not ended")


def test_a_call_goes_on_without_its_caller(session, home, tmp_path):
    """The caller is killed while its call runs; another process finds the value."""
    mark = tmp_path / "mark"
    caller = start_script(
        home,
        f"""
        import sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        import kinetic
        from on_sessions import touch_and_wait
        handle = kinetic.run("cpu", session="s")(touch_and_wait).run_async({str(mark)!r}, "there")
        print(handle.job_id, flush=True)
        handle.result()
        """,
    )
    job_id = caller.stdout.readline().decode().strip()
    wait_until(mark.exists, "not begun")
    caller.kill()
    caller.wait()
    caller.stdout.close()
    Path(f"{mark}.go").touch()
    assert kinetic.attach(job_id).result() == "there"


# -- the end of sessions ---------------------------------------------------------------------------


def test_a_session_ends_when_no_call_comes_but_not_during_one(hold, tmp_path):
    """idle_timeout counts from the end of the last call. The session's end says why, and a later
    call names it."""
    with hold(idle_timeout=4) as session:
        handle, go = begin(tmp_path, value="value")
        time.sleep(4.5)
        go.touch()
        assert handle.result() == "value"
        ended_at = time.time()
        wait_until(lambda: has_ended(session), "the session has not ended")
        assert session.job.outcome().ended_at - ended_at > 0.5
        assert session.status().state == "SUCCEEDED"
        assert "no call came for 4 s (idle_timeout)" in session.job.outcome().reason
        with pytest.raises(PreflightError, match=r"The session s \(job-.*\) has ended"):
            call(describe_process)()
    again = hold()
    assert again.job.job_id != session.job.job_id


def test_max_lifetime_cuts_off_a_call(hold, tmp_path):
    """The running call and the waiting one name the limit."""
    with hold(max_lifetime=6) as session:
        running, _ = begin(tmp_path)
        waiting = call(describe_process).run_async()
        for handle in (running, waiting):
            with pytest.raises(JobFailed, match="max_lifetime of 6 s"):
                handle.result()
        wait_until(lambda: has_ended(session), "the session has not ended")
        assert session.status().state == "SUCCEEDED"


def test_a_budget_ends_a_session_and_its_call(hold, tmp_path, monkeypatch):
    """At 3,600 dollars an hour, six dollars last for six seconds. The end names the budget."""
    monkeypatch.setenv("KINETIC_PRICES", "cpu=3600")
    with hold(budget="$6") as session:
        running, _ = begin(tmp_path)
        with pytest.raises(
            JobFailed, match=r"session s has ended: its budget of \$6\.00 .* is used up\."
        ):
            running.result()
        wait_until(lambda: has_ended(session), "the session has not ended")
        assert session.status().state == "SUCCEEDED"


def test_a_session_with_calls_is_stopped_only_by_force(session, tmp_path):
    """Without force, stopping is refused while a call runs. With it, every call gets a verdict."""
    running, _ = begin(tmp_path)
    waiting = call(describe_process).run_async()
    with pytest.raises(UsageError, match=f"The session s runs {running.job_id}, and 1 call waits"):
        session.stop()
    assert not has_ended(session)
    session.stop(force=True)
    with pytest.raises(PreflightError, match=r"The session s \(job-.*\) has ended"):
        call(describe_process)()
    for handle in (running, waiting):
        with pytest.raises(JobFailed, match="The session s was stopped"):
            handle.result()
    wait_until(lambda: has_ended(session), "the session has not ended")
    assert session.status().state == "CANCELLED"
    session.stop()


# -- deaths ----------------------------------------------------------------------------------------


def test_a_host_that_dies_is_replaced(session, tmp_path):
    """Killed in a call, the agent costs the call; killed while idle, it costs nothing."""
    handle, _ = begin(tmp_path)
    agent = agent_of(session)
    kill(agent)
    with pytest.raises(HostLost):
        handle.result()
    assert handle.outcome().first.exit is Exit.AGENT_LOST
    assert call(describe_process)()[0] > 0
    second = agent_of(session)
    assert second != agent
    kill(second)
    assert call(describe_process)()[0] > 0
    assert agent_of(session) not in (agent, second)


def test_a_worker_that_is_killed_in_a_kept_call_is_replaced(session, tmp_path):
    """SIGKILL of the function's process costs what was kept, and the call's error says so."""
    handle, _ = begin(tmp_path, keep=True)
    kill(worker_of(agent_of(session)))
    with pytest.raises(HostLost, match=f"(?s)SIGKILL.*{KEPT_IS_GONE}"):
        handle.result()
    assert call(count_calls, keep=True)()[1:] == (1, 1)


@pytest.mark.parametrize("keep", [False, True])
def test_any_process_of_a_gang_may_die(hold, tmp_path, keep):
    """Whichever process of a host is killed, in a call or between two, the next call runs on all
    hosts. Only the call that ran fails, at once."""
    with hold("gang", "tpu-v6e-8") as session:
        describe = call(describe_process, "tpu-v6e-8", keep=keep, all_hosts=True)
        wait = call(wait_for_mark, "tpu-v6e-8", keep=keep)
        victims = [(agent_of, 0), (agent_of, 1), (find_worker, 1), (find_fork_server, 0)]
        for number, (find, host) in enumerate(victims[: 3 if keep else 4]):
            describe()
            kill(find(session, host))
            assert len(describe.run_async().results()) == 2
            marks = [tmp_path / f"{number}-{host}" for host in (0, 1)]
            handle = wait.run_async(str(tmp_path / f"{number}"))
            wait_until(lambda marks=marks: all(mark.exists() for mark in marks), "not begun")
            kill(find(session, host))
            if find is not find_fork_server:
                with pytest.raises(HostLost, match=f"host {host} of 2"):
                    handle.result(timeout=PATIENCE_S)
            else:
                handle.cancel()
            assert len(describe.run_async().results()) == 2
        assert not has_ended(session)


def find_worker(session, host):
    return worker_of(agent_of(session, host))


def find_fork_server(session, host):
    agent = agent_of(session, host)
    return next(pid for pid in children(agent) if is_titled(pid, "kinetic-forks"))


def test_the_death_of_the_leader_ends_the_calls_and_the_session(hold, tmp_path):
    """All calls end with an error, and a session with the same name can be started."""
    with hold() as session:
        running, _ = begin(tmp_path)
        waiting = call(describe_process).run_async()
        kill(supervisor_of(session))
        for handle in (running, waiting):
            with pytest.raises(JobFailed, match="session"):
                handle.result(timeout=PATIENCE_S)
            assert handle.status() == "FAILED"
        assert has_ended(session)
    with hold() as again:
        assert again.job.job_id != session.job.job_id
        assert call(describe_process)()[0] > 0


def test_a_host_that_stands_still_between_calls_is_replaced_or_goes_on(session):
    """An idle agent that is stopped for a moment takes the next call when it goes on."""
    agent = agent_of(session)
    os.kill(agent, signal.SIGSTOP)
    handle = call(describe_process).run_async()
    time.sleep(0.3)
    os.kill(agent, signal.SIGCONT)
    assert handle.result()[1] == handle.job_id


@pytest.mark.long
def test_a_host_that_takes_no_call_is_replaced_and_the_call_goes_on(hold):
    """An agent that was stopped between calls does not hold a call up until its start_timeout."""
    with hold("still", "tpu-v6e-8") as session:
        agent = agent_of(session, 1)
        os.kill(agent, signal.SIGSTOP)
        handle = call(describe_process, "tpu-v6e-8").run_async()
    assert handle.result(timeout=PATIENCE_S)[1] == handle.job_id
    assert agent_of(session, 1) != agent
    assert "attempt 2" in handle.logs()


def draw(seed=None):
    import numpy as np

    if seed is not None:
        np.random.seed(seed)
    return float(np.random.random())


def use_up_descriptors():
    import resource

    resource.setrlimit(resource.RLIMIT_NOFILE, (3, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def test_a_kept_process_that_can_read_no_call_is_replaced(session):
    """One call fails; the next one begins in a new process."""
    kept = call(count_calls, keep=True)
    pid = kept()[0]
    call(use_up_descriptors, keep=True)()
    with pytest.raises(SetupFailed, match="Too many open files"):
        kept()
    new, *counts = kept()
    assert (new != pid, counts) == (True, [1, 1])


def test_random_numbers_go_on_between_kept_calls(session):
    """The state of NumPy's generator is kept like any other state of a module."""
    kept = call(draw, keep=True)
    first, second = kept(0), kept()
    generator = np.random.RandomState(0)
    assert [first, second] == [generator.random_sample(), generator.random_sample()]


def test_a_caller_that_wants_other_options_is_told(session, capsys):
    """The session keeps its own options; whoever asks for none of them, or for the same, is told
    nothing."""
    assert kinetic.session("cpu", name="s").job.job_id == session.job.job_id
    assert capsys.readouterr().err == ""
    kinetic.session("cpu", name="s", idle_timeout="7m")
    told = f"The session s exists already ({session.job.job_id}), and keeps the options"
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("removed", ["session", "call"])
def test_removed_records_end_what_they_are_of(hold, home, tmp_path, removed):
    """Without its own records a session ends, also in a call, and its name is free. Without the
    records of the call that runs, it goes on with the next call."""
    session = hold()
    with session:
        handle, go = begin(tmp_path)
        waiting = call(describe_process).run_async()
        supervisor = supervisor_of(session)
        shutil.rmtree(home / "jobs" / {"session": session.job, "call": handle}[removed].job_id)
        go.touch()
        if removed == "call":
            assert waiting.result()[1] == waiting.job_id
            return
    wait_until(lambda: not Path(f"/proc/{supervisor}").exists(), "the supervisor has not ended")
    with hold() as again:
        assert call(describe_process)()[0] > 0
        assert again.job.job_id != session.job.job_id


def fail_between_collectives(launched):
    """Launch a collective on host 0 alone, and keep its result; then raise on both hosts."""
    import jax
    from jax.experimental import multihost_utils
    from jax.sharding import NamedSharding, PartitionSpec

    multihost_utils.sync_global_devices("begin")
    mesh = jax.make_mesh((jax.device_count(),), ("d",))
    make = jax.jit(lambda: jax.numpy.ones(8), out_shardings=NamedSharding(mesh, PartitionSpec("d")))
    kinetic.kept.sum = None
    ones = make()
    if jax.process_index():
        while not launched.exists():
            time.sleep(0.01)
        raise ValueError("no")
    kinetic.kept.sum = jax.jit(
        lambda x: x.sum(), out_shardings=NamedSharding(mesh, PartitionSpec())
    )(ones)
    launched.touch()
    raise ValueError("no")


def sum_ones():
    import jax
    from jax.experimental import multihost_utils

    return int(multihost_utils.process_allgather(jax.numpy.ones(1)).sum())


def test_a_collective_that_one_host_never_joins_costs_the_kept_world(hold, tmp_path):
    """The next call begins in new processes, instead of waiting for the collective for ever."""
    with hold("gang", "tpu-v6e-8"):
        kept = kinetic.run("tpu-v6e-8", keep=True)
        with pytest.raises(ValueError, match="no"):
            kept(fail_between_collectives)(tmp_path / "launched")
        handle = kept(sum_ones).run_async()
        assert handle.result(timeout=PATIENCE_S) == 2
        assert GONE in handle.logs()


def test_the_name_of_a_stopped_session_is_free_at_once(hold, tmp_path):
    """A session that is started while the stopped one still ends is another one."""
    with hold() as session:
        begin(tmp_path)
        session.stop(force=True)
    with hold() as again:
        assert again.job.job_id != session.job.job_id
        assert call(describe_process)()[0] > 0
