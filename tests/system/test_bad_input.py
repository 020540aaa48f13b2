"""Programs with mistakes get a clear error at once; they create nothing and lose nothing. Unit
tests cover the values that options refuse; these tests check what is left on disk."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from bad_input_cases import PATIENCE_S, run, tree

import kinetic
from kinetic import errors
from kinetic.cli.root import call


@pytest.fixture
def project(home):
    folder = home.parent / "project"
    folder.mkdir(parents=True)
    (folder / "pyproject.toml").write_text("[project]\nname = 'p'\n")
    return folder


WITHOUT_OVERRIDE = (sys.executable, "-I", "-S", "-c", """
import ctypes, os, sys
for capability in (1, 2):  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
    ctypes.CDLL(None).prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP
os.execv(sys.argv[1], sys.argv[1:])
""")  # fmt: skip
"""A command prefix that takes from root the right to ignore file permissions. A preexec_fn cannot
do it: gRPC, if this process has loaded it, would start threads in the child, which fail."""


def is_told(
    done: subprocess.CompletedProcess[str], kind: type[errors.KineticError], *words: str
) -> None:
    """Check that the program ended with this error of kinetic, and no other error came before."""
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


# -- mistakes in the program -----------------------------------------------------------------------


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
    {"slices": 0}, {"slices": "2"}, {"timeout": -1},
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
    done = run(project, program, before=WITHOUT_OVERRIDE)
    assert done.stdout == "['program.py', 'pyproject.toml']\n", done.stderr
    assert "locked.txt" in done.stderr


def test_a_file_that_was_not_sent_is_told_about_where_it_is_missed(project):
    subprocess.run(["git", "init", "-q", project], check=True)
    (project / ".gitignore").write_text("data/\n")
    (project / "data").mkdir()
    (project / "data/x.py").touch()
    program = """
        import kinetic
        read = lambda name: open(name).read()
        for func, name in ((read, "data/x.py"), (__import__, "data.x"), (read, "data/y.csv")):
            try: kinetic.run(accelerator="cpu")(func)(name)
            except (FileNotFoundError, ImportError) as error:
                print(*[note for note in error.__notes__ if "ignore" in note])
    """
    done = run(project, program)
    first, module, *others = done.stdout.splitlines()
    assert first.startswith(
        "data/x.py exists on this machine. If it was not sent with the project"
    ), done
    assert module.endswith("include it with the line !data in .kineticignore."), done
    assert ("kinetic.Data('data/x.py')" in first, others) == (True, [""]), "nothing of y.csv"


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
        err = capfd.readouterr().err
        assert job_id in err
        assert "Traceback" not in err


# -- the home folder -------------------------------------------------------------------------------


SMALL = """
    import kinetic

    @kinetic.run(accelerator="{accelerator}", joins_jax=False)  # nor imports it
    def where():
        return "returned"

    print(where())
    assert [job.status().name for job in kinetic.list_jobs()] == ["SUCCEEDED"]
"""


ODD = {
    "spaces": "a home with spaces ",
    "quotes": 'it\'s "so" $HOME `x` %s %41#1? {} \\',
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
    done = run(project, SMALL.format(accelerator="cpu"), env=environ, before=WITHOUT_OVERRIDE)
    is_told(done, errors.StoreError, str(place), "KINETIC_HOME")
    for command in (
        ["jobs", "list"],
        ["jobs", "status", "job-1"],
        ["doctor"],
        ["jobs", "prune", "--yes"],
    ):
        line = [*WITHOUT_OVERRIDE, sys.executable, "-m", "kinetic", *command]
        refusal = subprocess.run(
            line, env=environ, capture_output=True, text=True, timeout=PATIENCE_S
        )
        assert refusal.returncode in (0, 1, 3, 5), refusal
        assert "Traceback" not in refusal.stderr
    assert tree(place.parent) == before


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
    """Return a command prefix for a program that may mount a small disk at the home folder, in a
    mount namespace that only the program and its children see."""
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
        for number in range(40_000):
            print("line", number, "of many", "." * 200)
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
        assert [line.rstrip(".") for line in lines[:2]] == ["line 0 of many ", "line 1 of many "]
        assert "bytes of output were lost, because the disk is full" in lines[-1], lines[-3:]
        job.cleanup()
    """,
        before=small_disk,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "return after the flood",
        "raise ZeroDivisionError after the flood",
    ]


def test_a_disk_that_is_full_while_a_function_logs(project, small_disk):
    done = run(
        project,
        ON_A_SMALL_DISK
        + """
    @kinetic.run(accelerator="cpu")
    def flood():
        values = {f"metric {number}": 0.5 for number in range(100)}
        for step in range(40_000):
            kinetic.log(step=step, **values)
        return "after the flood"

    job = flood.run_async()
    print(job.result(stream_logs=False))
    assert job.logs().rstrip().endswith("were lost, because the disk is full."), job.logs()
    first = job.metrics()["metric 0"]
    assert list(first.steps)[:100] == list(range(100))
    """,
        before=small_disk,
    )
    assert (done.stdout, done.returncode) == ("after the flood\n", 0), done.stderr


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


def test_a_disk_without_inodes(project, small_disk):
    """Try disks with more and more inodes. Each call returns its value, or raises an error that
    says no space or no inodes are left."""
    done = run(
        project,
        ON_A_SMALL_DISK
        + """
    @kinetic.run(accelerator="cpu")
    def double(number):
        return 2 * number

    heard = set()
    for inodes in range(8, 100):
        few = f"size=3m,mode=700,nr_inodes={inodes}"
        subprocess.run(["mount", "-t", "tmpfs", "-o", few, "none", home], check=True)
        try:
            value = double(inodes)
        except errors.KineticError as error:
            heard.add(type(error).__name__)
            words = ("no inodes are left", "No space left on device", "could not be stored")
            assert any(word in str(error) for word in words), (inodes, error)
            assert "107 bytes" not in str(error), (inodes, error)
        else:
            assert value == 2 * inodes
            break
        assert all(job.status().ended for job in kinetic.list_jobs()), inodes
    print(sorted(heard), "then it works" if value else "")
    """,
        before=small_disk,
    )
    assert done.returncode == 0, done.stderr
    assert "StoreFull" in done.stdout
    assert "HostLost" in done.stdout
    assert done.stdout.endswith("then it works\n")
