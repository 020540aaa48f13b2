"""The promises over a gang of programs: each host a `python -m kinetic.runner`, joined by TCP with
TLS.

In: functions, run over `doubles.programs`. Out: what callers see; nothing left running.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from doubles.gcs import serving
from gangs import PATIENCE_S, children, is_titled, kill, wait_until

import kinetic
from kinetic import errors
from kinetic._core import layout
from kinetic._core.exits import Exit

pytestmark = pytest.mark.usefixtures("over_programs")


def run(accelerator, **options):
    return kinetic.run(accelerator=accelerator, backend="ray", **options)


def hosts_of(handle):
    """Process ids of the programs, by host."""
    return wait_until(handle.processes, "the programs have not started")["agents"]


def hold(folder):
    """Say which host this is, and stay."""
    index = os.environ["KINETIC_HOST_INDEX"]
    print(f"host {index} runs", flush=True)
    (Path(folder) / index).touch()
    time.sleep(1000)


@pytest.fixture
def held(home):
    """A gang of four, all in the function."""
    folder = home.parent / "marks"
    folder.mkdir(parents=True)
    handle = run("tpu-v6e-16")(hold).run_async(str(folder))
    wait_until(lambda: len(list(folder.iterdir())) == 4, "the function has not started")
    return handle


# -- values and exceptions -------------------------------------------------------------------------


def test_the_leaders_value_and_output_come_back(capfd):
    @run("cpu")
    def add(a, b):
        print("adding", flush=True)
        return a + b

    assert add(1, 2) == 3
    assert capfd.readouterr().out == "adding\n"


def test_the_original_exception_comes_back():
    @run("tpu-v6e-8")
    def fail():
        if os.environ["KINETIC_HOST_INDEX"] == "1":
            raise ValueError("on purpose")
        time.sleep(1000)

    with pytest.raises(ValueError, match="on purpose") as caught:
        fail()
    assert "host 1 of 2" in "\n".join(caught.value.__notes__)


@pytest.fixture
def distant(monkeypatch):
    """A store that is no folder, in this process; each call takes its time."""
    with serving("bucket") as double:
        double.before = lambda *_: time.sleep(0.01)
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", double.uri)
        monkeypatch.setenv("KINETIC_STORE", "gs://bucket")
        yield double


def test_a_gang_works_over_a_distant_store(distant, capfd):
    handle = run("tpu-v6e-8", retries=1)(fail_once_aloud).run_async()
    with pytest.raises(ValueError, match="attempt 2"):
        handle.result(timeout=PATIENCE_S, stream_logs=True)
    assert capfd.readouterr().out.splitlines() == ["attempt 1", "attempt 2"]
    assert handle.outcome().attempt == 2
    assert "RETRY" in {event["kind"].upper() for event in handle.events()}


def fail_once_aloud():
    attempt = os.environ["KINETIC_ATTEMPT"]
    print(f"attempt {attempt}", flush=True)
    if os.environ["KINETIC_HOST_INDEX"] == "0":
        raise ValueError(f"attempt {attempt}")
    time.sleep(1000)


# -- deaths ----------------------------------------------------------------------------------------


def test_a_killed_host_ends_the_gang_and_is_named(held):
    kill(hosts_of(held)[2])
    with pytest.raises(errors.HostLost, match="host 2 of 4"):
        held.result(timeout=PATIENCE_S)
    assert held.outcome().blamed == (2,)


def test_a_killed_agent_ends_the_gang_and_is_named(held):
    (agent,) = children(hosts_of(held)[3])
    kill(agent)
    with pytest.raises(errors.HostLost, match="agent process was killed by SIGKILL"):
        held.result(timeout=PATIENCE_S)
    assert held.outcome().blamed == (3,)


def test_a_host_that_is_gone_at_once_is_noticed_by_its_connection(held):
    """Its machine has failed: nobody is left to say so."""
    program = hosts_of(held)[2]
    os.kill(program, signal.SIGSTOP)
    (agent,) = children(program)
    kill(agent)
    kill(program)
    with pytest.raises(errors.HostLost, match=r"Its connection broke, and it did not come back"):
        held.result(timeout=PATIENCE_S)
    assert held.outcome().blamed == (2,)


@pytest.mark.settles_within(15)
def test_a_killed_leader_is_named_not_the_hosts_that_lost_it(held):
    """They wait for it as long as it would wait for one of them: ten seconds."""
    kill(hosts_of(held)[0])
    with pytest.raises(errors.HostLost, match=r"host 0 of 4 was lost\. Its program, which led the"):
        held.result(timeout=PATIENCE_S)
    outcome = held.outcome()
    assert outcome.blamed == (0,)
    told = [report.detail for report in outcome.reports[1:]]
    assert all("The coordinator of the gang at 127.0.0.1:" in detail for detail in told), told


# -- cancel, timeouts, attempts --------------------------------------------------------------------


def test_cancel_stops_every_host(held):
    held.cancel()
    with pytest.raises(errors.JobCancelled):
        held.result(timeout=PATIENCE_S)


def test_a_job_is_cancelled_before_its_leader_can_listen():
    handle = run("cpu")(time.sleep).run_async(1000)
    handle.cancel()
    with pytest.raises(errors.JobCancelled):
        handle.result(timeout=PATIENCE_S)


def test_a_job_that_takes_too_long_is_stopped():
    with pytest.raises(errors.JobTimeout, match="its timeout of 1 s"):
        run("tpu-v6e-8", timeout=1)(time.sleep)(1000)


def fail_once(folder):
    attempt = os.environ["KINETIC_ATTEMPT"]
    (Path(folder) / f"{os.environ['KINETIC_HOST_INDEX']}-{attempt}").touch()
    if os.environ["KINETIC_HOST_INDEX"] == "1" and attempt == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    return attempt


def test_the_leader_makes_another_attempt_with_all_hosts(home):
    folder = home.parent / "marks"
    folder.mkdir(parents=True)
    again = run("tpu-v6e-8", retries=1)(fail_once)
    assert again(str(folder)) == "2"
    assert {path.name for path in folder.iterdir()} >= {"1-1", "0-2", "1-2"}


def fail_then_hold(folder):
    if os.environ["KINETIC_ATTEMPT"] == "1":
        raise ValueError("on purpose")
    hold(folder)


def agent_of(program):
    """Its agent; there are processes that fork, too."""

    def find():
        return [pid for pid in children(program) if is_titled(pid, "kinetic-agent")]

    return wait_until(find, "the program has no agent")[0]


def test_an_agent_that_is_killed_in_a_later_attempt_is_named(home):
    folder = home.parent / "marks"
    folder.mkdir(parents=True)
    handle = run("tpu-v6e-8", retries=1)(fail_then_hold).run_async(str(folder))
    wait_until(lambda: len(list(folder.iterdir())) == 2, "attempt 2 has not begun")
    kill(agent_of(hosts_of(handle)[1]))
    with pytest.raises(errors.HostLost, match="agent process was killed by SIGKILL"):
        handle.result(timeout=PATIENCE_S)
    assert (handle.outcome().attempt, handle.outcome().blamed) == (2, (1,))


def leave_much(folder):
    """Have the agent of host 1 clean up for a while: the failure of another host ends this."""
    made = Path(folder, "1")
    if os.environ["KINETIC_HOST_INDEX"] == "1":
        for number in range(20_000):
            Path(str(number)).touch()
        made.touch()
    while not made.exists():
        time.sleep(0.02)
    raise ValueError("on purpose")


@pytest.mark.settles_within(60)
def test_an_agent_that_is_killed_before_it_waits_for_its_place_ends_the_job(home):
    """Its program has nobody to tell it: the gang has ended."""
    folder = home.parent / "marks"
    folder.mkdir(parents=True)
    handle = run("tpu-v6e-8", retries=1)(leave_much).run_async(str(folder))
    agent, events = agent_of(hosts_of(handle)[1]), home / layout.events(handle.job_id)
    wait_until(lambda: events.exists() and b'"finished"' in events.read_bytes(), "it runs on")
    kill(agent)
    with pytest.raises(ValueError, match="on purpose"):
        handle.result(timeout=PATIENCE_S)
    assert handle.outcome().attempt == 1


def test_without_all_hosts_there_is_no_other_attempt(home):
    folder = home.parent / "marks"
    folder.mkdir(parents=True)
    handle = run("tpu-v6e-8", retries=1)(hold).run_async(str(folder))
    wait_until(lambda: len(list(folder.iterdir())) == 2, "the function has not started")
    kill(hosts_of(handle)[1])
    with pytest.raises(errors.HostLost, match="host 1 of 2"):
        handle.result(timeout=PATIENCE_S)
    outcome = handle.outcome()
    assert (outcome.attempt, outcome.reports[1].exit) == (1, Exit.AGENT_LOST)


def test_live_stacks_are_called_over_tls(held):
    assert set(held.stacks()) == {0, 1, 2, 3}
    held.cancel()
    held.wait(timeout=PATIENCE_S)
