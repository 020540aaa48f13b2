"""Elastic jobs: slices are killed for real, and the job goes on, waits, shrinks or gives up.

In: jobs with slices=(least, most), led by the process that has forked their agents, and by a head
that agents elsewhere join over TCP. Out: values, attempts, the story in the log; nothing is left
behind.
"""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from elastic_jobs import LIMIT_S, reached
from gangs import wait_until

import kinetic
from kinetic import errors
from kinetic.errors import HostLost, JobCancelled, UsageError

KINETIC = [sys.executable, "-c", "from kinetic.cli.main import main; main()"]
pytestmark = [pytest.mark.timeout(600), pytest.mark.settles_within(30)]
STEPS = 10


def train(folder, kills=(), pause_s=0.02):
    """Count steps with a collective in each. `kills` says which process is killed in which attempt
    before which step; -1 is before the first use of JAX."""
    die_if_asked(kills, -1)
    import jax
    import numpy as np
    from jax.experimental import multihost_utils

    for step in range(STEPS):
        die_if_asked(kills, step)
        total = multihost_utils.process_allgather(np.array([step])).sum()
        assert total == jax.process_count() * step
        Path(folder, f"{kinetic.attempt()}-{jax.process_index()}").write_text(str(step))
        pause(pause_s)
    assert {d.slice_index for d in jax.devices()} == set(range(kinetic.num_slices()))
    return kinetic.attempt(), jax.process_count(), kinetic.num_slices()


def count(folder, kills=(), pause_s=0.02):
    """Count steps as `train` does, but meet the other hosts by files and without JAX."""
    hosts, mine = int(os.environ["KINETIC_HOSTS"]), int(os.environ["KINETIC_HOST_INDEX"])
    marks = [Path(folder, f"{kinetic.attempt()}-{host}") for host in range(hosts)]
    for step in range(STEPS):
        die_if_asked(kills, step)
        marks[mine].write_text(str(step))
        while any(not mark.exists() or int(mark.read_text() or -1) < step for mark in marks):
            time.sleep(0.01)
        pause(pause_s)
    return kinetic.attempt(), hosts, kinetic.num_slices()


def pause(seconds):
    """Attempts that nobody harms are short."""
    time.sleep(seconds if kinetic.attempt() == 1 else min(seconds, 0.3))


def die_if_asked(kills, step):
    if (kinetic.attempt(), step, int(os.environ["KINETIC_HOST_INDEX"])) in kills:
        os.kill(os.getpid(), signal.SIGKILL)


def whole(attempt):
    return attempt, 4, 2


def half(attempt):
    return attempt, 2, 1


def elastic(least=1, most=2, function=count, **options):
    return kinetic.run("tpu-v6e-8", slices=(least, most), **options)(function)


@pytest.fixture(params=["local", "programs"])
def backend(request, monkeypatch):
    monkeypatch.setenv("KINETIC_BACKEND", request.param)
    return request.param


only_local = pytest.mark.parametrize("backend", ["local"], indirect=True)
only_programs = pytest.mark.parametrize("backend", ["programs"], indirect=True)


WHO_STAYS = {
    "local": {n: [f"{n} hosts go on in the process that they have."] for n in ("2 of 4", "all 2")},
    "programs": {"2 of 4": [], "all 2": []},
}
"""What the log says of processes: hosts that are programs have new ones in each attempt."""


@pytest.fixture
def begin(backend, begin):
    """On each backend. It waits, unless told otherwise."""
    return functools.partial(begin, wait=True)


# -- a slice is lost -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("backend", "victim"), [("local", 3), ("local", 0), ("programs", 0)], indirect=["backend"]
)
def test_it_waits_for_a_lost_slice_and_goes_on_with_the_same_mesh(begin, victim, backend):
    job = begin(elastic(function=train), [(1, 3, victim)], wait=False)
    assert job.handle.result(timeout=LIMIT_S) == whole(2)
    which = victim // 2
    lost, waiting, *stay, begins, recovered = job.story()
    assert stay == WHO_STAYS[backend]["2 of 4"]
    assert lost.startswith(
        f"slice {which} lost (failure 1 of at most 10): host {victim} of 4: The worker process was "
        "killed by SIGKILL"
    )
    assert waiting == f"waiting for slice {which} to return, for at most 300 s (slice_timeout)."
    assert begins == "attempt 2 of 11 begins on all 2 slices."
    assert re.fullmatch(r"recovered after [\d.]+ s\.", recovered)
    assert job.slices() == [(0, 1), (0, 1)]


