"""The zygote, a process that has imported libraries and forks the processes of local jobs: imports,
launches and errors."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys

import pytest

from kinetic._backends.local import launcher
from kinetic._host.local import zygote
from kinetic.errors import SubmitError


@pytest.mark.parametrize("name", [name for name in zygote.LATE if name.startswith("kinetic.")])
def test_our_own_modules_that_are_imported_ahead_exist(name):
    assert importlib.util.find_spec(name) is not None


@pytest.mark.starts_processes
def test_a_first_small_job_does_not_wait_for_what_it_can_do_without():
    code = "import kinetic._host.local.zygote, sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    without = {"grpc", "asyncio", "cloudpickle", "jax", "numpy", "tempfile", "secrets", "click"}
    without |= {"kinetic._host.agent.loop", "kinetic._host.leader"}
    assert not without & set(done.stdout.split())


@pytest.mark.starts_processes
def test_a_zygote_ends_with_its_caller_amid_its_imports(tmp_path):
    (tmp_path / "endless.py").write_text("print('begun', flush=True)\nwhile True: pass")
    ours, theirs = socket.socketpair()
    with subprocess.Popen(
        [sys.executable, "-m", "kinetic._host.local", str(theirs.fileno()), "endless"],
        pass_fds=[theirs.fileno()],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        stdout=subprocess.PIPE,
    ) as zygote:
        theirs.close()
        assert zygote.stdout.readline() == b"begun\n"
        ours.close()
        assert zygote.wait(timeout=100) == 0


@pytest.mark.starts_processes
def test_a_fork_during_a_launch_can_launch_too_and_holds_no_zygote():
    zygote = launcher.Zygote((), os.environ)
    launcher._zygotes["of this test",] = zygote
    try:
        with launcher._lock:
            pid = os.fork()
            if pid == 0:
                is_free = launcher._lock.acquire(timeout=100)
                os._exit(0 if is_free and zygote._socket.fileno() == -1 else 1)
        assert os.waitpid(pid, 0)[1] == 0
        assert zygote._socket.fileno() != -1
    finally:
        del launcher._zygotes["of this test",]
        zygote.close()


@pytest.mark.starts_processes
def test_what_a_signal_handler_raises_amid_a_launch_reaches_the_caller(tmp_path, monkeypatch):
    """A user's signal handler interrupts a launch with TimeoutError. The caller gets this error,
    although other OSErrors mean that the zygote has died."""

    def interrupted(_):
        raise TimeoutError("took too long")

    request = {"store": str(tmp_path), "job_id": "job-1"}
    environ = {**os.environ, "PYTHON_OF_THIS_TEST": "1"}  # Forces a new zygote.
    with monkeypatch.context() as amid:
        amid.setattr(launcher.Zygote, "_read_line", interrupted)
        with pytest.raises(TimeoutError, match="took too long"):
            launcher.launch(request, modules=(), environ=environ)
    with pytest.raises(SubmitError, match="job-1 could not begin"):  # job-1 has no folder.
        launcher.launch(request, modules=(), environ=environ)


@pytest.mark.starts_processes
@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("raise ImportError('jaxlib is too old.')", 'died: "ImportError: jaxlib is too old". Run'),
        ("import os; os._exit(3)", "died: it printed nothing. Run"),
    ],
)
def test_a_zygote_that_cannot_import_says_why_and_what_to_try(tmp_path, content, words):
    (tmp_path / "broken.py").write_text(content)
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    with pytest.raises(SubmitError) as caught:
        launcher.launch({"job_id": "job-1"}, modules=("broken",), environ=environ)
    assert caught.type is SubmitError
    assert words in str(caught.value)
    assert "python -c 'import broken'" in str(caught.value)


SITES = {
    "a thread": "import _thread, time; _thread.start_new_thread(time.sleep, (9**9,))",
    "the threads of a library": "import numpy",
}


@pytest.mark.starts_processes
@pytest.mark.parametrize("content", SITES.values(), ids=SITES)
def test_threads_of_a_sitecustomize_keep_no_zygote_from_forking(tmp_path, content):
    (tmp_path / "sitecustomize.py").write_text(content)
    environ = {name: value for name, value in os.environ.items() if "THREADS" not in name}
    assert launcher.try_out((), {**environ, "PYTHONPATH": str(tmp_path)}) == ""


@pytest.mark.starts_processes
def test_a_debugger_of_the_caller_does_not_follow(tmp_path):
    """The caller runs under a debugger. Its zygote must not load the debugger, which would start
    threads and change sys.path."""
    pytest.importorskip("debugpy")
    (tmp_path / "caller.py").write_text(
        "import os; from kinetic._backends.local import launcher\n"
        "print([launcher.try_out((), os.environ)])"
    )
    debugger = ["-Xfrozen_modules=off", "-m", "debugpy", "--listen", "127.0.0.1:0"]
    done = subprocess.run(
        [sys.executable, *debugger, str(tmp_path / "caller.py")],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout == "['']\n", done.stderr


@pytest.mark.starts_processes
@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("PYTHONHASHSEED", "abc", r'died: "Fatal Python error: .*PYTHONHASHSEED must be'),
        ("PYTHONIOENCODING", "abc", r'died: "Fatal Python error: .*; LookupError: unknown.* abc'),
    ],
)
def test_a_zygote_whose_interpreter_cannot_start_says_why(variable, value, words):
    environ = {**os.environ, variable: value}
    with pytest.raises(SubmitError, match=words):
        launcher.launch({"job_id": "job-1"}, modules=(), environ=environ)
