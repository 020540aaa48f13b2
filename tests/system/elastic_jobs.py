"""Running elastic jobs for tests that kill their processes: their pids, their events, and kinetic's
notices in their logs."""

from __future__ import annotations

import re
from pathlib import Path

from gangs import children, is_titled, wait_until
from on_elastic_hosts import count

import kinetic
from kinetic._core import layout
from kinetic._core.events import parse

LIMIT_S = 300


class Watched:
    """A running local job, with the pids of its processes and the records of its attempts."""

    def __init__(self, home, handle):
        self.handle = handle
        self.folder = home / layout.JobKeys(handle.job_id).prefix

    def leader(self):
        return wait_until(self.handle.processes, "it does not run")["supervisor"]

    def agents(self):
        return {int(host): pid for host, pid in self.handle.processes()["agents"].items()}

    def below_supervisor(self, title):
        """Return the pid of the supervisor's only child whose title begins with `title`."""
        (pid,) = (pid for pid in children(self.leader()) if is_titled(pid, title))
        return pid

    def events(self):
        path = self.folder / "events.jsonl"
        return parse(path.read_bytes()) if path.exists() else []

    def slices(self):
        """Return the indices of the slices on which each attempt ran, in order."""
        return [event.slices for event in self.events() if event.kind == "formed"]

    def losses(self):
        return [event.slices for event in self.events() if event.kind == "slice_lost"]

    def story(self):
        """Return kinetic's own lines in the log of host 0, without their prefix."""
        return re.findall(r"(?m)^kinetic: (.*)", "".join(self.handle.logs()))


def wait_for_step(folder, attempt, host, step=2):
    """Wait until a host's mark in the folder says that it has done the step of the attempt."""

    def done():
        mark = Path(folder, f"{attempt}-{host}")
        return mark.exists() and int(mark.read_text() or 0) >= step

    wait_until(done, f"host {host} does not reach step {step} of attempt {attempt}")


def whole(attempt):
    return attempt, 4, 2


def half(attempt):
    return attempt, 2, 1


def elastic(least=1, most=2, function=count, **options):
    return kinetic.run("tpu-v6e-8", slices=(least, most), **options)(function)
