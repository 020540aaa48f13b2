"""The folder that a host prepares for its function. If the store is removed meanwhile, the host
fails and does not create the store again."""

from __future__ import annotations

import shutil

import pytest
from laptop_fakes import plan

from kinetic._host.agent import workspace
from kinetic._host.identity import Identity
from kinetic._store.local import LocalStore
from kinetic.errors import SetupFailed


class RemovedStore(LocalStore):
    """A store that is removed when `folder` is called for the n-th time; n is `looks`."""

    looks = 1

    def folder(self):
        self.looks -= 1
        if self.looks == 0:
            shutil.rmtree(self.root)
        return super().folder()


def test_what_the_function_saves_is_read(tmp_path):
    assert workspace.read_saving_step(tmp_path / "absent") is None
    (tmp_path / "saving-local").write_text("7")
    assert workspace.read_saving_step(tmp_path) == 7
    (tmp_path / "saving-persistent").write_text("")  # The number is not yet written.
    assert workspace.read_saving_step(tmp_path) == 7
    (tmp_path / "saving-persistent").write_text("4")
    assert workspace.read_saving_step(tmp_path) == 4


@pytest.mark.parametrize("looks", [1, 2])
@pytest.mark.parametrize("cwd", [None, "a/b"])
def test_a_host_that_prepares_does_not_bring_back_a_store_that_was_removed(tmp_path, looks, cwd):
    home = tmp_path / "home"
    scratch = home / "jobs" / "job-1" / "local" / "work"
    scratch.mkdir(parents=True)
    store = RemovedStore(home, existing=True)
    store.root, store.looks = home, looks
    who = Identity(store.uri, "job-1", 0, 2, "", "", "", str(scratch))
    with pytest.raises(SetupFailed):
        workspace.prepare(who, plan(cwd_rel=cwd, tree=None), store)
    assert not home.exists(), sorted(map(str, home.rglob("*")))
