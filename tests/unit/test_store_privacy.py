"""A store that other users can write to is refused, because hosts run code from it. A store that
they can only read causes a warning."""

from __future__ import annotations

import grp
import os
import pwd
import stat

import pytest

from kinetic._store.local import LocalStore
from kinetic._store.open import open_store
from kinetic.errors import StoreError


@pytest.mark.parametrize("mode", [0o777, 0o702, 0o770])
def test_a_folder_that_others_can_write_to_is_refused(tmp_path, mode):
    root = tmp_path / "a store"
    root.mkdir()
    os.chown(root, -1, os.getgid())
    root.chmod(mode)
    message = f"mode {mode:o}.*who could run code as you.*chmod 700 '{root}'"
    if mode == 0o770 and pwd.getpwuid(os.geteuid()).pw_name == grp.getgrgid(os.getgid()).gr_name:
        open_store(root)  # The group has no other member.
        return
    with pytest.raises(StoreError, match=message):
        open_store(root)
    with pytest.raises(StoreError, match=message):
        LocalStore(root).put("a", b"1")
    assert list(root.iterdir()) == []


def test_a_folder_that_is_meant_for_all_stays_one(tmp_path):
    root = tmp_path / "store"
    root.mkdir()
    root.chmod(0o1777)
    with pytest.raises(StoreError, match=f"such as {root}/kinetic-") as caught:
        open_store(root)
    assert "chmod" not in str(caught.value)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_somebody_else_is_refused(tmp_path):
    root = tmp_path / "store"
    root.mkdir(mode=0o700)
    os.chown(root, 65534, -1)
    with pytest.raises(StoreError, match=r"belongs to .*Set KINETIC_STORE to a folder") as caught:
        open_store(root)
    assert "chown" not in str(caught.value), "it may be somebody's home"


def test_a_folder_that_others_can_look_into_is_told_once(tmp_path, caplog):
    root = tmp_path / "store"
    root.mkdir()
    root.chmod(0o755)
    for _ in range(2):
        open_store(root).put("a", b"1")
    assert [record.message for record in caplog.records] == [
        f"kinetic: Others can read the store {root} (mode 755). Run: chmod 700 {root}"
    ]


def test_a_folder_that_somebody_else_makes_meanwhile_is_refused(tmp_path):
    root = tmp_path / "store"
    store = open_store(root)
    root.mkdir()
    root.chmod(0o777)
    with pytest.raises(StoreError, match="is writable by everybody"):
        store.put("a", b"1")


def test_a_store_makes_its_own_folder_private(tmp_path):
    before = os.umask(0)
    try:
        open_store(tmp_path / "store").put("a", b"1")
    finally:
        os.umask(before)
    open_store(tmp_path / "store")
    assert stat.S_IMODE((tmp_path / "store").stat().st_mode) == 0o700
