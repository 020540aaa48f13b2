"""The cost of a batch, as `kinetic jobs status` prints it, from plans, events and verdicts in a
store."""

from __future__ import annotations

import json
import urllib.request
from dataclasses import replace

import pytest
from cli_fakes import NOW, World
from test_cost import plan_of

from kinetic._client.access import JobAccess
from kinetic._client.board.spending import SpendingWatch
from kinetic._core import layout
from kinetic._core.events import EventKind, GangEvent
from kinetic._core.exits import Exit
from kinetic._core.outcome import HostReport, Outcome, Verdict
from kinetic._core.place import Place
from kinetic._core.plan import Cost
from kinetic._core.ref import JobRef
from kinetic._store.local import LocalStore


def put_job(store, plan, number, **changes):
    """Store the reference of a batch's job, and a copy of this plan; return the reference."""
    job_id = f"job-{number:08x}"
    fields = {"group_id": "grp-00000001", "group_index": number, "hosts": plan.hosts}
    ref = JobRef(
        *(job_id, Place("fake"), plan.options.topology.name, "f", "f", NOW - 9000, store.uri),
        **fields,
    )
    ref = replace(ref, **changes)
    store.put(layout.JobKeys(job_id).ref, json.dumps(ref.to_json()).encode())
    document = json.dumps(replace(plan, job_id=job_id).to_json()).encode()
    store.put(layout.JobKeys(job_id).plan, document)
    return ref


def end_job(store, ref, *, started_at, ended_at):
    reports = (HostReport(0, Exit.RETURNED, started_at=started_at),)
    outcome = Outcome(Verdict.SUCCEEDED, reports=reports, ended_at=ended_at)
    store.put(layout.JobKeys(ref.job_id).outcome, json.dumps(outcome.to_json()).encode())
    if not store.has(layout.JobKeys(ref.job_id).events):
        ready = GangEvent(EventKind.READY, None, "", time=started_at)
        put_events(store, ref, ready, GangEvent(EventKind.ENDED, None, "", time=ended_at))


def put_events(store, ref, *events):
    text = "".join(f"{json.dumps(event.to_json())}\n" for event in events)
    store.put(layout.JobKeys(ref.job_id).events, text.encode())


@pytest.fixture
def spent(tmp_path):
    """A command line over an empty store."""
    return World(tmp_path / "store")


def status_of(world, capsys, what="grp-00000001"):
    assert world("jobs", "status", what, "--json") == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.starts_processes
def test_a_batch_has_cost_what_its_jobs_have(home, monkeypatch, spent, capsys):
    plan = plan_of(monkeypatch, "cpu", "cpu=3600").plan  # $1 a second
    ended, running, waiting = (put_job(spent.store, plan, number) for number in range(3))
    end_job(spent.store, ended, started_at=NOW - 100, ended_at=NOW - 90)
    put_events(spent.store, running, GangEvent(EventKind.READY, None, "", time=NOW - 7))
    status = status_of(spent, capsys)
    assert status["jobs"] == {"succeeded": 1, "running": 2}  # as the fake backend reports
    assert status["cost"] == {
        "so_far_usd": pytest.approx(17),
        "usd_per_hour": pytest.approx(3600),
        "origin": "your price",
        "is_simulated": False,
        "jobs_without_price": 0,
    }
    costs = [status_of(spent, capsys, ref.job_id)["cost"] for ref in (running, waiting)]
    assert [cost["so_far_usd"] for cost in costs] == [pytest.approx(7), 0]
    assert spent("jobs", "status", "grp-0000") == 0
    assert "about $17.00 so far ($3,600.00 an hour now, your price)" in capsys.readouterr().out
    for ref in (running, waiting):
        end_job(spent.store, ref, started_at=NOW - 7, ended_at=NOW)
    assert spent("jobs", "status", "grp-0000") == 0
    assert "about $24.00 (your price)" in capsys.readouterr().out


