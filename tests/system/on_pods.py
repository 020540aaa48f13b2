"""Functions that pods run, for tests with a cluster. Pods import this module instead of the tests:
importing pytest and the double of a cluster would take longer than the job."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import kinetic


def answer():
    print("from a pod")
    return 42


def token_size():
    return len(os.environ["MY_TOKEN"])


def world():
    import jax

    return jax.process_count(), jax.device_count()


def own_index():
    return int(os.environ["KINETIC_HOST_INDEX"])


def fail_on_host_2():
    if own_index() == 2:
        raise ValueError("on purpose")
    time.sleep(1000)


def mine(marker):
    return Path(f"{marker}-{own_index()}")


def wait_for_ever(marker):
    mine(marker).touch()
    while True:
        time.sleep(0.1)


def wait_at_first(marker):
    """Wait for ever in the first attempt, return in later ones."""
    if mine(marker).exists():
        return "again"
    return wait_for_ever(marker)


def wait_at_second(marker):
    """Raise in the first attempt, wait for ever in the second one, return in later ones."""
    if os.environ["KINETIC_ATTEMPT"] == "1":
        raise ValueError("on purpose")
    return wait_at_first(marker)


def nap(marker):
    """Wait until the test creates the marker, then return after a second."""
    Path(f"{marker}-0").touch()
    while not Path(marker).exists():
        time.sleep(0.05)
    time.sleep(1)
    return "slept"


def save(marker):
    """Wait for ever; when the host is asked to end, take half a second to save."""
    try:
        wait_for_ever(marker)
    finally:
        time.sleep(0.5)
        Path(f"{mine(marker)}-saved").touch()


def finish(marker):
    """Wait for ever; when the host is asked to end, return normally."""
    try:
        wait_for_ever(marker)
    except BaseException:
        return "finished"


def wait_at_third(marker):
    attempt = next(n for n in range(1, 9) if not Path(f"{mine(marker)}-{n}").exists())
    Path(f"{mine(marker)}-{attempt}").touch()
    return "third" if attempt == 3 else wait_for_ever(marker)


def count(lines):
    for n in range(lines):
        print(f"line {n} {'x' * 60}", flush=True)
        if n % 3 == 0:
            print(f"error {n}", file=sys.stderr, flush=True)
        time.sleep(0.02)
    return lines


def count_on_all_hosts(lines):
    import jax

    for n in range(lines):
        print(f"host {jax.process_index()} line {n}", flush=True)
        time.sleep(0.02)
    return lines


def wait_for_file(path):
    print("waiting", flush=True)
    while not os.path.exists(path):
        time.sleep(0.05)
    return "seen"


def train_until_enough(folder):
    """Step with a collective until the test creates the file `enough`; re-form when a lost slice is
    back."""
    import jax
    import numpy as np
    from jax.experimental import multihost_utils

    attempt, host = kinetic.attempt(), jax.process_index()
    while True:
        exists = Path(folder, "enough").exists()
        enough = multihost_utils.process_allgather(np.array([exists])).any()
        Path(folder, f"{attempt}-{host}").touch()
        if enough:
            return attempt, jax.process_count(), kinetic.num_slices()
        if kinetic.should_reform():
            kinetic.reform()
        time.sleep(0.05)


def wait_until_enough(folder):
    """Wait, without JAX, until the test creates the file `enough`."""
    Path(folder, f"{kinetic.attempt()}-{os.environ['KINETIC_HOST_INDEX']}").touch()
    while not Path(folder, "enough").exists():
        time.sleep(0.05)
    return kinetic.attempt(), int(os.environ["KINETIC_HOSTS"]), kinetic.num_slices()


def fail_at_first(folder):
    """Fail on host 1 in the first attempt, without waiting for the other hosts."""
    if os.environ["KINETIC_HOST_INDEX"] == "1" and kinetic.attempt() == 1:
        raise ValueError("no luck")
    return kinetic.attempt(), int(os.environ["KINETIC_HOSTS"]), kinetic.num_slices()


def fail_on_host_1(folder):
    if os.environ["KINETIC_HOST_INDEX"] == "1":
        raise ValueError("no luck")
    time.sleep(600)


def look_again():
    """Leave a mark in the host's local folder; return the marks of earlier attempts and the host's
    JAX rank. In the first attempt, host 1 is killed."""
    import jax
    from jax.experimental import multihost_utils

    folder = Path(os.environ["KINETIC_LOCAL_DIR"])
    before = sorted(path.name for path in folder.iterdir())
    (folder / f"{os.environ['KINETIC_ATTEMPT']}-{jax.process_index()}").touch()
    multihost_utils.sync_global_devices("marked")
    if os.environ["KINETIC_ATTEMPT"] == "1" and jax.process_index() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    rank = (folder / "jax-init-info.txt").read_text().split("\n")[0]
    multihost_utils.sync_global_devices("read")
    return before, rank


def train_and_die(steps):
    import jax
    import numpy as np
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
    spread = NamedSharding(mesh, P("data"))
    weights = jax.make_array_from_callback((16,), spread, lambda part: np.zeros(16)[part])
    with kinetic.Checkpointer(every=100, at_least_every=None, local_every=1) as ckpt:
        state, start = ckpt.restore({"weights": weights})
        for step in range(start, steps):
            state = {"weights": jax.jit(lambda weights: weights + 1)(state["weights"])}
            ckpt.save(step, state)
            if step == 3 and os.environ["KINETIC_ATTEMPT"] == "1":
                ckpt.wait()
                if jax.process_index() == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
    first = float(state["weights"].addressable_shards[0].data[0])
    return start > 0 and ckpt.restored.tier, first


def stand_still():
    print("begun", flush=True)
    time.sleep(1000)


def die_once_aloud():
    """Print the number of the attempt; in the first one, host 1 is then killed."""
    import jax
    import numpy as np
    from jax.experimental import multihost_utils

    if jax.process_index() == 0:
        print(f"attempt {kinetic.attempt()}", flush=True)
    multihost_utils.process_allgather(np.array([0]))
    if kinetic.attempt() == 1 and jax.process_index() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1000 if kinetic.attempt() == 1 else 0)
