"""Processes of a running local job: find, stop and kill them."""

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
    """List the files and folders below a folder while a supervisor may remove some of them."""
    return [Path(top, name) for top, *names in os.walk(folder) for name in (*names[0], *names[1])]


def read_files(folder: Path) -> dict[Path, bytes]:
    """Read all files below a folder while a supervisor may remove some of them."""
    contents = {}
    for path in list_paths(folder):
        with contextlib.suppress(FileNotFoundError):
            if path.is_file():
                contents[path] = path.read_bytes()
    return contents


def wait_until(read, what):
    """Call `read` until it returns a true value, and return that. After `PATIENCE_S`, fail with the
    message `what`. Pauses as long as the last call took, so that slow calls are rare."""
    deadline = time.monotonic() + PATIENCE_S
    begun = time.monotonic()
    while not (answer := read()):
        assert time.monotonic() < deadline, what
        time.sleep(max(0.002, time.monotonic() - begun))
        begun = time.monotonic()
    return answer


def children(pid):
    """List the direct children of a process."""
    pids = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            pids += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())
    return pids


def zygotes():
    """List the pids of the zygotes that this process has started for its local jobs."""
    zygote_pids = []
    for pid in children(os.getpid()):
        with contextlib.suppress(OSError):
            if b"kinetic/_host/local/__main__.py" in Path(f"/proc/{pid}/cmdline").read_bytes():
                zygote_pids.append(pid)
    return zygote_pids


def processes(handle):
    """Wait until the agents have been forked; return the supervisor's pid, and the agents' by
    host."""
    pids = wait_until(handle.processes, "the supervisor has not started")
    return pids["supervisor"], pids["agents"]


def worker_of(agent):
    """Wait until an agent has a worker; return the worker's pid."""

    def workers():
        return [pid for pid in children(agent) if is_titled(pid, "kinetic-worker")]

    return wait_until(workers, "the agent has no worker")[0]


def is_titled(pid, title):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().startswith(title.encode())
    return False


def family(handle):
    """List the pids of the job's processes: the supervisor, then agents, then workers."""
    supervisor, agents = processes(handle)
    return [supervisor, *agents.values(), *map(worker_of, agents.values())]


def kill(pid):
    os.kill(pid, signal.SIGKILL)


def is_stopped(pid):
    """True if the process is stopped, so that an earlier SIGSTOP has taken effect."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def stop(pid):
    """Stop a process, and wait until SIGSTOP has taken effect."""
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: is_stopped(pid), "SIGSTOP has no effect")


def start_script(home, source, **more):
    """Start a script in a process of its own, in which it calls jobs; return the process."""
    script = home.parent / "caller.py"
    script.parent.mkdir(parents=True, exist_ok=True)
    script.write_text(textwrap.dedent(source))
    return subprocess.Popen([sys.executable, str(script)], **({"stdout": subprocess.PIPE} | more))


def assert_next_job_runs():
    """Check that a new job runs, after an earlier job has been disturbed."""
    assert kinetic.run(accelerator="cpu")(lambda: "next")() == "next"


def train():
    """Train a Keras model on all devices of a slice; return the numbers of processes and of
    devices, and whether the loss fell."""
    sys.modules.update(sklearn=None, matplotlib=None)  # Keras would import both, a second each.
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
