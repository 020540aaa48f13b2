"""An agent whose folder takes no named pipes: the function runs, and its host says what is lost.

In: a folder in which none can be made. Out: a descriptor that has nothing, figures of the host.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace

from kinetic._core import layout
from kinetic._core.gang.messages import Heartbeat
from kinetic._core.metric_format import FrameDecoder
from kinetic._host.agent.metric_tee import MetricTee
from kinetic._store.local import LocalStore


def refuse(*_):
    raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))


def make_tee(tmp_path):
    store = LocalStore(tmp_path / "store")
    store.put(layout.plan("job-00000001"), b"{}")
    who = SimpleNamespace(scratch=str(tmp_path), index=0, job_id="job-00000001", attempt=1, host=0)
    return MetricTee(who, store, store.path(layout.log(who.job_id, 1, 0)))


def test_a_folder_without_named_pipes_costs_what_is_logged_and_nothing_else(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "mkfifo", refuse)
    tee = make_tee(tmp_path)
    assert tee.trouble.endswith("metrics-pipe-0: Operation not permitted")
    tee.drain()
    assert tee.pump()
    tee._figures = SimpleNamespace(is_due=lambda now: True)
    tee.note(Heartbeat(0, rss_bytes=1 << 20))
    tee.close()
    kept = tmp_path / "store" / layout.metrics("job-00000001", 1, 0)
    (frame,) = FrameDecoder().feed(kept.read_bytes())
    assert list(frame.values[0]) == [1 << 20]


def test_a_folder_with_them_has_no_trouble(tmp_path):
    tee = make_tee(tmp_path)
    assert tee.trouble == ""
    tee.close()
    assert not Path(tmp_path, "metrics-pipe-0").exists()
