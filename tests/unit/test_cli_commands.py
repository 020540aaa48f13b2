"""The command line from argv to exit code, over a real local store and a fake backend."""

from __future__ import annotations

import json
import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from batch_cases import leave
from cli_fakes import DAY, NOW, Capture, World

from kinetic._client.batch.inputs import BatchEnd
from kinetic._client.batch.records import Batch
from kinetic._core import layout
from kinetic._core.events import EventKind, GangEvent
from kinetic._core.exits import Exit
from kinetic._core.outcome import HostReport, Outcome, RemoteError, Verdict, judge
from kinetic._core.ref import JobRef
from kinetic._core.state import JobStatus
from kinetic._pickling import results
from kinetic._store.local import LocalStore
from kinetic.cli.context import AppContext
from kinetic.cli.root import call
from kinetic.errors import PreflightError, UsageError


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path / "store")


# -- list and status -------------------------------------------------------------------------------


def test_list_shows_all_states_newest_first(world: World, capsys: Capture) -> None:
    for number, age in enumerate((4000, 3000, 2000, 1000)):
        world.job(f"job-0000000{number}", name=f"f{number}", age=age)
    world.succeed("job-00000000")
    world.fail("job-00000001")
    world.end("job-00000002", Outcome(Verdict.CANCELLED))
    assert world("jobs", "list") == 0
    lines = capsys.readouterr().out.splitlines()
    heads = ["ID", "NAME", "ACCELERATOR", "HOSTS", "STATE", "TIME", "AGE", "REASON"]
    assert lines[0].split() == heads
    assert [line.split() for line in lines[1:]] == [
        ["job-00000003", "f3", "tpu-v6e-8", "1", "RUNNING", "-", "16m"],
        ["job-00000002", "f2", "tpu-v6e-8", "1", "CANCELLED", "-", "33m"],
        ["job-00000001", "f1", "tpu-v6e-8", "1", "FAILED", "-", "50m", "host", "1", "ended"],
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
    assert [len(ids) for ids in world.backend.asked] == [7]


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
    keys = [layout.JobKeys(f"job-0000000{number}").outcome for number in range(4)]
    assert sorted(read) == sorted(
        [*keys, *(layout.JobKeys(f"job-0000000{number}").ref for number in range(6))]
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
        world.store.put(layout.JobKeys(job_id).ref, json.dumps(ref.to_json()).encode())
        world.store.put(layout.GroupKeys(group_id).batch, b"{}")
        os.utime(
            world.store.path(layout.GroupKeys(group_id).batch), (NOW - 30 * DAY, NOW - 30 * DAY)
        )
    world.succeed("job-00000001", ended=NOW - 30 * DAY)
    world.store.put(layout.GroupKeys("grp-00000003").batch, b"{}")  # a batch that has just started
    assert world("jobs", "prune", "--yes") == 0
    assert [*world.store.list(layout.GROUPS)] == [
        layout.GroupKeys("grp-00000002").batch,
        layout.GroupKeys("grp-00000003").batch,
    ]


def test_jobs_of_one_batch(world: World, capsys: Capture) -> None:
    for number in range(4):
        ref = world.job(f"job-0000000{number}")
        if number % 2:
            grouped = replace(ref, group_id="grp-00000001", group_kind="map", group_index=number)
            world.store.put(layout.JobKeys(ref.job_id).ref, json.dumps(grouped.to_json()).encode())
    assert world("jobs", "list", "--group", "grp-00000001", "--json") == 0
    assert [job["job_id"] for job in json.loads(capsys.readouterr().out)] == [
        "job-00000003",
        "job-00000001",
    ]
    assert world("jobs", "status", "job-00000003") == 0
    assert "grp-00000001, input 3" in capsys.readouterr().out
    assert world("jobs", "status", "grp-00000001") == 0
    assert capsys.readouterr().out.split() == [
        "Batch:",
        "grp-00000001",
        "Jobs:",
        "2:",
        "2",
        "running",
    ]


def test_a_batch_without_a_job_and_one_that_is_not_there(world: World, capsys: Capture) -> None:
    leave(world.store, Batch("grp-00000001", 5, NOW, name="a sweep"))
    assert world("jobs", "status", "grp-00000001") == 0
    words = " ".join(capsys.readouterr().out.split())
    assert words == (
        "Batch: a sweep (grp-00000001) Inputs: 5 Jobs: none Failed: 5 inputs without a job. "
        "Input 0 of grp-00000001 was not submitted, because the process that submitted the batch "
        "ended first. To run this input, submit it again."
    )
    assert world("jobs", "status", "--json", "grp-00000001") == 0
    assert json.loads(capsys.readouterr().out) == {
        "group_id": "grp-00000001",
        "name": "a sweep",
        "total": 5,
        "created_at": NOW,
        "jobs": {},
        "cost": None,
        "not_submitted": 5,
    }
    assert world("jobs", "wait", "grp-00000001") == 1
    assert "0 of 5 inputs succeeded. 5 inputs without a job. Input 0" in capsys.readouterr().err
    assert world("jobs", "status", "grp-2") != 0
    assert "has no batch 'grp-2'" in capsys.readouterr().err


def test_a_batch_that_was_stopped_says_how_many_inputs_it_left_out(
    world: World, capsys: Capture
) -> None:
    records = leave(world.store, Batch("grp-00000001", 3, NOW))
    records.note_end(BatchEnd("another input failed", frozenset({1, 2})))
    assert world("jobs", "status", "grp-00000001") == 0
    words = " ".join(capsys.readouterr().out.split())
    left_out = "Left out: 2 inputs, because another input failed"
    assert words == f"Batch: grp-00000001 Inputs: 3 Jobs: none {left_out}"


def test_a_batch_that_has_ended_is_not_cancelled(world: World, capsys: Capture) -> None:
    """Input 0 ran; input 1 was never submitted, because the submitting process was killed."""
    batch = Batch("grp-00000001", 2, NOW)
    leave(world.store, batch)
    job_id = batch.job_id(0)
    member = replace(world.job(job_id), group_id="grp-00000001", group_index=0)
    world.store.put(layout.JobKeys(job_id).ref, json.dumps(member.to_json()).encode())
    world.succeed(job_id)
    assert world("jobs", "cancel", "grp-00000001") == 0
    assert capsys.readouterr() == ("", "grp-00000001 has already ended.\n")
    assert world.backend.cancelled == []


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
    history = "".join(json.dumps(event.to_json()) + "\n" for event in events)
    world.store.put(layout.JobKeys("job-00000001").events, history.encode())
    assert world("jobs", "status", "job-00000001") == 0
    out = capsys.readouterr().out
    assert "(running for 40s in 2 attempts)" in out
    lines = [line.split() for line in out.splitlines() if line]
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
    world.store.put(layout.JobKeys("job-00000001").outcome, b"\0garbage")
    world.job("job-00000002", name="evil\x1b]0;title\x07\n")
    for number, data in enumerate((b"", b"[]", b'{"job_id": 3}', b"\xff\xfe")):
        world.store.put(layout.JobKeys(f"job-bad{number}").ref, data)
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
    app = AppContext(world.store, missing, missing, lambda: NOW, world._submit)
    world.job("job-00000002")
    assert call(["jobs", "list"], app) == 0
    printed = capsys.readouterr()
    assert "UNKNOWN" in printed.out
    assert printed.err == "The states of some jobs are unknown. The error: no such backend\n"
    assert call(["jobs", "prune", "--yes", "--older-than", "1s"], app) == 0
    assert world.store.has(layout.JobKeys("job-00000001").ref)


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


def test_no_host_is_blamed_for_a_job_that_took_too_long(world: World, capsys: Capture) -> None:
    late = [
        HostReport(host, Exit.TIMEOUT, "the job ran longer than its timeout of 1 s", ended_at=at)
        for host, at in ((0, 12.0), (1, 11.0))
    ]
    outcome = judge(2, late, now=13.0)
    assert outcome.first is not None
    assert outcome.first.host == 0, "whichever ended first"
    world.job("job-00000001", hosts=2)
    world.end("job-00000001", outcome)
    assert world("jobs", "status", "job-00000001") == 0
    out = capsys.readouterr().out
    assert "timeout of 1 s" in " ".join(out.split())
    assert "Blamed" not in out


@pytest.mark.parametrize("kind", [EventKind.WAITING, EventKind.PROGRAMS])
@pytest.mark.parametrize("is_cause", [True, False])
def test_a_longer_timeout_is_no_advice_for_a_job_that_stood_still(
    world: World, capsys: Capture, kind: EventKind, *, is_cause: bool
) -> None:
    """Unless the job went on after the warning, so that its reason does not contain it."""
    warning = "host 1 has returned, and host 0 has stood still for 20 s: does it wait?"
    reason = f"it ran longer than its timeout of 1 s. {warning.capitalize() if is_cause else ''}"
    outcome = judge(2, [HostReport(host, Exit.TIMEOUT, reason) for host in (0, 1)], now=13.0)
    world.job("job-00000001", hosts=2)
    events = [GangEvent(EventKind.READY, time=NOW - 50), GangEvent(kind, None, warning)]
    history = "".join(json.dumps(event.to_json()) + "\n" for event in events)
    world.store.put(layout.JobKeys("job-00000001").events, history.encode())
    world.end("job-00000001", outcome)
    assert world("jobs", "explain", "--json", "job-00000001") == 0
    page = json.loads(capsys.readouterr().out)["sections"]
    assert page["Next"].startswith("Fix this cause first" if is_cause else "Set a longer timeout=")


@pytest.mark.parametrize("hosts", [1, 4])
def test_no_host_is_blamed_that_has_never_run(world: World, capsys: Capture, hosts: int) -> None:
    why = "No node of the cluster has tpu-v6e-slice 8x8."
    idle = tuple(HostReport(i, Exit.NEVER_JOINED, why if i == 0 else "") for i in range(hosts))
    reason = f"the job did not start within 8 s: {why}"
    world.job("job-00000001", hosts=hosts)
    world.end("job-00000001", Outcome(Verdict.FAILED, (0,), reason, idle))
    assert world("jobs", "status", "job-00000001") == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "Blamed" not in out
    assert "never_joined" not in out
    assert out.count(why) == 1


def test_status_shows_what_the_compilation_cache_saved(world: World, capsys: Capture) -> None:
    """Two of three jobs took programs from JAX's cache: their status says how many, and the seconds
    saved; the third one's has no such line."""
    lines = []
    for number, (hits, saved_s) in enumerate([(0, 0.0), (1, 4.0), (12, 340.0)]):
        job_id = f"job-0000000{number}"
        world.job(job_id)
        report = HostReport(0, Exit.RETURNED, cache_hits=hits, compile_saved_s=saved_s)
        world.end(job_id, Outcome(Verdict.SUCCEEDED, reports=(report,), ended_at=NOW))
        assert world("jobs", "status", job_id) == 0
        lines.append([x for x in capsys.readouterr().out.splitlines() if x.startswith("Compiled")])
        assert world("jobs", "status", "--json", job_id) == 0
        (reported,) = json.loads(capsys.readouterr().out)["outcome"]["reports"]
        assert (reported["cache_hits"], reported["compile_saved_s"]) == (hits, saved_s)
    assert [" ".join(" ".join(each).split()) for each in lines] == [
        "",
        "Compiled: 1 program from the cache, 4.0s saved",
        "Compiled: 12 programs from the cache, 5m40s saved",
    ]


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
    assert re.search(r"(?m)^388 +777 +signal", out)
    assert "992 more hosts" in err


@pytest.mark.parametrize(
    "command", ["status", "logs", "result", "wait", "cancel", "cleanup", "stacks"]
)
def test_unknown_ambiguous_and_invalid_job_ids_are_refused(
    world: World, command: str, capsys: Capture
) -> None:
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
    world.succeed(
        "job-00000001",
        {"a": np.arange(3), "b": np.float32(0.5), "c": [np.nan, -np.inf], 1: np.array([np.nan])},
    )
    assert world("jobs", "result", "--json", "job-0") == 0
    document = {"a": [0, 1, 2], "b": 0.5, "c": ["NaN", "-Infinity"], "1": ["NaN"]}
    assert json.loads(capsys.readouterr().out) == document
    for value in ({1, 2}, {(1, 2): 3}):
        world.succeed("job-00000001", value)
        assert world("jobs", "result", "--json", "job-0") == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert "--json" in err


def test_what_a_host_raised_does_not_steer_the_terminal(world: World, capsys: Capture) -> None:
    world.job("job-00000001")
    key = layout.HostKeys("job-00000001", 1, 0).error
    for problem in (ValueError("\x1b]0;title\x07 gone\r"), UsageError("\x1b[2Jgone")):
        world.store.put(key, results.pack_exception(problem))
        remote = RemoteError(type(problem).__name__, str(problem), "", key=key)
        world.fail("job-00000001", HostReport(0, Exit.RAISED, error=remote))
        assert world("jobs", "result", "job-0") == 1
        err = capsys.readouterr().err
        assert "gone" in err
        assert not {"\x1b", "\x07", "\r"} & set(err)


def test_the_result_of_a_failed_job_is_its_error(world: World, capsys: Capture) -> None:
    world.job("job-00000001", hosts=2)
    for problem in (
        ZeroDivisionError("by zero"),
        KeyboardInterrupt("theirs"),
        BrokenPipeError(32, "theirs"),
        SystemExit("theirs"),
    ):
        key = layout.HostKeys("job-00000001", 1, 1).error
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


def test_wait_exits_with_0_for_success_and_1_for_failure(world: World, capsys: Capture) -> None:
    world.job("job-00000001", hosts=2)
    world.succeed("job-00000001")
    assert world("jobs", "wait", "job-0") == 0
    world.fail("job-00000001")
    assert world("jobs", "wait", "job-0") == 1
    assert "host 1 ended" in capsys.readouterr().err
    assert world("jobs", "wait", "--json", "job-0") == 1
    assert json.loads(capsys.readouterr().out)["verdict"] == "failed"


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_wait_keeps_its_exit_code_when_the_reader_of_the_pipe_has_ended(
    world: World, monkeypatch: pytest.MonkeyPatch, stream: str
) -> None:
    """`jobs wait` exits with the job's code although the reader of its output has ended."""
    world.job("job-00000001")
    world.fail("job-00000001")
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as dead:
        monkeypatch.setattr(sys, stream, dead)
        assert world("jobs", "wait", "job-0", "--json") == 1


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
