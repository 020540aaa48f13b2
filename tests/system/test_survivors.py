"""Processes of hosts that are not lost, and that go on in the next attempt.

In: elastic jobs whose hosts are killed for real. Out: process ids, what the processes still know,
losses of a training; nothing is left behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest
from elastic_jobs import LIMIT_S, note, pids
from gangs import wait_until

import kinetic
from kinetic.errors import HostLost

pytestmark = [pytest.mark.timeout(600), pytest.mark.settles_within(30)]
STEPS = 8
SEEN: list[tuple[int, int]] = []
"""On a host: (attempt, process) of each call."""


def told(folder):
    """Leave a note of this call; return what this process has seen so far."""
    SEEN.append((kinetic.attempt(), os.getpid()))
    own = Path(folder, f"{kinetic.attempt()}-{os.environ['KINETIC_HOST_INDEX']}.json")
    place = {
        "pid": os.getpid(),
        "seen": SEEN,
        "slice": kinetic.slice_index(),
        "slices": kinetic.num_slices(),
        "variable": os.environ["KINETIC_ATTEMPT"],
        "agent": os.getppid(),
        "descriptors": [len(os.listdir(f"/proc/{pid}/fd")) for pid in (os.getppid(), "self")],
        "init": Path(os.environ["KINETIC_LOCAL_DIR"], "jax-init-info.txt").read_text().split(),
    }
    own.with_suffix(".part").write_text(json.dumps(place))
    own.with_suffix(".part").rename(own)


def train(folder, kills, given, pause_s=0.0):
    """Take steps together; `kills` are (attempt, host)."""
    import jax
    import numpy as np
    from jax.experimental import multihost_utils

    told(folder)
    given.append(kinetic.attempt())
    for step in range(STEPS):
        total = multihost_utils.process_allgather(np.array([step])).sum()
        Path(folder, f"{kinetic.attempt()}-{jax.process_index()}").write_text(str(step))
        if step == 3 and [kinetic.attempt(), jax.process_index()] in [list(k) for k in kills]:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(pause_s)
    slices = sorted({device.slice_index for device in jax.devices()})
    return kinetic.attempt(), jax.process_count(), slices, int(total), given


def elastic(function=train, slices=(1, 2), **options):
    return kinetic.run("tpu-v6e-8", slices=slices, **options)(function)


# -- they go on ------------------------------------------------------------------------------------


@pytest.mark.parametrize("victim", [0, 3])
def test_survivors_keep_their_process_while_the_slice_returns(begin, tmp_path, victim):
    job = begin(elastic(survivors="keep"), [(1, victim)], [])
    assert job.handle.result(timeout=LIMIT_S) == (2, 4, [0, 1], 4 * (STEPS - 1), [2])
    before, after, lost = pids(tmp_path, 1), pids(tmp_path, 2), victim // 2
    for host in range(4):
        assert (before[host] == after[host]) == (host // 2 != lost)
    survivor = note(tmp_path, 2, 2 * (1 - lost))
    assert survivor["seen"] == [[1, survivor["pid"]], [2, survivor["pid"]]], "its modules stay"
    assert survivor["variable"] == "2"
    assert job.losses() == [(lost,)]


def compiled(folder):
    """Return whether this attempt had to compile a program of all devices."""
    import jax
    from jax.experimental import multihost_utils

    found = []
    jax.monitoring.register_event_listener(lambda event, **_: found.append(event))
    spread = jax.sharding.NamedSharding(kinetic.make_mesh(), jax.sharding.PartitionSpec())
    jax.jit(lambda: jax.numpy.arange(32.0).sum(), out_shardings=spread)()
    hits = [event.endswith("/cache_hits") for event in found if "cache_hits" in event]
    multihost_utils.sync_global_devices("compiled")
    if kinetic.attempt() == 1:
        if kinetic.slice_index() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        multihost_utils.sync_global_devices("a slice is lost")
    return not hits


@pytest.mark.parametrize("survivors", ["keep", "restart"])
def test_no_host_compiles_again_what_it_has_compiled(begin, survivors):
    options = {"slices": (2, 2), "survivors": survivors, "all_hosts": True}
    job = begin(elastic(compiled, **options))
    assert job.handle.results(timeout=LIMIT_S) == [False] * 4


@pytest.mark.parametrize("lost", [0, 1])
def test_survivors_keep_their_process_in_a_smaller_attempt(begin, tmp_path, lost, monkeypatch):
    monkeypatch.setenv("KINETIC_SLICE_AWAY_S", "600")
    remote = elastic(slices=(1, 3), survivors="keep", on_slice_loss="shrink")
    job = begin(remote, [(1, 2 * lost + 1)], [])
    assert job.handle.result(timeout=LIMIT_S) == (2, 4, [0, 1], 4 * (STEPS - 1), [2])
    before, after = pids(tmp_path, 1), pids(tmp_path, 2)
    assert list(after.values()) != []
    left = [before[host] for host in range(6) if host // 2 != lost]
    assert [after[host] for host in range(4)] == left
    assert [note(tmp_path, 2, host)["slice"] for host in range(4)] == [0, 0, 1, 1]
    assert note(tmp_path, 2, 0)["slices"] == 2
    init = [note(tmp_path, 2, host)["init"] for host in range(4)]
    assert [process for process, _ in init] == ["0", "1", "2", "3"]
    assert {address for _, address in init} == {init[0][1]} != {note(tmp_path, 1, 0)["init"][1]}


def test_one_process_survives_again_and_again(begin, tmp_path):
    job = begin(elastic(survivors="keep"), [(1, 3), (2, 2), (3, 3)], [])
    assert job.handle.result(timeout=LIMIT_S)[0] == 4
    (first,) = {pids(tmp_path, attempt)[0] for attempt in range(1, 5)}
    assert note(tmp_path, 4, 0)["seen"] == [[attempt, first] for attempt in range(1, 5)]
    story = job.story()
    assert "2 of 4 hosts go on in the process that they have." in story
    early, late = (note(tmp_path, attempt, 0)["descriptors"] for attempt in (2, 4))
    more = [after - before for before, after in zip(early, late, strict=True)]
    assert max(more) < 3, "the agent or the worker opens some in each attempt"


def learn(folder):
    """Make room when it is asked for."""
    import jax
    from jax.experimental import multihost_utils

    told(folder)
    step, saved = 0, Path(folder, "saved")
    while kinetic.attempt() == 1 or kinetic.num_slices() < 2:
        multihost_utils.sync_global_devices(f"step {step}")
        step += 1
        if kinetic.attempt() == 1 and step == 3 and kinetic.slice_index() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if kinetic.should_reform():
            if jax.process_index() == 0:
                saved.write_text(str(step))
            multihost_utils.sync_global_devices("saved")
            kinetic.reform()
        time.sleep(0.02)
    return kinetic.attempt(), kinetic.num_slices()


def test_survivors_keep_their_process_when_the_job_grows(begin, tmp_path, monkeypatch):
    monkeypatch.setenv("KINETIC_SLICE_AWAY_S", "3")
    job = begin(elastic(learn, survivors="keep", on_slice_loss="shrink"))
    assert job.handle.result(timeout=LIMIT_S) == (3, 2)
    each = [pids(tmp_path, attempt) for attempt in (1, 2, 3)]
    assert [each[0][0], each[0][1]] == [each[1][0], each[1][1]] == [each[2][0], each[2][1]]
    assert job.losses() == [(1,)]


def lose_host_3(folder):
    """Host 3 is killed once all have left a note; the others do nothing."""
    if os.environ["KINETIC_HOST_INDEX"] == "3":
        while len(pids(folder, 1)) < 4:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)


def sleep(folder):
    told(folder)
    if kinetic.attempt() == 1:
        lose_host_3(folder)
    return kinetic.attempt()


def test_a_function_that_is_not_in_a_collective_is_interrupted(begin, tmp_path):
    job = begin(elastic(sleep, survivors="keep"))
    assert job.handle.result(timeout=LIMIT_S) == 2
    assert pids(tmp_path, 1)[0] == pids(tmp_path, 2)[0]


def meet(folder):
    """Host 0 waits at a barrier that nobody else comes to."""
    import jax
    from jax._src import distributed
    from jax.experimental import multihost_utils

    told(folder)
    multihost_utils.sync_global_devices("all are there")
    waits = Path(folder, "waits")
    if kinetic.attempt() == 1 and jax.process_index() == 0:
        waits.touch()
        distributed.global_state.client.wait_at_barrier("alone", 600_000)
    if kinetic.attempt() == 1 and jax.process_index() == 3:
        while not waits.exists():
            time.sleep(0.05)
        time.sleep(1.0)  # A barrier that begins after the loss is not broken off: it is too late.
        os.kill(os.getpid(), signal.SIGKILL)
    multihost_utils.sync_global_devices("all are there again")
    return kinetic.attempt()


def test_a_function_that_waits_at_a_barrier_is_freed(begin, tmp_path):
    job = begin(elastic(meet, survivors="keep"))
    assert job.handle.result(timeout=LIMIT_S) == 2
    assert pids(tmp_path, 1)[0] == pids(tmp_path, 2)[0]


def connect_in_vain(folder):
    """Host 3 stands still when it has said where it listens, so that others wait for connections
    from it; then it is killed."""
    import jax
    import numpy as np

    mesh, marks = kinetic.make_mesh(), Path(folder)
    every = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(mesh.axis_names))
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    ones = jax.make_array_from_callback((64,), every, lambda part: np.ones(64)[part])
    add_up = jax.jit(lambda x: x.sum(), out_shardings=whole)
    told(folder)
    if kinetic.attempt() == 1:
        host = jax.process_index()
        while host < 3 and not (marks / "stands still").exists():
            time.sleep(0.05)
        add_up(ones)
        del ones
        (marks / f"begun by {host}").touch()
        if host == 3:
            time.sleep(1.0)
            (marks / "stands still").touch()
            os.kill(os.getpid(), signal.SIGSTOP)
        while host == 2 and len(list(marks.glob("begun by *"))) < 4:
            time.sleep(0.05)
        if host == 2:
            time.sleep(1.0)
            os.kill(pids(folder, 1)[3], signal.SIGKILL)
        time.sleep(600)
    return kinetic.attempt(), float(add_up(ones))


def test_threads_of_jax_that_wait_for_a_lost_host_keep_nobody(begin, tmp_path):
    """Which of two hosts connects to the other is chance: two of three times one waits here."""
    job = begin(elastic(connect_in_vain, survivors="keep"))
    assert job.handle.result(timeout=LIMIT_S) == (2, 64.0)
    assert [pids(tmp_path, 1)[host] == pids(tmp_path, 2)[host] for host in (0, 1)] == [True, True]
    assert job.losses() == [(1,)]


TICKS: list[int] = []


def tick():
    while True:
        TICKS.append(1)
        time.sleep(0.01)


def feed(folder):
    """A data pipeline: a thread that the first call starts."""
    before = len(TICKS)
    if not TICKS:
        threading.Thread(target=tick, daemon=True).start()
    while len(TICKS) <= before + 10:
        time.sleep(0.01)
    told(folder)
    if kinetic.attempt() == 1:
        lose_host_3(folder)
    return kinetic.attempt(), before > 10


def test_threads_of_the_function_go_on(begin):
    job = begin(elastic(feed, survivors="keep", on_slice_loss="shrink"))
    assert job.handle.result(timeout=LIMIT_S) == (2, True)


def fit(folder, steps, kills, every):
    """A training whose losses are written down, with a Checkpointer."""
    import jax
    import jax.numpy as jnp
    from jax.experimental import multihost_utils
    from jax.sharding import NamedSharding, PartitionSpec

    told(folder)
    mesh = kinetic.make_mesh()
    split = NamedSharding(mesh, PartitionSpec(None, "fsdp"))
    spread = NamedSharding(mesh, PartitionSpec(("data", "fsdp")))

    @jax.jit
    def update(weights, step):
        def loss(w):
            x = jax.random.normal(jax.random.key(step), (32, 32))
            return jnp.mean((jnp.tanh(jax.lax.with_sharding_constraint(x, spread) @ w) - 0.5) ** 2)

        value, slope = jax.value_and_grad(loss)(weights)
        return jax.lax.with_sharding_constraint(weights - 0.3 * slope, split), value

    begin = jax.jit(lambda: jax.random.normal(jax.random.key(7), (32, 32)), out_shardings=split)
    with kinetic.Checkpointer(Path(folder, "saved"), every=every, local_every=1) as checkpoints:
        weights, first = checkpoints.restore(begin())
        for step in range(first, steps):
            weights, value = update(weights, step)
            if jax.process_index() == 0:
                with open(Path(folder, "losses"), "a") as losses:
                    losses.write(f"{step} {float(value).hex()}\n")
            checkpoints.save(step, weights)
            if [kinetic.attempt(), step, jax.process_index()] in [list(k) for k in kills]:
                checkpoints.wait()
                os.kill(os.getpid(), signal.SIGKILL)
    return multihost_utils.process_allgather(weights, tiled=True).tolist()


def losses(folder):
    """The last of each step."""
    return dict(line.split() for line in Path(folder, "losses").read_text().splitlines())


def test_a_training_has_the_losses_of_one_that_was_never_interrupted(begin, tmp_path):
    quiet = tmp_path / "quiet"
    quiet.mkdir()
    kills = [(1, 5, 3), (2, 9, 0), (3, 13, 2)]
    remote = elastic(fit, slices=(2, 2), survivors="keep")
    job = begin(remote, 18, kills, 4)
    weights = job.handle.result(timeout=LIMIT_S)
    assert job.losses() == [(1,), (0,), (1,)]
    assert kinetic.run("tpu-v6e-8", slices=2)(fit)(str(quiet), 18, [], 4) == weights
    assert losses(tmp_path) == losses(quiet)
    assert pids(tmp_path, 1)[0] == pids(tmp_path, 2)[0] != pids(tmp_path, 3)[0]
    assert pids(tmp_path, 3)[0] == pids(tmp_path, 4)[0]


# -- more is lost meanwhile ------------------------------------------------------------------------


def test_a_survivor_is_killed_while_it_waits(begin, tmp_path, monkeypatch):
    monkeypatch.setenv("KINETIC_SLICE_AWAY_S", "3")
    job = begin(elastic(), [(1, 3)], [])
    wait_until(lambda: job.losses() == [(1,)], "no loss")
    assert (job.folder / "local/reserve").stat().st_size, "for records when the disk is full"
    victim = pids(tmp_path, 1)[1]
    wait_until(lambda: not has_connections(victim), "it does not leave its world")
    os.kill(victim, signal.SIGKILL)
    assert job.handle.result(timeout=LIMIT_S)[0] == 2
    assert victim not in pids(tmp_path, 2).values()
    told = "host 1 of slice 0: Its worker process was killed while it waited for its place."
    assert any(told in line for line in job.story()), job.story()


def has_connections(pid):
    """Whether a process has TCP connections."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    inodes = {f"socket:[{row[9]}]" for row in rows}
    return any(open_file(fd) in inodes for fd in Path(f"/proc/{pid}/fd").iterdir())


