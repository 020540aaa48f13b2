"""The file of one host's metrics, which the host's agent reads and stores."""

from __future__ import annotations

import errno
import os
import shutil
from array import array
from types import SimpleNamespace

import pytest
from doubles.memory_store import MemoryStore

from kinetic._backends import attempt_logs
from kinetic._backends.base import LogRequest
from kinetic._core import layout
from kinetic._core.gang.messages import Heartbeat
from kinetic._core.metrics import RowDecoder, Rows
from kinetic._core.place import Place
from kinetic._core.ref import JobRef
from kinetic._host.agent.metric_file import MetricFile
from kinetic._store.base import is_near
from kinetic._store.local import LocalStore

JOB = "job-00000001"
LINE = Rows(("loss",), array("d", [1.0]), array("q", [1]), [array("d", [0.5])]).encode()


@pytest.fixture(params=["folder", "objects"])
def store(request, tmp_path):
    store = LocalStore(tmp_path / "store") if request.param == "folder" else MemoryStore()
    store.put(layout.HostKeys(JOB, 1, 0).report, b"{}")
    return store


@pytest.fixture
def file(store, tmp_path):
    who = SimpleNamespace(scratch=str(tmp_path), index=0, job_id=JOB, attempt=1, host=0)
    file = MetricFile(who, store)
    file._figures = SimpleNamespace(is_due=lambda now: True)
    yield file
    file.close()


def read(store):
    ref = JobRef(JOB, Place("local"), "cpu", "f", "f", 0.0, store.uri)
    request = LogRequest(hosts=(0,), follow=False, metrics=True)
    chunks = attempt_logs.read(store, ref, request, lambda: True)
    return RowDecoder().feed(b"".join(chunk.data for chunk in chunks if chunk))


def test_what_the_function_appends_is_counted_and_the_figures_of_its_host_are_not(file, store):
    file.note(Heartbeat(0, rss_bytes=1 << 20))
    assert file.row_bytes == 0
    with file.path.open("ab") as appended:
        appended.write(LINE)
    assert file.row_bytes == len(LINE)
    file.note(Heartbeat(0, rss_bytes=2 << 20, cpu_s=1.0))
    file.deliver()
    names = [rows.names for rows in read(store)]
    assert names == [("host/memory_bytes",), ("loss",), ("host/memory_bytes", "host/cpu_cores")]


def test_what_is_appended_is_sent_with_the_next_sign_of_life(file, store):
    file._figures.is_due = lambda now: False
    file.note(Heartbeat(0))
    file.path.write_bytes(LINE)
    if file._segments is not None:
        assert read(store) == []
        woken = []
        file._segments.wake = lambda: woken.append(1) or file._segments.flush()
        file.note(Heartbeat(0))
        file.note(Heartbeat(0))
        assert woken == [1]
    assert [rows.names for rows in read(store)] == [("loss",)]


def test_a_full_disk_costs_the_figures_only(file, store, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        file.note(Heartbeat(0, rss_bytes=1 << 20))
    file.deliver()
    assert read(store) == []


def test_a_job_that_logs_nothing_has_no_file(file):
    assert not file.path.exists()


def test_a_job_that_was_removed_does_not_come_back(file, store, tmp_path):
    if is_near(store):
        shutil.rmtree(tmp_path / "store")
        file.note(Heartbeat(0, rss_bytes=1 << 20))
        assert not (tmp_path / "store").exists()
