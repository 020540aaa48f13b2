"""Functions of jobs that the dashboard shows. Hosts import this module instead of the tests:
importing pytest would take longer than the job."""

from __future__ import annotations

import os
import sys
import time

import kinetic


def train(path):
    """Print a line per step until the file exists; end with markup that a page must escape."""
    step = 0
    while not os.path.exists(path):
        print(f"step {step} loss {1 / (1 + step):.4f}", flush=True)
        step += 1
        time.sleep(0.1)
    print("done <b>bold</b> \x1b[31mred\x1b[0m", flush=True)
    return step


def run_on(path):
    """Print lines until the file exists; start another attempt whenever a slice comes back."""
    while not os.path.exists(path):
        print(f"on slice {kinetic.slice_index()} of {kinetic.num_slices()}", flush=True)
        time.sleep(0.1)
        if kinetic.should_reform():
            kinetic.reform()


def stand_still(path):
    """Keep the host of the first slice busy; that of the second prints a line, then waits."""
    if kinetic.slice_index() == 1:
        print("needle in host one", flush=True)
        print("\x1b]0;title\x07warned\x1b[2J", file=sys.stderr, flush=True)
    while not os.path.exists(path):
        if kinetic.slice_index() == 0:
            print("busy", flush=True)
        time.sleep(0.3 if kinetic.slice_index() == 0 else 0.02)


def save_step_three(path, folder):
    """Save step 3; its commit waits until the file exists."""
    from kinetic._in_job.checkpoint.local_tier import LocalTier

    committed = LocalTier.commit

    def commit(tier, local):
        while not os.path.exists(path):
            time.sleep(0.02)
        return committed(tier, local)

    LocalTier.commit = commit
    options = {"local_every": 3, "every": 100, "local_directory": f"{folder}/local"}
    with kinetic.Checkpointer(f"{folder}/checkpoints", **options) as ckpt:
        ckpt.save(3, {"n": 3})
        while not os.path.exists(path):
            print("busy", flush=True)
            time.sleep(0.1)
        ckpt.wait()
        print("saved", flush=True)
        while not os.path.exists(f"{path}-too"):
            time.sleep(0.02)


def pretrain(path):
    """Log a realistic training until the file exists; re-form when a slice comes back."""
    import math
    import random

    step = 0
    while not os.path.exists(path):
        loss = 2.1 * math.exp(-step / 90) + 1.4 + random.gauss(0, 0.02)
        rate = 3e-4 * min(1.0, step / 40)
        kinetic.log(step=step, loss=loss, learning_rate=rate, grad_norm=0.8 + random.random() / 5)
        if step % 10 == 0:
            print(f"step {step:4d}  loss {loss:.3f}  lr {rate:.2e}", flush=True)
        if step % 70 == 69:
            print("warning: the loader waited 0.4 s for a shard", file=sys.stderr, flush=True)
        step += 1
        time.sleep(0.05)
        if kinetic.should_reform():
            kinetic.reform()
