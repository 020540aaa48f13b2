"""Timing with a floor: each figure is printed next to the least possible time (the floor), measured
on the same machine in the same run.

In: callables or commands. Out: rows of text (figure, floor, ratio, goal).
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_QUIET = {"KINETIC_BACKEND": "local"}
"""Silences the notice that this machine stands in for a cluster."""


def environment(home: str) -> dict[str, str]:
    """Return the environment of a measured process: with a home of its own, and with cached
    bytecode."""
    inherited = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith("KINETIC_") and k != "PYTHONDONTWRITEBYTECODE"
    }
    return (
        inherited
        | {
            "KINETIC_HOME": f"{home}/home",
            "KINETIC_CACHE_DIR": f"{home}/cache",
            "PYTHONPATH": str(ROOT),
        }
        | _QUIET
    )


@contextmanager
def home() -> Iterator[str]:
    """Use an empty home in the environment of this process and its children."""
    with tempfile.TemporaryDirectory(prefix="kn-bench-") as folder:
        before, chosen = dict(os.environ), environment(folder)
        os.environ.clear()
        os.environ.update(chosen)
        try:
            yield folder
        finally:
            os.environ.clear()
            os.environ.update(before)


def seconds(act: Callable[[], object]) -> float:
    """Return the wall time of one call."""
    begun = time.perf_counter()
    act()
    return time.perf_counter() - begun


def medians(*acts: Callable[[], object], runs: int = 7, warm_up: int = 1) -> tuple[float, ...]:
    """Return median wall times of several calls, measured in turn, so that a slow moment of the
    machine affects all of them."""
    for _ in range(warm_up):
        for act in acts:
            act()
    taken = [[seconds(act) for act in acts] for _ in range(runs)]
    return tuple(statistics.median(column) for column in zip(*taken, strict=True))


def python(*arguments: str) -> Callable[[], object]:
    """Return a call that runs this interpreter."""
    return lambda: subprocess.run(
        [sys.executable, *arguments],
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def heading(text: str) -> None:
    """Print the title of a table."""
    print(f"\n{text}\n{'':44}{'measured':>12}{'floor':>12}{'ratio':>9}   goal")


def row(name: str, measured_s: float, floor_s: float, goal: str = "") -> None:
    """Print one figure next to its floor."""
    print(
        f"  {name:42}{measured_s * 1e3:9.1f} ms{floor_s * 1e3:9.1f} "
        f"ms{measured_s / floor_s:8.2f}x   {goal}"
    )