def open_file(fd):
    """What it leads to; "" once it is closed."""
    with contextlib.suppress(FileNotFoundError):
        return os.readlink(fd)
    return ""


def test_a_survivor_is_killed_as_soon_as_it_goes_on(begin, tmp_path):
    job = begin(elastic(), [(1, 3)], [], 0.1)
    wait_until(lambda: 0 in pids(tmp_path, 2), "no second attempt")
    os.kill(pids(tmp_path, 2)[0], signal.SIGKILL)
    assert job.handle.result(timeout=LIMIT_S)[:2] == (3, 4)


def late_error(folder):
    """Host 1 raises in the second attempt; in the first, host 3 dies when no other is in JAX."""
    import jax
    from jax.experimental import multihost_utils

    told(folder)
    multihost_utils.sync_global_devices("all are there")
    if kinetic.attempt() == 2 and jax.process_index() == 1:
        raise ValueError("no luck")
    Path(folder, f"waits-{jax.process_index()}").touch()
    if kinetic.attempt() == 1 and jax.process_index() == 3:
        while len(list(Path(folder).glob("waits-*"))) < 4:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)


def test_an_exception_in_a_process_that_stayed_ends_the_job(begin, tmp_path):
    job = begin(elastic(late_error, survivors="keep"))
    with pytest.raises(ValueError, match="no luck"):
        job.handle.result(timeout=LIMIT_S)
    assert pids(tmp_path, 1)[1] == pids(tmp_path, 2)[1], job.story()
    assert job.losses() == [(1,)]


def test_it_is_given_up_though_processes_have_stayed(begin):
    job = begin(elastic(max_failures=1), [(1, 3), (2, 0)], [])
    with pytest.raises(HostLost, match="given up: it failed 2 times"):
        job.handle.result(timeout=LIMIT_S)
