"""Delay from a host's death to the caller's error, compared with a bare parent that waits for its
child."""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import time

import measure

import kinetic
from kinetic import errors


def die(host: int) -> None:
    if os.environ["KINETIC_HOST_INDEX"] == str(host):
        print(repr(time.time()), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1000)


def by_waiting() -> float:
    child = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import os, time; print(repr(time.time()), flush=True); os.kill(os.getpid(), 9)",
        ],
        stdout=subprocess.PIPE,
    )
    child.wait()
    with child.stdout:
        return time.time() - float(child.stdout.read())


def ours(accelerator: str, host: int) -> float:
    handle = kinetic.run(accelerator=accelerator)(die).run_async(host)
    try:
        handle.result()
    except errors.HostLost:
        return time.time() - float(handle.logs(host=host).split()[0])
    raise AssertionError("the death was not noticed")


def main() -> None:
    with measure.home():
        floor_s = statistics.median(by_waiting() for _ in range(7))
        measure.heading(
            "from a host's death to the caller's error (floor: a parent that waits for its child)"
        )
        for accelerator, host in (("cpu", 0), ("tpu-v6e-8", 1), ("tpu-v6e-16", 3)):
            figure = statistics.median(ours(accelerator, host) for _ in range(3))
            measure.row(f"{accelerator}, host {host} killed", figure, floor_s, "<= 3 s")


if __name__ == "__main__":
    main()
