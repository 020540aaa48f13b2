"""Functions whose hosts are taken away, or die, while a checkpoint is saved.

In: folders. Out: what is left of the save in the next attempt. Hosts import this module and not
those of the tests: pytest would cost each of them more than its whole job.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path

import kinetic


def step_without_end(folder):
    """Step without end in the first attempt, three more times in the others; note where each host
    begins."""
    import jax
    import numpy as np
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    attempt, host = kinetic.attempt(), jax.process_index()
    everywhere = NamedSharding(jax.sharding.Mesh(np.array(jax.devices()), "x"), P())
    blank = np.zeros(4, np.float32)
    state = {"w": jax.make_array_from_callback((4,), everywhere, lambda part: blank[part])}
    update = jax.jit(lambda w: w + 1, out_shardings=everywhere)
    with kinetic.Checkpointer(Path(folder, "run"), local_every=None) as ckpt:
        state, start = ckpt.restore(state)
        Path(folder, f"{attempt}-{host}").write_text(json.dumps([start, float(state["w"][0])]))
        step = start
        while attempt == 1 or step < start + 3:
            state = {"w": update(state["w"])}
            ckpt.save(step, state)
            Path(folder, f"step-{attempt}-{host}").write_text(str(step))
            step += 1
            time.sleep(0.02)
    return step, float(state["w"][0])


def save_as_the_other_dies(folder):
    """Save a step. In the first attempt host 1 dies before the hosts have told each other that it
    is saved, and Orbax's thread of host 0 is late to tell: it finds the next world."""
    import jax
    import numpy as np
    from jax._src import distributed
    from orbax.checkpoint._src.futures import synchronization

    attempt, host = kinetic.attempt(), jax.process_index()
    world = distributed.global_state.client
    tell = synchronization.MultihostSynchronizedValue.set

    def tell_late(value, is_saving):
        if not is_saving and attempt == 1 and host == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        while not is_saving and distributed.global_state.client in (world, None):
            time.sleep(0.01)
        tell(value, is_saving)

    if attempt == 1:
        synchronization.MultihostSynchronizedValue.set = tell_late
    with kinetic.Checkpointer(Path(folder, "run"), every=1, local_every=None) as ckpt:
        state, start = ckpt.restore({"w": np.zeros(4, np.float32)})
        ckpt.save(start, {"w": state["w"] + 1})
    return start + 1, float(state["w"][0]) + 1


def leave_a_save(folder):
    """In the first attempt host 1 dies before the hosts have told each other that a step is saved,
    and nobody ends the checkpointer. Return what is left of that in the second one: whether JAX has
    devices, and threads."""
    import numpy as np
    from jax._src import xla_bridge

    if kinetic.attempt() == 2:
        time.sleep(1)
        return xla_bridge.backends_are_initialized(), [t.name for t in threading.enumerate()]

    import jax
    from orbax.checkpoint._src.futures import synchronization

    tell = synchronization.MultihostSynchronizedValue.set

    def tell_or_die(value, is_saving):
        if not is_saving and jax.process_index() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        tell(value, is_saving)

    synchronization.MultihostSynchronizedValue.set = tell_or_die
    ckpt = kinetic.Checkpointer(Path(folder, "run"), every=1, local_every=None)
    state, start = ckpt.restore({"w": np.zeros(4, np.float32)})
    ckpt.save(start, state)
    time.sleep(600)
