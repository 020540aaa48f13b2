"""Debugging jobs on real processes, with a client that speaks a debugger's protocol: the host that
waits, the line where it stops, and processes that are left."""

from __future__ import annotations

import bdb
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from dap import Editor

import kinetic
from kinetic import errors
from kinetic._client import debugging as debug
from kinetic._rpc.client import ControlClient

HERE = Path(__file__).resolve()
PATIENCE_S = 200.0

pytestmark = pytest.mark.timeout(600)


def wait_until(read, what):
    deadline = time.monotonic() + PATIENCE_S
    while not (answer := read()):
        assert time.monotonic() < deadline, what
        time.sleep(0.01)
    return answer


def line_of(words):
    """Return the number of the line in this file that ends with this comment."""
    return next(
        n for n, line in enumerate(HERE.read_text().splitlines(), 1) if line.endswith(f"# {words}")
    )


def configuration(forward):
    return json.loads(forward.instructions[forward.instructions.index("{") :])["configurations"][0]


@contextlib.contextmanager
def attach_editor(handle):
    """Attach an editor to host 0; yield the forwarded connection and the editor."""
    forward = handle.debug_attach(0)
    try:
        with Editor(forward.port) as editor:
            yield forward, editor
    finally:
        forward.terminate()


@contextlib.contextmanager
def process(command, cwd):
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=cwd
    ) as started:
        try:
            yield started
        finally:
            started.kill()


def command_line(*words):
    return process(
        [sys.executable, "-c", "from kinetic.cli.main import main; main()", *words],
        cwd=HERE.parents[2],
    )


def read_configuration(caller):
    """Return the editor configuration that the caller's process prints to stderr."""
    words = ""
    while not words.endswith("\n}\n"):
        line = caller.stderr.readline()
        assert line, words
        words += line
    return json.loads(words[words.index("{") :])["configurations"][0]


def states(handle):
    address = handle._backend.control(handle.ref)
    if address is None:
        return {}
    with ControlClient(address) as client:
        return {member["host"]: member["state"] for member in client.snapshot()["members"]}


def doubled(x):
    twice = 2 * x
    return twice  # here in a helper


def test_an_editor_stops_the_function_looks_and_changes_it():
    @kinetic.run(accelerator="cpu", debug=True)
    def train(n):
        total = doubled(n)
        breakpoint()
        return total  # after the breakpoint

    handle = train.run_async(4)
    with attach_editor(handle) as (forward, editor):
        verified = editor.attach(configuration(forward), {str(HERE): [line_of("here in a helper")]})
        assert verified == {str(HERE): [True]}
        thread, frames = editor.wait_for_stop()
        assert [(f["source"]["path"], f["name"]) for f in frames[:2]] == [
            (str(HERE), "doubled"),
            (str(HERE), "train"),
        ]
        assert frames[0]["line"] == line_of("here in a helper")
        assert editor.value("twice", frames[0]) == "8"
        editor.ask("continue", threadId=thread)
        thread, frames = editor.wait_for_stop()
        assert frames[0]["line"] == line_of("after the breakpoint")
        editor.value("total = 41", frames[0])
        editor.ask("continue", threadId=thread)
        assert handle.result() == 41
        editor.event("terminated")
        assert forward.wait(PATIENCE_S) == 0
    with pytest.raises(errors.NotFound):
        handle.debug_attach(0)


def test_no_host_starts_before_the_debugger_has_attached(home):
    marks = home.parent / "marks"
    marks.mkdir(parents=True)

    @kinetic.run(accelerator="tpu-v6e-16", debug=True)
    def train():
        import jax

        (marks / str(jax.process_index())).touch()
        return jax.process_count()

    handle = train.run_async()
    with attach_editor(handle) as (forward, editor):
        expected = {0: "debugging", 1: "held", 2: "held", 3: "held"}
        wait_until(lambda: states(handle) == expected, "the hosts do not wait")
        assert list(marks.iterdir()) == []
        editor.attach(configuration(forward), {})
        assert handle.result() == 4
    assert sorted(mark.name for mark in marks.iterdir()) == ["0", "1", "2", "3"]


def test_after_the_window_the_function_starts_and_can_still_be_debugged(monkeypatch, home):
    monkeypatch.setenv("KINETIC_DEBUG_WAIT_TIMEOUT", "0.2")
    stop = home.parent / "stop"

    @kinetic.run(accelerator="tpu-v6e-8", debug=True)
    def train():
        print("started", flush=True)
        count = 0
        while not stop.exists():
            count += 1
            time.sleep(0.01)  # in the loop
        return count > 0

    handle = train.run_async()
    wait_until(lambda: "started" in handle.logs(), "the function did not start")
    assert "no debugger attached within 0.2 s" in handle.logs()
    wait_until(lambda: "started" in handle.logs(host=1), "the other host did not start")
    with attach_editor(handle) as (forward, editor):
        assert "is running" in forward.instructions
        editor.attach(configuration(forward), {str(HERE): [line_of("in the loop")]})
        thread, frames = editor.wait_for_stop()
        assert int(editor.value("count", frames[0])) > 0
        stop.touch()
        editor.ask("setBreakpoints", source={"path": str(HERE)}, breakpoints=[])
        editor.ask("continue", threadId=thread)
        assert handle.result() is True


BLOCKING = """
import kinetic

@kinetic.run(accelerator="cpu", debug=True)
def train():
    import os
    value = 6
    breakpoint()
    print(os.environ["PYTHONBREAKPOINT"], os.environ["KINETIC_DEBUG"])
    return value

print("value", train())
"""


