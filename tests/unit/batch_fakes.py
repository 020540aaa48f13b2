"""Jobs of a batch that end as a script says, without processes.

In: for each input, how its job ends. Out: a `JobSource` whose jobs end when they are submitted,
released or cancelled. Used by the tests of batches.
"""

from __future__ import annotations

import os
import threading
from dataclasses import replace

import laptop_fakes
from laptop_fakes import FakeBackend, put_outcome, put_ref, put_success, raised

from kinetic._client.batch.inputs import job_id_of
from kinetic._client.handle import JobHandle
from kinetic._core import layout
from kinetic._core.exits import Exit
from kinetic._core.outcome import HostReport
from kinetic._core.state import JobStatus
from kinetic.errors import InsufficientMemory


class Scripted(FakeBackend):
    """A `JobSource` whose `script` says for each input, by index, how its job ends.

    "ok" (the default), "raise", "lost" (killed), "hang" (until released or cancelled), "crowded"
    (no memory while others hang), "refuse" (`submit` raises), or an exception that `submit` raises.
    """

    fits = 2

    def __init__(self, store, script=()):
        super().__init__(store)
        self.script = script
        self.order = []
        self.hanging = {}
        self.bells = {}
        self.most_at_once = 0
        self.turned_away = 0
        self.gate = threading.Event()
        self.gate.set()
        self._lock = threading.Lock()

    def snapshot_inputs(self):
        pass

    def submit(self, group_id, index, job_id=""):
        self.gate.wait(30)
        with self._lock:
            act = self._act(index)
            if isinstance(act, BaseException):
                raise act
            if act == "refuse":
                raise ValueError(f"input {index} is not wanted")
            if act == "crowded":
                if self.hanging:
                    self.turned_away += 1
                    raise InsufficientMemory("full", hosts=1)
                act = "ok"
            self.order.append(index)
            job = laptop_fakes.ref(job_id or job_id_of(group_id, index), hosts=1)
            job = put_ref(
                self.store, replace(job, group_id=group_id, group_kind="map", group_index=index)
            )
            self._end(act, job, index)
        return JobHandle(job, self, self.store)

    def room(self):
        return self.fits

    def _act(self, index):
        return self.script[index] if index < len(self.script) else "ok"

    def _end(self, act, job, index):
        if act == "ok":
            put_success(self.store, job, (index, 1))
        elif act == "raise":
            report = raised(self.store, job, 0, ValueError(f"input {index} failed"))
            put_outcome(self.store, job, report)
        elif act == "lost":
            put_outcome(self.store, job, HostReport(0, Exit.SIGNAL, detail="killed"))
        else:
            self.phases[job.job_id] = JobStatus.RUNNING
            self.hanging[index] = job
            self.bells[job.job_id] = os.pipe()
            self.most_at_once = max(self.most_at_once, len(self.hanging))

    def release(self, index):
        """End the hanging job of an input with success."""
        with self._lock:
            job = self.hanging.pop(index)
            put_success(self.store, job, (index, 1))
            self._ring(job)

    def lose(self, index):
        """End the hanging job of an input without a verdict, and remove its reference."""
        with self._lock:
            job = self.hanging.pop(index)
            self.phases.clear()
            self.store.delete(layout.JobKeys(job.job_id).ref)
            self._ring(job)

    def cancel(self, ref):
        super().cancel(ref)
        with self._lock:
            if self.hanging.pop(ref.group_index, None) is not None:
                put_outcome(self.store, ref, HostReport(0, Exit.CANCELLED))
                self._ring(ref)

    def ending_fd(self, ref):
        """Return a pipe that becomes readable when the job ends; None if the job does not hang."""
        with self._lock:
            bell = self.bells.get(ref.job_id)
            return None if bell is None else os.dup(bell[0])

    def _ring(self, ref):
        for fd in self.bells.pop(ref.job_id):
            os.close(fd)
