"""kinetic's promises about the output of a job, its environment, and how it starts and ends."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import textwrap

import pytest
from gangs import PATIENCE_S, read_files, stop, wait_until

import kinetic
from kinetic import errors

pytestmark = pytest.mark.usefixtures("place")


# -- output ----------------------------------------------------------------------------------------


def run_script(source, home, **extra):
    script = home.parent / "script.py"
    script.parent.mkdir(parents=True, exist_ok=True)
    script.write_text(textwrap.dedent(source))
    env = dict(os.environ) | extra
    return subprocess.run(
        [sys.executable, str(script)], capture_output=True, env=env, timeout=PATIENCE_S
    )


def test_output_arrives_as_it_is(home):
    done = run_script(
        """
        import kinetic, sys

        @kinetic.run(accelerator="cpu")
        def talk():
            import os, sys
            print("[rank0] arr[i] [/tmp/x] [bold]x[/bold]", flush=True)
            print("x" * 500)
            print("to stderr", file=sys.stderr)
            os.write(1, b"\\xff\\xfe raw\\n")
            os.system("echo from a child process")
            print("no newline at the end", end="")

        talk()
        """,
        home,
    )
    assert done.stdout == (
        b"[rank0] arr[i] [/tmp/x] [bold]x[/bold]\n"
        + b"x" * 500
        + b"\n\xff\xfe raw\nfrom a child process\nno newline at the end"
    )
    assert b"to stderr\n" in done.stderr
    assert done.returncode == 0


def test_a_large_output_is_complete_and_in_order(home):
    done = run_script(
        """
        import kinetic

        @kinetic.run(accelerator="cpu")
        def flood():
            import resource
            for i in range(200_000):
                print(f"{i:08d} " + "." * 50)

        flood()
        """,
        home,
    )
    lines = done.stdout.split(b"\n")
    assert len(lines) == 200_001
    assert all(line.startswith(b"%08d " % i) for i, line in enumerate(lines[:-1]))


def test_other_hosts_keep_their_output():
    @kinetic.run(accelerator="tpu-v6e-8")
    def speak():
        print("I am host", os.environ["KINETIC_HOST_INDEX"])

    handle = speak.run_async()
    handle.result()
    assert handle.logs() == "I am host 0\n"
    assert handle.logs(host=1) == "I am host 1\n"


# -- environment -----------------------------------------------------------------------------------


def test_only_what_is_declared_travels(monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "s3cret")
    monkeypatch.setenv("CAPTURED_ONE", "1")
    monkeypatch.setenv("NOT_DECLARED", "1")

    @kinetic.run(
        accelerator="cpu", env={"GIVEN": "2"}, secrets=["MY_TOKEN"], capture_env_vars=["CAPTURED_*"]
    )
    def read_variables():
        return {k: os.environ.get(k) for k in ("MY_TOKEN", "CAPTURED_ONE", "NOT_DECLARED", "GIVEN")}

    assert read_variables() == {
        "MY_TOKEN": "s3cret",
        "CAPTURED_ONE": "1",
        "NOT_DECLARED": None,
        "GIVEN": "2",
    }


def test_secrets_rest_nowhere(monkeypatch, home):
    # Not as one literal: the sources, which the host gets, would contain it.
    secret = "-".join(["s3cret", "value", "of", "the", "test"])
    monkeypatch.setenv("MY_TOKEN", secret)

    @kinetic.run(accelerator="cpu", secrets=["MY_TOKEN"])
    def quiet():
        return len(os.environ["MY_TOKEN"])

    assert quiet() == 24
    files = read_files(home)
    assert files
    assert not [path for path, content in files.items() if secret.encode() in content]


# -- the life of a job -----------------------------------------------------------------------------


def test_a_second_result_and_an_attach_work():
    @kinetic.run(accelerator="cpu")
    def value():
        return [1, 2]

    handle = value.run_async()
    assert handle.result() == handle.result() == [1, 2]
    assert kinetic.attach(handle.job_id).result() == [1, 2]
    assert [h.job_id for h in kinetic.list_jobs()] == [handle.job_id]


def test_the_job_outlives_its_caller(home):
    done = run_script(
        """
        import kinetic, os, signal

        @kinetic.run(accelerator="cpu")
        def slow():
            import time
            time.sleep(1.5)
            return "done"

        print(slow.run_async().job_id, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
        """,
        home,
    )
    handle = kinetic.attach(done.stdout.decode().strip())
    assert handle.result() == "done"


def test_a_file_that_is_saved_during_the_call_is_packed_again(home):
    done = run_script(
        """
        import kinetic, pathlib

        NOTES = pathlib.Path(__file__).parent / "notes.txt"
        NOTES.write_text("first")

        class Saves:
            def __reduce__(self):  # Pickled after the tree was packed and before it is sent.
                if NOTES.read_text() == "first":
                    NOTES.write_text("second")
                return Saves, ()

        @kinetic.run(accelerator="cpu")
        def read(_):
            return open("notes.txt").read()

        import os
        os.chdir(NOTES.parent)
        print(read(Saves()))
        """,
        home,
        KINETIC_PACKAGE_ROOT=str(home.parent),
    )
    assert done.stdout == b"second\n", done.stderr.decode()


def test_what_is_printed_to_both_streams_by_turns_keeps_its_order():
    @kinetic.run(accelerator="cpu")
    def by_turns(lines):
        for number in range(lines):
            print(number, file=sys.stderr if number % 3 == 1 else sys.stdout)

    handle = by_turns.run_async(400)
    handle.result()
    assert handle.logs().split() == [str(number) for number in range(400)]


def test_a_failing_gang_is_started_again(capfd):
    @kinetic.run(accelerator="cpu", retries=2)
    def third_time():
        attempt = int(os.environ["KINETIC_ATTEMPT"])
        print("attempt", attempt)
        if attempt < 3:
            raise ValueError("not yet")
        return attempt

    handle = third_time.run_async()
    assert handle.result(stream_logs=True) == 3
    log = handle.logs()
    notices = [
        line
        for line in log.splitlines()
        if not line.startswith("  File") and 'not yet")' not in line
    ]
    assert notices == [
        "attempt 1",
        "Traceback (most recent call last):",
        "ValueError: not yet",
        "kinetic: attempt 1 of 3 failed: host 0 of 1: ValueError: not yet",
        "kinetic: attempt 2 of 3 begins.",
        "attempt 2",
        "Traceback (most recent call last):",
        "ValueError: not yet",
        "kinetic: attempt 2 of 3 failed: host 0 of 1: ValueError: not yet",
        "kinetic: attempt 3 of 3 begins.",
        "attempt 3",
    ]
    captured = capfd.readouterr()
    shown_lines = [
        line
        for line in (captured.out + captured.err).splitlines()
        # These lines come once per process, or while a job waits for the cluster.
        if not line.startswith(("kinetic: no cluster configured", f"kinetic: {handle.job_id}: "))
    ]
    assert sorted(shown_lines) == sorted(log.splitlines()), (
        "what nobody raises is shown as it happens"
    )


def test_children_of_the_function_end_with_it():
    @kinetic.run(accelerator="cpu")
    def leave_children():
        subprocess.Popen(["sleep", "1000"], start_new_session=True)
        subprocess.Popen(
            [sys.executable, "-c", "import os, time; os.fork(); os.setsid(); time.sleep(1000)"]
        )
        return "returned"

    assert leave_children() == "returned"  # `no_leftovers` checks the children.


@pytest.mark.settles_within(30)  # Programs of pods end late after such a failure.
def test_a_host_that_never_joins_stops_all(home, place):
    @kinetic.run(accelerator="tpu-v6e-16", start_timeout=8)
    def touch(path):
        open(path, "w").close()

    def has_joined(handle, host):
        return any(e["kind"] == "joined" and e["host"] == host for e in handle.events())

    for number in itertools.count():
        ran = home.parent / f"ran-{number}"
        handle = touch.run_async(str(ran))
        # On a busy machine the job may end before the test can read the agent's pid.
        agent = place.agent(handle, 2, unless=handle.done)
        if agent is None:
            handle.cleanup()
            continue
        stop(agent)
        wait_until(
            lambda handle=handle: has_joined(handle, 3) or handle.done(), "host 3 does not join"
        )
        if not has_joined(handle, 2):
            break
        os.kill(agent, signal.SIGCONT)  # The agent had already joined; try once more.
        handle.cleanup()
    with pytest.raises(errors.GangTimeout, match="did not join within 8 s") as caught:
        handle.result()
    in_time = itertools.takewhile(lambda event: event["kind"] != "stop", handle.events())
    joined = {event["host"] for event in in_time if event["kind"] == "joined"}
    assert 2 not in joined
    # Others may be late, too, on a busy machine: the error names all of them.
    assert set(caught.value.hosts) == set(range(4)) - joined
    assert not ran.exists()