@pytest.mark.parametrize(
    ("backend", "victim"), [("local", 2), ("local", 0), ("programs", 0)], indirect=["backend"]
)
def test_it_shrinks_at_once_also_without_the_first_slice(begin, victim, monkeypatch, backend):
    monkeypatch.setenv("KINETIC_SLICE_AWAY_S", "600")
    job = begin(elastic(function=train, on_slice_loss="shrink"), [(1, 3, victim)], wait=False)
    assert job.handle.result(timeout=LIMIT_S) == half(2)
    which = victim // 2
    lost, shrinking, *stay, begins, _ = job.story()
    assert stay == WHO_STAYS[backend]["all 2"]
    assert lost.startswith(f"slice {which} lost")
    assert shrinking == "shrinking to 1 slice until it is back."
    assert begins == f"attempt 2 of 11 begins on slice {1 - which} of 2."
    assert job.slices() == [(0, 1), (1 - which,)]
    shown = subprocess.run(
        [*KINETIC, "jobs", "status", job.handle.job_id], capture_output=True, text=True, check=True
    ).stdout
    assert re.search(r"(?m)^0, 1 +1 .* failed", shown), shown
    assert re.search(rf"(?m)^{1 - which} +2 .* succeeded", shown), shown
    assert re.findall(r"(?m)^(\d) +(\d) +returned", shown) == [
        (str(1 - which), "0"),
        (str(1 - which), "1"),
    ]


@only_local
def test_a_host_is_lost_before_it_uses_jax(begin):
    job = begin(elastic(function=train), [(1, -1, 1), (2, -1, 3)], wait=False)
    assert job.handle.result(timeout=LIMIT_S) == whole(3)
    assert job.losses() == [(0,), (1,)]


def compile_once(folder):
    """The process with index 2 is killed while it compiles, in the first attempt."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    mesh = kinetic.make_mesh()
    everywhere = NamedSharding(mesh, PartitionSpec())

    @jax.jit
    def traced(x):
        if kinetic.attempt() == 1 and jax.process_index() == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        x = jax.lax.with_sharding_constraint(
            x, NamedSharding(mesh, PartitionSpec(("data", "fsdp")))
        )
        return jax.lax.with_sharding_constraint(x.sum(), everywhere)

    return float(traced(jnp.ones(16)))


@only_local
def test_a_host_is_lost_while_it_compiles(begin):
    job = begin(elastic(function=compile_once, all_hosts=True), wait=False)
    assert job.handle.results(timeout=LIMIT_S) == [16.0] * 4
    assert job.losses() == [(1,)]


def who_serves(folder):
    """Say which process serves JAX's coordination; host 0 is killed in the first attempt."""
    import jax
    from jax._src import distributed
    from jax.experimental import multihost_utils

    multihost_utils.sync_global_devices("all are there")
    if kinetic.attempt() == 1 and jax.process_index() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600 if kinetic.attempt() == 1 else 0)
    return distributed.global_state.service is None, os.environ["JAX_COORDINATOR_ADDRESS"]


@only_local
def test_no_worker_serves_the_coordination_of_jax(begin):
    job = begin(elastic(function=who_serves, all_hosts=True), wait=False)
    (told,) = set(job.handle.results(timeout=LIMIT_S))
    assert told[0]
    assert job.losses() == [(0,)]


@only_local
def test_what_serves_the_coordination_of_jax_is_killed(begin):
    """JAX aborts all processes; the job goes on."""
    job = begin(elastic(function=train), (), 0.3)
    pid = job.below_supervisor("kinetic-service")
    os.kill(pid, signal.SIGKILL)
    assert job.handle.result(timeout=LIMIT_S) == whole(2)
    (lost,) = job.losses()
    assert lost in {(0,), (1,), (0, 1)}, "some processes may be freed before JAX aborts them"


