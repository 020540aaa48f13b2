"""A store is removed while a reader writes the verdict of a job whose leader is dead: the write
creates no file and no folder."""

from __future__ import annotations

import shutil

from laptop_fakes import put_ref, ref

from kinetic._backends.base import Status
from kinetic._client.board import verdicts
from kinetic._core.state import JobStatus
from kinetic._store import index
from kinetic._store.local import LocalStore


def test_a_store_that_is_removed_does_not_come_back_with_a_verdict(tmp_path, monkeypatch):
    root = tmp_path / "home"
    store = LocalStore(root)
    job = put_ref(store, ref())
    write = index.write_outcome

    def remove_first(*args, **kwargs):
        shutil.rmtree(root)
        return write(*args, **kwargs)

    monkeypatch.setattr(index, "write_outcome", remove_first)
    assert verdicts.judge_orphan(store, job, lambda _: None, Status(JobStatus.FAILED), 1.0) is None
    assert not root.exists()
