"""The command line from argv to exit code, over a real local store and a fake backend."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cli_fakes import DAY, NOW, World, chunk

import kinetic
from kinetic._backends.base import LogRequest
from kinetic._backends.programs import folders
from kinetic._core import layout
from kinetic._core.events import EventKind, GangEvent
from kinetic._core.exits import Exit
from kinetic._core.log_format import STDERR, Position
from kinetic._core.outcome import HostReport, Outcome, RemoteError, Verdict
from kinetic._core.ref import JobRef
from kinetic._core.state import JobStatus
from kinetic._pickling import results
from kinetic._store.gc_lock import submitting
from kinetic._store.local import LocalStore
from kinetic.cli import output, pruning
from kinetic.cli.context import AppContext
from kinetic.cli.root import call
from kinetic.errors import HostLost, PreflightError

ROOT = Path(kinetic.__file__).parent.parent


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path / "store")


Capture = pytest.CaptureFixture[str]


# -- list and status -------------------------------------------------------------------------------


def test_list_shows_all_states_newest_first(world: World, capsys: Capture) -> None:
    for number, age in enumerate((4000, 3000, 2000, 1000)):
        world.job(f"job-0000000{number}", name=f"f{number}", age=age)
    world.succeed("job-00000000")
    world.fail("job-00000001")
    world.end("job-00000002", Outcome(Verdict.CANCELLED))
    assert world("jobs", "list") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["ID", "NAME", "ACCELERATOR", "HOSTS", "STATE", "TIME", "AGE"]
    assert [line.split() for line in lines[1:]] == [
        ["job-00000003", "f3", "tpu-v6e-8", "1", "RUNNING", "-", "16m"],
        ["job-00000002", "f2", "tpu-v6e-8", "1", "CANCELLED", "-", "33m"],
        ["job-00000001", "f1", "tpu-v6e-8", "1", "FAILED", "-", "50m"],
        ["job-00000000", "f0", "tpu-v6e-8", "1", "SUCCEEDED", "-", "66m"],
    ]


def test_the_backend_is_asked_once_for_all_jobs_of_a_place(world: World, capsys: Capture) -> None:
    for number in range(8):
        world.job(f"job-0000000{number}", age=number)
    world.succeed("job-00000003")
    assert world("jobs", "list", "--limit", "5") == 0
    assert world.backend.asked == [[f"job-0000000{number}" for number in (0, 1, 2, 4)]]
    world.backend.asked.clear()
    assert world("jobs", "prune", "--yes") == 0
    assert [len(asked) for asked in world.backend.asked] == [7]


def test_a_list_reads_each_record_once(world: World, capsys: Capture) -> None:
    class Counting(LocalStore):
        def get(self, key: str) -> bytes:
            read.append(key)
            return super().get(key)

    read: list[str] = []
    for number in range(6):
        world.job(f"job-0000000{number}", age=number)
        world.succeed(f"job-0000000{number}")
    app = replace(world.app, store=Counting(Path(world.store.uri)))
    assert call(["jobs", "list", "--limit", "4"], app) == 0
    shown = [layout.outcome(f"job-0000000{number}") for number in range(4)]
    assert sorted(read) == sorted(
        [*shown, *(layout.ref(f"job-0000000{number}") for number in range(6))]
    )


def test_why_a_job_waits_is_shown(world: World, capsys: Capture) -> None:
    world.job("job-00000001")
    world.job("job-00000002", age=30)
    world.backend.phases["job-00000001"] = JobStatus.PENDING
    world.backend.reasons["job-00000001"] = "waiting for memory"
    assert world("jobs", "list") == 0
    head, second, first = capsys.readouterr().out.splitlines()
    assert head.split()[-1] == "REASON"
    assert first.endswith("waiting for memory")
    assert second.split()[-1] == "30s"
    assert world("jobs", "status", "job-00000001") == 0
    assert re.search(r"Reason: +waiting for memory", capsys.readouterr().out)
    assert world("jobs", "status", "--json", "job-00000001") == 0
    assert json.loads(capsys.readouterr().out)["reason"] == "waiting for memory"
    assert world("jobs", "list", "--json") == 0
    assert [job["reason"] for job in json.loads(capsys.readouterr().out)] == [
        "",
        "waiting for memory",
    ]


def test_list_filters_before_it_counts(world: World, capsys: Capture) -> None:
    for number in range(6):
        world.job(f"job-0000000{number}", age=number)
        if number % 2:
            world.succeed(f"job-0000000{number}")
    assert world("jobs", "list", "--state", "succeeded", "--limit", "2", "--json") == 0
    out, _err = capsys.readouterr()
    assert [job["job_id"] for job in json.loads(out)] == ["job-00000001", "job-00000003"]
    assert world("jobs", "list", "--limit", "2") == 0
    assert "--all" in capsys.readouterr().err
    assert world("jobs", "list", "--all", "--json") == 0
    assert len(json.loads(capsys.readouterr().out)) == 6


def test_a_batch_goes_with_its_last_job(world: World, capsys: Capture) -> None:
    for group_id, job_id in (("grp-00000001", "job-00000001"), ("grp-00000002", "job-00000002")):
        ref = replace(world.job(job_id, age=30 * DAY), group_id=group_id)
        world.store.put(layout.ref(job_id), json.dumps(ref.to_json()).encode())
        world.store.put(layout.batch(group_id), b"{}")
        os.utime(world.store.path(layout.group(group_id)), (NOW - 30 * DAY, NOW - 30 * DAY))
    world.succeed("job-00000001", ended=NOW - 30 * DAY)
    world.store.put(layout.batch("grp-00000003"), b"{}")  # it has only just begun
    assert world("jobs", "prune", "--yes") == 0
    assert [*world.store.list(layout.GROUPS)] == [
        layout.batch("grp-00000002"),
        layout.batch("grp-00000003"),
    ]


def test_jobs_of_one_batch(world: World, capsys: Capture) -> None:
    for number in range(4):
        ref = world.job(f"job-0000000{number}")
        if number % 2:
            grouped = replace(ref, group_id="grp-00000001", group_kind="map", group_index=number)
            world.store.put(layout.ref(ref.job_id), json.dumps(grouped.to_json()).encode())
    assert world("jobs", "list", "--group", "grp-00000001", "--json") == 0
    assert [job["job_id"] for job in json.loads(capsys.readouterr().out)] == [
        "job-00000003",
        "job-00000001",
    ]
    assert world("jobs", "status", "job-00000003") == 0
    assert "grp-00000001, input 3" in capsys.readouterr().out


def test_status_shows_each_attempt_with_its_verdict(world: World, capsys: Capture) -> None:
    world.job("job-00000001", hosts=2)
    events = [
        GangEvent(EventKind.JOINED, 0, time=NOW - 50),
        GangEvent(EventKind.READY, time=NOW - 50),
        GangEvent(EventKind.LOST, 1, exit=Exit.AGENT_LOST, time=NOW - 40),
        GangEvent(
            EventKind.ENDED,
            verdict=Verdict.FAILED,
            hosts=(1,),
            detail="host 1: lost",
            time=NOW - 40,
        ),
        GangEvent(EventKind.RETRY, time=NOW - 40),
        GangEvent(EventKind.READY, attempt=2, time=NOW - 30),
    ]
    told = "".join(json.dumps(event.to_json()) + "\n" for event in events)
    world.store.put(layout.events("job-00000001"), told.encode())
    assert world("jobs", "status", "job-00000001") == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line]
    first = next(line for line in lines if line[:1] == ["1"])
    assert first[-5:] == ["10s", "failed", "host", "1:", "lost"]
    assert ["0", "running"] in [line[:2] for line in lines], "as far as events tell"
    returned = [HostReport(host, Exit.RETURNED) for host in range(2)]
    world.end("job-00000001", Outcome(Verdict.SUCCEEDED, reports=(*returned,), attempt=2))
    assert world("jobs", "status", "--json", "job-00000001") == 0
    first, second = json.loads(capsys.readouterr().out)["attempts"]
    assert (first["verdict"], first["blamed"]) == ("failed", [1])
    assert first["hosts"][1] == {
        "host": 1,
        "state": "failed",
        "exit": "agent_lost",
        "detail": "",
    }
    assert (second["attempt"], second["verdict"], second["started_at"]) == (
        2,
        "succeeded",
        NOW - 30,
    )
    assert [host["state"] for host in second["hosts"]] == ["returned", "returned"]


def test_an_empty_list_is_no_error(world: World, capsys: Capture) -> None:
    assert world("jobs", "list") == 0
    assert world("jobs", "list", "--json") == 0
    assert json.loads(capsys.readouterr().out) == []


def test_garbage_hides_no_other_job(world: World, capsys: Capture) -> None:
    world.job("job-00000001")
    world.store.put(layout.outcome("job-00000001"), b"\0garbage")
    world.job("job-00000002", name="evil\x1b]0;title\x07\n")
    for number, data in enumerate((b"", b"[]", b'{"job_id": 3}', b"\xff\xfe")):
        world.store.put(layout.ref(f"job-bad{number}"), data)
    assert world("jobs", "list") == 0
    out = capsys.readouterr().out
    assert len(out.splitlines()) == 3
    assert "\x1b" not in out
    assert "\x07" not in out


def test_a_job_of_a_backend_that_is_not_here_is_listed_as_unknown(
    world: World, capsys: Capture
) -> None:
    def missing(ref: JobRef) -> Any:
        raise PreflightError("no such backend")

    world.job("job-00000001")
    app = AppContext(world.store, missing, missing, world._submit, lambda: NOW)
    assert call(["jobs", "list"], app) == 0
    assert "UNKNOWN" in capsys.readouterr().out
    assert call(["jobs", "prune", "--yes", "--older-than", "1s"], app) == 0
    assert world.store.has(layout.ref("job-00000001"))


def test_status(world: World, capsys: Capture) -> None:
    world.job("job-00000001", hosts=2)
    assert world("jobs", "status", "job-0") == 0
    assert "RUNNING" in capsys.readouterr().out
    world.fail("job-00000001")
    assert world("jobs", "status", "00000001") == 0
    out = capsys.readouterr().out
    assert "FAILED" in out
    assert "host 1" in out
    assert "os_exit" in out
    assert world("jobs", "status", "--json", "job-00000001") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["state"] == "FAILED"
    assert document["outcome"]["blamed"] == [1]


def test_nobody_is_blamed_for_a_job_that_was_cancelled(world: World, capsys: Capture) -> None:
    world.job("job-00000001", hosts=2)
    world.end(
        "job-00000001", Outcome(Verdict.CANCELLED, reason="The job was cancelled.", blamed=(0, 1))
    )
    assert world("jobs", "status", "job-00000001") == 0
    out = capsys.readouterr().out
    assert "CANCELLED" in out
    assert "Blamed" not in out


def test_status_of_a_large_gang_fits_on_a_screen(world: World, capsys: Capture) -> None:
    world.job("job-00000001", hosts=1024)
    reports = tuple(
        HostReport(i, Exit.STOPPED if i != 777 else Exit.SIGNAL, signal=9) for i in range(1024)
    )
    world.end(
        "job-00000001",
        Outcome(Verdict.FAILED, blamed=(777,), reason="host 777 died", reports=reports),
    )
    assert world("jobs", "status", "job-0") == 0
    out, err = capsys.readouterr()
    assert len(out.splitlines()) < 50
    assert "\n 777" in out or "\n777" in out
    assert "992 hosts more" in err


@pytest.mark.parametrize(
    "command", ["status", "logs", "result", "wait", "cancel", "cleanup", "stacks"]
)
def test_ids(world: World, command: str, capsys: Capture) -> None:
    world.job("job-aaaa0001")
    world.job("job-aaaa0002")
    assert world("jobs", command, "job-bbbb0000") == 3
    assert world("jobs", command, "job-aaaa000x") == 3
    assert "job-aaaa0001" in capsys.readouterr().err
    assert world("jobs", command, "job-aaaa") == 2
    assert world("jobs", command, "../../etc/passwd") == 2
    assert world("jobs", command, "") == 2
    assert world("jobs", command) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "Traceback" not in err


# -- logs ------------------------------------------------------------------------------------------


def test_logs_are_the_bytes_that_were_printed(
    world: World, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    world.job("job-00000001")
    odd = b"\x00\xff[rank0] [/tmp/x] arr[i] \x1b[31m\r\n" + b"x" * 500 + b"\nno end"
    world.backend.output["job-00000001"] = [chunk(odd[:7]), None, chunk(odd[7:], stream=STDERR)]
    assert world("jobs", "logs", "job-0") == 0
    assert capfdbinary.readouterr() == (odd, b"")


def test_logs_pass_on_what_was_asked_for(world: World) -> None:
    world.job("job-00000001", hosts=4)
    world("jobs", "logs", "job-0")
    world("jobs", "logs", "job-0", "-n", "5", "--host", "3")
    world("jobs", "logs", "job-0", "--host", "3", "--host", "1", "--host", "3")
    world("jobs", "logs", "job-0", "--all-hosts")
    world("jobs", "logs", "job-0", "--attempt", "1")
    assert world.backend.requests == [
        LogRequest((0,), False, None),
        LogRequest((3,), False, 5),
        LogRequest((3, 1), False, None),
        LogRequest(None, False, None),
        LogRequest((0,), False, None, attempt=1),
    ]
    assert world("jobs", "logs", "job-0", "--host", "4") == 2
    assert world("jobs", "logs", "job-0", "--attempt", "2") == 2
    assert world("jobs", "logs", "job-0", "-n", "-1") == 2


def test_a_log_without_a_line_is_told_apart_from_no_log(world: World, capfd: Capture) -> None:
    world.job("job-00000001")
    world.backend.output["job-00000001"] = []
    assert world("jobs", "logs", "job-0") == 0
    out, err = capfd.readouterr()
    assert (out, err) == (
        "",
        "There is no output. `kinetic jobs status job-00000001` shows where the job stands.\n",
    )
    assert world("jobs", "logs", "-n", "0", "job-0") == 0
    assert capfd.readouterr().err == ""


def test_logs_of_all_hosts_name_the_host(world: World, capfd: Capture) -> None:
    world.job("job-00000001", hosts=2)
    world.backend.output["job-00000001"] = [chunk(b"a\nb\n"), chunk(b"c", 1)]
    assert world("jobs", "logs", "job-0", "--all-hosts") == 0
    assert capfd.readouterr().out == "[host 0] a\n[host 0] b\n[host 1] c\n"
    assert world("jobs", "logs", "job-0", "--timestamps") == 0
    assert capfd.readouterr().out == "2001-09-09T01:46:40.000Z a\n2001-09-09T01:46:40.000Z b\n"


def test_logs_always_begin_at_the_beginning_also_when_that_is_asked_for(
    world: World, capfd: Capture
) -> None:
    world.job("job-00000001")
    world.backend.output["job-00000001"] = [chunk(b"one\n")]
    world.backend.at_end = lambda: world.succeed("job-00000001")
    assert world("jobs", "logs", "--follow", "--no-resume", "job-00000001") == 0
    assert capfd.readouterr().out == "one\n"


def test_following_ends_with_the_job(world: World, capfd: Capture) -> None:
    world.job("job-00000001")
    world.backend.output["job-00000001"] = [None, chunk(b"a\n"), None]
    world.backend.at_end = lambda: world.succeed("job-00000001")
    assert world("jobs", "logs", "-f", "job-0") == 0
    assert capfd.readouterr().out == "a\n"
    begin, rest = world.backend.requests
    assert begin == LogRequest((0,), True, None)
    assert rest == replace(begin, after={0: Position(1, 2)}), "what is left after the verdict"


def test_a_reader_that_goes_away_is_no_error(world: World) -> None:
    """As with cat: `kinetic jobs logs ID | head -1` is quiet."""
    ref = world.job("job-00000001")
    big = b"line\n" * 100_000
    world.store.put(layout.outcome(ref.job_id), b"{}")
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from test_cli_commands import World, chunk; "
        "from pathlib import Path\n"
        "world = World(Path(sys.argv[2])); world.backend.output['job-00000001'] = "
        "[chunk(b'line\\n' * 100_000)] * 3\n"
        "sys.exit(world('jobs', 'logs', 'job-0'))"
    )
    command = [sys.executable, "-c", code, str(Path(__file__).parent), world.store.uri]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(5) == big[:5]
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0


# -- result and wait -------------------------------------------------------------------------------


def test_result_prints_the_value_again_and_again(world: World, capsys: Capture) -> None:
    world.job("job-00000001")
    world.succeed("job-00000001", {"loss": 0.5, "名": [1, 2]})
    for _ in range(2):
        assert world("jobs", "result", "job-0") == 0
        assert capsys.readouterr().out == "{'loss': 0.5, '名': [1, 2]}\n"
    assert world("jobs", "result", "--json", "job-0") == 0
    assert json.loads(capsys.readouterr().out) == {"loss": 0.5, "名": [1, 2]}


def test_arrays_have_a_json_form_and_sets_have_none(world: World, capsys: Capture) -> None:
    import numpy as np

    world.job("job-00000001")
    world.succeed("job-00000001", {"a": np.arange(3), "b": np.float32(0.5)})
    assert world("jobs", "result", "--json", "job-0") == 0
    assert json.loads(capsys.readouterr().out) == {"a": [0, 1, 2], "b": 0.5}
    for value in ({1, 2}, float("nan"), {(1, 2): 3}):
        world.succeed("job-00000001", value)
        assert world("jobs", "result", "--json", "job-0") == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert "--json" in err


def test_the_result_of_a_failed_job_is_its_error(world: World, capsys: Capture) -> None:
    world.job("job-00000001", hosts=2)
    for problem in (
        ZeroDivisionError("by zero"),
        KeyboardInterrupt("theirs"),
        BrokenPipeError(32, "theirs"),
        SystemExit("theirs"),
    ):
        key = layout.error("job-00000001", 1, 1)
        world.store.put(key, results.pack_exception(problem))
        remote = RemoteError(
            type(problem).__name__, str(problem), "Traceback: line 7 in train\n", key=key
        )
        world.fail("job-00000001", HostReport(1, Exit.RAISED, error=remote))
        assert world("jobs", "result", "job-0") == 1
        out, err = capsys.readouterr()
        assert out == ""
        assert type(problem).__name__ in err
        assert "line 7 in train" in err


def test_waiting_tells_by_its_exit_code(world: World, capsys: Capture) -> None:
    world.job("job-00000001", hosts=2)
    world.succeed("job-00000001")
    assert world("jobs", "wait", "job-0") == 0
    world.fail("job-00000001")
    assert world("jobs", "wait", "job-0") == 1
    assert "host 1 ended" in capsys.readouterr().err
    assert world("jobs", "wait", "--json", "job-0") == 1
    assert json.loads(capsys.readouterr().out)["verdict"] == "failed"


@pytest.mark.parametrize("command", ["wait", "result"])
def test_giving_up_leaves_the_job_running(world: World, command: str, capsys: Capture) -> None:
    world.job("job-00000001")
    world.backend.output["job-00000001"] = [None]
    assert world("jobs", command, "--timeout", "1ms", "job-0") == 124
    out, err = capsys.readouterr()
    assert out == ""
    assert "job-00000001" in err
    assert world.backend.cancelled == []
    assert world("jobs", command, "--timeout", "soon", "job-0") == 2


# -- stopping and removing -------------------------------------------------------------------------


def test_cancel_takes_several_and_passes_over_what_has_ended(world: World, capsys: Capture) -> None:
    for number in range(3):
        world.job(f"job-0000000{number}")
    world.succeed("job-00000000")
    assert world("jobs", "cancel", "00000000", "00000001", "job-00000001") == 0
    assert world.backend.cancelled == ["job-00000001"]
    assert world("jobs", "cancel", "00000002", "nobody") == 3
    assert world.backend.cancelled == ["job-00000001"], (
        "a wrong id must not leave half of the others cancelled"
    )


def test_cleanup(world: World) -> None:
    world.job("job-00000001")
    world.succeed("job-00000001")
    assert world("jobs", "cleanup", "--no-gcs", "job-0") == 0
    assert world.store.has(layout.ref("job-00000001"))
    assert world("jobs", "cleanup", "job-0") == 0
    assert not world.store.has(layout.ref("job-00000001"))


def test_cleanup_stops_a_running_job_and_gives_up_in_time(world: World, capsys: Capture) -> None:
    world.job("job-00000001")
    world.backend.output["job-00000001"] = [None]
    assert world("jobs", "cleanup", "--cleanup-timeout", "0.01", "job-0") == 124
    assert world.backend.cancelled == ["job-00000001"]
    assert world.store.has(layout.ref("job-00000001"))


def history(world: World) -> None:
    """An old job, a young one, one that runs since long ago, and content: shared, unused, unused
    but young."""
    world.job("job-0000000d", age=30 * DAY)
    world.succeed("job-0000000d", ended=NOW - 20 * DAY)
    world.job("job-0000000e", age=2 * DAY)
    world.fail("job-0000000e", ended=NOW - 1 * DAY)
    world.job("job-0000000f", age=90 * DAY)
    shared = world.blob("a")
    world.plan("job-0000000d", world.blob("b"), shared)
    world.plan("job-0000000f", world.blob("c"), world.tree("1", world.blob("2", b"source file")))
    world.plan("job-0000000e", world.blob("d"), shared)
    world.blob("e")
    world.blob("f", age=3600)
    world.store.put(f"{layout.outputs('job-0000000d')}/model.bin", b"weights")


def remaining(world: World) -> str:
    return "".join(sorted(key[-1] for key in contents(world)))


def contents(world: World) -> set[str]:
    """The keys of all content."""
    prefixes = (layout.BLOBS, layout.PACKS, layout.PACK_INDEXES, layout.TREES)
    return {key for prefix in prefixes for key in world.store.list(prefix)}


def test_prune_removes_what_nobody_needs(world: World, capsys: Capture) -> None:
    history(world)
    assert world("jobs", "prune", "--dry-run", "--json") == 0
    promised = json.loads(capsys.readouterr().out)
    assert (promised["jobs"], promised["contents"]) == (["job-0000000d"], 2)
    assert remaining(world) == "12abcdef"
    assert world("jobs", "prune", "--yes", "--json") == 0
    assert json.loads(capsys.readouterr().out) == promised
    assert remaining(world) == "12acdf"
    assert not world.store.has(layout.ref("job-0000000d"))
    assert not list(world.store.list(layout.job("job-0000000d")))
    assert world.store.has(layout.ref("job-0000000e"))
    assert world.store.get(f"{layout.outputs('job-0000000d')}/model.bin") == b"weights"
    assert world.backend.cleaned == ["job-0000000d"]


def test_prune_of_many_jobs_keeps_to_one_screen_and_ends_with_what_it_did(
    world: World, capsys: Capture
) -> None:
    for number in range(25):
        world.job(f"job-{number:08x}", name="many", age=30 * DAY)
        world.succeed(f"job-{number:08x}", ended=NOW - 20 * DAY)
    assert world("jobs", "prune", "--dry-run") == 0
    assert capsys.readouterr().out.count("  many\n") == 25
    assert world("jobs", "prune", "--yes") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("Removed ")
    assert lines[-2].endswith(" more")
    assert len(lines) == 22


def test_prune_asks_and_does_nothing_without_an_answer(
    world: World, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    history(world)
    with open(os.devnull) as nobody:
        monkeypatch.setattr(sys, "stdin", nobody)
        assert world("jobs", "prune") == 2
    assert "--yes" in capsys.readouterr().err
    assert remaining(world) == "12abcdef"


def test_prune_takes_no_chances_with_plans_that_it_cannot_read(world: World) -> None:
    history(world)
    newer = {"schema_version": 99, "forest": [{"root": "1" * 64}], "payload": "c" * 64}
    for plan in (json.dumps(newer).encode(), b"garbage " + b"1" * 64 + b" \xff " + b"c" * 64):
        world.store.put(layout.plan("job-0000000f"), plan)
        assert world("jobs", "prune", "--yes") == 0
        assert set("12c") <= set(remaining(world))


def test_prune_goes_on_when_a_job_cannot_be_removed(world: World, capsys: Capture) -> None:
    world.job("job-00000001", age=30 * DAY)
    world.succeed("job-00000001", ended=NOW - 20 * DAY)
    world.job("job-00000002", age=30 * DAY)
    world.succeed("job-00000002", ended=NOW - 20 * DAY)
    world.backend.broken = {"job-00000001"}
    assert world("jobs", "prune", "--yes") == 5
    assert world.store.has(layout.ref("job-00000001"))
    assert not world.store.has(layout.ref("job-00000002"))
    assert "job-00000001 was kept" in capsys.readouterr().err


def test_prune_removes_what_a_killed_submission_left(world: World) -> None:
    world.plan("job-0000000a", world.blob("a"))
    os.utime(world.store.path(layout.job("job-0000000a")), (NOW - 2 * DAY, NOW - 2 * DAY))
    world.plan("job-0000000b", world.blob("b"))
    os.utime(world.store.path(layout.job("job-0000000b")), (NOW - 60, NOW - 60))
    assert world("jobs", "prune", "--yes") == 0
    assert remaining(world) == "b"
    assert not list(world.store.list(layout.job("job-0000000a")))


def ship(world: World, folder: Path, *, age: float) -> str:
    """Send a real tree, as a submission does, and let it age. Returns its digest."""
    from kinetic._source import bundle

    before = contents(world)
    built = bundle.build(folder, cache_dir=folder.parent / "cache")
    bundle.upload(built, world.store)
    for key in contents(world) - before:
        os.utime(world.store.path(key), (NOW - age, NOW - age))
    return built.tree.manifest.digest


def plant(folder: Path, changing: str = "") -> None:
    (folder / "pkg").mkdir(parents=True, exist_ok=True)
    (folder / "pkg/a.py").write_text("a = 1" * 100)
    (folder / "b.py").write_text(f"b = {changing!r}")
    (folder / "weights").write_bytes(b"w" * 300_000)


def test_a_real_tree_is_kept_as_long_as_a_job_needs_it(world: World, tmp_path: Path) -> None:
    plant(tmp_path / "tree")
    world.job("job-00000001")
    world.plan("job-00000001", world.blob("a"), ship(world, tmp_path / "tree", age=9 * DAY))
    before = contents(world)
    assert len(before) == 5, "payload, large file, pack, index, record"
    pruning.sweep(world.store, older_than=NOW - DAY)
    assert contents(world) == before
    world.succeed("job-00000001")
    assert world("jobs", "cleanup", "job-00000001") == 0
    pruning.sweep(world.store, older_than=NOW - DAY)
    assert contents(world) == set()


def test_old_content_of_a_young_tree_stays_with_its_record(world: World, tmp_path: Path) -> None:
    """Or the next submission would find the record, send nothing, and the job would miss its
    files. The same for a tree that a plan names."""
    from kinetic._source import bundle

    plant(tmp_path / "tree", "first")
    old = ship(world, tmp_path / "tree", age=9 * DAY)
    before = contents(world)
    plant(tmp_path / "tree", "second")
    young = ship(world, tmp_path / "tree", age=60)
    assert len(contents(world) - before) == 3, "a small pack, its index, a record"
    made = bundle.build(tmp_path / "tree", cache_dir=tmp_path / "cache")
    for older_than in (NOW - DAY, NOW + DAY):
        swept = pruning.sweep(world.store, older_than=older_than)
        keys = [content.key for content in swept.contents]
        assert keys == ([layout.tree(old)] if older_than < NOW else [])
        bundle.unpack(world.store, made.tree, tmp_path / f"dest{older_than}")
        world.plan("job-00000001", world.blob("a"), young)
        world.job("job-00000001")


def test_a_sweep_that_is_killed_leaves_nothing_that_vouches_for_what_is_gone(
    world: World, tmp_path: Path
) -> None:
    plant(tmp_path / "tree")
    ship(world, tmp_path / "tree", age=9 * DAY)
    found = pruning.find_unused(world.store, older_than=NOW - DAY)
    kinds = [content.key.partition("/")[0] for content in found.contents]
    assert kinds == ["trees", "pack-indexes", "packs", "blobs"]


def test_a_pack_that_was_sent_again_is_young(world: World, tmp_path: Path) -> None:
    """A submission that was killed left it; the next one wrote its index."""
    plant(tmp_path / "tree")
    digest = ship(world, tmp_path / "tree", age=9 * DAY)
    world.store.delete(layout.tree(digest))
    (index,) = world.store.list(layout.PACK_INDEXES)
    os.utime(world.store.path(index), (NOW, NOW))
    swept = pruning.sweep(world.store, older_than=NOW - DAY)
    assert [content.key.partition("/")[0] for content in swept.contents] == ["blobs"]


def test_a_sweep_survives_content_that_vanishes_meanwhile(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host removes what it finds damaged, without a lock."""
    listed = pruning._contents

    def vanishing(folder: Path, prefix: str) -> list[pruning.Content]:
        found = list(listed(folder, prefix))
        for each in found:
            world.store.delete(each.key)
        return found

    young, old = world.tree("1", world.blob("3"), age=60), world.tree("2")
    monkeypatch.setattr(pruning, "_contents", vanishing)
    swept = pruning.sweep(world.store, older_than=NOW - DAY)
    assert [each.digest for each in swept.contents] == [old, "3" * 64]
    assert young not in {each.digest for each in swept.contents}


