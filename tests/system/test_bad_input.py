"""Bad input, in real programs: a clear error here and now, nothing created, nothing lost.

In: programs with a fault, stores that cannot be written, records of another time. Out: what their
callers see. What each option refuses is a matter of the unit tests; here it is what is left
afterwards.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import kinetic
from kinetic import errors
from kinetic._backends import registry
from kinetic._backends.local.backend import LocalBackend
from kinetic._config.settings import worker_environ
from kinetic._core import layout
from kinetic._pickling import call as payload
from kinetic._pickling import envelope
from kinetic.cli.root import call

PATIENCE_S = 200.0


@pytest.fixture
def project(home):
    folder = home.parent / "project"
    folder.mkdir(parents=True)
    (folder / "pyproject.toml").write_text("[project]\nname = 'p'\n")
    return folder


def run(project: Path, program: str, **how) -> subprocess.CompletedProcess[str]:
    (project / "program.py").write_text(textwrap.dedent(program))
    command = [*how.pop("before", ()), sys.executable, "program.py"]
    return subprocess.run(
        command, cwd=project, capture_output=True, text=True, timeout=PATIENCE_S, **how
    )


def is_told(
    done: subprocess.CompletedProcess[str], kind: type[errors.KineticError], *words: str
) -> None:
    """The program ended with this error of ours as its last one, and none of ours came before
    it."""
    last = [
        line
        for line in done.stderr.splitlines()
        if line.startswith(("kinetic.errors.", "  kinetic.errors."))
    ]
    assert done.returncode == 1, done
    assert last, done.stderr
    assert last[-1].strip().startswith(f"kinetic.errors.{kind.__name__}: "), done.stderr
    for word in words:
        assert word in done.stderr


# -- faults of the program -------------------------------------------------------------------------

FAULTS = """
import functools, sys, threading
import kinetic
from kinetic import errors

lock = threading.Lock()
cpu = kinetic.run(accelerator="cpu")

@cpu
def fine(a, *, b=1):
    return a

@cpu
def uses_global():
    return lock

@cpu
def has_default(x=threading.Lock()):
    return x

def make():
    file = open("/dev/null", "w")
    @cpu
    def closes_over():
        return file
    return closes_over

def generator():
    yield 1

class Evil:
    def __reduce__(self):
        raise KeyError("in reduce")

class Sly:
    def __getattribute__(self, name):
        raise ValueError(name)

deep = []
for _ in range(100_000):
    deep = [deep]

ACCELERATORS = (
    "tpu-v99", "tpu-v6e-3", "tpu-v5litepod-3x5", "tpu-v6e-0", "gpu-l4x3", "gpu-l4x-1",
    "cpu-0", "tpu-v6e-1e3", "", " ", "cpu\\0", "a" * 100_000, 3, None, b"cpu",
)
OPTIONS = (
    {"slices": 0}, {"slices": 2, "accelerator": "tpu-v6e-16"}, {"timeout": -1},
    {"timeout": 0}, {"timeout": 10**400}, {"start_timeout": -1},
    {"hang_timeout": -5}, {"retries": -1}, {"backend": "slurm"}, {"backend": ""}, {"backend": 3},
    {"env": {"A": "\\ud800"}}, {"output_dir": "\\ud800"}, {"secrets": ["NOT_SET_ANYWHERE"]},
)
THINGS = (
    classmethod(fine), staticmethod(fine), functools.lru_cache(fine.__wrapped__), generator,
    functools.partial(generator), 3, None, property(fine), fine,
)
VALUES = (
    lock, (i for i in range(3)), open("/dev/null", "w"), sys._getframe(), Evil(), Sly(), deep,
    sys.stdin,
)
FAULTS = [
    *((lambda a=a: kinetic.run(accelerator=a)(fine.__wrapped__)(1)) for a in ACCELERATORS),
    *(
        (lambda o=o: kinetic.run(**{"accelerator": "cpu", **o})(fine.__wrapped__)(1))
        for o in OPTIONS
    ),
    *((lambda f=f: cpu(f)()) for f in THINGS),
    *((lambda v=v: fine(v)) for v in VALUES),
    uses_global, has_default, make(),
    fine, lambda: fine(1, 2), lambda: fine(1, c=3), lambda: fine(1, b=lock),
    lambda: fine(kinetic.Data("/nowhere/at/all")),
    lambda: kinetic.run("cpu", volumes={"/data": kinetic.Data("/nowhere/at/all")})(
        fine.__wrapped__
    )(1),
    *((lambda i=i: kinetic.attach(i)) for i in ("job-00000000", "../..", None, "")),
    lambda: kinetic.attach_batch("grp-00000000"),
]
for number, fault in enumerate(FAULTS):
    try:
        print(number, "ended well:", fault())
    except errors.KineticError as error:
        assert 10 < len(str(error)) < 3000, (number, len(str(error)))
    except BaseException as error:
        print(number, "is not ours:", repr(error)[:300])
