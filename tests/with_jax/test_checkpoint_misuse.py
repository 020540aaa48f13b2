"""Misuse of a `Checkpointer`: calls in the wrong order, bad iterators, states with odd leaves. The
errors are raised before anything is lost."""

from __future__ import annotations

import os
import resource
import shutil

import jax
import numpy as np
import pytest

import kinetic
from kinetic._in_job.checkpoint import persistent, tree
from kinetic._system import memory_folder
from kinetic.errors import CheckpointError, CheckpointMismatch, UsageError

STATE = {"n": 0}


class Numbers:
    """An iterator over numbers whose position can be read and set."""

    next = 0

    def get_state(self):
        return {"next": self.next}

    def set_state(self, state):
        self.next = state["next"]


@pytest.mark.parametrize("step", [1, 2])  # Step 1 goes to one tier, step 2 to both.
def test_a_closed_checkpointer_saves_nothing(tmp_path, step):
    options = {"every": 2, "local_every": 1, "local_directory": tmp_path / "memory"}
    ckpt = kinetic.Checkpointer(tmp_path / "run", **options)
    ckpt.save(0, STATE)
    ckpt.close()
    with pytest.raises(UsageError, match="is closed"):
        ckpt.save(step, STATE)


def test_what_is_no_iterator_is_told_before_there_is_a_checkpoint(tmp_path):
    with (
        kinetic.Checkpointer(tmp_path, every=1) as ckpt,
        pytest.raises(UsageError, match=r"get_state\(\).*got a list_iterator"),
    ):
        ckpt.restore(STATE, data=iter([1]))


def test_a_position_that_is_not_saved_is_told_at_the_first_save(tmp_path):
    with kinetic.Checkpointer(tmp_path, every=2, local_every=None) as ckpt:
        ckpt.restore(STATE, data=Numbers())
        assert ckpt.save(1, STATE) == ()
        with pytest.raises(CheckpointMismatch, match=r"Give data= to save\(\), too"):
            ckpt.save(2, STATE)
    assert not (tmp_path / "2").exists()


@pytest.mark.parametrize("alone", [False, True])
def test_arrays_without_content_come_back_from_the_folder(tmp_path, alone):
    def state(number):
        empty = {"a": np.zeros((0, 3), np.int16), "b": jax.numpy.zeros((2, 0))}
        return empty["b"] if alone else empty | {"n": number}

    with kinetic.Checkpointer(tmp_path, every=1, local_every=None) as ckpt:
        ckpt.save(0, state(7))
    with kinetic.Checkpointer(tmp_path, every=1, local_every=None) as ckpt:
        restored, step = ckpt.restore(state(0))
    one, other = tree.take_apart(restored), tree.take_apart(state(7))
    assert (step, one.leaves) == (1, other.leaves)


@pytest.mark.parametrize(
    ("leaf", "words"),
    [
        (np.array(["text"]), "an array of str128"),
        (np.array("2026-01-01", "datetime64[D]"), r"an array of datetime64\[D\]"),
        (1 << 64, "an int of 65 bits"),
    ],
)
def test_what_orbax_cannot_save_is_told_before_the_first_step(tmp_path, leaf, words):
    with (
        kinetic.Checkpointer(tmp_path, every=1) as ckpt,
        pytest.raises(CheckpointError, match=rf"\['x'\] is {words}"),
    ):
        ckpt.restore({"x": leaf})


def test_a_training_goes_on_from_the_step_before_one_that_has_lost_a_part(tmp_path, caplog):
    with kinetic.Checkpointer(tmp_path, every=1, local_every=None) as ckpt:
        ckpt.save(0, {"n": 1})
        ckpt.save(2, {"n": 3})
    shutil.rmtree(tmp_path / "2" / "state")
    with kinetic.Checkpointer(tmp_path, every=1, local_every=None, keep=1) as ckpt:
        assert ckpt.restore(STATE) == ({"n": 1}, 1)
        assert f"step 2 in {tmp_path} cannot be read" in caplog.text
        ckpt.save(1, {"n": 2})
        ckpt.wait()
        assert sorted(path.name for path in tmp_path.glob("[0-9]")) == ["1", "2"]
        ckpt.save(2, {"n": 4})
    with kinetic.Checkpointer(tmp_path, every=1, local_every=None) as ckpt:
        assert ckpt.restore(STATE) == ({"n": 4}, 3)


