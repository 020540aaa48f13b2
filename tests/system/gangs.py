"""Holding the processes of a job in a phase, for tests that do something to them.

In: handles, conditions. Out: process ids. Called by system tests.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import kinetic

PATIENCE_S = 200.0


def list_paths(folder: Path) -> list[Path]:
    """The files and folders below a folder from which a supervisor may still remove some."""
    return [Path(top, name) for top, *names in os.walk(folder) for name in (*names[0], *names[1])]


def read_files(folder: Path) -> dict[Path, bytes]:
    """The contents of the files below a folder from which a supervisor may still remove some."""
    contents = {}
    for path in list_paths(folder):
        with contextlib.suppress(FileNotFoundError):
            if path.is_file():
                contents[path] = path.read_bytes()
    return contents


def wait_until(look, what):
    """Return the first true answer; what takes long to look at is looked at less often."""
    deadline = time.monotonic() + PATIENCE_S
    begun = time.monotonic()
    while not (found := look()):
        assert time.monotonic() < deadline, what
        time.sleep(max(0.002, time.monotonic() - begun))
        begun = time.monotonic()
    return found


def children(pid):
    """Direct children of a process."""
    found = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            found += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())
    return found


def zygotes():
    """Those of this process."""
    found = []
    for pid in children(os.getpid()):
        with contextlib.suppress(OSError):
            if b"kinetic/_host/local/__main__.py" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


def processes(handle):
    """(supervisor, agents by host), once the gang has been forked."""
    told = wait_until(handle.processes, "the supervisor has not started")
    return told["supervisor"], told["agents"]


def worker_of(agent):
    """Its worker. An agent that stays for other attempts has a fork server, too."""

    def workers():
        return [pid for pid in children(agent) if is_titled(pid, "kinetic-worker")]

    return wait_until(workers, "the agent has no worker")[0]


def is_titled(pid, title):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().startswith(title.encode())
    return False


def family(handle):
    """Every process of the gang: the supervisor, the agents, the workers."""
    supervisor, agents = processes(handle)
    return [supervisor, *agents.values(), *map(worker_of, agents.values())]


def kill(pid):
    """kill -9."""
    os.kill(pid, signal.SIGKILL)


def is_stopped(pid):
    """Whether SIGSTOP has taken effect."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def stop(pid):
    """Freeze a process, and wait until it is."""
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: is_stopped(pid), "SIGSTOP has no effect")


def start_script(home, source, **more):
    """Run a script as a caller of its own."""
    script = home.parent / "caller.py"
    script.parent.mkdir(parents=True, exist_ok=True)
    script.write_text(textwrap.dedent(source))
    return subprocess.Popen([sys.executable, str(script)], **({"stdout": subprocess.PIPE} | more))


def assert_next_job_runs():
    """Whatever happened, it is over."""
    assert kinetic.run(accelerator="cpu")(lambda: "next")() == "next"


def train():
    """Train a model with Keras on all devices of a slice; return the number of processes, that of
    devices, and whether it learns."""
    sys.modules.update(sklearn=None, matplotlib=None)  # Keras would import them, for a second each
    import jax
    import keras
    import numpy as np

    keras.utils.set_random_seed(1)
    devices = keras.distribution.list_devices()
    parallel = keras.distribution.DataParallel(devices=devices, auto_shard_dataset=False)
    keras.distribution.set_distribution(parallel)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(optimizer="sgd", loss="mse")
    x, y = np.ones((32, 4), "float32"), np.ones((32, 1), "float32")
    losses = model.fit(x, y, epochs=2, batch_size=16, verbose=0).history["loss"]
    print(f"host {jax.process_index()} trained", flush=True)
    return jax.process_count(), jax.device_count(), losses[1] < losses[0]
