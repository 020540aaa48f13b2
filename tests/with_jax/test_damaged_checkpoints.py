"""Every file of both checkpoint tiers, damaged in every way.

A training has two steps in the persistent tier and a newer one in memory. A restore returns exactly
a saved state, and prints a line if it is not the newest one.
"""

from __future__ import annotations

import gc
import re
import shutil

import jax
import numpy as np
import pytest
from doubles.checkpoint_fakes import Crowd, on_all

import kinetic
from kinetic._in_job.checkpoint import digests, tree
from kinetic._in_job.checkpoint.local_tier import LocalTier
from kinetic._in_job.checkpoint.opening import Opened
from kinetic._in_job.checkpoint.restoring import Restoring
from kinetic.errors import CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
"""Ignore warnings about coroutines that a failing reader of Orbax never awaits."""

OPTIONS = {"every": 1, "local_every": 3}
DAMAGES = ["removed", "emptied", "halved", "zeroed", *(f"flipped at {n}/4" for n in range(4))]


def state(step):
    """Return a state of numbers that do not compress: otherwise damaged bytes would fail to
    decompress, before digests are compared."""
    luck = np.random.default_rng(step)
    return {
        "w": jax.numpy.asarray(luck.normal(size=(64, 8)).astype(np.float32)),
        "b": luck.normal(size=300).astype(np.float32),
        "n": step,
    }


def checkpointer(folder, **more):
    return kinetic.Checkpointer(folder / "run", local_directory=folder / "memory", **OPTIONS | more)