def test_what_a_kill_has_left_of_a_removal_is_removed_later(tmp_path, monkeypatch):
    """A process is killed while Orbax removes a step, when only kinetic's mark of the step is gone.
    A later save removes the rest."""
    from orbax.checkpoint._src.path import deleter

    def remove_a_part(self, step):
        shutil.rmtree(tmp_path / f"{step}" / "kinetic")

    with kinetic.Checkpointer(tmp_path, every=1, local_every=None, keep=1) as ckpt:
        ckpt.save(0, {"n": 1})
        ckpt.wait()
        with monkeypatch.context() as patched:
            patched.setattr(deleter.StandardCheckpointDeleter, "delete", remove_a_part)
            ckpt.save(1, {"n": 2})
            ckpt.wait()
    assert (tmp_path / "0" / "state").exists()
    with kinetic.Checkpointer(tmp_path, every=1, local_every=None, keep=1) as ckpt:
        assert ckpt.restore(STATE) == ({"n": 2}, 2)
        ckpt.save(2, {"n": 3})
    assert sorted(path.name for path in tmp_path.glob("[0-9]")) == ["2"]


def fill_the_disk_in_step_1(folder):
    state = {"x": np.random.default_rng(0).random(300_000)}
    with kinetic.Checkpointer(folder, every=1, local_every=None, at_least_every=None) as ckpt:
        ckpt.save(0, state)
        ckpt.wait()
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
        try:
            ckpt.save(1, state)
            ckpt.wait()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_that_is_full_is_told_with_the_step_that_was_being_saved(tmp_path):
    with pytest.raises(CheckpointError, match=r"written \(step 1\)") as caught:
        fill_the_disk_in_step_1(tmp_path)
    assert caught.value.step == 1


@pytest.mark.parametrize("last", ["persistent", "local"])
def test_memory_is_freed_when_the_folder_has_the_last_step(tmp_path, monkeypatch, last):
    monkeypatch.setenv("KINETIC_LOCAL_DIR", str(tmp_path / "memory"))
    with kinetic.Checkpointer(tmp_path / "run", every=1, local_every=1) as ckpt:
        ckpt.restore({"x": np.zeros(3)})
        ckpt.save(0, {"x": np.ones(3)})
        if last == "local":
            ckpt._cadence = ckpt._cadence.__class__(None, None, 1)
            assert ckpt.save(1, {"x": np.ones(3)}) == ("local",)
    paths = [path for path in (tmp_path / "memory").rglob("*") if path.is_file()]
    assert bool(paths) is (last == "local")


@pytest.mark.parametrize("option", ["directory", "local_directory"])
@pytest.mark.parametrize("path", ["checkpoints", "tree/sub/../checkpoints", "absolute"])
def test_a_folder_that_goes_with_the_job_is_refused(tmp_path, monkeypatch, in_job, option, path):
    """A folder that is removed with the job is refused: the next call would start at step 0."""
    (in_job / "tree" / "sub").mkdir(parents=True)
    monkeypatch.chdir(in_job / "tree")
    link = tmp_path / "link"
    link.symlink_to(in_job)
    path = str(link / "tree" / "run") if path == "absolute" else path
    folders = {"directory": str(tmp_path / "run")} | {option: path}
    with pytest.raises(UsageError, match=rf"{option}='.*' is in the work folder.*output_dir="):
        kinetic.Checkpointer(**folders)
    monkeypatch.chdir(tmp_path)
    kinetic.Checkpointer("run", local_directory="memory")


@pytest.mark.parametrize("obstacle", ["gone", "by a file", "by others"])
def test_that_there_is_no_folder_in_memory_is_told(tmp_path, monkeypatch, capfd, obstacle, in_job):
    memory = tmp_path / "shm"
    monkeypatch.setattr(memory_folder, "MEMORY", memory)
    folder = memory / f"kinetic-{os.getuid()}"
    if obstacle != "gone":
        memory.mkdir()
    if obstacle == "by a file":
        folder.write_text("")
    if obstacle == "by others":
        folder.mkdir()
        folder.chmod(0o777)
    with kinetic.Checkpointer(tmp_path / "run", every=1) as ckpt:
        ckpt.restore({"x": 0})
        assert ckpt.save(10, {"x": 1}) == ("persistent",)
    assert f"no folder in memory could be created for them ({folder}: " in capfd.readouterr().err
    with kinetic.Checkpointer(tmp_path / "run", every=1, local_every=None) as ckpt:
        ckpt.restore({"x": 0})
    assert "no folder in memory" not in capfd.readouterr().err


