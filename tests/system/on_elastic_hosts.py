"""Functions of elastic jobs, and the notes in files that they leave for the tests. Hosts import
this module instead of the tests: importing pytest would take longer than the job."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import kinetic

STEPS = 10


def pids(folder, attempt):
    """Return the pids that the workers of an attempt have noted, by host."""
    notes = Path(folder).glob(f"{attempt}-*.json")
    return {int(n.stem.partition("-")[2]): json.loads(n.read_text())["pid"] for n in notes}


def note(folder, attempt, host):
    return json.loads(Path(folder, f"{attempt}-{host}.json").read_text())


def count(folder, kills=(), pause_s=0.02):
    """Count steps without JAX; before each, wait for the other hosts' mark files. `kills` lists
    (attempt, step, host): this worker is killed before this step."""
    hosts, mine = int(os.environ["KINETIC_HOSTS"]), int(os.environ["KINETIC_HOST_INDEX"])
    marks = [Path(folder, f"{kinetic.attempt()}-{host}") for host in range(hosts)]
    for step in range(STEPS):
        die_if_asked(kills, step)
        marks[mine].write_text(str(step))
        while any(not mark.exists() or int(mark.read_text() or -1) < step for mark in marks):
            time.sleep(0.01)
        pause(pause_s)
    return kinetic.attempt(), hosts, kinetic.num_slices()


def hang_once(folder):
    """Hang on all hosts in the first attempt."""
    if kinetic.attempt() == 1:
        threading.Event().wait()
    return kinetic.attempt(), int(os.environ["KINETIC_HOSTS"]), kinetic.num_slices()


def pause(seconds):
    """Sleep in the first attempt; in later ones, which no test disturbs, for at most 0.3 s."""
    time.sleep(seconds if kinetic.attempt() == 1 else min(seconds, 0.3))


def die_if_asked(kills, step):
    if (kinetic.attempt(), step, int(os.environ["KINETIC_HOST_INDEX"])) in kills:
        os.kill(os.getpid(), signal.SIGKILL)


def train(folder, kills=(), pause_s=0.02):
    """Count steps with a JAX collective in each. `kills` lists (attempt, step, host): this worker
    is killed before this step; step -1 is before the first use of JAX."""
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


def compile_once(folder):
    """Compile a function; process 2 kills itself while it compiles, in the first attempt."""
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


def keep(folder):
    """Write a file to this host's own folder, which attempts share; return the content from an
    earlier attempt."""
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


def hold(folder, leave):
    """Start a child that outlives the worker, note its pid, and wait for the file "over"."""
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    mark = Path(folder, f"child-{os.environ['KINETIC_ATTEMPT']}-{os.environ['KINETIC_HOST_INDEX']}")
    mark.with_suffix(".part").write_text(str(child.pid))
    mark.with_suffix(".part").rename(mark)
    while not Path(folder, "over").exists():
        time.sleep(0.05)
    child.kill()
    child.wait()


def learn(folder, pause_s):
    """Count to 40, from the last saved step; save and re-form when a lost slice is back."""
    import jax
    import numpy as np
    from jax.experimental import multihost_utils

    saved = Path(folder, "saved")
    step, sizes = json.loads(saved.read_text()) if saved.exists() else (0, [])
    attempt = kinetic.attempt()
    while step < 40:
        if attempt == 1 and step == 3 and kinetic.slice_index() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        everyone = multihost_utils.process_allgather(np.array([step])).reshape(-1)
        assert set(everyone.tolist()) == {step}, "all hosts have gone on from the same step"
        step, sizes = step + 1, [*sizes, jax.process_count()]
        if kinetic.should_reform():
            if jax.process_index() == 0:
                saved.write_text(json.dumps([step, sizes]))
            multihost_utils.sync_global_devices("saved")
            kinetic.reform()
        time.sleep(pause_s if kinetic.num_slices() == 1 else 0)
    return attempt, step, sizes


def fail(folder):
    if os.environ["KINETIC_HOST_INDEX"] == "1":
        raise ValueError("no luck")
    time.sleep(600)


def fail_or_die(folder, ends):
    """Meet the other hosts, then end as `ends` tells this host in this attempt: it is a list of
    (attempt, host, "raise" or "die").

    The first barrier connects only the first device of each host, so a second one follows.
    """
    import jax
    from jax.experimental import multihost_utils

    mine = kinetic.attempt(), int(os.environ["KINETIC_HOST_INDEX"])
    Path(folder, f"{mine[0]}-{mine[1]}.json").write_text(json.dumps({"pid": os.getpid()}))
    multihost_utils.sync_global_devices("begun")
    multihost_utils.sync_global_devices("all devices are connected")
    end = {(attempt, host): how for attempt, host, how in ends}.get(mine)
    if end == "raise":
        raise LookupError(f"attempt {mine[0]}")
    if end == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if any(attempt == mine[0] for attempt, *_ in ends):
        multihost_utils.sync_global_devices("never")
    return mine[0], jax.process_count(), kinetic.num_slices()


def leave_alone(leaver):
    """Call `reform` on process `leaver` only; all others continue with collectives."""
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


def leave_unasked(folder):
    """Call `reform` in attempt 1 while all slices are there, which is an error. Call it again in
    attempt 2, while slice 1 is missing."""
    import jax

    jax.devices()
    if kinetic.attempt() == 1:
        try:
            kinetic.reform()
        except kinetic.errors.UsageError as error:
            message = str(error)
        assert "no slice of this job was missing" in message
        Path(folder, os.environ["KINETIC_HOST_INDEX"]).touch()
        if kinetic.slice_index() == 1:
            while not Path(folder, "0").exists():
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)  # until the loss is noticed
    if kinetic.attempt() == 2:
        kinetic.reform()
    return kinetic.attempt()


def meet(folder):
    """Write a note, then wait in JAX for all processes; host 3 first waits for the file "join"."""
    note = f"{kinetic.attempt()}-{os.environ['KINETIC_HOST_INDEX']}"
    Path(folder, f"{note}.part").write_text(f'{{"pid": {os.getpid()}}}')
    Path(folder, f"{note}.part").rename(Path(folder, f"{note}.json"))
    Path(folder, note).write_text("2")
    last = os.environ["KINETIC_HOST_INDEX"] == "3"
    while kinetic.attempt() == 1 and last and not Path(folder, "join").exists():
        time.sleep(0.05)
    import jax

    return kinetic.attempt(), jax.process_count(), kinetic.num_slices()