while deep:
    deep = deep.pop()
"""


def test_faults_of_a_program_create_nothing(project, home):
    done = run(project, FAULTS)
    assert (done.stdout, done.returncode) == ("", 0), done
    assert [str(p) for p in home.rglob("*")] == []


def test_a_file_that_cannot_be_read_is_named_and_stays_behind(project, home):
    (project / "locked.txt").write_text("locked")
    (project / "locked.txt").chmod(0)
    program = """
        import os, kinetic

        @kinetic.run(accelerator="cpu")
        def there():
            return sorted(os.listdir())

        print(there())
    """
    done = run(project, program, preexec_fn=without_override)
    assert done.stdout == "['program.py', 'pyproject.toml']\n", done.stderr
    assert "locked.txt" in done.stderr


def without_override() -> None:
    """Let root be stopped by permissions as everybody is, in what this process executes next."""
    libc = ctypes.CDLL(None)
    for capability in (1, 2):  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
        libc.prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP


def test_unknown_ids_are_answered_with_near_ones(home, capfd):
    job_id = kinetic.run(accelerator="cpu")(int).run_async().job_id
    kinetic.attach(job_id).wait(PATIENCE_S)
    near = job_id[:-1] + ("0" if job_id[-1] != "0" else "1")
    with pytest.raises(errors.NotFound, match=job_id) as caught:
        kinetic.attach(near)
    assert caught.value.suggestions == (job_id,)
    for verb in ("status", "logs", "result", "wait", "stacks", "cancel", "cleanup", "debug"):
        capfd.readouterr()
        assert call(["jobs", verb, near]) == 3
        told = capfd.readouterr().err
        assert job_id in told
        assert "Traceback" not in told


# -- the home folder -------------------------------------------------------------------------------

SMALL = """
    import kinetic

    @kinetic.run(accelerator="{accelerator}")
    def where():
        return "returned"

    print(where())
    assert [job.status().name for job in kinetic.list_jobs()] == ["SUCCEEDED"]
"""
ODD = {
    "spaces": "a home with spaces ",
    "quotes": 'it\'s "so" $HOME `x` %s {} \\',
    "unicode": "домашняя 家 🏠",
    "no text": os.fsdecode(b"\xff\xfe"),
    "line end": "two\nlines",
    "long": "/".join(["x" * 100] * 3),
    "dashes": "-rf",
}


@pytest.mark.parametrize("name", ODD.values(), ids=ODD)
@pytest.mark.parametrize("accelerator", ["cpu", "tpu-v6e-8"])
def test_odd_homes_work(project, name, accelerator):
    home = project.parent / name
    done = run(
        project, SMALL.format(accelerator=accelerator), env=os.environ | {"KINETIC_HOME": str(home)}
    )
    assert done.stdout == "returned\n", done.stderr
    assert (home / "jobs").is_dir()


def test_a_relative_home_is_refused_with_what_to_write(project):
    done = run(
        project, SMALL.format(accelerator="cpu"), env=os.environ | {"KINETIC_HOME": "some/home"}
    )
    is_told(done, errors.UsageError, "KINETIC_HOME", f"{project}/some/home")
    assert not (project / "some").exists()


def test_a_link_to_a_home_works(project):
    (project.parent / "real").mkdir()
    (project.parent / "link").symlink_to(project.parent / "real")
    done = run(
        project,
        SMALL.format(accelerator="cpu"),
        env=os.environ | {"KINETIC_HOME": str(project.parent / "link")},
    )
    assert done.stdout == "returned\n", done.stderr


def a_file(place: Path) -> None:
    place.write_text("mine")


def a_dangling_link(place: Path) -> None:
    place.symlink_to("nowhere/at/all")


def a_looping_link(place: Path) -> None:
    place.symlink_to(place)


def a_closed_folder(place: Path) -> None:
    place.mkdir(mode=0o500)


def below_a_file(place: Path) -> None:
    place.parent.mkdir()
    (place.parent / "file").write_text("mine")
    place.symlink_to("file/below")


@pytest.mark.parametrize(
    "make",
    [a_file, a_dangling_link, a_looping_link, a_closed_folder, below_a_file],
    ids=lambda m: m.__name__,
)
def test_a_home_that_cannot_be_is_refused_and_left_alone(project, make):
    place = project.parent / "odd" / "home"
    if make is not below_a_file:
        place.parent.mkdir()
    make(place)
    before = tree(place.parent)
    environ = os.environ | {"KINETIC_HOME": str(place)}
    done = run(project, SMALL.format(accelerator="cpu"), env=environ, preexec_fn=without_override)
    is_told(done, errors.StoreError, str(place), "KINETIC_HOME")
    for command in (
        ["jobs", "list"],
        ["jobs", "status", "job-1"],
        ["doctor"],
        ["jobs", "prune", "--yes"],
    ):
        line = [sys.executable, "-m", "kinetic", *command]
        told = subprocess.run(
            line,
            env=environ,
            capture_output=True,
            text=True,
            preexec_fn=without_override,
            timeout=PATIENCE_S,
        )
        assert told.returncode in (0, 1, 3, 5), told
        assert "Traceback" not in told.stderr
    assert tree(place.parent) == before


def tree(folder: Path) -> list[tuple[str, int]]:
    return sorted((str(p), p.lstat().st_mode) for p in folder.rglob("*"))


# -- a full disk -----------------------------------------------------------------------------------

ON_A_SMALL_DISK = """
    import os, shutil, subprocess, sys
    import kinetic
    from kinetic import errors

    home = os.environ["KINETIC_HOME"]
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=3m,mode=700", "none", home], check=True
    )