def keep(folder):
    """Leave a file in this host's own folder, and return what the host has left there before."""
    import jax
    from jax.experimental import multihost_utils

    own = Path(os.environ["KINETIC_LOCAL_DIR"], "left")
    before = own.read_text() if own.exists() else ""
    own.write_text(f"{kinetic.slice_index()} of {kinetic.num_slices()}")
    multihost_utils.sync_global_devices("all have left a file")
    if kinetic.attempt() == 1 and kinetic.slice_index() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600 if kinetic.attempt() == 1 else 0)
    return kinetic.attempt(), jax.process_count(), before


@only_local
def test_a_host_keeps_its_folder_whatever_its_place_in_an_attempt(begin, monkeypatch):
    monkeypatch.setenv("KINETIC_SLICE_AWAY_S", "600")
    job = begin(elastic(function=keep, on_slice_loss="shrink"), wait=False)
    assert job.handle.result(timeout=LIMIT_S) == (2, 2, "1 of 2"), "slice 1 is the first there"


@only_local
def test_all_values_of_a_smaller_attempt(begin, monkeypatch):
    monkeypatch.setenv("KINETIC_SLICE_AWAY_S", "600")
    job = begin(elastic(on_slice_loss="shrink", all_hosts=True), [(1, 3, 0)], wait=False)
    assert job.handle.results(timeout=LIMIT_S) == [half(2)] * 2


@only_local
def test_an_agent_is_stopped(begin):
    """It falls silent, and is ended with its slice."""
    job = begin(elastic(), (), 2.0)
    os.kill(job.agents()[2], signal.SIGSTOP)
    assert job.handle.result(timeout=LIMIT_S) == whole(2)
    assert job.losses() == [(1,)]