def test_prune_removes_credentials_of_ended_programs(world: World, capsys: Capture) -> None:
    old, runs = (folders.root() / job_id for job_id in ("job-0000000a", "job-0000000b"))
    for folder in (old, runs):
        (folder / "credentials").mkdir(parents=True)
        (folder / folders.LOCK).write_text("held\n")
        os.utime(folder, (NOW - 2 * DAY, NOW - 2 * DAY))
    with folders.held(runs):
        assert world("jobs", "prune", "--dry-run") == 0
        assert "1 folder of ended programs" in capsys.readouterr().out
        assert old.exists()
        assert world("jobs", "prune", "--yes") == 0
    assert (old.exists(), runs.exists()) == (False, True)


def test_prune_of_nothing(world: World, capsys: Capture) -> None:
    assert world("jobs", "prune") == 0
    assert "0 jobs" in capsys.readouterr().out


def test_a_sweep_waits_for_submissions_to_end(world: World) -> None:
    """A submission finds old content in place, and names it in its plan only later: the sweep must
    not come between."""
    import threading

    content = world.blob("a")
    order: list[str] = []
    with submitting(world.store):
        assert world.store.has(layout.blob(content))
        sweeper = threading.Thread(
            target=lambda: (pruning.sweep(world.store, older_than=NOW), order.append("swept"))
        )
        sweeper.start()
        sweeper.join(0.05)
        world.plan("job-00000001", content)
        order.append("submitted")
    sweeper.join()
    assert order == ["submitted", "swept"]
    assert world.store.has(layout.blob(content))