def test_a_blocking_call_says_where_to_attach_and_returns_the_value(monkeypatch, tmp_path):
    monkeypatch.setenv("KINETIC_NO_TTY_DEBUG", "1")
    script = tmp_path / "script.py"
    script.write_text(BLOCKING)
    with process([sys.executable, str(script)], cwd=tmp_path) as caller:
        attach = read_configuration(caller)
        with Editor(attach["connect"]["port"]) as editor:
            editor.attach(attach, {})
            thread, frames = editor.wait_for_stop()
            assert frames[0]["source"]["path"] == str(script)
            editor.value("value = 7", frames[0])
            editor.ask("continue", threadId=thread)
            assert caller.stdout.read().splitlines() == ["debugpy.breakpoint 1", "value 7"]
        assert caller.wait(PATIENCE_S) == 0


def test_a_call_that_fails_before_it_can_be_debugged_tells_why(monkeypatch):
    monkeypatch.setenv("KINETIC_NO_TTY_DEBUG", "1")

    class Unloadable:
        def __reduce__(self):
            return os.stat, ("/no/such/file/at/all",)

    @kinetic.run(accelerator="cpu", debug=True)
    def train(x): ...

    with pytest.raises(errors.SetupFailed, match="/no/such/file/at/all"):
        train(Unloadable())


def test_a_job_that_waits_for_its_debugger_can_be_cancelled():
    @kinetic.run(accelerator="tpu-v6e-8", debug=True)
    def train(): ...

    handle = train.run_async()
    handle.debug_attach(0).terminate()
    wait_until(lambda: states(handle).get(1) == "held", "the other host does not wait")
    handle.cancel()
    with pytest.raises(errors.JobCancelled):
        handle.result()
    assert "Traceback" not in handle.logs(all_hosts=True)


def test_a_leader_killed_at_a_breakpoint_is_named():
    @kinetic.run(accelerator="tpu-v6e-8", debug=True)
    def train():
        import jax

        if jax.process_index() == 0:
            print(f"pid {os.getpid()}", flush=True)
            breakpoint()
        time.sleep(1000)

    handle = train.run_async()
    with attach_editor(handle) as (forward, editor):
        editor.attach(configuration(forward), {})
        editor.wait_for_stop()
        pid = int(re.search(r"pid (\d+)", handle.logs())[1])
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(errors.HostLost, match="host 0"):
            handle.result()


def test_an_editor_that_goes_away_lets_the_function_go_on():
    @kinetic.run(accelerator="cpu", debug=True)
    def train():
        breakpoint()
        return "went on"

    handle = train.run_async()
    with attach_editor(handle) as (forward, editor):
        editor.attach(configuration(forward), {})
        editor.wait_for_stop()
    assert handle.result() == "went on"


def test_the_command_line_forwards_until_the_job_ends():
    @kinetic.run(accelerator="cpu", debug=True)
    def train():
        return "done"

    handle = train.run_async()
    with command_line("jobs", "debug", "--port", "0", handle.job_id) as caller:
        attach = read_configuration(caller)
        with Editor(attach["connect"]["port"]) as editor:
            editor.attach(attach, {})
            assert handle.result() == "done"
        assert caller.wait(PATIENCE_S) == 0


def test_the_command_line_lets_go_on_interruption():
    @kinetic.run(accelerator="cpu", debug=True)
    def train(): ...

    handle = train.run_async()
    with command_line("jobs", "debug", "--port", "0", handle.job_id) as caller:
        read_configuration(caller)
        caller.send_signal(signal.SIGINT)
        assert caller.wait(PATIENCE_S) == 130
        assert f"kinetic jobs debug {handle.job_id}" in caller.stderr.read()
    assert not handle.status().ended
    assert debug.read(handle._store, handle.ref).listens
    handle.cancel()
    with pytest.raises(errors.JobCancelled):
        handle.result()


@kinetic.run(accelerator="cpu")
def stop(how):
    if how == "breakpoint":
        breakpoint()  # the line: breakpoint
    elif how == "pdb":
        import pdb

        pdb.set_trace()  # the line: pdb
    else:
        import bdb

        raise bdb.BdbQuit  # as a debugger whose input has ended
    return how


@pytest.mark.parametrize("how", ["breakpoint", "pdb"])
def test_a_breakpoint_that_nobody_can_attach_to_says_so_in_one_line(how, capfd):
    with pytest.raises(errors.UsageError) as caught:
        stop(how)
    words = "breakpoint()" if how == "breakpoint" else "pdb.set_trace()"
    assert str(caught.value).startswith(f"{words}: a job has no terminal")
    assert "debug=True" in str(caught.value)
    assert "\n" not in str(caught.value)
    where = f"as above, raised at {HERE.name}:{line_of(f'the line: {how}')} in stop."
    assert where in "".join(caught.value.__notes__)
    assert "Pdb" not in capfd.readouterr().out


def test_a_debugger_of_ones_own_that_finds_no_terminal_is_explained():
    with pytest.raises(bdb.BdbQuit) as caught:
        stop("another")
    assert "debug=True" in "".join(caught.value.__notes__)


def test_breakpoints_can_be_passed_over():
    assert stop.with_options(env={"PYTHONBREAKPOINT": "0"})("breakpoint") == "breakpoint"


def test_a_job_that_waits_for_its_debugger_says_so():
    handle = stop.with_options(debug=True).run_async("breakpoint")
    waiting = wait_until(lambda: handle.tail(1), "the job's output")
    assert "waits for a debugger" in waiting
    assert f"kinetic jobs debug {handle.job_id}" in waiting
    handle.cancel()
