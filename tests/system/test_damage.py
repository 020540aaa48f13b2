"""One file of a job is truncated, deleted or replaced, while the job runs or after its end. Every
command stays usable and names the damaged record. Other jobs are not affected."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from gangs import PATIENCE_S

import kinetic
from kinetic import errors
from kinetic._core.state import JobStatus
from kinetic.cli.root import call

# -- ways to damage a file -------------------------------------------------------------------------


def truncated(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def emptied(file: Path) -> None:
    os.truncate(file, 0)


def deleted(file: Path) -> None:
    file.unlink()


def garbage(file: Path) -> None:
    replaced(file, b"\x80\x00\xff{]" * 40)


def other_json(file: Path) -> None:
    replaced(
        file,
        b'{"verdict": "succeeded", "reports": [{}], "pid": "x", "hosts": "many", "ended_at": [], '
        b'"schema_version": 1}',
    )


def nested_json(file: Path) -> None:
    replaced(file, b"[" * 100_000)


def folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def replaced(file: Path, data: bytes) -> None:
    fresh = file.with_name("fresh")
    fresh.write_bytes(data)
    fresh.replace(file)


DAMAGES = (truncated, emptied, deleted, garbage, other_json, nested_json, folder)
FILES = (
    "refs/{id}.json",
    "jobs/{id}/plan.json",
    "jobs/{id}/outcome.json",
    "jobs/{id}/attempts/1/hosts/0/result.pkl",
    "jobs/{id}/events.jsonl",
    "jobs/{id}/attempts/1/hosts/0/report.json",
    "jobs/{id}/attempts/1/hosts/0/error.pkl",
    "jobs/{id}/attempts/1/hosts/0/log",
    "jobs/{id}/attempts/1/hosts/0/log.idx",
    "jobs/{id}/local/lock",
    "jobs/{id}/local/supervisor.json",
    "jobs/{id}/local/supervisor.log",
)
SAMPLES = {"jobs/{id}/attempts/1/hosts/0/metrics"}
"""Files that a job writes only after several seconds, as on a busy machine."""
LIVE_FILES = (
    *(
        f
        for f in FILES
        if not f.endswith(("outcome.json", "result.pkl", "report.json", "error.pkl"))
    ),
    "jobs/{id}/local/socket",
    "jobs/{id}/local/state.json",
)


def files_of(home: Path, job_id: str) -> set[str]:
    """Return the paths of a job's files, below the home and with "{id}" for the job's id."""
    below = [home / "refs" / f"{job_id}.json", *(home / "jobs" / job_id).rglob("*")]
    return {str(f.relative_to(home)).replace(job_id, "{id}") for f in below if not f.is_dir()}


# -- commands --------------------------------------------------------------------------------------


def timeless(answer: Answer) -> str:
    """Return an answer's text with ages replaced: they grow between two commands."""
    return re.sub(r"\b\d+(?:\.\d+)?[smhd]( ago)?\b", "AGE", repr(answer))


class Answer:
    """The exit code and the output of one command, run when the object is made."""

    def __init__(self, argv: list[str], capfd: pytest.CaptureFixture[str]) -> None:
        capfd.readouterr()
        self.argv = argv
        self.code = call(argv)
        self.out, self.err = capfd.readouterr()

    def __repr__(self) -> str:
        return f"{' '.join(self.argv)} -> {self.code}\n{self.out}\n{self.err}"

    def check(self) -> Answer:
        """Check that no unexpected exception was printed; errors of kinetic are allowed."""
        assert "`kinetic -v …`" not in self.err, self
        assert f"{Path(kinetic.__file__).parent}/" not in self.err, self
        return self


def list_commands(job_id: str) -> list[list[str]]:
    return [
        ["jobs", "status", job_id],
        ["jobs", "status", "--json", job_id],
        ["jobs", "logs", job_id],
        ["jobs", "logs", "-f", "-n", "3", "--timestamps", "--all-hosts", job_id],
        ["jobs", "result", "--timeout", "20s", job_id],
        ["jobs", "wait", "--timeout", "20s", job_id],
        ["jobs", "stacks", job_id],
    ]


# -- a job that has ended --------------------------------------------------------------------------


def good(n):
    print("line one\nline two", flush=True)
    return {"value": n}


def bad(n):
    print("about to fail", file=sys.stderr)
    raise ZeroDivisionError(f"number {n}")


