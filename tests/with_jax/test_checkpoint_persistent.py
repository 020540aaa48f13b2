"""The persistent tier, and the marks and log lines that show the saves of a training."""

from __future__ import annotations

import importlib.util
import logging
import shutil
import threading
from pathlib import Path

import jax
import numpy as np
import pytest
from doubles.checkpoint_fakes import PATIENCE_S, state
from orbax.checkpoint import CheckpointManager

import kinetic
from kinetic._host.agent import workspace
from kinetic._host.worker import worlds
from kinetic._in_job.checkpoint import persistent, saving_mark
from kinetic._in_job.checkpoint.local_tier import LocalTier
from kinetic._store.checkpoints import Checkpoints
from kinetic._system import machine
from kinetic.errors import CheckpointError, PreflightError, UsageError


def losses(directory, step_metrics, **options):
    """Save a step with each of these metrics; return the steps that the Checkpointer keeps."""
    with kinetic.Checkpointer(directory, every=1, local_every=None, **options) as ckpt:
        for step, metrics in enumerate(step_metrics):
            ckpt.save(step, {"n": step}, metrics=metrics)
            ckpt.wait()
    return sorted(int(path.name) for path in directory.iterdir() if path.name.isdigit())


@pytest.mark.parametrize(
    ("options", "remaining"),
    [
        ({"keep": 2}, [4, 5]),
        ({"keep": None}, [0, 1, 2, 3, 4, 5]),
        ({"keep": 1, "keep_every": 3}, [0, 3, 5]),
        ({"keep": 1, "best": "loss"}, [2, 5]),
        ({"keep": 1, "best": "loss", "best_is": "max", "keep_best": 2}, [0, 3, 5]),
    ],
)
def test_which_checkpoints_stay(tmp_path, options, remaining):
    step_metrics = [
        {"loss": 7.0},
        {"loss": float("nan")},
        {"loss": 1.0},
        {"loss": 9.0},
        None,
        {"x": 0},
    ]
    assert losses(tmp_path, step_metrics, **options) == remaining


def test_a_training_that_forgot_to_restore_is_told(tmp_path):
    losses(tmp_path, [None, None])
    with pytest.raises(CheckpointError, match=r"the last step is 1\).*Call restore\(\)"):
        losses(tmp_path, [None])
    with kinetic.Checkpointer(tmp_path, every=1, local_every=None) as ckpt:
        assert ckpt.restore({"n": 0}) == ({"n": 1}, 2)
        with pytest.raises(CheckpointError, match="Step 0 cannot be saved: step 1 was saved"):
            ckpt.save(0, {"n": 0})
        assert ckpt.save(2, {"n": 5}) == ("persistent",)
    with pytest.raises(UsageError, match="closed"):
        ckpt.restore({"n": 0})


def test_a_folder_that_was_removed_is_told(tmp_path):
    options = {"every": 2, "local_every": 1, "local_directory": tmp_path / "memory"}
    with kinetic.Checkpointer(tmp_path / "run", **options) as ckpt:
        ckpt.save(0, {"n": np.zeros(3)})
        ckpt.wait()
        shutil.rmtree(tmp_path / "run")
        assert ckpt.save(1, {"n": np.zeros(3)}) == ("local",)
        with pytest.raises(CheckpointError, match=r"run, or .* was removed: nothing more is saved"):
            ckpt.save(2, {"n": np.zeros(3)})


def remove_newest(directory):
    checkpoints = Checkpoints(str(directory))
    checkpoints.remove([checkpoints.step(None)])


@pytest.mark.parametrize(
    ("removes", "start"),
    [(lambda directory: None, 4), (remove_newest, 1), (shutil.rmtree, 0)],
    ids=["nothing", "the newest step", "the folder"],
)
def test_a_training_that_was_removed_does_not_come_back_from_memory(tmp_path, removes, start):
    options = {"every": 2, "local_every": 1, "local_directory": tmp_path / "memory"}
    with kinetic.Checkpointer(tmp_path / "run", **options) as ckpt:
        for step in range(4):
            ckpt.save(step, {"n": np.full(3, float(step))})
            ckpt.wait()
    for _ in range(2):
        removes(tmp_path / "run")
        removes = lambda directory: None  # noqa: E731 - the second time it is as it was left
        with kinetic.Checkpointer(tmp_path / "run", **options) as ckpt:
            assert ckpt.restore({"n": np.zeros(3)})[1] == start


