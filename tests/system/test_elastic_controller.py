"""Elastic jobs in which one process controls all slices. Virtual slices are lost, and the process
goes on; the losses of a training are those of one that lost no slice."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from gangs import wait_until
from on_controllers import asynchronous, hold, raising, save_and_lose, train

import kinetic
from kinetic.errors import HostLost, NotFound, UsageError
from kinetic.job_status import JobStatus

ROOT = Path(kinetic.__file__).parent.parent
KINETIC = [sys.executable, "-c", "from kinetic.cli.main import main; main()"]
pytestmark = [pytest.mark.timeout(600), pytest.mark.settles_within(30)]
LIMIT_S = 300
UNDISTURBED = []
"""Cache of the fixture `undisturbed`: the result and losses of a training that lost no slice."""


class Training:
    """A training job, and the notes that it writes for each step."""

    def __init__(self, folder, remote, *args):
        self.folder = folder
        folder.mkdir()
        self.handle = remote.run_async(str(folder), *args)

    def notes(self):
        path = self.folder / "steps"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def losses(self):
        return {note["step"]: note["loss"] for note in self.notes()}

    def reach(self, attempt, step):
        def is_done():
            return any((n["attempt"], n["step"]) == (attempt, step) for n in self.notes())

        wait_until(
            lambda: is_done() or self.handle.done(), f"step {step} of attempt {attempt} is not done"
        )
        assert is_done(), f"it has ended: {''.join(self.handle.logs())}"

    def result(self):
        return self.handle.result(timeout=LIMIT_S)

    def story(self):
        """Return kinetic's own lines in the job's log, without their prefix."""
        return re.findall(r"(?m)^kinetic: (.*)", "".join(self.handle.logs()))


def elastic(least=1, most=3, function=train, **options):
    return kinetic.run("tpu-v6e-8", slices=(least, most), controller="single", **options)(function)


@pytest.fixture
def begin(tmp_path):
    names = iter("abcdef")

    def begin(remote, *args):
        return Training(tmp_path / next(names), remote, *args)

    return begin


@pytest.fixture
def undisturbed(begin):
    """Return result and losses of this training on slices that are never lost."""
    if not UNDISTURBED:
        training = begin(kinetic.run("tpu-v6e-8", slices=3, controller="single")(train), 0.0)
        UNDISTURBED.extend((training.result()[2], training.losses()))
    return UNDISTURBED


# -- a slice is lost -------------------------------------------------------------------------------


@pytest.mark.long
def test_it_waits_for_the_slice_and_trains_on_as_if_nothing_had_happened(
    begin, undisturbed, monkeypatch
):
    monkeypatch.setenv("KINETIC_SLICE_AWAY_S", "5")  # The test may notice the loss late.
    training = begin(elastic(), 0.0, [[1, 12]])
    training.reach(1, 12)
    assert training.handle.kill_hosts(slice=1) == (3, 4)
    assert training.result() == (2, 3, undisturbed[0])
    assert training.losses() == undisturbed[1]
    notes = training.notes()
    assert {note["slices"] for note in notes} == {3}
    assert len({note["pid"] for note in notes}) == 1, "the process lives on"
    repeated = [note["step"] for note in notes if note["attempt"] == 2]
    assert repeated[0] in (11, 12), "from the newest checkpoint"
    lost, waiting, second, recovered, restored, stepped = training.story()
    assert re.match(r"slice 1 lost \(failure 1 of at most 10\): .*DATA_LOSS: slice 1 is down", lost)
    assert waiting == "waiting for slice 1 to return, for at most 300 s (slice_timeout)."
    assert second == "attempt 2 of 11 begins on all 3 slices."
    assert re.fullmatch(r"the function runs again, [\d.]+ s after the interruption\.", recovered)
    assert re.fullmatch(r"step 1[01] is restored from the hosts' memory\.", restored)
    assert re.fullmatch(
        r"the training has reached its next step, [\d.]+ s after the interruption\.", stepped
    )


@pytest.mark.long
@pytest.mark.parametrize("victim", [0, 2])
def test_it_shrinks_and_grows_back_at_a_step(begin, undisturbed, victim, monkeypatch):
    monkeypatch.setenv("KINETIC_SLICE_AWAY_S", "10")
    training = begin(elastic(on_slice_loss="shrink"), 0.0, [[1, 4]], True)
    training.reach(1, 4)
    training.handle.kill_hosts(slice=victim)
    attempt, slices, weights = training.result()
    assert (attempt, slices) == (3, 3)
    assert weights == [pytest.approx(row, abs=1e-5) for row in undisturbed[0]]
    assert training.losses() == pytest.approx(undisturbed[1], abs=1e-5)
    by_attempt = {note["attempt"]: note["slices"] for note in training.notes()}
    assert by_attempt == {1: 3, 2: 2, 3: 3}
    steps = {a: [n["step"] for n in training.notes() if n["attempt"] == a] for a in by_attempt}
    assert steps[3][0] == steps[2][-1] + 1, "growing repeats no step"
    story = "\n".join(training.story())
    remaining = [each for each in range(3) if each != victim]
    assert f"attempt 2 of 11 begins on slices {remaining[0]} and {remaining[1]} of 3." in story
    assert f"slice {victim} is back: the next attempt begins with more slices." in story
    assert "attempt 3 of 11 begins on all 3 slices." in story


@pytest.mark.long
def test_a_loss_while_a_checkpoint_is_saved_leaves_a_whole_one(begin, undisturbed):
    training = begin(elastic(max_failures=5, function=save_and_lose), 0.0)
    for attempt in (1, 2, 3):
        training.reach(attempt, 5 * attempt)
        training.handle.kill_hosts(slice=attempt % 3)
    assert training.result() == (4, 3, undisturbed[0])
    assert training.losses() == undisturbed[1]


@pytest.mark.long
def test_it_gives_up_after_too_many_losses_with_the_whole_history(begin, monkeypatch):
    monkeypatch.setenv("KINETIC_SLICE_AWAY_S", "5")  # The test may notice the loss late.
    training = begin(elastic(max_failures=1, function=hold), [1, 2])
    for attempt, victim in ((1, 1), (2, 2)):
        training.reach(attempt, 0)
        training.handle.kill_hosts(slice=victim)
    with pytest.raises(HostLost) as caught:
        training.result()
    assert re.search(
        r"Given up: it failed 2 times, and max_failures is 1\. attempt 1: slice 1 lost: .*DATA_LOSS"
        r".*; attempt 2: slice 2 lost: .*DATA_LOSS",
        str(caught.value),
    )


@pytest.mark.long
def test_it_gives_up_when_a_slice_does_not_return_in_time(begin, monkeypatch):
    monkeypatch.setenv("KINETIC_SLICE_AWAY_S", "600")
    training = begin(elastic(3, 3, slice_timeout=1, function=hold), [1])
    training.reach(1, 0)
    training.handle.kill_hosts(slice=1)
    with pytest.raises(HostLost, match=r"slice 1 did not return within 1 s \(slice_timeout\)"):
        training.result()


def test_an_exception_of_the_function_is_no_loss(begin):
    training = begin(elastic(function=raising))
    with pytest.raises(LookupError, match="own") as caught:
        training.result()
    assert not any("pathwaysutils" in note for note in caught.value.__notes__)
    assert [path.name for path in training.folder.iterdir()] == ["call-1"]


def test_functions_may_be_asynchronous():
    assert elastic(function=asynchronous)() == 3


# -- slices and processes that are killed ----------------------------------------------------------


def test_the_command_loses_a_slice_and_says_which(begin):
    training = begin(elastic(function=hold), [1])
    training.reach(1, 0)
    none = kn("jobs", "kill", "--yes", training.handle.job_id, "--slice", "3")
    assert none.returncode == 3
    assert "does not run on machines 0-1 of slice 3 at present" in none.stderr
    done = kn("jobs", "kill", "--yes", training.handle.job_id, "--slice", "1", "--host", "0")
    assert done.stdout == (
        f"SIGKILL was sent to machine 0 of slice 1 of {training.handle.job_id}.\n"
    )
    assert training.result() == 2
    with pytest.raises(NotFound, match="has ended"):
        training.handle.kill_hosts(slice=1)


def test_the_controller_itself_is_the_job(begin):
    training = begin(elastic(function=hold), [1])
    training.reach(1, 0)
    assert training.handle.kill_hosts(host=0) == (0,)
    with pytest.raises(HostLost, match="SIGKILL"):
        training.result()


def test_slices_of_a_fixed_number_stay(home):
    fixed = kinetic.run("tpu-v6e-8", slices=2, controller="single")(time.sleep)
    job = fixed.run_async(600)
    wait_until(lambda: job.status() is JobStatus.RUNNING, "it does not run")
    with pytest.raises(UsageError, match=r"only with slices=\(least, most\)"):
        job.kill_hosts(slice=1)
    job.cancel()


# -- programs instead of functions -----------------------------------------------------------------

PROGRAM = """
    import sys
    from pathlib import Path

    import jax
    import numpy as np
    from pathwaysutils.elastic import manager

    slices = manager.Manager()
    calls = []

    @slices.elastic_retry(max_retries=3, poll_interval=0.1)
    def train():
        calls.append(1)
        devices = [d for d in jax.devices() if d.slice_index in slices.active_slice_indices]
        sharding = jax.sharding.NamedSharding(
            jax.sharding.Mesh(np.array(devices), ("d",)), jax.sharding.PartitionSpec("d")
        )
        state = jax.device_put(np.arange(16.0), sharding)
        Path(sys.argv[1], f"call-{len(calls)}").touch()
        while len(calls) == 1:
            jax.block_until_ready(state)
        return float(state.sum())

    print(train(), len(calls))
"""


@pytest.mark.long
def test_a_program_that_knows_pathways_goes_on_by_itself(tmp_path):
    (tmp_path / "train.py").write_text(textwrap.dedent(PROGRAM))
    options = ["run", "-a", "tpu-v6e-8", "--controller", "single", "--slices", "1:2"]
    refused = kn(*options, "--max-failures", "3", "train.py", cwd=tmp_path)
    assert refused.returncode == 2
    assert "--max-failures has no effect with --controller single" in refused.stderr
    (detached,) = kn(*options, "-d", "train.py", str(tmp_path), cwd=tmp_path).stdout.split()
    wait_until((tmp_path / "call-1").exists, "the program has not begun")
    kinetic.attach(detached).kill_hosts(slice=0)
    assert kinetic.attach(detached).wait(timeout=LIMIT_S).ok
    assert "120.0 2\n" in "".join(kinetic.attach(detached).logs())


def kn(*argv, cwd=None):
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [*KINETIC, *argv], cwd=cwd, env=env, capture_output=True, text=True, timeout=LIMIT_S
    )
