"""Jobs that are kept where only the options of their function say: they are found again.

In: two stores, of which the settings name one. Out: what lists, commands and Python find.
"""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import time
from pathlib import Path
from urllib.parse import quote

import click
import pytest
from click.testing import CliRunner
from laptop_fakes import NOW, put_ref, put_success, ref

import kinetic
from kinetic import errors
from kinetic._client import elsewhere
from kinetic._client.batch.manifest import Batch, Manifest
from kinetic._client.client import client_of
from kinetic._config import settings
from kinetic._core.accelerators.resolve import resolve
from kinetic._core.options import Options
from kinetic._store.local import LocalStore
from kinetic.cli.context import pass_app
from kinetic.cli.root import call
from kinetic.collections import attach_batch

HERE, THERE = "job-0000000a", "job-0000000b"


@pytest.fixture
def other(home, tmp_path):
    """The store of a job that is newer than that of the configured store."""
    stores = LocalStore(home), LocalStore(tmp_path / "other")
    for number, (store, job_id) in enumerate(zip(stores, (HERE, THERE), strict=True)):
        put_success(store, put_ref(store, ref(job_id, created_at=NOW + number)), 7 + number)
    elsewhere.note_store(dataclasses.replace(settings.load(), store=stores[1].uri))
    return stores[1]


def test_python_finds_them(other):
    assert [handle.job_id for handle in kinetic.list_jobs()] == [THERE, HERE]
    assert kinetic.attach(THERE[:-1] + "b").result() == 8
    assert kinetic.attach(HERE).result() == 7
    with pytest.raises(errors.NotFound):
        kinetic.attach("job-0000000c")


def test_commands_find_them(other, capsys):
    assert call(["jobs", "list", "--json"]) == 0
    assert [each["job_id"] for each in json.loads(capsys.readouterr().out)] == [THERE, HERE]
    assert call(["jobs", "list", "--json", "--limit", "1"]) == 0
    assert [each["job_id"] for each in json.loads(capsys.readouterr().out)] == [THERE]
    for job_id in (HERE, THERE):
        assert call(["jobs", "status", job_id]) == 0
        assert job_id in capsys.readouterr().out
    assert call(["jobs", "status", "job-0000000c"]) != 0
    assert call(["jobs", "cleanup", "--yes", THERE]) == 0
    assert list(other.list("jobs")) == []
    assert list(LocalStore(settings.load().folder).list("jobs"))


@pytest.fixture
def batch(other):
    """The id of a batch of one job in the other store."""
    jobs = (("job-0000000d",),)
    manifest = Manifest.begin(other, Batch("grp-0000000e", 1, NOW, "sweep", jobs=jobs))
    job = dataclasses.replace(ref(jobs[0][0]), group_id="grp-0000000e", group_index=0)
    put_success(other, put_ref(other, job), 9)
    manifest.note_end("", ())
    return "grp-0000000e"


def test_python_finds_batches(batch):
    assert attach_batch(batch).results(progress=False) == [9]
    with pytest.raises(errors.NotFound, match="grp-00000000"):
        attach_batch("grp-00000000")


def test_commands_find_batches(batch, capsys):
    for text in (batch, batch[:-1]):
        assert call(["jobs", "status", "--json", text]) == 0
        assert json.loads(capsys.readouterr().out)["group_id"] == batch
        assert call(["jobs", "list", "--json", "--group", text]) == 0
        (listed,) = json.loads(capsys.readouterr().out)
        assert listed["job_id"] == "job-0000000d"
    assert call(["jobs", "status", "grp-00000000"]) != 0


GONE = "ray+http://127.0.0.1:9"


def note_gone(days_ago):
    """Remember a cluster that no longer answers."""
    elsewhere.note_store(dataclasses.replace(settings.load(), store=GONE))
    [file] = Path(settings.load().cache_dir, "stores").iterdir()
    then = time.time() - days_ago * 86_400
    os.utime(file, (then, then))