@pytest.mark.parametrize("local_every", [None, 1])
def test_a_state_may_be_one_array(tmp_path, local_every):
    options = {"local_every": local_every, "local_directory": tmp_path / "memory"}
    with kinetic.Checkpointer(tmp_path / "run", every=1, **options) as ckpt:
        ckpt.save(3, jax.numpy.arange(3.0))
    with kinetic.Checkpointer(tmp_path / "run", **options) as ckpt:
        restored, start = ckpt.restore(jax.numpy.zeros(3))
    assert (restored.tolist(), start) == ([0.0, 1.0, 2.0], 4)


def test_what_another_program_has_saved_is_restored(tmp_path):
    import orbax.checkpoint as ocp

    with ocp.CheckpointManager(tmp_path) as manager:
        saved = ocp.args.Composite(state=ocp.args.StandardSave({"w": np.arange(3.0)}))
        manager.save(7, args=saved)
    with kinetic.Checkpointer(tmp_path, local_every=None) as ckpt:
        restored, start = ckpt.restore({"w": np.zeros(3)})
    assert (list(restored["w"]), start) == ([0.0, 1.0, 2.0], 8)


def save_into_a_file(tmp_path):
    folder = tmp_path / "memory"
    with kinetic.Checkpointer(
        tmp_path / "run", local_every=1, local_directory=folder, at_least_every=None
    ) as ckpt:
        ckpt.restore({"w": np.zeros(3)})
        ckpt.wait()
        (step_folder,) = folder.glob("checkpoints/*")
        shutil.rmtree(step_folder)
        step_folder.write_text("")
        ckpt.save(0, {"w": np.zeros(3)})


def test_a_save_that_fails_in_the_background_is_told(tmp_path):
    with pytest.raises(CheckpointError, match="could not be written"):
        save_into_a_file(tmp_path)


def test_memory_that_is_too_small_costs_local_saves_and_a_warning(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(machine, "is_memory_folder", lambda path: True)
    monkeypatch.setattr(machine, "available_memory_bytes", lambda: 10)
    options = {"local_directory": tmp_path / "memory", "local_every": 1, "at_least_every": None}
    state = {"w": np.zeros(100_000)}
    with kinetic.Checkpointer(tmp_path / "run", **options) as ckpt:
        assert ckpt.restore(state)[1] == 0
        for step in range(3):
            ckpt.save(step, state, force=step == 2)
    assert "no space is left for 800 kB" in caplog.text
    assert 'local_storage="2Mi"' in caplog.text
    with kinetic.Checkpointer(tmp_path / "run", **options) as ckpt:
        assert ckpt.restore(state)[1] == 3


def test_without_orbax_it_is_told_what_to_install(tmp_path, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if "orbax" in name else find(name)
    )
    with pytest.raises(PreflightError, match="pip install orbax-checkpoint"):
        kinetic.Checkpointer(tmp_path).restore({"n": 0})


@pytest.mark.parametrize(
    "options", [{"keep": 0}, {"keep": 1.5}, {"best_is": "least"}, {"every": 0}, {"directory": ""}]
)
def test_options_that_cannot_work(tmp_path, options):
    with pytest.raises(UsageError):
        kinetic.Checkpointer(**{"directory": tmp_path} | options)


def test_outside_of_jobs_there_is_no_folder_by_default():
    with pytest.raises(UsageError, match="Pass directory="):
        kinetic.Checkpointer()


# -- marks of steps that are being saved -----------------------------------------------------------


@pytest.fixture
def marked(tmp_path, monkeypatch):
    """A function that returns the step that is marked for the agent as being saved, or None."""
    folder = tmp_path / "host"
    folder.mkdir()
    monkeypatch.setenv("KINETIC_PREEMPTION", str(folder))
    return lambda: workspace.read_saving_step(folder)


def test_a_host_says_which_step_it_saves_until_that_is_whole(tmp_path, marked, monkeypatch):
    marks, committed = [], LocalTier.commit

    def commit(tier, local):
        marks.append(marked())
        return committed(tier, local)

    monkeypatch.setattr(LocalTier, "commit", commit)
    finalized, gates = CheckpointManager._finalize, [threading.Event(), threading.Event()]
    ends = iter(gates)

    def finalize(*args):
        next(ends).wait(PATIENCE_S)
        return finalized(*args)

    monkeypatch.setattr(CheckpointManager, "_finalize", finalize)
    options = {"every": 4, "local_every": 3, "local_directory": tmp_path / "local"}
    with kinetic.Checkpointer(tmp_path / "checkpoints", **options) as ckpt:
        ckpt.restore(state(0))
        assert ckpt.save(3, state(3)) == ("local",)
        ckpt.wait()
        assert (marks, marked()) == ([3], None)
        assert ckpt.save(4, state(4)) == ("persistent",)
        assert marked() == 4
        threading.Timer(0.3, gates[0].set).start()
        ckpt.save(8, state(8))  # Waits for save 4, whose end must not clear mark 8.
        mark = marked()
        gates[1].set()
    assert mark == 8
    await_end_of("kinetic-saving-mark")
    assert marked() is None


def test_a_save_that_fails_leaves_no_mark(tmp_path, marked, monkeypatch):
    def fail(*_):
        raise ZeroDivisionError

    monkeypatch.setattr(LocalTier, "stage", fail)
    options = {"every": 5, "local_every": 1, "local_directory": tmp_path / "local"}
    with pytest.raises(ZeroDivisionError), kinetic.Checkpointer(tmp_path / "c", **options) as ckpt:
        ckpt.save(0, state(0))
    assert marked() is None
    monkeypatch.setattr(CheckpointManager, "_finalize", fail)
    ckpt = kinetic.Checkpointer(tmp_path / "d", every=1, local_every=None)
    ckpt.save(0, state(0))
    assert marked() == 0
    with pytest.raises(CheckpointError, match="ZeroDivisionError"):
        ckpt.wait()
    assert marked() is None
    await_end_of("kinetic-saving-mark")


def test_the_end_of_a_save_does_not_take_the_mark_of_the_next(marked, monkeypatch):
    mark, unlink = saving_mark.SavingMark("persistent"), Path.unlink
    next_save = threading.Thread(target=mark.set, args=(8,))

    def unlink_while_the_next_begins(*args, **options):
        next_save.start()
        next_save.join(0.3)
        unlink(*args, **options)

    mark.set(4)
    monkeypatch.setattr(Path, "unlink", unlink_while_the_next_begins)
    mark.clear_after(lambda: False, PATIENCE_S)
    await_end_of("kinetic-saving-mark")
    next_save.join()
    assert marked() == 8


def await_end_of(name):
    for thread in threading.enumerate():
        if thread.name == name:
            thread.join()


# -- log lines of Orbax ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "is_told"), [("CANCELLED: WaitAtBarrier", False), ("INTERNAL: no space left", True)]
)
def test_a_save_that_was_cut_off_with_its_world_is_no_news(words, is_told, tmp_path, caplog):
    persistent.Persistent(str(tmp_path), persistent.Keep()).close()
    try:
        try:
            raise jax.errors.JaxRuntimeError(words)
        except jax.errors.JaxRuntimeError as error:
            raise TimeoutError("Timed out while waiting for a barrier") from error
    except TimeoutError:
        logging.getLogger("absl").exception("Save Finalize thread failed.")
    messages = [
        record.getMessage() for record in caplog.records
    ]  # Ignore records of earlier saves.
    assert ("Save Finalize thread failed." in messages) is is_told