"""


@pytest.fixture
def small_disk(home):
    """How to start a program that may mount a small disk at the home folder, seen by nobody else
    and gone with its processes."""
    home.mkdir(parents=True)
    apart = ["unshare", "-m"] if os.geteuid() == 0 else ["unshare", "-Urm"]
    probe = shutil.which("unshare") and subprocess.run(
        [*apart, "mount", "-t", "tmpfs", "none", str(home)], capture_output=True, text=True
    )
    if not probe or probe.returncode:
        pytest.skip(
            "this machine lets nobody mount apart: "
            f"{probe.stderr if probe else 'there is no unshare'}"
        )
    return apart


def test_a_disk_that_is_full_while_a_job_is_submitted(project, small_disk):
    done = run(
        project,
        ON_A_SMALL_DISK
        + """
    @kinetic.run(accelerator="cpu")
    def length(data):
        return len(data)

    assert length(b"x") == 1
    for large in (os.urandom(10_000_000), os.urandom(3_140_000)):
        try:
            print("went well", length(large))
        except errors.StoreFull as error:
            assert "no space is left" in str(error) and "KINETIC_HOME" in str(error), error
    assert len(kinetic.list_jobs()) == 1
    assert len(os.listdir(os.environ["KINETIC_HOME"] + "/jobs")) == 1
    assert length(b"xy") == 2
    """,
        before=small_disk,
    )
    assert (done.stdout, done.returncode) == ("", 0), done.stderr


def test_a_disk_that_is_full_while_a_function_prints(project, small_disk):
    done = run(
        project,
        ON_A_SMALL_DISK
        + """
    @kinetic.run(accelerator="cpu")
    def flood(what):
        for number in range(400_000):
            print("line", number, "of many")
        if what == "raise":
            raise ZeroDivisionError("after the flood")
        return "after the flood"

    for what in ("return", "raise"):
        job = flood.run_async(what)
        try:
            print(what, job.result(stream_logs=False))
        except (errors.KineticError, ZeroDivisionError) as error:
            print(what, type(error).__name__, error)
        outcome = job.outcome()
        assert outcome.reports[0].lost_log_bytes > 1_000_000, outcome
        lines = job.logs().splitlines()
        assert lines[:2] == ["line 0 of many", "line 1 of many"], lines[:3]
        assert "bytes of output were lost: the disk is full" in lines[-1], lines[-3:]
        job.cleanup()
    """,
        before=small_disk,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "return after the flood",
        "raise ZeroDivisionError after the flood",
    ]


def test_a_disk_that_the_function_has_filled(project, small_disk):
    done = run(
        project,
        ON_A_SMALL_DISK
        + """
    @kinetic.run(accelerator="cpu")
    def fill(what):
        try:
            with open(os.environ["KINETIC_OUTPUT_DIR"] + "/large", "ab", buffering=0) as file:
                while True:
                    file.write(bytes(512))
        except OSError:
            pass
        if what == "raise":
            raise ZeroDivisionError("mine")
        return what

    def make_room():
        shutil.rmtree(os.environ["KINETIC_HOME"] + "/outputs")

    print(fill("value"))
    make_room()
    try:
        fill("raise")
    except ZeroDivisionError as error:
        print(error)
    make_room()
    try:
        fill("large" * 100_000)
    except errors.ResultUnavailable as error:
        print("no space is left" in str(error))
    """,
        before=small_disk,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["value", "mine", "True"]


# -- what was tampered with ------------------------------------------------------------------------


class Tampering(LocalBackend):
    """Changes something in the store after the submission and before the start."""

    def __init__(self, store, change: Callable) -> None:
        super().__init__(store, worker_environ())
        self._stored, self._change = store, change

    def submit(self, ref, documents, secrets):
        plan = json.loads(self._stored.get(layout.plan(ref.job_id)))
        self._change(self._stored, plan)
        super().submit(ref, documents, secrets)


def flipped(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def payload_flipped(store, plan):
    flipped(store.path(layout.blob(plan["payload"]["digest"])))


def payload_lost(store, plan):
    store.delete(layout.blob(plan["payload"]["digest"]))


def payload_of_another_job(store, plan):
    store.put(layout.blob(plan["payload"]["digest"]), payload.pack(touch, (), {}, env_vars={}).data)


def record_flipped(store, plan):
    flipped(store.path(layout.tree(plan["tree"]["manifest"]["digest"])))


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
    with registry.substituted("local", lambda _, store: Tampering(store, change)):
        handle = kinetic.run(accelerator=accelerator)(touch).run_async(str(marker))
    with pytest.raises(
        errors.SetupFailed,
        match=r"not what was (submitted|sent)|missing|nothing under|cannot be read|is damaged",
    ):
        handle.result(timeout=PATIENCE_S)
    assert not marker.exists()
    # Submitting again sends what is missing or wrong.
    mended = kinetic.run(accelerator="cpu")(touch).run_async(str(marker))
    mended.result(timeout=PATIENCE_S)
    assert marker.exists()


def test_a_function_of_a_batch_that_was_tampered_with_is_not_run(home, project, monkeypatch):
    monkeypatch.chdir(project)
    monkeypatch.setattr(touch, "__module__", "__main__")
    marks = [str(project.parent / name) for name in ("first", "second")]

    def function_flipped(store, plan):
        flipped(store.path(layout.blob(plan["function"]["digest"])))

    with registry.substituted("local", lambda _, store: Tampering(store, function_flipped)):
        batch = kinetic.run(accelerator="cpu")(touch).run_async_map(marks, max_concurrent=1)
        batch.wait(PATIENCE_S)
    assert not any(Path(mark).exists() for mark in marks)
    assert {type(job.error()) for job in batch.jobs} == {errors.SetupFailed}
    assert kinetic.run(accelerator="cpu")(touch).run_async_map(marks).results() == [None, None]


def test_another_version_of_python_is_named(home, monkeypatch):
    here = envelope.versions_here()
    monkeypatch.setattr(envelope, "versions_here", lambda: dataclasses.replace(here, python="3.7"))
    handle = kinetic.run(accelerator="cpu")(touch).run_async("/nowhere")
    monkeypatch.undo()
    with pytest.raises(errors.SetupFailed, match=rf"Python 3\.7.*{re.escape(here.python)}"):
        handle.result(timeout=PATIENCE_S)


# -- at the same time ------------------------------------------------------------------------------


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
    for each in programs:
        each.stdin.close()  # Now.
        each.stdin = None
    assert [each.communicate(timeout=PATIENCE_S)[0] for each in programs] == ["19900\n"] * 4
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
        told = each.communicate(timeout=PATIENCE_S)[1]
        assert each.returncode in (0, 1, 3, 4, 5), (command, each.returncode, told)
        assert "Traceback" not in told, (command, told)
        assert "KINETIC_LOG_LEVEL=DEBUG" not in told, (command, told)
    assert [h.job_id for h in kinetic.list_jobs()] == [bystander.job_id]
    assert os.listdir(home / "jobs") == [bystander.job_id]
    assert bystander.result() is None


# -- a clock that was moved back -------------------------------------------------------------------

DAY_S = 86400.0


def test_jobs_of_the_future_are_shown_and_kept(home, capfd):
    """The clock was moved back by a day after the job had ended."""
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
    for file in home.rglob("*"):
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


def test_data_may_not_hide_the_store(home, tmp_path):
    (tmp_path / "data").mkdir()
    with pytest.raises(errors.UsageError, match="would hide"):
        kinetic.run(
            accelerator="cpu", volumes={str(home.parent): kinetic.Data(str(tmp_path / "data"))}
        )(int)()
    assert not list(home.glob("jobs/*"))
