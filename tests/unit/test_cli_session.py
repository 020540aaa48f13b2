"""`kinetic session` and `kinetic run --session`, over a fake backend that holds the slices."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cli_fakes import Capture, World
from manifest_cases import planned

from kinetic._client.sessions import SessionHandle
from kinetic._core import layout
from kinetic._core.outcome import Outcome, Verdict
from kinetic._core.place import Place
from kinetic._core.plan import Cost
from kinetic._core.ref import JobRef
from kinetic._core.session import Session
from kinetic._core.state import JobStatus
from kinetic.cli import suggestions

HELD = "job-0000005e"


class Sessions(World):
    """A world with the session dev, which holds two slices for $3.60 an hour since a minute ago."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.now = time.time()
        self.held: list[tuple[str, Mapping[str, Any]]] = []
        self.backend.cancelled = _Cancelled(self)
        self.app = replace(self.app, now=time.time, hold=self._hold)
        self.session = self.hold("dev")

    def hold(self, name: str, job_id: str = HELD) -> JobRef:
        cost = Cost(3.60, "list price, us-east5")
        plan = replace(
            planned("tpu-v6e-16", slices=2), job_id=job_id, holds=Session(name), cost=cost
        )
        self.job(job_id, name=f"session {name}")
        ref = replace(self.app.find(job_id), session_name=name, accelerator="tpu-v6e-16")
        ref = replace(ref, created_at=self.now - 70)
        keys = layout.JobKeys(job_id)
        self.store.put(keys.ref, json.dumps(ref.to_json()).encode())
        self.store.put(keys.plan, json.dumps(plan.to_json()).encode())
        self.store.put(keys.events, b'{"time": %f, "kind": "ready"}\n' % (self.now - 60))
        self.store.put(layout.session(name), b'{"job_id": "%s"}' % job_id.encode())
        return ref

    def call(self, job_id: str, *, waits: bool = True, name: str = "train") -> None:
        """Add a call of the session; `waits` puts it into the queue."""
        self.job(job_id, name=name)
        ref = replace(self.app.find(job_id), place=Place("fake", session=HELD))
        self.store.put(layout.JobKeys(job_id).ref, json.dumps(ref.to_json()).encode())
        if waits:
            self.store.put(layout.JobKeys(HELD).call(time.time_ns(), job_id), b"")

    def end_session(self, job_id: str = HELD) -> None:
        self.end(job_id, Outcome(Verdict.CANCELLED, ended_at=self.now))

    def _hold(self, accelerator: str, options: Mapping[str, Any]) -> tuple[SessionHandle, bool]:
        self.held.append((accelerator, options))
        return self.app.session_of(self.session), len(self.held) == 1


class _Cancelled(list[str]):
    """The cancelled jobs of a world, which end at once."""

    def __init__(self, world: Sessions) -> None:
        super().__init__()
        self._world = world

    def append(self, job_id: str) -> None:
        super().append(job_id)
        self._world.end_session(job_id)


@pytest.fixture
def world(tmp_path: Path) -> Sessions:
    return Sessions(tmp_path / "store")


def test_start_says_what_is_held_and_how_to_use_and_stop_it(
    world: Sessions, capsys: Capture
) -> None:
    """The name, the slices, their price and the end come first, then the next commands."""
    options = ["--slices", "2", "--spot", "--idle-timeout", "1h", "--budget", "50", "--cpu", "4"]
    assert world("session", "start", "tpu-v6e-16", "--name", "dev", *options) == 0
    out, err = capsys.readouterr()
    assert (out, err) == (
        "The session dev holds 2 slices of tpu-v6e-16 ($3.60 an hour); it ends after 30 min "
        "without a call, and at the latest 12 h after its start.\n"
        "To use it: kinetic run --session dev -- CMD\n"
        "To stop it: kinetic session stop dev\n",
        "",
    )
    ((accelerator, passed),) = world.held
    given = {name: value for name, value in passed.items() if value}
    assert accelerator == "tpu-v6e-16"
    assert given == {
        "name": "dev",
        "slices": 2,
        "spot": True,
        "idle_timeout": 3600.0,
        "max_lifetime": 12 * 3600.0,
        "budget": "50",
        "cpu": "4",
    }
    assert world("session", "start", "tpu-v6e-16", "--name", "dev", "--detach") == 0
    out, err = capsys.readouterr()
    assert "The session dev exists already (job-0000005e)" in err
    assert "keeps the options with which it was started.\n" in err
    assert out.startswith("The session dev will hold 2 slices")
    assert world("session", "start", "tpu-v6e-16", "--name", "dev", "--detach", "--keep") == 0
    assert "keep=True has no effect" in capsys.readouterr().err