def cut_off(folder, forced, value=5):
    """Save steps 0 to 5 locally, as if the hosts were killed before step 5 was also persistent."""
    options = {"every": 100, "best": "loss", "local_directory": folder / "memory"}
    with kinetic.Checkpointer(folder / "run", local_every=1, **options) as ckpt:
        for step in range(6):
            state = {"n": value if step == 5 else step}
            ckpt.save(step, state, metrics={"loss": 0.5}, force=forced and step == 5)
    shutil.rmtree(folder / "run" / "5", ignore_errors=True)
    return folder / "run", options


def numbers_in(folder):
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit())


@pytest.mark.parametrize(("forced", "stays"), [(True, [0, 5]), (False, [0])])
def test_a_save_that_was_cut_off_is_finished_by_the_restore(tmp_path, forced, stays):
    """A forced save was cut off: the restore completes it, because the function may have no step
    left to save. Other saves are not completed."""
    folder, options = cut_off(tmp_path, forced)
    with kinetic.Checkpointer(folder, **options) as ckpt:
        assert ckpt.restore({"n": 0}) == ({"n": 5}, 6)
        assert ckpt.restored is not None
        assert ckpt.restored.tier == "local"
    assert numbers_in(folder) == stays
    with kinetic.Checkpointer(folder, local_every=None) as ckpt:
        assert ckpt.restore({"n": 0}) == ({"n": stays[-1]}, stays[-1] + 1)
    metrics = [file.read_text() for file in folder.glob("*/metrics/metrics")]
    assert len(metrics) == len(stays)
    assert all("0.5" in text for text in metrics)


def test_who_forces_the_finished_step_is_told_that_it_is_saved_for_good(tmp_path):
    folder, options = cut_off(tmp_path, forced=True)
    with kinetic.Checkpointer(folder, **options) as ckpt:
        state, after = ckpt.restore({"n": 0})
        assert ckpt.save(after - 1, state, metrics={"loss": 0.5}, force=True) == ("persistent",)