@pytest.fixture(scope="module")
def ended(playground: Path):
    """A function that copies a store with three ended jobs to a folder and returns their ids:
    "good" and "bad", to be damaged, and "healthy"."""
    template = playground / "ended"
    before = dict(os.environ)
    os.environ |= {
        "KINETIC_HOME": str(template / "home"),
        "KINETIC_CACHE_DIR": str(template / "cache"),
    }
    try:
        run = kinetic.run(accelerator="cpu")
        handles = {
            "good": run(good).run_async(1),
            "bad": run(bad).run_async(2),
            "healthy": run(good).run_async(3),
        }
        for handle in handles.values():
            handle.wait(30)
            while handle.processes():
                time.sleep(0.01)
    finally:
        os.environ.clear()
        os.environ |= before
    ids = {name: handle.job_id for name, handle in handles.items()}

    def copied(home: Path) -> dict[str, str]:
        shutil.copytree(template / "home", home)
        for ref in (home / "refs").iterdir():
            ref.write_text(ref.read_text().replace(str(template / "home"), str(home)))
        return ids

    return copied


def test_the_list_of_files_is_whole(ended, home):
    ids = ended(home)
    names = files_of(home, ids["good"]) | files_of(home, ids["bad"])
    assert names - set(FILES) - SAMPLES == set()


@pytest.mark.parametrize("victim", ["good", "bad"])
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda d: d.__name__)
@pytest.mark.parametrize("file", FILES)
def test_an_ended_job_with_a_damaged_file(
    ended, home, capfd, caplog, file: str, damage: Callable[[Path], None], victim: str
):
    ids = ended(home)
    target = home / file.format(id=ids[victim])
    if not target.is_file():
        if "supervisor.json" not in file:
            return  # The job has no such file.
        target.write_text(
            json.dumps({"pid": 1, "target": "unix:/nowhere", "token": "x", "agents": {}})
        )  # as left by a killed supervisor
    healthy = ids["healthy"]
    expected = [timeless(Answer(argv, capfd)) for argv in list_commands(healthy)]
    damage(target)

    listed = Answer(["jobs", "list", "--all"], capfd).check()
    assert listed.code == 0, listed
    assert healthy in listed.out
    assert ids[victim] in listed.out + listed.err + caplog.text or (
        "refs" in file and damage is deleted
    )
    assert [timeless(Answer(argv, capfd)) for argv in list_commands(healthy)] == expected
    for argv in list_commands(ids[victim]):
        answer = Answer(argv, capfd).check()
        assert answer.code in (0, 1, 3, 5), answer
        if answer.code:
            assert ids[victim] in answer.err, answer
    assert healthy in [handle.job_id for handle in kinetic.list_jobs()]
    check_python(ids[victim], victim)

    Answer(["jobs", "cancel", ids[victim]], capfd).check()
    pruned = Answer(["jobs", "prune", "--older-than", "0.01s", "--dry-run"], capfd).check()
    assert pruned.code == 0, pruned
    cleaned = Answer(["jobs", "cleanup", ids[victim]], capfd).check()
    assert cleaned.code == 0, cleaned
    assert [
        str(p) for p in home.rglob("*") if ids[victim] in p.name and p.parent.name != "outputs"
    ] == []
    pruned = Answer(["jobs", "prune", "--older-than", "0.01s", "--yes"], capfd).check()
    assert pruned.code == 0, pruned
    assert list((home / "refs").iterdir()) == []


def check_python(job_id: str, victim: str) -> None:
    """Check that Python's calls return the job's value or error, or raise an error with its id."""
    try:
        handle = kinetic.attach(job_id)
    except (errors.NotFound, errors.CorruptRecord) as error:
        assert job_id in str(error)  # noqa: PT017
        return
    assert handle.status() in (JobStatus.SUCCEEDED, JobStatus.FAILED)
    handle.logs()
    handle.events()
    try:
        assert handle.result(timeout=PATIENCE_S) == {"value": 1}
        assert victim == "good"
    except ZeroDivisionError as error:
        assert (str(error), victim) == ("number 2", "bad")  # noqa: PT017
    except (errors.KineticError, OSError) as error:
        assert job_id in str(error)  # noqa: PT017
        assert not isinstance(error, errors.WaitTimeout)  # noqa: PT017


def wait_for_ever():
    time.sleep(1000)


@pytest.mark.parametrize("damage", [garbage, deleted, folder], ids=lambda d: d.__name__)
@pytest.mark.parametrize("verb", ["cancel", "cleanup"])
def test_a_running_job_with_a_damaged_reference_can_be_stopped(
    home, capfd, verb: str, damage: Callable[[Path], None]
):
    handle = kinetic.run(accelerator="cpu")(wait_for_ever).run_async()
    damage(home / "refs" / f"{handle.job_id}.json")
    answer = Answer(["jobs", verb, handle.job_id], capfd).check()
    assert answer.code == 0, answer
    if verb == "cleanup":
        assert not (home / "jobs" / handle.job_id).exists()
    else:
        with pytest.raises(errors.JobCancelled):
            handle.result(timeout=PATIENCE_S, stream_logs=False)