# -- run -------------------------------------------------------------------------------------------


def run(world: World, *argv: str) -> int:
    return world("run", "-a", "tpu-v6e-8", *argv)


def test_run_passes_its_options_on(world: World, capsys: Capture, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    options = [
        "--env",
        "A=1=2",
        "--env",
        "B=",
        "--secret",
        "HF_TOKEN",
        "--timeout",
        "2h",
        "--start-timeout",
        "30s",
    ]
    more = [
        "--slices",
        "1",
        "--hang-timeout",
        "5m",
        "--retries",
        "2",
        "--name",
        "exp 1",
        "--output-dir",
        "out",
        "--backend",
        "local",
        "--queue",
        "team",
        "--priority",
        "high",
        "-d",
    ]
    assert run(world, *options, *more, str(script), "--env", "C=3") == 0
    assert capsys.readouterr().out == "job-00000001\n"
    function, given = world.submitted[0]
    assert given == {
        "accelerator": "tpu-v6e-8",
        "slices": 1,
        "env": {"A": "1=2", "B": ""},
        "secrets": ["HF_TOKEN"],
        "timeout": 7200.0,
        "start_timeout": 30.0,
        "hang_timeout": 300.0,
        "retries": 2,
        "name": "exp 1",
        "output_dir": "out",
        "backend": "local",
        "queue": "team",
        "priority": "high",
        "reservation": None,
        "joins_jax": "lazy",
    }
    assert function.__name__ == "train.py"


def test_run_prints_what_the_leader_prints_where_it_printed_it(
    world: World, capfd: Capture
) -> None:
    world.backend.output["job-00000001"] = [
        chunk(b"out\n"),
        chunk(b"err\n", stream=STDERR),
        chunk(b"other\n", 1),
        None,
    ]
    world.backend.at_end = lambda: world.succeed("job-00000001")
    assert run(world, "--", "ls") == 0
    assert capfd.readouterr() == ("out\n", "err\n")
    assert run(world, "--all-hosts", "--", "ls") == 0
    assert capfd.readouterr() == ("[host 0] out\n[host 1] other\n", "[host 0] err\n")
    assert world.submitted[0][1]["joins_jax"] == "program"


def test_run_ends_with_the_code_of_the_program(world: World, capfd: Capture) -> None:
    exited = HostReport(1, Exit.SYS_EXIT, exit_code=42, detail="The function called sys.exit(42).")
    world.backend.at_end = lambda: world.fail("job-00000001", exited)
    assert run(world, "--", "make", "all") == 42
    out, err = capfd.readouterr()
    assert (out, err) == ("", "error: make exited with code 42 on host 1 of 2 (job-00000001).\n")
    world.backend.at_end = lambda: world.fail(
        "job-00000001", HostReport(1, Exit.SIGNAL, signal=9, detail="Killed by SIGKILL.")
    )
    assert run(world, "--", "make") == 137
    assert "SIGKILL" in capfd.readouterr().err


def test_ctrl_c_says_how_to_come_back(world: World, capfd: Capture) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    world.backend.at_end = interrupt
    assert run(world, "--", "ls") == 130
    err = capfd.readouterr().err
    assert "kinetic jobs logs -f job-00000001" in err
    assert "kinetic jobs cancel job-00000001" in err
    assert world.backend.cancelled == []


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["--"],
        ["-m"],
        ["absent.py"],
        ["ls", "-l"],
        ["--env", "A", "--", "ls"],
        ["--env", "=x", "--", "ls"],
        ["--timeout", "0", "--", "ls"],
        ["--retries", "-1", "--", "ls"],
        ["--hang-timeout", "5m", "--", "ls"],
        ["--unknown", "--", "ls"],
    ],
)
def test_a_wrong_command_line_creates_nothing(
    world: World, argv: list[str], capsys: Capture
) -> None:
    assert run(world, *argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert world.submitted == []


def test_an_accelerator_is_needed(world: World, capsys: Capture) -> None:
    assert world("run", "--", "ls") == 2
    assert "--accelerator" in capsys.readouterr().err


# -- accelerators, the root, and errors ------------------------------------------------------------


def test_accelerators(world: World, capsys: Capture) -> None:
    assert world("accelerators", "--json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert {"tpu-v6e-16", "cpu"} <= {row["name"] for row in rows}
    assert world("accelerators", "V6E-16") == 0
    assert capsys.readouterr().out.splitlines()[1].split()[:4] == ["tpu-v6e-16", "tpu", "16", "4"]
    assert world("accelerators", "trillium-8") == 0
    assert "tpu-v6e-8" in capsys.readouterr().out
    assert world("accelerators", "tpu-v6e-13") == 2
    assert "tpu-v6e-16" in capsys.readouterr().err


@pytest.mark.parametrize("columns", [80, 200])
def test_on_a_terminal_only_names_are_cut(
    world: World, capsys: Capture, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    world.job("job-00000001", name="a" * 100)
    world.job("job-00000002", name="[red]bracket :smile:")
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert world("jobs", "list") == 0
    out = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    assert max(map(len, out.splitlines())) <= columns
    assert len(out.splitlines()) == 3
    assert out.count("job-0000000") == 2
    assert out.count("tpu-v6e-8") == 2
    assert out.count("RUNNING") == 2
    assert "[red]bracket :smile:" in out
    assert ("a" * 100 in out) is (columns == 200)


def test_typing_errors_get_a_hint(world: World, capsys: Capture) -> None:
    assert world("jbos") == 2
    assert "Did you mean 'jobs'?" in capsys.readouterr().err
    assert world("jobs", "lst") == 2
    assert "Did you mean 'list'?" in capsys.readouterr().err
    assert world("jobs", "list", "--josn") == 2


def test_help_is_whole(world: World, capsys: Capture) -> None:
    for argv in (
        [],
        ["jobs"],
        ["run"],
        ["accelerators"],
        *(["jobs", c] for c in ("list", "status", "logs", "result", "wait")),
    ):
        assert world(*argv, "--help") == 0
        out = capsys.readouterr().out
        assert "Example" in out
        assert max(map(len, out.splitlines())) <= 100
    assert world("--help") == 0
    out = capsys.readouterr().out
    assert all(code in out for code in ("124", "130", "  5 "))
    assert world("--version") == 0
    assert capsys.readouterr().out == f"kinetic {kinetic.__version__}\n"


def test_an_error_shows_its_traceback_only_when_debugging(
    world: World, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fault(*_: Any) -> Any:
        raise ZeroDivisionError("a fault of ours")

    world.job("job-00000001")
    app = AppContext(world.store, fault, fault, world._submit)
    assert call(["jobs", "wait", "job-0"], app) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: ZeroDivisionError: a fault of ours\n")
    assert "KINETIC_LOG_LEVEL=DEBUG" in err
    monkeypatch.setenv("KINETIC_LOG_LEVEL", "debug")
    assert call(["jobs", "wait", "job-0"], app) == 1
    assert "Traceback" in capsys.readouterr().err


def test_a_lost_host_is_a_failure_of_the_job(world: World, capsys: Capture) -> None:
    def lost(*_: Any) -> Any:
        raise HostLost("host 3 died", job_id="job-00000001", hosts=[3])

    world.job("job-00000001")
    assert call(["jobs", "wait", "job-0"], AppContext(world.store, lost, lost, world._submit)) == 1
    assert capsys.readouterr().err == "error: host 3 died\n"


def loaded_by(*argv: str) -> set[str]:
    code = (
        "import sys; from kinetic.cli.root import call; code = call(sys.argv[1:]);"
        "print(*sys.modules, file=sys.stderr); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *argv], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return set(done.stderr.splitlines()[-1].split())


@pytest.mark.parametrize(
    "argv", [("--help",), ("jobs", "list"), ("accelerators",), ("run", "--help"), ("--version",)]
)
def test_light_commands_load_no_heavy_package(argv: tuple[str, ...]) -> None:
    heavy = {
        "rich",
        "grpc",
        "google",
        "cloudpickle",
        "tblib",
        "jax",
        "numpy",
        "pathspec",
        "asyncio",
        "multiprocessing",
    }
    assert not {name.partition(".")[0] for name in loaded_by(*argv)} & heavy


def test_a_list_loads_what_reads_jobs_and_nothing_that_runs_them() -> None:
    ours = {name for name in loaded_by("jobs", "list") if name.startswith("kinetic.")}
    rooms = {".".join(name.split(".")[:2]) for name in ours}
    assert rooms <= {
        "kinetic._client",
        "kinetic._config",
        "kinetic._core",
        "kinetic._shadows",
        "kinetic._store",
        "kinetic._system",
        "kinetic.cli",
        "kinetic.errors",
        "kinetic.version",
    }
    assert {name for name in ours if name.startswith("kinetic._client.")} == {
        "kinetic._client.board",
        "kinetic._client.board.text",
    }
    assert len(ours) <= 36


def test_help_of_the_root_loads_click_and_little_of_ours() -> None:
    ours = {name for name in loaded_by("--help") if name.startswith("kinetic.")}
    assert ours <= {
        "kinetic.version",
        "kinetic._shadows",
        "kinetic.errors",
        "kinetic.cli",
        "kinetic.cli.root",
        "kinetic.cli.lazy",
        "kinetic.cli.output",
        "kinetic._client",
        "kinetic._client.board",
        "kinetic._client.board.text",
        "kinetic._system",
        "kinetic._system.streams",
        "kinetic.cli.exit_codes",
    }


def test_the_configured_store_is_read(home: Path, capsys: Capture) -> None:
    World(home).job("job-00000007")
    assert time.time() > NOW
    assert call(["jobs", "list", "--json"]) == 0
    (job,) = json.loads(capsys.readouterr().out)
    assert (job["job_id"], job["state"]) == ("job-00000007", "UNKNOWN")


def test_on_a_terminal_errors_break_between_words(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    words = (
        "These words are too long for the terminal at hand, `kinetic jobs list` with "
        "some-thing-with-hyphens."
    )
    code = "  File x, line 1, as it is, long or not"
    output.error(f"{words}\n{code}\nlast", "hint")
    assert capsys.readouterr().err == f"error: {words}\n{code}\nlast\nhint\n"
    monkeypatch.setenv("COLUMNS", "30")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    output.error(f"{words}\n{code}\nlast", "hint")
    lines = capsys.readouterr().err.splitlines()
    lines.remove(code)
    assert max(map(len, lines)) <= 30
    assert " ".join(lines) == f"error: {words} last hint"
    assert any("`kinetic jobs list`" in line for line in lines)


def test_a_command_ends_without_taking_its_modules_apart() -> None:
    code = (
        "import atexit, sys\n"
        "class Module:\n"
        "    def __del__(self): print('taken apart')\n"
        "module = Module()\n"
        "atexit.register(print, 'exit handlers have run')\n"
        "from kinetic.cli.main import main\n"
        "main()"
    )
    for argv, expected in (("--version", 0), ("--no-such-option", 2)):
        done = subprocess.run(
            [sys.executable, "-c", code, argv], cwd=ROOT, capture_output=True, text=True
        )
        assert done.returncode == expected
        assert done.stdout.splitlines()[-1] == "exit handlers have run"
        assert ("no-such-option" in done.stderr) == (expected != 0)
