"""The local tier of checkpoints: committed and uncommitted steps, and states assembled from the
parts of several hosts. Hosts are threads."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import signal
import threading

import jax
import numpy as np
import pytest
from doubles.checkpoint_fakes import PATIENCE_S, Crowd, on_all, state

from kinetic._host.worker import worlds
from kinetic._in_job.checkpoint import tree
from kinetic._in_job.checkpoint.assembly import LocalRestore
from kinetic._in_job.checkpoint.local_saves import Due, LocalSaves
from kinetic._in_job.checkpoint.local_tier import LocalSaveFailed, LocalTier
from kinetic._in_job.checkpoint.pieces import find_newest
from kinetic._system import machine
from kinetic.errors import CheckpointError, CheckpointMismatch


def written(tier, number, writer="run"):
    tier.commit(tier.stage(number, writer, 1, tree.take_apart(state(number))))


def read(tier, like):
    whole = find_newest([tier.list_committed()])
    now = tree.take_apart(like).as_saved(whole.leaves)
    assembly = LocalRestore(tier, Crowd(1).hosts()[0], whole)
    assembly.fetch(now)
    return now.with_values(lambda n: assembly.value(now.leaves[n], now.values[n]))


def same(one, other):
    one, other = tree.take_apart(one), tree.take_apart(other)
    assert one.leaves == other.leaves
    for a, b in zip(one.values, other.values, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_what_was_written_is_read(tmp_path):
    tier = LocalTier(tmp_path / "tier")
    assert tier.list_committed() == []
    written(tier, 5)
    same(read(LocalTier(tmp_path / "tier"), state(0)), state(5))


def test_an_array_takes_the_type_of_the_state(tmp_path):
    tier = LocalTier(tmp_path)
    written(tier, 5)
    like = state(0) | {"w": np.zeros((3, 4), np.float64)}
    assert read(tier, like)["w"].dtype == np.float64


def test_numbers_and_arrays_without_a_shape_come_back_as_they_were_saved(tmp_path):
    saved, like = {"a": 1, "b": np.float32(0.1)}, {"a": np.zeros(()), "b": 0.5}
    tier = LocalTier(tmp_path)
    tier.commit(tier.stage(5, "run", 1, tree.take_apart(saved)))
    (local,) = tier.list_committed()
    tree.check_same(local.leaves, tree.take_apart(like).leaves, "of step 5")
    same(read(tier, like), saved)


def test_the_step_before_stays_until_it_is_retired_and_then_makes_room(tmp_path):
    tier = LocalTier(tmp_path)
    for number in range(4):
        written(tier, number)
        assert [each.step for each in tier.list_committed()] == (
            [0] if number == 0 else [number - 1, number]
        )
        tier.retire(number)
        assert [each.step for each in tier.list_committed()] == [number]
        tier.open() if number == 2 else None
    same(read(tier, state(0)), state(3))


def test_a_smaller_state_over_a_larger_one(tmp_path):
    tier = LocalTier(tmp_path)
    for number in range(2):
        written(tier, number)
        tier.retire(number)
    small = {"w": np.ones(2)}
    tier.commit(tier.stage(2, "run", 1, tree.take_apart(small)))
    same(read(tier, small), small)
    assert (tmp_path / "2/data").stat().st_size == 64


@pytest.mark.parametrize("leftover", ["nothing", "half the data", "all but the name"])
def test_what_was_not_committed_is_not_seen(tmp_path, leftover):
    tier = LocalTier(tmp_path)
    written(tier, 1)
    written(tier, 2)
    os.rename(tmp_path / "2", tmp_path / "writing")
    if leftover != "all but the name":
        (tmp_path / "writing/index.json").unlink()
        os.truncate(tmp_path / "writing/data", 0 if leftover == "nothing" else 70)
    assert [each.step for each in tier.list_committed()] == [1]
    tier.open()
    assert [path.name for path in tmp_path.iterdir()] == ["1"]


@pytest.mark.parametrize("damage", ["short data", "no data", "no index", "bad index", "other step"])
def test_what_is_damaged_is_left_out(tmp_path, damage):
    tier = LocalTier(tmp_path)
    written(tier, 1)
    written(tier, 2)
    folder = tmp_path / "2"
    if damage == "short data":
        os.truncate(folder / "data", 9)
    elif damage == "no data":
        (folder / "data").unlink()
    elif damage == "no index":
        (folder / "index.json").unlink()
    elif damage == "bad index":
        (folder / "index.json").write_text('{"format": 1')
    else:
        folder.rename(tmp_path / "3")
    assert [each.step for each in tier.list_committed()] == [1]


def test_steps_of_another_run_are_removed(tmp_path):
    tier = LocalTier(tmp_path)
    written(tier, 1)
    written(tier, 2, writer="another")
    whole = find_newest([[each for each in tier.list_committed() if each.step == 1]])
    tier.keep_only(whole)
    assert [each.step for each in tier.list_committed()] == [1]
    tier.keep_only(None)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_told_with_what_to_do(tmp_path, monkeypatch):
    tier = LocalTier(tmp_path)
    written(tier, 1)

    def full(fd, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(CheckpointError, match="no space is left") as caught:
        written(tier, 2)
    assert caught.value.step == 2
    assert [each.step for each in tier.list_committed()] == [1]


def saves(host, folder, warned, numbers, spoil=lambda number: None):
    """Save these steps as one of several hosts; return the steps in its tier afterwards."""
    tier = LocalTier(folder / str(host.index))
    local = LocalSaves(tier, "run", host, warned.append)
    for number in numbers:
        local.wait()
        spoil(number)
        local.begin(Due(number, number, tree.take_apart({"w": np.full(9, number)}), None))
    local.wait()
    return [each.step for each in tier.list_committed()]


def test_a_host_without_room_costs_all_hosts_this_step_and_one_warning(tmp_path, monkeypatch):
    write, warned = os.write, {0: [], 1: [], 2: []}

    def full_on_host_1(fd, data):
        if os.readlink(f"/proc/self/fd/{fd}").startswith(str(tmp_path / "1/")):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(fd, data)

    def run(host, numbers):
        return saves(host, tmp_path, warned[host.index], numbers)

    assert on_all(Crowd(3).hosts(), lambda host: run(host, [0])) == [[0]] * 3
    for path in tmp_path.glob("*/writing"):
        shutil.rmtree(path)
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full_on_host_1)
        assert on_all(Crowd(3).hosts(), lambda host: run(host, [1, 2, 3])) == [[0]] * 3
    assert [len(each) for each in warned.values()] == [1, 1, 1], "the leader's is shown"
    assert "host 1: The local checkpoint of step 1 could not be written" in warned[0][0]
    assert "request at least 295 B" in warned[0][0]
    assert on_all(Crowd(3).hosts(), lambda host: run(host, [4, 5])) == [[5]] * 3


def test_memory_that_the_machine_does_not_have_is_not_taken(tmp_path, monkeypatch):
    """The machine has less free memory than a save needs: the tier refuses the save. Otherwise the
    kernel would kill a process."""
    tier = LocalTier(tmp_path)
    monkeypatch.setattr(machine, "is_memory_folder", lambda path: True)
    monkeypatch.setattr(machine, "available_memory_bytes", lambda: 999)
    tier.prepare(999)
    with pytest.raises(LocalSaveFailed, match=r'no space is left for 1 kB.*local_storage="1Mi"'):
        tier.prepare(1000)


def test_a_folder_that_was_removed_is_made_again(tmp_path):
    warned: list[str] = []

    def spoil(number):
        if number == 2:
            shutil.rmtree(tmp_path)

    (host,) = Crowd(1).hosts()
    assert saves(host, tmp_path, warned, range(4), spoil) == [3]
    assert warned == []


def test_a_folder_that_is_removed_during_a_save_costs_this_save(tmp_path, monkeypatch):
    warned: list[str] = []
    commit = LocalTier.commit

    def too_late(tier, local):
        if local.step == 2:
            shutil.rmtree(tmp_path)
        commit(tier, local)

    monkeypatch.setattr(LocalTier, "commit", too_late)
    (host,) = Crowd(1).hosts()
    assert saves(host, tmp_path, warned, range(3)) == []
    assert "of step 2 could not be written" in warned[0]
    assert saves(host, tmp_path, warned, range(3, 5)) == [4]


def test_the_memory_of_two_steps_is_written_again_and_again(tmp_path):
    used = set()
    tier = LocalTier(tmp_path)
    for number in range(8):
        written(tier, number)
        used.add((tmp_path / f"{number}/data").stat().st_ino)
        tier.retire(number)
    assert len(used) == 2


def test_a_folder_that_is_a_file_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="could not be written"):
        written(LocalTier(tmp_path / "file"), 1)


def test_a_host_without_a_copy_gets_it_from_another_one(tmp_path):
    def without_devices(number):
        return {k: v for k, v in state(number).items() if k not in ("key", "on a device")}

    first = LocalTier(tmp_path / "0")
    first.commit(first.stage(5, "run", 3, tree.take_apart(without_devices(5))))
    whole = find_newest([first.list_committed(), [], []])

    def restore(host):
        assembly = LocalRestore(LocalTier(tmp_path / str(host.index)), host, whole)
        now = tree.take_apart(without_devices(0))
        assembly.fetch(now)
        got = now.with_values(lambda n: assembly.value(now.leaves[n], now.values[n]))
        return got, assembly.received_from

    for index, (got, received) in enumerate(on_all(Crowd(3).hosts(), restore)):
        same(got, without_devices(5))
        assert received == (set() if index == 0 else {0})


@pytest.mark.parametrize(
    ("saved", "now", "words"),
    [
        ({"a": 1}, {"a": 1, "b": 2}, r"the checkpoint has no \['b'\]"),
        ({"a": 1, "b": 2}, {"a": 1}, r"the state of restore\(\) has no \['b'\]"),
        ({"a": np.ones(3)}, {"a": np.ones(4)}, r"\['a'\] is .* \(3,\) .*but .*\(4,\)"),
        ({"a": np.ones(3)}, {"a": 1}, r"\['a'\] is .* \(3,\) .*but a number"),
        ({str(n): n for n in range(9)}, {}, "and 6 more"),
        (
            {"a": jax.random.key(0)},
            {"a": np.ones(2, np.uint32)},
            "a key of threefry2x32 in .*but an array",
        ),
        ({"a": jax.random.key(0)}, {"a": 1}, "a key of threefry2x32 in .*but a number"),
    ],
)
def test_a_state_that_does_not_fit(saved, now, words):
    before, after = tree.take_apart(saved).leaves, tree.take_apart(now).leaves
    with pytest.raises(CheckpointMismatch, match=words):
        tree.check_same(before, after, "of step 3")


@pytest.mark.parametrize(
    ("leaf", "words"),
    [(print, "a builtin_function"), ("text", "a str"), (np.array([{}]), "Python objects")],
)
def test_what_is_no_array_is_refused(leaf, words):
    with pytest.raises(CheckpointError, match=rf"\['x'\] is .*{words}"):
        tree.take_apart({"x": leaf})


# -- saves in the background -----------------------------------------------------------------------


def test_a_save_by_the_newer_interface_of_orbax_is_waited_for():
    from orbax.checkpoint._src.asyncio_utils import AsyncRunner

    async def save():
        begun.set()
        await asyncio.sleep(0.3)

    runner, begun = AsyncRunner(), threading.Event()
    saving = runner.run_coroutine(save())
    begun.wait()
    assert not worlds.settle(0.05)
    assert worlds.settle(PATIENCE_S)
    assert saving.done()
    runner.shutdown()


def test_a_save_whose_wait_was_interrupted_is_waited_for():
    """An exception interrupts `join` on the thread of a save, and Python then considers the thread
    ended. kinetic still waits for the save."""

    def interrupt(signum, frame):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    goes_on = threading.Event()
    saving = threading.Thread(target=goes_on.wait, name="save_finalize")
    saving.start()
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        with pytest.raises(KeyboardInterrupt):
            saving.join()
        assert worlds.is_saving()
        assert not worlds.settle(0.05)
        goes_on.set()
        assert worlds.settle(PATIENCE_S)
        assert not worlds.is_saving()
    finally:
        signal.signal(signal.SIGALRM, before)
