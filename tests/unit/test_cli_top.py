"""`kinetic jobs top`: rows from snapshots, and the command over a fake backend."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from kinetic._backends.base import Status
from kinetic._client.board import activity
from kinetic._client.board.activity import Rates
from kinetic._client.handle import JobHandle
from kinetic._core import layout
from kinetic._core.endpoint import Endpoint
from kinetic._core.events import EventKind, GangEvent
from kinetic._core.exits import Exit
from kinetic._core.gang.picture import picture_of
from kinetic._core.place import Place
from kinetic._core.ref import JobRef
from kinetic._core.state import JobStatus
from kinetic._store.local import LocalStore
from kinetic.cli.commands import top
from kinetic.cli.context import AppContext
from kinetic.cli.root import call
from kinetic.errors import BackendUnavailable, CoordinatorLost

NOW = 1_700_000_000.0
Capture = pytest.CaptureFixture[str]


def member(host: int, **changes: Any) -> dict[str, Any]:
    beat = {
        "state": "running",
        "rss_bytes": 100 << 20,
        "cpu_s": 30.0,
        "log_bytes": 2048,
        "stalled_s": 0.0,
        "silent_s": 0.5,
    }
    return {"host": host, "last_line": f"step {host}", **beat, **changes}


def snapshot(*members: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {
        "phase": "running",
        "attempt": 1,
        "running_s": 60.0,
        "members": list(members),
        **changes,
    }


def ref(job_id: str = "job-00000001", **changes: Any) -> JobRef:
    fields = {
        "place": Place("fake"),
        "accelerator": "tpu-v6e-8",
        "func_name": "f",
        "display_name": "train",
    }
    return JobRef(
        job_id=job_id, created_at=NOW - 90, store_uri="/s", hosts=2, **{**fields, **changes}
    )


def test_the_share_of_a_processor_is_taken_between_two_tellings() -> None:
    rates = Rates()
    assert rates.percent(("j", 0), 30.0, 60.0, 100.0) == 50.0  # since the function started
    assert rates.percent(("j", 0), 30.0, 60.1, 100.1) == 50.0  # the same report, read twice
    assert rates.percent(("j", 0), 32.0, 61.0, 101.0) == 200.0
    assert rates.percent(("j", 0), 32.0, 62.0, 102.0) == 0.0
    assert rates.percent(("j", 0), 0.5, 1.0, 103.0) == 50.0  # a new attempt
    assert rates.percent(("j", 1), 0.0, 0.0, 103.0) is None


def test_a_line_for_each_host() -> None:
    hosts = snapshot(
        member(0), member(1, stalled_s=12.0, last_line="\x1b[32mgreen\x1b[0m\x1b]0;title\x07 line")
    )
    first, second = activity.lines(ref(), "RUNNING", hosts, Rates(), NOW)
    assert (first.cpu_percent, first.still_s, first.last_line) == (50.0, 0.0, "step 0")
    assert (second.still_s, second.last_line) == (12.0, "green line")
    assert activity.cells(second) == (
        "job-00000001",
        second.ref.display_name,
        second.ref.accelerator,
        "-",
        "1",
        "running",
        "90s",
        "50%",
        "100.0 MiB",
        "2.0 KiB",
        "12s",
        "green line",
    )
    assert activity.headline([first, second]) == "1 job, 2 hosts, 1 standing still"


def cells(line: activity.HostLine, *names: str) -> tuple[str, ...]:
    by_name = dict(zip(activity.COLUMNS, activity.cells(line), strict=True))
    return tuple(by_name[name] for name in names)


@pytest.mark.parametrize(
    ("report", "state", "memory", "still"),
    [
        ({"silent_s": 5.0}, "silent", "100.0 MiB", "-"),
        ({"state": "debugging"}, "debugging", "100.0 MiB", "-"),
        ({"saving_step": 0}, "saving", "100.0 MiB", "-"),
        ({"saving_step": 20, "stalled_s": 12.0}, "saving", "100.0 MiB", "12s"),
        ({"saving_step": 20, "silent_s": 5.0}, "silent", "100.0 MiB", "-"),
        ({"saving_step": 20, "state": "returned"}, "returned", "-", "-"),
        ({"state": "waiting", "stalled_s": 40.0}, "waiting", "100.0 MiB", "-"),
        (
            {"state": "missing", "silent_s": 50.0, "rss_bytes": 0, "log_bytes": 0},
            "missing",
            "-",
            "-",
        ),
        ({"state": "raised", "exit": "raised", "silent_s": 50.0}, "raised", "-", "-"),
    ],
)
def test_a_row_shows_the_state_memory_and_stall_of_a_host(
    report: dict[str, Any], state: str, memory: str, still: str
) -> None:
    (line,) = activity.lines(ref(), "RUNNING", snapshot(member(0, **report)), Rates(), NOW)
    assert cells(line, "STATE", "MEMORY", "STILL") == (state, memory, still)


def test_hosts_of_a_session_are_idle_after_a_call() -> None:
    """Whether the last call returned or raised, the hosts wait for the next one."""
    held = ref(session_name="dev")
    for ended in ({"state": "returned"}, {"state": "raised", "exit": "raised"}):
        (line,) = activity.lines(held, "RUNNING", snapshot(member(0, **ended)), Rates(), NOW)
        assert (line.state, line.last_line) == ("idle", "")
    for state in ("running", "missing"):
        (line,) = activity.lines(held, "RUNNING", snapshot(member(0, state=state)), Rates(), NOW)
        assert line.state == state


def test_a_job_of_which_no_host_is_known_has_a_line() -> None:
    for nothing in (None, {}, snapshot()):
        (line,) = activity.lines(ref(), "PENDING", nothing, Rates(), NOW)
        assert cells(line, "HOST", "STATE", "CPU", "LOG") == ("-", "PENDING", "-", "-")
    assert activity.document([line])[0]["members"] == []


def test_hosts_of_a_job_that_has_not_started_do_not_make_it_run() -> None:
    gathering = activity.lines(ref(), "PENDING", snapshot(member(0)), Rates(), NOW)
    assert activity.document(gathering)[0]["state"] == "PENDING"


def test_without_a_snapshot_events_tell_where_hosts_stand() -> None:
    events = [GangEvent(EventKind.JOINED, 1), GangEvent(EventKind.LOST, 0, exit=Exit.AGENT_LOST)]
    attempt = picture_of(events, 2).current
    lines = activity.lines(ref(), "RUNNING", None, Rates(), NOW, attempt=attempt)
    assert [(line.host, line.state) for line in lines] == [(0, "agent_lost"), (1, "joined")]
    assert cells(lines[0], "CPU", "MEMORY", "LOG") == ("-", "-", "-")


def test_narrow_terminals_show_less() -> None:
    (line,) = activity.lines(ref(), "RUNNING", snapshot(member(0)), Rates(), NOW)
    assert (
        activity.list_hidden_columns(None, [line])
        == activity.list_hidden_columns(140, [line])
        == ["SLICE"]
    )
    assert activity.list_hidden_columns(139, [line]) == ["SLICE", "ACCELERATOR", "NAME", "LOG"]


# -- the command -----------------------------------------------------------------------------------


class Backend:
    """A backend whose jobs have the phases that a test sets."""

    def __init__(self) -> None:
        self.phases: dict[str, JobStatus] = {}
        self.asked: list[str] = []
        self.is_away = False

    def status(self, refs: Sequence[JobRef]) -> dict[str, Status]:
        self.asked += [ref.job_id for ref in refs]
        if self.is_away:
            raise BackendUnavailable("The cluster does not answer.")
        return {ref.job_id: Status(self.phases[ref.job_id]) for ref in refs}

    def control(self, job: JobRef) -> Endpoint | None:
        return Endpoint("unix:/socket", "token", job.job_id)


class Client:
    """A client of a gang's coordinator, which answers with the job's entry in `gangs`."""

    gangs: ClassVar[dict[str, Callable[[], dict[str, Any]]]] = {}

    def __init__(self, endpoint: Endpoint, *, give_up_s: float) -> None:
        self.job_id = endpoint.job_id

    def snapshot(self, timeout_s: float) -> dict[str, Any]:
        return self.gangs[self.job_id]()

    def close(self) -> None: ...


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AppContext:
    def lost() -> dict[str, Any]:
        raise CoordinatorLost("nobody answers")

    backend, store = Backend(), LocalStore(tmp_path / "store")
    Client.gangs = {"job-00000001": lambda: snapshot(member(0), member(1)), "job-00000002": lost}
    monkeypatch.setattr("kinetic._rpc.client.ControlClient", Client)
    for number, phase in enumerate((JobStatus.SUCCEEDED, JobStatus.RUNNING, JobStatus.RUNNING)):
        job = ref(f"job-0000000{number}")
        backend.phases[job.job_id] = phase
        store.put(layout.JobKeys(job.job_id).ref, json.dumps(job.to_json()).encode())
    place: Any = backend
    return AppContext(
        store, lambda job: place, lambda job: JobHandle(job, place, store), lambda: NOW
    )


def test_once_prints_one_table_of_running_jobs(world: AppContext, capsys: Capture) -> None:
    assert call(["jobs", "top", "--once"], world) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [(row[0], row[3], row[4]) for row in rows[1:]] == [
        ("job-00000002", "-", "RUNNING"),
        ("job-00000001", "0", "running"),
        ("job-00000001", "1", "running"),
    ]
    assert call(["jobs", "top", "1"], world) == 3
    assert call(["jobs", "top", "00000001"], world) == 0
    assert "job-00000002" not in capsys.readouterr().out


def test_json_has_the_hosts_of_each_running_job(world: AppContext, capsys: Capture) -> None:
    assert call(["jobs", "top", "--json"], world) == 0
    second, first = json.loads(capsys.readouterr().out)
    assert (second["job_id"], second["members"]) == ("job-00000002", [])
    assert [m["last_line"] for m in first["members"]] == ["step 0", "step 1"]
    assert first["members"][0]["cpu_percent"] == 50.0


def test_top_without_a_running_job_says_so_and_ends(
    world: AppContext, capsys: Capture, tmp_path: Path
) -> None:
    empty = AppContext(LocalStore(tmp_path / "empty"), world.backend_of, world.handle_of, world.now)
    assert call(["jobs", "top"], empty) == 0
    assert capsys.readouterr() == ("", "No job is running.\n")
    assert call(["jobs", "top", "--json"], empty) == 0
    assert json.loads(capsys.readouterr().out) == []


def test_what_has_ended_is_not_looked_at_twice(world: AppContext) -> None:
    backend: Any = world.backend_of(ref())
    with top.ActivityWatch(world, set()) as watch:
        assert len(watch.poll()) == 3
        backend.asked.clear()
        backend.phases["job-00000001"] = JobStatus.FAILED
        assert [line.ref.job_id for line in watch.poll()] == ["job-00000002"]
        watch.poll()
        assert backend.asked.count("job-00000000") == 0
        assert backend.asked.count("job-00000001") == 1
        world.store.delete(layout.JobKeys("job-00000002").ref)
        assert watch.poll() == []


def test_jobs_stay_while_their_backend_does_not_answer(world: AppContext) -> None:
    backend: Any = world.backend_of(ref())
    with top.ActivityWatch(world, set()) as watch:
        assert len(watch.poll()) == 3
        backend.is_away = True
        away = [(line.host, line.state) for line in watch.poll()]
        assert away == [(None, "UNKNOWN"), (0, "running"), (1, "running")]
        backend.is_away = False
        assert len(watch.poll()) == 3


def test_status_of_a_running_job_shows_what_its_hosts_are_doing(
    world: AppContext, capsys: Capture
) -> None:
    events = [("ready", 80.0, 1), ("retry", 40.0, 1), ("ready", 30.5, 2)]
    lines = "".join(
        json.dumps({"time": NOW - ago, "kind": kind, "attempt": attempt}) + "\n"
        for kind, ago, attempt in events
    )
    world.store.put(layout.JobKeys("job-00000001").events, lines.encode() + b"\0damaged\n")
    assert call(["jobs", "status", "job-00000001"], world) == 0
    out = capsys.readouterr().out
    assert "(running for 80s in 2 attempts)" in out
    rows = [line.split() for line in out.splitlines()[-3:]]
    assert rows[0] == ["HOST", "STATE", "CPU", "MEMORY", "LOG", "STILL", "LAST", "LINE"]
    assert [(row[0], row[1], row[-2:]) for row in rows[1:]] == [
        ("0", "running", ["step", "0"]),
        ("1", "running", ["step", "1"]),
    ]
    assert call(["jobs", "status", "--json", "job-00000001"], world) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["started_at"], document["ended_at"], len(document["members"])) == (
        NOW - 80.0,
        None,
        2,
    )


def test_status_of_a_large_running_gang_shows_the_hosts_that_stand_still(
    world: AppContext, capsys: Capture
) -> None:
    hosts = [member(host, stalled_s=60.0 if host == 77 else 0.0) for host in range(100)]
    Client.gangs["job-00000001"] = lambda: snapshot(*hosts)
    assert call(["jobs", "status", "job-00000001"], world) == 0
    out, err = capsys.readouterr()
    assert "step 77" in out
    assert len(out.splitlines()) < 50
    assert "68 more hosts" in err


def test_a_job_that_has_not_started_has_no_time(world: AppContext, capsys: Capture) -> None:
    assert call(["jobs", "status", "job-00000002"], world) == 0
    out = capsys.readouterr().out
    assert "Started" not in out
    assert "HOST" not in out