@pytest.mark.parametrize(("backend", "host"), [("local", 1), ("programs", 2)], indirect=["backend"])
def test_an_agent_is_killed(begin, tmp_path, host):
    job = begin(elastic(), (), 0.3)
    before = job.agents()
    os.kill(before[host], signal.SIGKILL)
    reached(tmp_path, 2, 0)
    after, which = job.agents(), host // 2
    kept = {h for h in before if before[h] == after[h]}
    others = {h for h in before if (h // 2 != which if job.is_forked else h != host)}
    assert kept == others, "agents of the other slice stay; elsewhere all that live"
    assert job.handle.result(timeout=LIMIT_S) == whole(2)
    assert job.losses() == [(which,)]


@only_local
def test_a_whole_slice_is_killed(begin):
    job = begin(elastic(), (), 0.3)
    assert job.handle.kill_hosts(slice=0, agents=True) == (0, 1)
    assert job.handle.result(timeout=LIMIT_S) == whole(2)
    assert job.losses() == [(0,)]


@only_local
def test_all_slices_are_killed(begin):
    job = begin(elastic(on_slice_loss="shrink"), (), 0.3)
    for pid in job.agents().values():
        os.kill(pid, signal.SIGKILL)
    assert job.handle.result(timeout=LIMIT_S)[0] == 2
    assert job.losses() == [(0, 1)]


def hold(folder, leave):
    """Start a process that outlives the worker, and wait for ever."""
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    mark = Path(folder, f"child-{os.environ['KINETIC_ATTEMPT']}-{os.environ['KINETIC_HOST_INDEX']}")
    mark.with_suffix(".part").write_text(str(child.pid))
    mark.with_suffix(".part").rename(mark)
    while not Path(folder, "over").exists():
        time.sleep(0.05)
    child.kill()
    child.wait()


@only_local
@pytest.mark.parametrize("survivors", ["restart", "keep"])
def test_nothing_that_a_lost_slice_has_started_lives_on(begin, tmp_path, survivors, backend):
    """Of processes that go on, their children do."""
    job = begin(elastic(function=hold, survivors=survivors), True, wait=False)
    marks = [tmp_path / f"child-1-{host}" for host in range(4)]
    wait_until(lambda: all(mark.exists() for mark in marks), "no children")
    children = [int(mark.read_text()) for mark in marks]
    os.kill(job.agents()[2], signal.SIGKILL)
    again = [tmp_path / f"child-2-{host}" for host in range(4)]
    wait_until(lambda: all(mark.exists() for mark in again), "no second attempt")
    gone = [host for host, pid in enumerate(children) if not Path(f"/proc/{pid}").exists()]
    assert gone == ([2, 3] if (backend, survivors) == ("local", "keep") else [0, 1, 2, 3])
    (tmp_path / "over").touch()
    assert job.handle.result(timeout=LIMIT_S) is None
    assert [pid for pid in children if Path(f"/proc/{pid}").exists()] == []


def learn(folder, pause_s):
    """Count up to 40, from where the last attempt has saved; make room when it is asked for."""
    import jax
    import numpy as np
    from jax.experimental import multihost_utils

    saved = Path(folder, "saved")
    step, seen = json.loads(saved.read_text()) if saved.exists() else (0, [])
    attempt = kinetic.attempt()
    while step < 40:
        if attempt == 1 and step == 3 and kinetic.slice_index() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        everyone = multihost_utils.process_allgather(np.array([step])).reshape(-1)
        assert set(everyone.tolist()) == {step}, "all hosts have gone on from the same step"
        step, seen = step + 1, [*seen, jax.process_count()]
        if kinetic.should_reform():
            if jax.process_index() == 0:
                saved.write_text(json.dumps([step, seen]))
            multihost_utils.sync_global_devices("saved")
            kinetic.reform()
        time.sleep(pause_s if kinetic.num_slices() == 1 else 0)
    return attempt, step, seen


def test_it_grows_back_at_a_step_and_repeats_none(begin, monkeypatch):
    monkeypatch.setenv("KINETIC_SLICE_AWAY_S", "5")
    job = begin(elastic(function=learn, on_slice_loss="shrink"), 1.0, wait=False)
    attempt, steps, seen = job.handle.result(timeout=LIMIT_S)
    assert (attempt, steps, len(seen)) == (3, 40, 40), "the second attempt began anew, unsaved"
    assert seen == sorted(seen)
    assert {2, 4} == set(seen)
    assert job.slices() == [(0, 1), (0,), (0, 1)]
    assert job.losses() == [(1,)]
    story = job.story()
    assert "slice 1 back: the next attempt begins with more slices." in story
    assert "attempt 3 of 12 begins on all 2 slices." in story


def test_outside_of_elastic_jobs_nobody_is_asked_to_make_room():
    assert not kinetic.should_reform()


# -- while it recovers -----------------------------------------------------------------------------


@only_local
def test_another_slice_is_lost_while_the_job_waits(begin, monkeypatch):
    monkeypatch.setenv("KINETIC_SLICE_AWAY_S", "3")
    job = begin(elastic(), [(1, 3, 0)], wait=False)
    wait_until(lambda: job.losses() == [(0,)], "no loss")
    os.kill(job.agents()[3], signal.SIGKILL)
    assert job.handle.result(timeout=LIMIT_S) == whole(2)
    assert job.losses() == [(0,), (1,)]
    assert any("slice 1 lost (failure 2 of at most 10)" in line for line in job.story())


@only_local
def test_a_slice_that_does_not_return_in_time(begin, monkeypatch):
    monkeypatch.setenv("KINETIC_SLICE_AWAY_S", "600")
    job = begin(elastic(2, 2, slice_timeout=1), [(1, 3, 2)], wait=False)
    with pytest.raises(HostLost) as caught:
        job.handle.result(timeout=LIMIT_S)
    words = str(caught.value)
    assert "slice 1 did not return within 1 s (slice_timeout), and there is 1 slice left" in words
    assert "attempt 1: slice 1 lost: host 2 of 4: The worker process was killed by SIG" in words


@only_local
def test_one_that_has_waited_goes_on_with_those_left(begin, monkeypatch):
    monkeypatch.setenv("KINETIC_SLICE_AWAY_S", "600")
    job = begin(elastic(slice_timeout=1), [(1, 3, 2)], wait=False)
    assert job.handle.result(timeout=LIMIT_S) == half(2)


@only_local
def test_it_is_cancelled_while_it_waits(begin, monkeypatch):
    monkeypatch.setenv("KINETIC_SLICE_AWAY_S", "600")
    job = begin(elastic(2, 2), [(1, 3, 2)], wait=False)
    wait_until(lambda: job.losses() == [(1,)], "no loss")
    job.handle.cancel()
    with pytest.raises(JobCancelled, match="before its next attempt"):
        job.handle.result(timeout=LIMIT_S)


# -- the end ---------------------------------------------------------------------------------------


def test_its_records_are_removed_while_it_waits(begin, monkeypatch):
    monkeypatch.setenv("KINETIC_SLICE_AWAY_S", "600")
    job = begin(elastic(2, 2), [(1, 3, 2)], wait=False)
    wait_until(lambda: job.losses() == [(1,)], "no loss")
    pid = job.leader()
    job.folder.rename(job.folder.parents[1] / "removed")
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), "it goes on without its records")
    assert not job.folder.exists()