def test_numbers_that_were_cast_are_not_saved_in_place_of_those_before(tmp_path):
    folder, options = cut_off(tmp_path, forced=True, value=np.full(3, 5.005, np.float32))
    with kinetic.Checkpointer(folder, **options) as ckpt:
        state, after = ckpt.restore({"n": np.zeros(3, np.float16)}, cast=True)
        assert (state["n"].dtype, after) == (np.float16, 6)
    assert numbers_in(folder) == [0]


def test_a_folder_that_cannot_be_written_does_not_keep_the_training_from_going_on(
    tmp_path, monkeypatch, caplog
):
    folder, options = cut_off(tmp_path, forced=True)

    def refuse(*args, **options):
        raise CheckpointError("there is no room")

    with kinetic.Checkpointer(folder, **options) as ckpt:
        with monkeypatch.context() as patched:
            patched.setattr(persistent.Persistent, "save", refuse)
            assert ckpt.restore({"n": 0}) == ({"n": 5}, 6)
        assert "step 5 exists only as a local checkpoint" in caplog.text
        assert "there is no room" in caplog.text
        assert ckpt.save(6, {"n": 6}, force=True) == ("persistent",)


def test_of_an_error_of_orbax_one_line_is_logged(tmp_path, caplog):
    """The log gets an error of Orbax as one line. The traceback goes to the caller that waits."""
    with kinetic.Checkpointer(tmp_path, every=1, local_every=None) as ckpt:
        ckpt.save(0, {"n": 0})
    own = logging.getLogger("absl")
    where = [
        logging.LogRecord("absl", logging.ERROR, f"/x{path}", 1, "%s failed", (0,), None)
        for path in ("/orbax/checkpoint/a.py", "/mine.py")
    ]
    for record in where:
        try:
            raise OSError("No space left")
        except OSError as error:
            record.exc_info = (OSError, error, error.__traceback__)
        own.handle(record)
    orbaxs, users = where
    assert (orbaxs.getMessage(), orbaxs.exc_info) == ("0 failed: No space left", None)
    assert (users.getMessage(), users.exc_info is None) == ("0 failed", False)


def test_a_thread_of_the_users_with_that_name_is_not_waited_for():
    goes_on = threading.Event()
    threading.Thread(target=goes_on.wait, name="async_save", daemon=True).start()
    worlds.finish(returned=True)
    goes_on.set()


def test_a_long_save_is_told_and_not_waited_for_without_end(monkeypatch, capfd):
    monkeypatch.setattr(worlds, "_SAY_AFTER_S", 0.05)
    monkeypatch.setattr(worlds, "_SAVES_S", 0.3)
    goes_on = threading.Event()
    threading.Thread(target=goes_on.wait, name="async_save").start()
    try:
        worlds.finish(returned=True)
    finally:
        goes_on.set()
    err = capfd.readouterr().err
    assert err.count("returned, but a checkpoint is still being saved") == 1
    assert "so the save was ended" in err


def test_what_is_saved_is_waited_for_where_the_function_returns(tmp_path):
    ckpt = kinetic.Checkpointer(tmp_path, every=1, local_every=None)
    ckpt.restore({"w": np.ones(100_000)})
    ckpt.save(0, {"w": np.ones(100_000)})
    worlds.finish(returned=True)
    assert (tmp_path / "0").is_dir()
    ckpt.close()


@pytest.mark.usefixtures("in_job")
def test_an_error_is_told_where_the_function_returns_and_nobody_closes(tmp_path, monkeypatch):
    ckpt = kinetic.Checkpointer(tmp_path, every=1, local_every=None)
    ckpt.restore({"n": 0})
    called = []
    monkeypatch.setattr(worlds, "_ending", [*worlds._ending, called.append])

    def fail():
        raise OSError("No space left")

    monkeypatch.setattr(ckpt._opened.persistent._manager, "wait_until_finished", fail)
    with pytest.raises(CheckpointError, match=r"No space left.*Free some space"):
        worlds.finish(returned=True)
    worlds.finish(returned=True)
    assert called == [True, True], "the others are called all the same"
    ckpt._opened.lease.release()


def test_of_a_function_that_raised_nothing_is_waited_for(tmp_path, monkeypatch, in_job):
    ckpt = kinetic.Checkpointer(tmp_path, every=1, local_every=None)
    ckpt.restore({"n": 0})
    ckpt._opened.persistent._manager.wait_until_finished = lambda: pytest.fail("it waits")
    worlds.finish(returned=False)
    ckpt._opened.lease.release()
