"""`kinetic.Checkpointer` in jobs: real processes, real collectives, Orbax's real files. Trainings
are killed or lose saves; the tests check from which step, and with which state, they continue."""

from __future__ import annotations

import os
import signal
import sys

import pytest
from gangs import wait_until
from on_saving_hosts import (
    compile_steps,
    go_on_with_what_is_described,
    hold,
    read_numbers,
    save_another_kind,
    save_to_a_full_disk,
    save_without_closing,
    train,
    twice,
)
from places import Place

import kinetic
from kinetic import errors
from kinetic._core.exits import Exit
from kinetic._system import memory_folder
from kinetic.cli.root import call

pytestmark = pytest.mark.timeout(600)


def result_of(job):
    """Return the value of a job, and check that its cleanup removes its files in memory."""
    value = job.result()
    job.cleanup()
    assert not memory_folder.of_job(job.job_id).exists()
    return value


def alone(steps):
    """Compute in plain Python, for this number of steps, the state that `train` ends with."""
    w, b, n = [[0.0] * 3 for _ in range(8)], [0.0] * 3, 0
    for step in range(steps):
        sums = [sum(row[i] for row in w) for i in range(3)]
        w = [[each + step for each in row] for row in w]
        b = [each * 2 + more + 1 for each, more in zip(b, sums, strict=True)]
        n += step
    return sum(map(sum, w)) + sum(b), n


def test_a_host_that_was_killed_goes_on_from_memory(tmp_path):
    run = kinetic.run("cpu:2", slices=2, retries=1, all_hosts=True, output_dir=str(tmp_path))
    job = run(train).run_async(11, die=(1, 6, 1))
    job.result()
    for starts, total, n, _ in job.results():
        assert starts == [(2, 7, (6, "local", ()))]
        assert (total, n) == alone(11)
    result_of(job)
    steps = {path.name for path in (tmp_path / "checkpoints").iterdir() if path.name.isdigit()}
    assert steps == {"0", "4", "8"}


@pytest.mark.long
def test_a_host_that_lost_its_copy_gets_it_from_the_other_slice(tmp_path):
    run = kinetic.run("cpu:2", slices=2, retries=1, all_hosts=True, output_dir=str(tmp_path))
    job = run(train).run_async(11, die=(1, 6, 1), lose=[(2, 1)])
    job.result()
    zero, one = job.results()
    assert zero[0][0][2][1:] == ("local", ())
    assert one[0][0][2][1:] == ("local", (0,))
    assert zero[1:3] == one[1:3] == alone(11)
    result_of(job)


@pytest.mark.long
def test_without_local_copies_it_goes_on_from_the_folder(tmp_path):
    run = kinetic.run("cpu:2", slices=2, retries=1, all_hosts=True, output_dir=str(tmp_path))
    job = run(train).run_async(11, die=(1, 6, 1), lose=[(2, -1)])
    job.result()
    for starts, total, n, _ in job.results():
        assert starts == [(2, 5, (4, "persistent", ()))]
        assert (total, n) == alone(11)
    result_of(job)


@pytest.mark.parametrize(
    ("shape", "host"),
    [
        ({"slices": 2}, 0),
        pytest.param({"slices": 2}, 1, marks=pytest.mark.long),
        pytest.param({}, 0, marks=pytest.mark.long),
    ],
)
@pytest.mark.settles_within(30)
def test_a_host_that_is_taken_away_lets_all_save_the_same_step(
    home, tmp_path, monkeypatch, shape, host
):
    monkeypatch.setenv("KINETIC_GRACE_S", "100")
    place = Place("local", home.parent)
    run = kinetic.run("cpu:2", all_hosts=True, output_dir=str(tmp_path), **shape)
    job = run(train).run_async(10_000, every=None, local_every=None, pause=str(tmp_path))
    wait_until((tmp_path / f"{host}-3").exists, "step 3 was not reached")
    os.kill(place.host(job, host), signal.SIGTERM)
    with pytest.raises(errors.HostLost, match="asked to end"):
        job.result(timeout=200)
    assert job.outcome().first.exit is Exit.EVICTED
    (step,) = [int(p.name) for p in (tmp_path / "checkpoints").iterdir() if p.name.isdigit()]
    assert step >= 3
    assert f"kinetic: step {step} is saved on all hosts, which end now." in job.logs()
    assert "Traceback" not in job.logs(all_hosts=True)
    result = run(train)(step + 3, every=None, local_every=None)
    assert result[0] == [(1, step + 1, (step, "persistent", ()))]
    # float32 rounds the sum after many steps.
    assert result[1:3] == pytest.approx(alone(step + 3), rel=1e-5)