def test_it_is_cancelled_while_it_runs(begin):
    job = begin(elastic(), (), 1.0)
    job.handle.cancel()
    with pytest.raises(JobCancelled):
        job.handle.result(timeout=LIMIT_S)
    assert job.losses() == []


@only_local
def test_it_is_given_up_with_the_whole_history(begin):
    job = begin(elastic(max_failures=1), [(1, 2, 3), (2, 2, 0)], wait=False)
    with pytest.raises(HostLost) as caught:
        job.handle.result(timeout=LIMIT_S)
    words = str(caught.value)
    assert "given up: it failed 2 times, and max_failures is 1. attempt 1: slice 1 lost" in words
    assert "; attempt 2: slice 0 lost: host 0 of 4" in words


def fail(folder):
    import jax

    if jax.process_index() == 1:
        raise ValueError("no luck")
    time.sleep(600)


@only_local
def test_an_exception_of_the_function_is_no_loss(begin):
    job = begin(elastic(function=fail), wait=False)
    with pytest.raises(ValueError, match="no luck"):
        job.handle.result(timeout=LIMIT_S)
    assert (job.slices(), job.losses()) == ([(0, 1)], [])


def test_the_leader_is_killed(begin):
    job = begin(elastic(), (), 10.0, wait=False)
    wait_until(lambda: job.slices() == [(0, 1)], "it does not begin")
    word = "supervisor" if job.is_forked else "which led the job"
    os.kill(job.leader(), signal.SIGKILL)
    with pytest.raises(errors.KineticError, match=word):
        job.handle.result(timeout=LIMIT_S)


@only_programs
def test_the_program_of_a_host_is_killed(begin, tmp_path):
    """It is started again, and the others stay."""
    job = begin(elastic(), (), 0.3)
    before = job.programs()
    os.kill(before[2], signal.SIGKILL)
    reached(tmp_path, 2, 0)
    after = job.programs()
    assert {h for h in before if before[h] == after[h]} >= {0, 1}
    assert job.handle.result(timeout=LIMIT_S) == whole(2)
    assert job.losses() == [(1,)]


@only_programs
def test_a_machine_is_gone_at_once(begin, tmp_path):
    """Nobody is left to say so."""
    job = begin(elastic(), (), 0.3)
    program, agent = job.programs()[1], job.agents()[1]
    os.kill(program, signal.SIGSTOP)
    for pid in (agent, program):
        os.kill(pid, signal.SIGKILL)
    assert job.handle.result(timeout=LIMIT_S) == whole(2)
    assert job.losses() == [(0,)]


@only_programs
def test_a_host_is_taken_away(begin):
    """A cluster asks its program to end, and starts it again."""
    job = begin(elastic(), (), 0.3)
    before = job.programs()
    os.kill(before[2], signal.SIGTERM)
    assert job.handle.result(timeout=LIMIT_S) == whole(2)
    assert job.losses() == [(1,)]


@only_local
def test_what_forks_is_killed(begin, tmp_path):
    """Without the process that starts agents, a lost slice cannot return."""
    job = begin(elastic(on_slice_loss="shrink", slice_timeout=1), (), 0.3)
    os.kill(job.below_supervisor("kinetic-stem"), signal.SIGKILL)
    os.kill(job.agents()[3], signal.SIGKILL)
    assert job.handle.result(timeout=LIMIT_S) == half(2)


def leave_alone(leaver):
    """One host leaves, the others go on."""
    import jax
    import numpy as np
    from jax.experimental import multihost_utils

    from kinetic._in_job import elastic

    elastic._LIMIT_S = 2.0
    multihost_utils.process_allgather(np.zeros(1))
    if jax.process_index() == leaver:
        kinetic.reform()
    while True:
        multihost_utils.process_allgather(np.zeros(1))


@pytest.mark.parametrize("leaver", [0, 3])
def test_a_host_that_leaves_alone_is_told_and_holds_nobody_up(leaver):
    with pytest.raises(UsageError, match=rf"called on host {leaver}, and hosts .* have not called"):
        elastic(function=leave_alone)(leaver)
