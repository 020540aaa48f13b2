"""Several processes cancel, collect and remove one job at once: each gets a right answer, and
nothing of the job is left."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading

import pytest
from gangs import PATIENCE_S, children, kill, wait_until, zygotes
from on_hosts import quick, slow

import kinetic
from kinetic import errors
from kinetic._backends.local.backend import LocalBackend
from kinetic._core import layout
from kinetic._store.local import LocalStore

ONE_OF_MANY = """
import sys, time
from pathlib import Path
import kinetic
from kinetic import errors

what, job_id, ready, go = sys.argv[1:]
handle = kinetic.attach(job_id)
Path(ready).touch()
while not Path(go).exists():
    time.sleep(0.001)
try:
    if what == "prune":
        from kinetic.cli.main import main
        sys.argv[1:] = ["jobs", "prune", "--older-than", "0s", "--yes"]
        main()
    else:
        print(what, getattr(handle, what)())
except errors.KineticError as error:
    print(what, type(error).__name__)
"""

TRUE = {
    "result": {"value", "JobCancelled", "NotFound", "ResultUnavailable"},
    "cancel": {"None"},
    "cleanup": {"None"},
    "prune": set(),
}


@pytest.mark.parametrize("func", [quick, slow])
def test_many_processes_end_one_job_at_once(func, home):
    handle = kinetic.run(accelerator="cpu")(func).run_async()
    if func is quick:
        handle.wait()
    else:
        wait_until(lambda: "running" in handle.logs(), "not running")
    script = home.parent / "one.py"
    script.write_text(textwrap.dedent(ONE_OF_MANY))
    go, kinds = home.parent / "go", [*TRUE, *TRUE]
    crew = [
        start(script, kind, handle.job_id, home.parent / f"ready-{i}", go)
        for i, kind in enumerate(kinds)
    ]
    for i in range(len(crew)):
        wait_until((home.parent / f"ready-{i}").exists, "not ready")
    go.touch()
    for kind, member in zip(kinds, crew, strict=True):
        out, err = member.communicate(timeout=PATIENCE_S)
        assert "Traceback" not in err, err
        if kind != "prune":
            assert out.split()[1] in TRUE[kind], out
    assert not LocalStore(home).has(layout.JobKeys(handle.job_id).ref)
    assert not (home / layout.JobKeys(handle.job_id).prefix).exists()


def start(script, *words):
    command = [sys.executable, str(script), *map(str, words)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_job_that_is_removed_while_others_collect_it_is_never_called_failed(home):
    """Remove ten jobs while others read their values. Each reader gets the value, or an error that
    the job or its result was removed; none says that it failed."""
    job = kinetic.run(accelerator="cpu")(quick)
    for _ in range(10):
        handle = job.run_async()
        handle.wait()
        answers = []
        crew = [threading.Thread(target=collect, args=(handle.job_id, answers)) for _ in range(4)]
        for member in crew:
            member.start()
        handle.cleanup()
        for member in crew:
            member.join(PATIENCE_S)
        assert set(answers) <= {"value", "NotFound", "ResultUnavailable"}, answers
        assert not (home / layout.JobKeys(handle.job_id).prefix).exists()


def collect(job_id, answers):
    try:
        attached = kinetic.attach(job_id)
        for _ in range(50):
            answers.append(attached.result())
    except errors.KineticError as error:
        answers.append(type(error).__name__)


def test_a_supervisor_that_is_killed_before_it_holds_the_lock(home, monkeypatch):
    """The supervisor is killed before it holds the job's lock: the caller gets a SubmitError."""
    for pid in zygotes():  # Remove zygotes that earlier tests have started.
        kill(pid)
    wait_until(lambda: not zygotes(), "they do not end")
    assert kinetic.run(accelerator="cpu")(quick)() == "value"
    (zygote,) = zygotes()
    wait_until(lambda: not children(zygote), "its supervisor does not end")
    submit = LocalBackend.submit

    def hold_up(self, ref, documents, secrets):
        """Submit with a FIFO as supervisor.log: without a reader, the supervisor blocks on it."""
        self._folder(ref).mkdir(parents=True)
        os.mkfifo(self._folder(ref) / "supervisor.log")
        submit(self, ref, documents, secrets)

    monkeypatch.setattr(LocalBackend, "submit", hold_up)
    killer = threading.Thread(
        target=lambda: kill(wait_until(lambda: children(zygote), "no supervisor")[0])
    )
    killer.start()
    with pytest.raises(errors.SubmitError, match="it ended before it took over the job"):
        kinetic.run(accelerator="cpu")(quick).run_async()
    killer.join()
    monkeypatch.undo()
    assert len(kinetic.list_jobs()) == 1
    assert zygotes() == [zygote], "it starts the next one"
    assert kinetic.run(accelerator="cpu")(quick)() == "value"
