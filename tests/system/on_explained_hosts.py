"""Functions that fail or stand still, for tests of the page about a job."""

from __future__ import annotations

import os
import time
from pathlib import Path

from on_differing_hosts import differ


def fail_on_one_host(logs):
    """Print 30 lines on each host; host 1 writes a log of its chips and raises."""
    host = int(os.environ["KINETIC_HOST_INDEX"])
    for line in range(30):
        print(f"line {line} of host {host}")
    if host == 1:
        Path(logs, "tpu_driver.INFO").write_text("the link of chip 3 is down")
        raise ValueError("the data of this host is broken")
    time.sleep(300)


def hold_the_others_up():
    """Host 1 sleeps, and the others wait for it in a collective."""
    from jax.experimental import multihost_utils

    if os.environ["KINETIC_HOST_INDEX"] == "1":
        time.sleep(300)
    multihost_utils.sync_global_devices("meet")


def return_early():
    """Host 1 returns, and the other goes on."""
    if os.environ["KINETIC_HOST_INDEX"] != "1":
        time.sleep(300)


def differ_and_stand():
    """Hosts run different programs, and stand still then."""
    differ("shape")
    time.sleep(300)