# -- lost steps and folders ------------------------------------------------------------------------


def two_steps(folder):
    with kinetic.Checkpointer(folder, every=1, local_every=None) as ckpt:
        for step in (0, 2):
            ckpt.save(step, {"n": step + 1})
    return folder


def empty(step):
    for path in step.rglob("*"):
        path.unlink() if path.is_file() else None


@pytest.mark.parametrize("lose", [empty, shutil.rmtree], ids=["emptied", "lost"])
def test_a_training_goes_on_from_the_step_before_one_that_was_lost_meanwhile(
    tmp_path, lose, caplog
):
    with kinetic.Checkpointer(two_steps(tmp_path), every=1, local_every=None) as ckpt:
        ckpt._open()
        lose(tmp_path / "2")
        assert ckpt.restore(STATE) == ({"n": 1}, 1)
        assert f"step 2 in {tmp_path} cannot be read: " in caplog.text
        ckpt.save(1, {"n": 2})
        ckpt.save(2, {"n": 4})
    with kinetic.Checkpointer(tmp_path, every=1, local_every=None) as ckpt:
        assert ckpt.restore(STATE) == ({"n": 4}, 3)


@pytest.mark.parametrize("saved", [False, True])
def test_an_empty_folder_is_no_step(tmp_path, saved):
    two_steps(tmp_path) if saved else None
    (tmp_path / "7").mkdir()
    with kinetic.Checkpointer(tmp_path, every=1, local_every=None) as ckpt:
        assert ckpt.restore(STATE) == (({"n": 3}, 3) if saved else (STATE, 0))
        ckpt.save(7, {"n": 8})
    with kinetic.Checkpointer(tmp_path, every=1, local_every=None) as ckpt:
        assert ckpt.restore(STATE) == ({"n": 8}, 8)


@pytest.mark.parametrize(
    "error", [PermissionError(13, "Permission denied"), ValueError("UNAVAILABLE: no answer")]
)
def test_storage_that_does_not_answer_is_no_damage(tmp_path, monkeypatch, error):
    def fail(*_):
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(persistent.OrbaxTree, "read", fail)
        with (
            kinetic.Checkpointer(two_steps(tmp_path), every=1, local_every=None) as ckpt,
            pytest.raises(CheckpointError, match=r"could not be read \(step 2\)"),
        ):
            ckpt.restore(STATE)
    with kinetic.Checkpointer(tmp_path, every=1, local_every=None) as ckpt:
        assert ckpt.restore(STATE) == ({"n": 3}, 3)


def test_a_file_in_the_place_of_the_folder_is_named(tmp_path):
    file = tmp_path / "weights.bin"
    file.write_text("")
    for act in (
        lambda: kinetic.Checkpointer(file, local_every=None).restore(STATE),
        lambda: kinetic.Checkpointer(tmp_path / "a").restore(STATE, start_from=file),
    ):
        with pytest.raises(
            CheckpointError, match=r"weights.bin cannot be read: Not a direc"
        ) as caught:
            act()
        assert "KINETIC_HOME" not in str(caught.value)


# -- positions saved by other hosts ----------------------------------------------------------------


class ElasticIterator(Numbers):
    """An iterator whose class name is that of an iterator of Grain."""


@pytest.mark.parametrize(("kind", "warns"), [(Numbers, True), (ElasticIterator, False)])
def test_positions_of_another_number_of_hosts_are_told(tmp_path, monkeypatch, caplog, kind, warns):
    with kinetic.Checkpointer(tmp_path, every=1, local_every=None) as ckpt:
        ckpt.save(0, STATE, data=kind())
    record = persistent.Persistent.record

    def of_two_hosts(self, step):
        contents = record(self, step)
        return contents | {"data": contents["data"] * 2}

    monkeypatch.setattr(persistent.Persistent, "record", of_two_hosts)
    with kinetic.Checkpointer(tmp_path, every=1, local_every=None) as ckpt:
        ckpt.restore(STATE, data=kind())
    assert ("were saved on 2 hosts, and now there are 1: " in caplog.text) is warns