@pytest.mark.long
def test_two_jobs_do_not_write_one_folder(tmp_path):
    first = kinetic.run("cpu", output_dir=str(tmp_path))(hold).run_async(str(tmp_path))
    second = kinetic.run("cpu:2", slices=2, output_dir=str(tmp_path))(train)
    try:
        wait_until((tmp_path / "held").exists, "the first job did not begin")
        with pytest.raises(errors.CheckpointInUse, match=f"written by {first.job_id}") as refusal:
            second(3)
        assert refusal.value.job_id == first.job_id
    finally:
        first.cancel()
        first.wait()
    with pytest.raises(errors.CheckpointMismatch, match=r"has no \['b'\], \['own'\], \['w'\]"):
        second(3)


def test_what_cannot_work_is_told_before_the_first_step(tmp_path):
    run = kinetic.run("cpu:2", slices=2)
    (tmp_path / "file").touch()
    with pytest.raises(errors.CheckpointError, match="cannot be written to"):
        run(train)(3, folder=str(tmp_path / "file/below"))
    with pytest.raises(errors.CheckpointError, match="cannot be used"):
        run(train)(3, folder=str(tmp_path), local_directory=str(tmp_path / "file/below"))


def test_what_could_not_be_restored_is_told_when_it_is_saved_first(tmp_path):
    message = r"state of save\(\) at step 0 .*'x'\] is an array of shape \(3,\) .*but a number"
    with pytest.raises(errors.CheckpointMismatch, match=message):
        kinetic.run("cpu")(save_another_kind)(str(tmp_path))


@pytest.mark.parametrize(("host", "saves"), [(0, 2), pytest.param(1, 9, marks=pytest.mark.long)])
def test_a_full_disk_is_told_at_once(tmp_path, host, saves):
    """A host with a full disk fails at once; others would wait for it in Orbax for ten minutes."""
    run = kinetic.run("cpu", slices=2, output_dir=str(tmp_path))
    job = run(save_to_a_full_disk).run_async(host, saves)
    with pytest.raises(errors.CheckpointError, match=r"could not be written \(step 1\)"):
        job.result(timeout=200)
    assert job.outcome().first.host == host
    assert {"0"} == {p.name for p in (tmp_path / "checkpoints").iterdir() if p.name.isdigit()}


@pytest.mark.parametrize("end", [int, sys.exit])
def test_what_was_saved_is_committed_though_nobody_closes(tmp_path, end):
    job = kinetic.run("cpu", slices=2, output_dir=str(tmp_path))(save_without_closing).run_async(
        end
    )
    job.result()
    assert "still running" not in job.logs()
    assert (tmp_path / "checkpoints/1").is_dir()


@pytest.mark.parametrize("end", ["", "raise SystemExit"])
def test_what_a_script_has_saved_is_committed_though_nobody_closes(tmp_path, monkeypatch, end):
    """A script ends before Orbax has completed a save. The save is completed, although Python shuts
    down the executors of Orbax's threads at the end of a script."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pyproject.toml").write_text("")
    (tmp_path / "s.py").write_text(f"{SAVES}\n{end}")
    assert call(["run", "-a", "cpu", "s.py", str(tmp_path / "steps")]) == 0
    assert (tmp_path / "steps/0").is_dir()


SAVES = """
import asyncio, sys
import kinetic, numpy, orbax.checkpoint

async def save_slowly(*args, **more):
    await asyncio.sleep(0.5)
    return await save(*args, **more)

save = orbax.checkpoint.JsonCheckpointHandler._save_fn
orbax.checkpoint.JsonCheckpointHandler._save_fn = save_slowly
checkpointer = kinetic.Checkpointer(sys.argv[1], every=1, local_every=None)
checkpointer.restore({"w": numpy.ones(10)})
checkpointer.save(0, {"w": numpy.ones(10)})
"""


@pytest.mark.long
@pytest.mark.parametrize("slice_", ["cpu:2", "tpu-v6e-4"])
def test_the_first_state_need_not_be_as_those_after_a_step(tmp_path, slice_):
    run = kinetic.run(slice_, slices=2 if slice_ == "cpu:2" else 1, retries=1)
    ends = (9, 9, 1.5**9, ["float32", "bfloat16"])
    assert run(twice)(compile_steps, str(tmp_path)) == [(7, *ends), (5, *ends)]


@pytest.mark.long
def test_iterators_go_on_where_each_host_was(tmp_path):
    run = kinetic.run("cpu:2", slices=2, retries=1, all_hosts=True)
    job = run(twice).run_async(read_numbers, str(tmp_path), 7)
    job.result()
    assert job.results() == [[(7, 7), (5, 7)], [(7, 1007), (5, 1007)]]


def test_a_described_state_is_restored_on_several_hosts(tmp_path):
    run = kinetic.run("cpu:2", slices=2, retries=1, all_hosts=True)
    job = run(go_on_with_what_is_described).run_async(str(tmp_path))
    job.result()
    alone = ([2.0] * 3, True)
    expected = [(2, tier, True, [True, True], alone) for tier in ("persistent", "local")]
    assert job.results() == [expected] * 2
