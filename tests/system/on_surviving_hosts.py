"""Functions of elastic jobs whose processes go on, or cannot, in the next attempt.

In: a folder that all hosts share, whom to kill. Out: notes of each call, values. Hosts import this
module and not those of the tests: pytest would cost each of them more than its whole job.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

from on_elastic_hosts import pids

import kinetic

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


def fit(folder, steps, kills, every):
    """A training whose losses are written down, with a Checkpointer."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.experimental import multihost_utils
    from jax.sharding import NamedSharding, PartitionSpec

    told(folder)
    mesh = kinetic.make_mesh()
    split = NamedSharding(mesh, PartitionSpec(None, "fsdp"))
    spread = NamedSharding(mesh, PartitionSpec(("data", "fsdp")))

    def draw(seed):  # with NumPy: JAX would compile for a second on each host
        return np.random.default_rng(seed).standard_normal((32, 32), np.float32)

    @jax.jit
    def update(weights, x):
        def loss(w):
            return jnp.mean((jnp.tanh(jax.lax.with_sharding_constraint(x, spread) @ w) - 0.5) ** 2)

        value, slope = jax.value_and_grad(loss)(weights)
        return jax.lax.with_sharding_constraint(weights - 0.3 * slope, split), value

    begin = jax.jit(lambda: draw(7), out_shardings=split)
    with kinetic.Checkpointer(Path(folder, "saved"), every=every, local_every=1) as checkpoints:
        weights, first = checkpoints.restore(begin())
        for step in range(first, steps):
            weights, value = update(weights, draw(step))
            if jax.process_index() == 0:
                with open(Path(folder, "losses"), "a") as losses:
                    losses.write(f"{step} {float(value).hex()}\n")
            checkpoints.save(step, weights)
            if [kinetic.attempt(), step, jax.process_index()] in [list(k) for k in kills]:
                checkpoints.wait()
                os.kill(os.getpid(), signal.SIGKILL)
    return multihost_utils.process_allgather(weights, tiled=True).tolist()


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


def tell_together(folder):
    """Leave a note once all hosts have come here."""
    from jax.experimental import multihost_utils

    multihost_utils.sync_global_devices("all are there")
    told(folder)


def lose_the_last(folder):
    tell_together(folder)
    if kinetic.attempt() == 1:
        time.sleep(0 if os.environ["KINETIC_HOST_INDEX"] == "3" else 600)
        os.kill(os.getpid(), signal.SIGKILL)
    return kinetic.attempt()


def import_half(folder):
    """Host 0 is interrupted in the middle of an import."""
    from jax.experimental import multihost_utils

    tell_together(folder)
    if kinetic.slice_index() == 0:
        sys.path.insert(0, folder)
        import half  # noqa: F401
    multihost_utils.sync_global_devices("all have it")
    return kinetic.attempt()


def cling(folder, how):
    """Host 0 does not get free in the first attempt: it holds Python's lock in native code, or
    swallows whatever is raised, or is ended as native code does that loses its peer."""
    import jax
    from jax.experimental import multihost_utils

    tell_together(folder)
    if kinetic.attempt() == 1:
        if jax.process_index() == 0 and how == "native code":
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # It would end the sleep.
            ctypes.PyDLL(None).sleep(600)
        while True:
            try:
                time.sleep(600)
            except BaseException:
                if jax.process_index() == 1:
                    raise
                if how == "aborts":
                    os.kill(os.getpid(), signal.SIGABRT)
    multihost_utils.sync_global_devices("all are there again")
    return kinetic.attempt()


KEPT: list[object] = []


def hoard(folder):
    """Keep an array of all devices where the function's end does not free it."""
    import jax
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    everywhere = NamedSharding(kinetic.make_mesh(), PartitionSpec())
    KEPT.append(jax.device_put(np.ones(4), everywhere))
    tell_together(folder)
    if kinetic.attempt() == 1:
        time.sleep(600)
    return kinetic.attempt(), len(KEPT), float(KEPT[0].sum())