@pytest.fixture(autouse=True)
def nothing_unawaited():
    """Collect garbage at each test's end, because only this module ignores its warnings."""
    yield
    gc.collect()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a training with steps 1 and 2 in the persistent tier, and step 3 in memory."""
    folder = tmp_path_factory.mktemp("trained") / "now"
    with checkpointer(folder) as ckpt:
        for step in (1, 2):
            ckpt.save(step, state(step))
    with checkpointer(folder, every=None) as ckpt:
        ckpt.restore(state(0))
        ckpt.save(3, state(3))
    for leftover in folder.glob("memory/*/*/writing"):  # Memory that is kept for the next step.
        shutil.rmtree(leftover)
    return folder.rename(folder.with_name("saved"))


def files(folder):
    return sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())


def spoil(path, damage):
    content = bytearray(path.read_bytes())
    if damage == "removed":
        path.unlink()
        return
    if damage == "emptied":
        content = b""
    elif damage == "halved":
        content = content[: len(content) // 2]
    elif damage == "zeroed":
        content = bytes(len(content))
    elif content:
        content[len(content) * int(damage.split()[-1][0]) // 4] ^= 1
    path.write_bytes(content)


def restore(folder, **more):
    """Restore the newest step, check that its state is as saved, and return the step."""
    with checkpointer(folder, **more) as ckpt:
        restored, _ = ckpt.restore(state(0))
    step = ckpt.restored.step
    assert restored["n"] == step
    for name in ("w", "b"):
        np.testing.assert_array_equal(np.asarray(restored[name]), np.asarray(state(step)[name]))
    return step


def copied(trained):
    """Copy the training back to its own path, to which its steps in memory belong."""
    folder = trained.with_name("now")
    shutil.rmtree(folder, ignore_errors=True)
    return shutil.copytree(trained, folder)


def damaged(trained, tier):
    """Yield the folder once for each damage to each file of a tier; undo the damage in between."""
    old = trained / "run" / "1"  # Step 1 has the same files.
    for name in files(trained / tier):
        if old in (trained / tier / name).parents:
            continue
        for damage in DAMAGES:
            folder = copied(trained)
            spoil(folder / tier / name, damage)
            yield f"{name} {damage}", folder


def test_damage_to_the_memory_is_never_restored(trained, caplog):
    outcomes = {}
    for what, folder in damaged(trained, "memory"):
        caplog.clear()
        outcomes[what] = (restore(folder), caplog.text)
        assert outcomes[what][0] == 2, what
        assert "3" in caplog.text, what
        assert "damaged" in caplog.text
    assert len(outcomes) == 2 * len(DAMAGES)


def test_damage_to_the_folder_is_never_restored(trained, caplog):
    outcomes = {}
    for what, folder in damaged(trained, "run"):
        shutil.rmtree(folder / "memory")
        caplog.clear()
        outcomes[what] = (restore(folder), " ".join(each.getMessage() for each in caplog.records))
    silent = [
        what for what, (step, reason) in outcomes.items() if step != 2 and "step 2" not in reason
    ]
    assert silent == []
    assert {step for step, _ in outcomes.values()} == {1, 2}
    named = [
        what for what, (_, reason) in outcomes.items() if "differs from what was saved" in reason
    ]
    run = trained / "run"  # Orbax writes a varying number of files.
    most = max(files(run), key=lambda name: (name.parts[0] == "2", (run / name).stat().st_size))
    missed = {f"{most} flipped at {n}/4" for n in (1, 2, 3)} - {*named}
    assert missed == set(), "a flipped bit among numbers, which nobody else sees"


def test_without_verifying_damage_is_restored_and_a_step_without_digests_always(trained):
    """With verify=False, a step is restored although its digests were lost. A step that was saved
    without digests is always restored."""
    folder = copied(trained)
    shutil.rmtree(folder / "memory")
    shutil.rmtree(folder / "run/2/digests")
    assert restore(folder, verify=False) == 2
    assert restore(folder) == 1
    with checkpointer(folder, verify=False) as ckpt:
        ckpt.restore(state(0))
        ckpt.save(4, state(4))
    assert not (folder / "run/4/digests").exists()
    assert restore(folder) == 4


def test_where_the_library_is_missing_it_is_said_and_the_training_goes_on(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(digests, "is_available", lambda: False)
    with checkpointer(tmp_path) as ckpt:
        ckpt.save(3, state(3))
    assert "The package xxhash is not installed" in caplog.text
    assert not (tmp_path / "run/3/digests").exists()
    monkeypatch.undo()
    assert restore(tmp_path) == 3


def halves(host, folder, step):
    """Commit one host's part of a step that two hosts save, and return the host's tier."""
    tier = LocalTier(folder / str(host.index))
    tier.commit(tier.stage(step, "run", 2, tree.take_apart({"w": np.full(99, step)})))
    return tier


class NoFolder:
    """A stand-in for a persistent tier that has no steps."""

    def steps(self):
        return []

    def continue_after(self, step):
        pass


@pytest.mark.parametrize(
    ("spoiled", "step", "words"),
    [
        ([], 2, None),
        (
            [(1, 2)],
            2,
            r"host 1: .*of step 2.*damaged.*leaf \['w'\].*A copy of another host is used",
        ),
        (
            [(0, 2), (1, 2)],
            1,
            r"host 0: .*of step 2.*No other host has a copy. The newest undamaged",
        ),
        ([(0, 2), (1, 2), (0, 1)], 1, r"host 0: .*of step 1.* A copy of another host is used"),
    ],
)
def test_what_one_host_has_lost_another_one_has(tmp_path, spoiled, step, words):
    warned = {0: [], 1: []}
    for host in range(2):
        for saved in (1, 2):
            halves(Crowd(2).hosts()[host], tmp_path, saved)
    for host, saved in spoiled:
        spoil(tmp_path / f"{host}/{saved}/data", "flipped at 2/4")

    def run(host):
        opened = Opened(None, "run", NoFolder(), LocalTier(tmp_path / str(host.index)))
        restoring = Restoring(opened, host, "the folder", warned[host.index].append)
        restored = restoring.restore(tree.take_apart({"w": np.zeros(99, int)}))
        return restored.restored.step, restored.state["w"].tolist()

    assert on_all(Crowd(2).hosts(), run) == [(step, [step] * 99)] * 2
    assert warned[0] == warned[1]
    if words is None:
        assert warned[0] == []
    else:
        assert re.search(words, " ".join(warned[0]))


def test_what_arrives_is_checked(tmp_path):
    """One host sends other bytes than it read, as over a broken network: the receiver notices."""
    halves(Crowd(1).hosts()[0], tmp_path, 1)

    def run(host):
        broadcast, host.broadcast = host.broadcast, None

        def garbled(data, source):
            content = broadcast(data, source).copy()
            content[3] ^= 1
            return content

        host.broadcast = garbled
        opened = Opened(None, "run", NoFolder(), LocalTier(tmp_path / str(host.index)))
        restoring = Restoring(opened, host, "the folder", lambda words: None)
        return restoring.restore(tree.take_apart({"w": np.zeros(99, int)}))

    for error in on_all(Crowd(2).hosts(), run):
        assert isinstance(error, CheckpointError)
        assert "a part of step 1 from host 0 differs from what was saved" in str(error)


def test_where_nothing_is_left_it_is_an_error_that_says_what_to_do(trained):
    folder = copied(trained)
    for path in (*folder.glob("run/*/state/_METADATA"), *folder.glob("memory/*/*/3/data")):
        spoil(path, "zeroed")
    with (
        checkpointer(folder) as ckpt,
        pytest.raises(
            CheckpointError,
            match=r"None of the saved steps .*step 3.*damaged.*step 2 in .*step 1 in .*directory=",
        ),
    ):
        ckpt.restore(state(0))