@pytest.mark.starts_processes
def test_every_attempt_of_a_batchs_jobs_counts(home, monkeypatch, spent, capsys):
    plan = plan_of(monkeypatch, "cpu", "cpu=3600", retries=1).plan
    ref = put_job(spent.store, plan, 1)
    times = [(EventKind.READY, 1, 100), (EventKind.ENDED, 1, 80), (EventKind.READY, 2, 50)]
    put_events(
        spent.store,
        ref,
        *(GangEvent(kind, None, "", attempt=n, time=NOW - ago) for kind, n, ago in times),
    )
    end_job(spent.store, ref, started_at=NOW - 50, ended_at=NOW - 40)
    assert status_of(spent, capsys)["cost"]["so_far_usd"] == pytest.approx(30)


@pytest.mark.starts_processes
def test_jobs_without_a_price_are_told_of_and_simulated_ones_are_free(
    home, monkeypatch, spent, capsys
):
    unknown = replace(plan_of(monkeypatch, "cpu", "").plan, cost=None)
    first = put_job(spent.store, unknown, 1)
    assert status_of(spent, capsys)["cost"] is None
    assert spent("jobs", "status", "grp-0000") == 0
    assert "Cost" not in capsys.readouterr().out
    paid = plan_of(monkeypatch, "cpu", "cpu=3600").plan
    second = put_job(spent.store, paid, 2, func_name="g")
    end_job(spent.store, second, started_at=NOW - 5, ended_at=NOW)
    assert status_of(spent, capsys)["cost"]["jobs_without_price"] == 1
    assert spent("jobs", "status", "grp-0000") == 0
    words = "about $5.00 so far ($0.00 an hour now, your price); not counted: 1 job without a known"
    assert words in capsys.readouterr().out
    spent.store.delete(layout.JobKeys(first.job_id).ref)
    spent.store.delete(layout.JobKeys(second.job_id).ref)
    free = replace(paid, cost=Cost(3600, "list price, us-central1", is_simulated=True))
    put_job(spent.store, free, 3)
    assert status_of(spent, capsys)["cost"]["so_far_usd"] == 0
    assert spent("jobs", "status", "grp-0000") == 0
    assert "nothing: the jobs are simulated" in capsys.readouterr().out


@pytest.mark.starts_processes
def test_jobs_that_have_ended_are_read_once(home, monkeypatch, tmp_path):
    plan = plan_of(monkeypatch, "cpu", "cpu=3600", retries=1).plan
    world, keys = World(tmp_path / "store"), []
    refs = [put_job(world.store, plan, number) for number in range(30)]
    for ref in refs:
        end_job(world.store, ref, started_at=NOW - 2, ended_at=NOW)
    standings = world.app.board.read_standings(refs)
    jobs = [(ref, standings[ref.job_id]) for ref in refs]
    get = LocalStore.get
    monkeypatch.setattr(LocalStore, "get", lambda s, key: (keys.append(key), get(s, key))[1])
    watch = SpendingWatch(world.app.board)
    first = watch.read(jobs)
    assert first.so_far_usd == pytest.approx(60)
    keys.clear()
    assert watch.read(jobs) == first
    assert keys == []


@pytest.mark.starts_processes
def test_the_page_of_a_batch_says_what_it_has_cost(home, monkeypatch, spent):
    pytest.importorskip("starlette")
    from kinetic._dashboard.server import DashboardServer

    plan = plan_of(monkeypatch, "cpu", "cpu=3600").plan
    ended, running = (put_job(spent.store, plan, number) for number in range(2))
    end_job(spent.store, ended, started_at=NOW - 100, ended_at=NOW - 90)
    put_events(spent.store, running, GangEvent(EventKind.READY, None, "", time=NOW - 7))
    access = JobAccess(spent.store, lambda _: spent.backend, lambda _: None, lambda: NOW)
    server = DashboardServer(access)
    server.start()
    try:
        with urllib.request.urlopen(f"{server.url}batches/grp-00000001") as page:
            assert "about $17.00 so far ($3,600.00 an hour now, your price)" in page.read().decode()
    finally:
        server.close()