def test_where_they_are_cannot_be_reached(home, capsys, caplog):
    """Others are listed all the same; it may answer later."""
    store = LocalStore(home)
    put_success(store, put_ref(store, ref(HERE)), 7)
    note_gone(days_ago=29)
    for _ in range(2):
        assert call(["jobs", "list"]) == 0
        assert HERE in capsys.readouterr().out
        assert "used before are left out. Nothing answers at http" in caplog.text
        caplog.clear()
    with pytest.raises(errors.NotFound):
        kinetic.attach(THERE)
    assert [handle.job_id for handle in kinetic.list_jobs()] == [HERE]
    caplog.clear()
    assert call(["jobs", "status", HERE]) == 0
    assert "left out" not in caplog.text, "the job is here"


def test_one_that_has_been_silent_for_a_month_is_forgotten(home):
    note_gone(days_ago=31)
    assert elsewhere.has_stores()
    assert elsewhere.list_flags({}) == []
    assert not elsewhere.has_stores()


def test_one_that_takes_connections_and_never_answers(home, monkeypatch):
    monkeypatch.setattr(elsewhere, "_PATIENCE_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        uri = f"ray+http://127.0.0.1:{silent.getsockname()[1]}"
        elsewhere.note_store(dataclasses.replace(settings.load(), store=uri))
        assert elsewhere.list_flags({}) == []
    assert elsewhere.has_stores()


def test_a_token_goes_only_where_it_was_used(home, monkeypatch, caplog):
    """The token of tonight's cluster, and a cluster of last week, whose address may be anybody's by
    now."""
    monkeypatch.setenv("HOME", str(home.parent))  # Ray's own programs leave a token there.
    for before, now, is_asked in (("", "mine", False), ("mine", "mine", True), ("mine", "", True)):
        caplog.clear()
        monkeypatch.setattr(elsewhere, "_PATIENCE_S", 0.5)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            uri = f"ray+http://127.0.0.1:{listener.getsockname()[1]}"
            monkeypatch.setenv("RAY_AUTH_TOKEN", before)
            elsewhere.note_store(dataclasses.replace(settings.load(), store=uri))
            monkeypatch.setenv("RAY_AUTH_TOKEN", now)
            assert elsewhere.list_flags({}) == [], "nobody answers"
            assert ("was not used with the token" in caplog.text) != is_asked
            listener.setblocking(False)
            if is_asked:
                asked, _ = listener.accept()
                asked.setblocking(True)
                assert (b"Bearer mine" in asked.recv(65536)) == bool(now)
                asked.close()
            else:
                with pytest.raises(BlockingIOError):
                    listener.accept()
        Path(settings.load().cache_dir, "stores").joinpath(quote(uri, safe="")).unlink()


def test_a_call_remembers_the_cluster_that_its_options_alone_name(home, monkeypatch):
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "http://head:8265")
    client_of(Options(resolve("cpu"), backend="ray"))
    monkeypatch.setattr(elsewhere, "_find_problem", lambda chosen, uri: "")
    assert elsewhere.list_flags({}) == [{"store": "ray+http://head:8265"}]
    monkeypatch.setenv("KINETIC_BACKEND", "ray")
    assert elsewhere.list_flags({}) == [], "the settings name it"


def test_a_command_runs_once_whatever_it_does_not_find(other):
    """`kinetic run` would submit its job again."""
    ran_in = []

    @click.command()
    @click.argument("job_id", default="")
    @pass_app
    def look(app, /, job_id):
        ran_in.append(app.store.uri)
        raise errors.NotFound(job_id)

    here = LocalStore(settings.load().folder)
    for given, store in (([], here), ([HERE], here), ([THERE], other), (["job-0000000c"], here)):
        CliRunner().invoke(look, given)
        assert ran_in == [store.uri]
        ran_in.clear()