def test_while_hosts_are_awaited_each_reason_is_one_line(
    world: Sessions, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reason that stays the same is printed once, on stderr; Ctrl-C leaves the session alone."""
    world.backend.phases[HELD] = JobStatus.PENDING
    reasons = iter(["no quota", "no quota", "nodes start"])

    def sleep(_: float) -> None:
        world.backend.reasons[HELD] = reason = next(reasons, "")
        if not reason:
            raise KeyboardInterrupt

    monkeypatch.setattr("kinetic._client.sessions.time.sleep", sleep)
    assert world("session", "start", "tpu-v6e-16", "--name", "dev") == 130
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "kinetic: waiting for the session dev: no quota",
        "kinetic: waiting for the session dev: nodes start",
        "",
        "The session dev keeps starting (job-0000005e). To see it: kinetic session status dev",
        "To stop it: kinetic session stop dev",
    ]
    assert not world.backend.cancelled


def test_the_list_has_sessions_that_hold_slices(world: Sessions, capsys: Capture) -> None:
    """A session that has ended is listed only with --all."""
    world.hold("old", "job-0000001d")
    world.end_session("job-0000001d")
    world.call("job-00000001", waits=False)
    world.succeed("job-00000001")
    world.call("job-00000002")
    world.call("job-00000003")
    assert world("session", "list") == 0
    head, row = capsys.readouterr().out.splitlines()
    assert head.split() == ["NAME", "ACCELERATOR", "STATE", "HELD", "$/H", "COST", "CALLS"]
    name, accelerator, state, _held, rate, cost, calls = row.split("  ")[:1] + [
        cell for cell in row.split("  ")[1:] if cell
    ]
    assert (name, accelerator.strip()) == ("dev", "2 x tpu-v6e-16")
    assert len(row) < 80
    assert (state.strip(), rate.strip(), cost.strip()) == ("RUNNING", "$3.60", "$0.06")
    assert calls.strip() == "3, 1 waiting"
    assert world("session", "ls", "--all", "--json") == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows.keys() == {"dev", "old"}
    assert rows["old"]["state"] == "CANCELLED"
    assert rows["dev"]["calls"] == ["job-00000002", "job-00000003"]
    assert (rows["dev"]["total_calls"], rows["dev"]["slices"]) == (3, 2)


def test_without_sessions_the_list_says_how_to_start_one(world: Sessions, capsys: Capture) -> None:
    world.end_session()
    assert world("session", "list") == 0
    assert "kinetic session start" in capsys.readouterr().err


def test_the_status_has_calls_cost_and_limits(world: Sessions, capsys: Capture) -> None:
    """While a call runs, no idle time counts; without a call, it is shown."""
    assert world("session", "status", "dev", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert 59 < document["idle_s"] <= document["held_s"]
    assert (document["idle_timeout_s"], document["max_lifetime_s"]) == (1800.0, 43200.0)
    assert world("session", "status", "dev") == 0
    facts = dict(line.split(":", 1) for line in capsys.readouterr().out.splitlines())
    assert re.fullmatch(r" +in 2[89]m\d\ds, unless a call comes", facts["Ends"])
    world.call("job-00000001", name="train")
    world.call("job-00000002", name="evaluate")
    world.call("job-00000003", name="evaluate")
    assert world("session", "status", "dev") == 0
    facts = dict(line.split(":", 1) for line in capsys.readouterr().out.splitlines())
    assert facts["Running"].strip() == "job-00000001 (train)"
    assert facts["Waiting"].strip() == "job-00000002 (evaluate), and 1 more"
    assert "about $0.06 so far" in facts["Cost"]
    assert facts["Ends"].strip() == "in 11h58m, at the latest"
    assert "Idle for" not in facts
    assert world("session", "status", "nope") == 3
    assert "kinetic session list" in capsys.readouterr().err


def test_a_session_with_calls_is_stopped_only_by_force(world: Sessions, capsys: Capture) -> None:
    """The refusal names the call and the ways out, and other sessions are stopped."""
    world.call("job-00000001")
    world.hold("idle", "job-0000001d")
    assert world("session", "stop", "dev", "idle") == 4
    out, err = capsys.readouterr()
    assert world.backend.cancelled == ["job-0000001d"]
    assert out.startswith("The session idle has ended; it was held for ")
    assert "The session dev runs job-00000001." in err
    assert "kinetic session stop --force dev" in err
    assert world("session", "stop", "dev", "nope") == 3
    assert world("session", "stop", "dev", "--force") == 0
    assert "cost about $0.06" in capsys.readouterr().out
    assert world("session", "stop", "dev") == 0
    assert capsys.readouterr().err == "The session dev has already ended.\n"


def test_a_program_takes_the_slices_of_its_session(
    world: Sessions, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a session, -a is not needed, wherever the session is named."""
    assert world("run", "--session", "dev", "--detach", "--", "ls") == 0
    monkeypatch.setenv("KINETIC_SESSION", "dev")
    assert world("run", "--detach", "--", "ls") == 0
    for _, options in world.submitted:
        assert (options["accelerator"], options["slices"]) == ("tpu-v6e-16", 2)
    assert [options["session"] for _, options in world.submitted] == ["dev", None]
    capsys.readouterr()
    assert world("run", "--session", "nope", "--", "ls") == 3
    monkeypatch.delenv("KINETIC_SESSION")
    assert world("run", "--", "ls") == 2
    assert "(or --session)" in capsys.readouterr().err


def test_the_status_of_a_call_names_its_session(world: Sessions, capsys: Capture) -> None:
    world.call("job-00000001")
    assert world("jobs", "status", "job-00000001") == 0
    assert "Session:      dev (job-0000005e)" in capsys.readouterr().out
    assert world("jobs", "list", "--json") == 0
    rows = {row["job_id"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["job-00000001"]["session"] == HELD
    assert rows[HELD]["session_name"] == "dev"


def test_names_of_sessions_are_completed(world: Sessions, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only names of sessions that have not ended are offered."""
    world.hold("old", "job-0000001d")
    world.end_session("job-0000001d")
    monkeypatch.setattr(suggestions, "_open_app", lambda ctx: world.app)
    context: Any = None
    assert [item.value for item in suggestions.sessions(context, context, "")] == ["dev"]
    assert suggestions.sessions(context, context, "x") == []
