"""An agent whose folder takes no named pipes, or whose disk is full: the function runs, and its
host says what is lost.

In: a folder in which none can be made, frames. Out: figures of the host, what is kept, counts.
"""

from __future__ import annotations

import errno
import os
import shutil
from array import array
from pathlib import Path
from types import SimpleNamespace

import pytest

from kinetic._core import layout
from kinetic._core.gang.messages import Heartbeat
from kinetic._core.metric_format import Frame, FrameDecoder
from kinetic._host.agent.metric_tee import MetricTee
from kinetic._store.local import LocalStore


def full(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def refuse(*_):
    raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))


def make_tee(tmp_path):
    store = LocalStore(tmp_path / "store")
    store.put(layout.JobKeys("job-00000001").plan, b"{}")
    who = SimpleNamespace(scratch=str(tmp_path), index=0, job_id="job-00000001", attempt=1, host=0)
    return MetricTee(who, store, store.path(layout.HostKeys(who.job_id, 1, 0).log))


def test_a_folder_without_named_pipes_costs_what_is_logged_and_nothing_else(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "mkfifo", refuse)
    tee = make_tee(tmp_path)
    assert tee.trouble.endswith("metrics-pipe-0: Operation not permitted")
    tee.drain()
    assert tee.pump()
    tee._figures = SimpleNamespace(is_due=lambda now: True)
    tee.note(Heartbeat(0, rss_bytes=1 << 20))
    tee.close()
    kept = tmp_path / "store" / layout.HostKeys("job-00000001", 1, 0).metrics
    (frame,) = FrameDecoder().feed(kept.read_bytes())
    assert list(frame.values[0]) == [1 << 20]


@pytest.mark.parametrize("is_open", [True, False])
def test_what_a_full_disk_loses_is_counted_and_no_text_is_written_among_frames(
    tmp_path, monkeypatch, is_open
):
    tee = make_tee(tmp_path)
    frame = Frame(("loss",), array("d", [1.0]), array("q", [1]), [array("d", [0.5])]).encode()
    kept = tmp_path / "store" / layout.HostKeys("job-00000001", 1, 0).metrics

    def send():
        Path(tmp_path, "metrics-pipe-0").write_bytes(frame)
        tee.drain()

    if is_open:
        send()
    assert tee.lost_bytes == 0
    with monkeypatch.context() as patch:
        patch.setattr(os, "write" if is_open else "open", full)
        tee._write(frame)
    assert tee.lost_bytes == len(frame)
    send()  # There is room again.
    tee.close()
    assert kept.read_bytes() == frame * (2 if is_open else 1)
    assert tee.lost_bytes == len(frame)


def test_a_job_that_was_removed_has_lost_nothing_to_a_full_disk(tmp_path):
    tee = make_tee(tmp_path)
    shutil.rmtree(tmp_path / "store")
    tee._write(b"frame")
    assert tee.lost_bytes == 0
    tee.close()


def test_a_folder_with_them_has_no_trouble(tmp_path):
    tee = make_tee(tmp_path)
    assert tee.trouble == ""
    tee.close()
    assert not Path(tmp_path, "metrics-pipe-0").exists()


def test_what_the_function_logs_is_counted_and_the_figures_of_its_host_are_not(tmp_path):
    tee = make_tee(tmp_path)
    tee._figures = SimpleNamespace(is_due=lambda now: True)
    tee.note(Heartbeat(0, rss_bytes=1 << 20))
    assert tee.row_bytes == 0
    frame = Frame(("loss",), array("d", [1.0]), array("q", [1]), [array("d", [0.5])]).encode()
    Path(tmp_path, "metrics-pipe-0").write_bytes(frame)
    tee.drain()
    tee.close()
    assert tee.row_bytes == len(frame)
