"""Objects in the store that were changed after the submission are not run. Also: many submissions
at once, and clocks that were set back."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from bad_input_cases import PATIENCE_S, run
from gangs import list_paths

import kinetic
from kinetic import errors
from kinetic._backends import registry
from kinetic._backends.local.backend import LocalBackend
from kinetic._config.settings import worker_environ
from kinetic._core import layout
from kinetic._pickling import call as payload
from kinetic._pickling import envelope
from kinetic.cli.root import call


@pytest.fixture
def project(home):
    folder = home.parent / "project"
    folder.mkdir(parents=True)
    (folder / "pyproject.toml").write_text("[project]\nname = 'p'\n")
    return folder


# -- tampering -------------------------------------------------------------------------------------


class Tampering(LocalBackend):
    """A backend that changes the store after a submission, before the job starts."""

    def __init__(self, store, change: Callable) -> None:
        super().__init__(store, worker_environ())
        self._stored, self._change = store, change

    def submit(self, ref, documents, secrets):
        plan = json.loads(self._stored.get(layout.JobKeys(ref.job_id).plan))
        self._change(self._stored, plan)
        super().submit(ref, documents, secrets)


def flip_bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def payload_flipped(store, plan):
    flip_bit(store.path(layout.blob(plan["payload"]["digest"])))


def payload_lost(store, plan):
    store.delete(layout.blob(plan["payload"]["digest"]))


def payload_of_another_job(store, plan):
    store.put(layout.blob(plan["payload"]["digest"]), payload.pack(touch, (), {}, env_vars={}).data)


def record_flipped(store, plan):
    flip_bit(store.path(layout.tree(plan["tree"]["manifest"]["digest"])))


def record_lost(store, plan):
    store.delete(layout.tree(plan["tree"]["manifest"]["digest"]))


def pack_lost(store, plan):
    store.delete(layout.PACKS)


def source_flipped(store, plan):
    (key,) = store.list(layout.PACKS)
    whole = store.get(key)
    assert whole.count(b"source = 1\n") == 1
    store.put(key, whole.replace(b"source = 1\n", b"source = 2\n"))


def touch(marker):
    Path(marker).touch()


@pytest.mark.parametrize(
    "change",
    [
        payload_flipped,
        payload_lost,
        payload_of_another_job,
        record_flipped,
        record_lost,
        pack_lost,
        source_flipped,
    ],
    ids=lambda c: c.__name__,
)
@pytest.mark.parametrize("accelerator", ["cpu", "tpu-v6e-8"])
def test_what_was_tampered_with_is_not_run(home, project, monkeypatch, change, accelerator):
    (project / "source.py").write_text("source = 1\n")
    monkeypatch.chdir(project)
    monkeypatch.setenv("KINETIC_PACKAGE_ROOT", str(project))
    monkeypatch.setattr(touch, "__module__", "__main__")
    marker = project.parent / "ran"
    with registry.substitute_backend("local", lambda _, store: Tampering(store, change)):
        handle = kinetic.run(accelerator=accelerator)(touch).run_async(str(marker))
    with pytest.raises(
        errors.SetupFailed,
        match=r"not what was (submitted|sent)|missing|cannot be read|is damaged",
    ):
        handle.result(timeout=PATIENCE_S)
    assert not marker.exists()
    # A new submission sends missing and damaged objects again.
    mended = kinetic.run(accelerator="cpu")(touch).run_async(str(marker))
    mended.result(timeout=PATIENCE_S)
    assert marker.exists()


def test_a_function_of_a_batch_that_was_tampered_with_is_not_run(home, project, monkeypatch):
    monkeypatch.chdir(project)
    monkeypatch.setattr(touch, "__module__", "__main__")
    marks = [str(project.parent / name) for name in ("first", "second")]

    def function_flipped(store, plan):
        flip_bit(store.path(layout.blob(plan["function"]["digest"])))

    with registry.substitute_backend("local", lambda _, store: Tampering(store, function_flipped)):
        batch = kinetic.run(accelerator="cpu")(touch).run_async_map(marks, max_concurrent=1)
        batch.wait(PATIENCE_S)
    assert not any(Path(mark).exists() for mark in marks)
    assert {type(job.error()) for job in batch.jobs} == {errors.SetupFailed}
    assert kinetic.run(accelerator="cpu")(touch).run_async_map(marks).results() == [None, None]


def test_another_version_of_python_is_named(home, monkeypatch):
    versions = envelope.read_versions()
    monkeypatch.setattr(
        envelope, "read_versions", lambda: dataclasses.replace(versions, python="3.7")
    )
    handle = kinetic.run(accelerator="cpu")(touch).run_async("/nowhere")
    monkeypatch.undo()
    with pytest.raises(errors.SetupFailed, match=rf"Python 3\.7.*{re.escape(versions.python)}"):
        handle.result(timeout=PATIENCE_S)


# -- concurrency -----------------------------------------------------------------------------------


def test_programs_that_submit_the_same_tree_at_once(project):
    for number in range(200):
        (project / f"source_{number}.py").write_text(f"number = {number}\n")
    program = project / "program.py"
    program.write_text(
        textwrap.dedent("""
            import sys, kinetic

            @kinetic.run(accelerator="cpu")
            def total():
                import importlib
                return sum(importlib.import_module(f"source_{n}").number for n in range(200))

            sys.stdin.read(1)
            print(total())
        """)
    )
    how = {"cwd": project, "stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    programs = [subprocess.Popen([sys.executable, str(program)], **how) for _ in range(4)]
    for process in programs:
        process.stdin.close()  # Closing stdin starts all programs at once.
        process.stdin = None
    assert [process.communicate(timeout=PATIENCE_S)[0] for process in programs] == ["19900\n"] * 4
    assert [handle.status().name for handle in kinetic.list_jobs()] == ["SUCCEEDED"] * 4


def print_for_ever(marker):
    while True:
        print("tick", flush=True)
        Path(marker).touch()
        time.sleep(0.005)


def test_a_job_that_is_read_cancelled_pruned_and_removed_at_once(home):
    marker = home.parent / "runs"
    bystander = kinetic.run(accelerator="cpu")(touch).run_async(str(marker))
    bystander.wait(PATIENCE_S)
    marker.unlink()
    handle = kinetic.run(accelerator="cpu")(print_for_ever).run_async(str(marker))
    deadline = time.monotonic() + PATIENCE_S
    while not marker.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    job = handle.job_id
    prune = ["prune", "--older-than", "1h", "--yes"]
    commands = [
        *[
            ["logs", "-f", job],
            ["logs", "-f", "--all-hosts", "--timestamps", job],
            ["wait", job],
            ["result", job],
        ],
        *[
            ["cancel", job],
            prune,
            ["cleanup", job],
            ["cancel", job],
            prune,
            ["cleanup", job],
            ["status", job],
            ["list"],
        ],
    ]
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    running = [
        subprocess.Popen([sys.executable, "-m", "kinetic", "jobs", *command], **how)
        for command in commands
    ]
    for command, each in zip(commands, running, strict=True):
        err = each.communicate(timeout=PATIENCE_S)[1]
        assert each.returncode in (0, 1, 3, 4, 5), (command, each.returncode, err)
        assert "Traceback" not in err, (command, err)
        assert "`kinetic -v …`" not in err, (command, err)
    assert [h.job_id for h in kinetic.list_jobs()] == [bystander.job_id]
    assert os.listdir(home / "jobs") == [bystander.job_id]
    assert bystander.result() is None


# -- a clock that was moved back -------------------------------------------------------------------


DAY_S = 86400.0


def test_jobs_of_the_future_are_shown_and_kept(home, capfd):
    """A job ended, and the clock was set back by a day: commands show it, and `prune` keeps it."""
    handle = kinetic.run(accelerator="cpu")(print).run_async("line")
    handle.result()
    move(home, handle.job_id, DAY_S)
    for command in (
        ["list"],
        ["list", "--json"],
        ["status", handle.job_id],
        ["logs", "--timestamps", handle.job_id],
        ["top", "--once"],
    ):
        capfd.readouterr()
        code = call(["jobs", *command])
        out, err = capfd.readouterr()
        assert code == 0 or command[0] == "top", (command, err)
        assert "Traceback" not in err
        assert not re.search(r"(?<![-\d])-\d+ ?(s|m|h|d)\b", out), out
    assert call(["jobs", "prune", "--older-than", "0.01s", "--yes"]) == 0
    assert kinetic.attach(handle.job_id).result() is None
    assert kinetic.run(accelerator="cpu")(print).run_async("line").result() is None


def move(home: Path, job_id: str, by_s: float) -> None:
    for file, fields in (
        (home / "refs" / f"{job_id}.json", ["created_at"]),
        (home / "jobs" / job_id / "outcome.json", ["ended_at"]),
    ):
        document = json.loads(file.read_text())
        for field in fields:
            document[field] += by_s
        file.write_text(json.dumps(document))
    for file in list_paths(home):
        with contextlib.suppress(FileNotFoundError):  # The supervisor removes files as it ends.
            os.utime(file, (time.time() + by_s,) * 2)


def test_a_clock_that_goes_back_while_a_job_runs(project):
    done = run(
        project,
        """
        import time
        import kinetic

        @kinetic.run(accelerator="cpu", timeout=600)
        def work():
            time.sleep(0.3)
            print("line")
            return 5

        real = time.time
        job = work.run_async()
        time.time = lambda: real() - 86400
        assert job.wait(200).ok
        assert job.result() == 5
        assert job.logs() == "line\\n"
        assert [j.job_id for j in kinetic.list_jobs()] == [job.job_id]
        assert work() == 5
        """,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("where", ["file", "file/below"])
def test_an_output_folder_that_is_a_file_is_refused(home, tmp_path, where):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(errors.UsageError, match=f"{tmp_path}/file is a file"):
        kinetic.run(accelerator="cpu", output_dir=tmp_path / where)(int)()
    assert not list(home.glob("jobs/*"))


def test_data_may_not_hide_the_store(disk_path, monkeypatch):
    above = disk_path / "above"
    monkeypatch.setenv("KINETIC_HOME", str(above / "home"))
    (disk_path / "data").mkdir()
    with pytest.raises(errors.UsageError, match="would hide"):
        kinetic.run(accelerator="cpu", volumes={str(above): kinetic.Data(str(disk_path / "data"))})(
            int
        )()
    assert not list(above.glob("home/jobs/*"))
